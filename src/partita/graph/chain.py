"""A forward graph as a chain of segments, and the same chain with its repeats folded.

A cut lies between two ops of the graph's order; what crosses it are the activations made before and
read after. Cuts are kept where little crosses: fewer bytes than at the cuts next to it. Residual
streams, modules with branches, encoders whose output every decoder layer reads, and long skips all
become chains in this way; what lives long simply crosses many cuts. No cut lies between a dispatch
to experts and its combine: the tokens of both are routed together, by one stage.

Segments with equal ops, hanging together in the same way, are of one class. Where a pattern of
classes repeats, `folded` keeps its first, one middle and its last run: a graph that is small for a
deep model, in which every segment of the model has its like. O(ops) but for the merging.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from partita.graph.record import Graph, Op, Tensor
from partita.graph.splits import routed_pairs
from partita.graph.work import flops

MOST_SEGMENTS = 128
UNIT_BEYOND = 64  # with more segments than this, a repeated pattern becomes one segment
LONGEST_PERIOD = 12
KEPT_RUNS = 3
LEAST_ROW = 3  # fewer modules numbered by their names are parts, not a row of blocks
_DIGITS = "0123456789"


@dataclass(frozen=True)
class Segment:
    """Consecutive forward ops; `entering` are the activations that cross the cut before them."""

    ops: tuple[str, ...]
    entering: tuple[str, ...]
    kind: int  # segments of one kind are alike


@dataclass(frozen=True)
class Chain:
    """All forward ops in segments; `crossing_bytes[i]` cross the cut before segment i."""

    graph: Graph
    segments: tuple[Segment, ...]
    crossing_bytes: tuple[int, ...]

    @property
    def num_segments(self) -> int:
        """How many there are."""
        return len(self.segments)


@dataclass(frozen=True)
class Folded:
    """A chain's folded forward graph, its segments, and which of them each segment is like."""

    graph: Graph
    segments: tuple[tuple[str, ...], ...]
    like: tuple[int, ...]  # for each segment of the whole chain
    op_like: dict[str, str]  # for each forward op of the whole graph


def chain_of(
    graph: Graph, most: int = MOST_SEGMENTS, unit_beyond: int = UNIT_BEYOND, *,
    whole_blocks: bool = False,
) -> Chain:  # fmt: skip
    """The chain of a graph's forward ops, finer the more segments it may have.

    With `whole_blocks` no cut lies inside of a module of a list, such as the layers of a
    transformer or the blocks of a ResNet, nor of a smaller module beside them.
    """
    ops = [op for op in graph.ops if op.phase == "forward"]
    crossing = _crossing(graph, ops)
    sizes = [sum(graph.tensor(name).size_bytes for name in names) for names in crossing]
    blocks = list(map(_block_of(ops), ops))
    cuts = _small(graph, ops, crossing, sizes, blocks)
    if whole_blocks:
        cuts = [i for i in cuts if i == 0 or not blocks[i] or blocks[i] != blocks[i - 1]]
    if len(cuts) > unit_beyond:
        cuts = _by_unit(graph, ops, cuts, crossing, blocks)
    cuts = _merged(graph, ops, cuts, most)
    kinds = _kinds(graph, ops, cuts, crossing)
    ends = [*cuts[1:], len(ops)]
    segments = tuple(
        Segment(tuple(op.name for op in ops[a:b]), crossing[a], kind)
        for a, b, kind in zip(cuts, ends, kinds, strict=True)
    )
    return Chain(graph, segments, tuple(sizes[a] for a in cuts))


def cut_blocks(graph: Graph, firsts: Iterable[str]) -> dict[str, str]:
    """Which of these forward ops lie inside of a block, not at its begin: the block of each."""
    inside = inside_blocks(graph)
    return {first: inside[first] for first in sorted(set(firsts)) if first in inside}


def inside_blocks(graph: Graph) -> dict[str, str]:
    """All forward ops that do not begin the block they are in, and that block."""
    ops = [op for op in graph.ops if op.phase == "forward"]
    blocks = list(map(_block_of(ops), ops))
    return {
        op.name: block
        for op, block, before in zip(ops[1:], blocks[1:], blocks, strict=False)
        if block and block == before
    }


def _block_of(ops: Sequence[Op]) -> Callable[[Op], str]:
    """The module that an op is in as a part of one; none of them is most of the model.

    That is the outermost module of a list, or of a row of them as `block1`, `block2`, `block3`.
    Beside those it is the outermost module that holds no more ops than one of them does
    (embeddings, a final norm, a head), or one without modules.
    """
    holds: Counter[str] = Counter()
    for op in ops:
        holds.update(_modules(op))
    parents = {each.rpartition(".")[0] for each in holds}
    most = len(ops) / 2
    rows = _rows(holds, parents)

    def listed(op: Op) -> str:
        numbered = (each for each in _modules(op) if _is_listed(each) or each in rows)
        return next((each for each in numbered if holds[each] <= most), "")

    largest = max((holds[block] for op in ops if (block := listed(op))), default=0)

    def beside(op: Op) -> str:
        small = (each for each in _modules(op) if holds[each] <= most)
        return next((one for one in small if holds[one] <= largest or one not in parents), "")

    return lambda op: listed(op) or beside(op)


def _rows(modules: Iterable[str], parents: Container[str]) -> set[str]:
    """Modules that are numbered beside each other by their names, and hold no such ones.

    Of `layer1` to `layer4` with `layer1.0` and `layer1.1` inside, the latter are the blocks.
    """
    numbered = [each for each in modules if each in parents and each[-1].isdecimal()]
    stems = Counter(each.rstrip(_DIGITS) for each in numbered)
    outer = {each[:i] for each in numbered for i, sign in enumerate(each) if sign == "."}
    return {
        each for each in numbered
        if each not in outer and stems[each.rstrip(_DIGITS)] >= LEAST_ROW and not _is_listed(each)
    }  # fmt: skip


def _is_listed(module: str) -> bool:
    """Is it `layers.3`, of a list of modules?"""
    return module.rpartition(".")[2].isdecimal()


def _modules(op: Op) -> list[str]:
    """Of `encoder.3.conv`: encoder, encoder.3, and encoder.3.conv, which may be the op itself."""
    path = op.name if op.scope and op.name.startswith(f"{op.scope}.") else op.scope
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _crossing(graph: Graph, ops: Sequence[Op]) -> list[tuple[str, ...]]:
    """What crosses the cut before each op, in the order it was made."""
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        for name in op.inputs:
            if not graph.tensor(name).is_given:
                last[name] = i
    alive: dict[str, None] = {}
    crossing = []
    for i, op in enumerate(ops):
        crossing.append(tuple(alive))
        for name in op.inputs:
            if last.get(name) == i:
                alive.pop(name, None)
        for name in op.outputs:
            if last.get(name, -1) > i:
                alive[name] = None
    return crossing


def _small(
    graph: Graph, ops: Sequence[Op], crossing: Sequence[tuple[str, ...]], sizes: Sequence[int],
    blocks: Sequence[str],
) -> list[int]:  # fmt: skip
    """The cuts that fewer bytes cross than those beside them, or one tensor before a layer.

    Where as many cross several cuts in a row, it is the last of them, or the begin of the block
    that lies around this one: a cast that opens a block must not hide its border.
    """
    cuts = {0}
    routed = _inside_routings(graph, ops)
    level = 1  # the first cut of those that as many bytes cross
    for i in range(1, len(sizes)):
        if sizes[i] != sizes[i - 1]:
            level = i
        if i in routed:
            continue
        after = sizes[i + 1] if i + 1 < len(sizes) else None
        small = sizes[i] <= sizes[i - 1] and (after is None or sizes[i] < after)
        layer = any(graph.tensor(name).role == "parameter" for name in ops[i].inputs)
        if small:
            begin = i  # of the block that this op is in
            while begin > level and blocks[i] and blocks[begin] == blocks[begin - 1]:
                begin -= 1
            cuts.add(begin if _begins(blocks, begin) and begin not in routed else i)
        elif len(crossing[i]) == 1 and layer:
            cuts.add(i)
    return sorted(cuts)


def _inside_routings(graph: Graph, ops: Sequence[Op]) -> set[int]:
    """The cuts between a dispatch and its combine."""
    place = {op.name: i for i, op in enumerate(ops)}
    inside: set[int] = set()
    for dispatch, combine in routed_pairs(graph):
        if dispatch.name in place and combine.name in place:
            inside.update(range(place[dispatch.name] + 1, place[combine.name] + 1))
    return inside


def _kinds(
    graph: Graph, ops: Sequence[Op], cuts: Sequence[int], crossing: Sequence[tuple[str, ...]]
) -> list[int]:
    numbers: dict[tuple[object, ...], int] = {}
    ends = [*cuts[1:], len(ops)]
    kinds = []
    for a, b in zip(cuts, ends, strict=True):
        leaving = crossing[b] if b < len(ops) else ()
        key = _signature(graph, ops[a:b], crossing[a], leaving)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _signature(
    graph: Graph, ops: Sequence[Op], entering: tuple[str, ...], leaving: tuple[str, ...]
) -> tuple[object, ...]:
    """Equal for segments that are alike: ops, and how they hang together with each other."""
    ids: dict[str, object] = {name: f"in{i}" for i, name in enumerate(entering)}
    rows: list[object] = [_look(graph.tensor(name)) for name in entering]
    for op in ops:
        for name in op.inputs:
            if name not in ids:
                tensor = graph.tensor(name)
                users = [user for user in graph.consumers(name) if user.phase == "forward"]
                tied = name if tensor.role == "parameter" and len(users) > 1 else ""
                ids[name] = len(ids)
                rows.append((*_look(tensor), tied))
        for name in op.outputs:
            ids[name] = len(ids)
            rows.append((*_look(graph.tensor(name)), name in graph.outputs))
        rows.append((op.kind, op.attrs, *(ids[name] for name in (*op.inputs, *op.outputs))))
    rows.append(tuple(ids.get(name, "passes") for name in leaving))
    return tuple(rows)


def _look(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.role


def runs(kinds: Sequence[int], least: int = 2) -> list[tuple[int, int, int]]:
    """(first, period, how often) of every layer range in which a pattern of kinds repeats."""
    runs_found = []
    i = 0
    while i < len(kinds):
        best = (0, 1, 1)  # segments covered beyond one period, period, times
        for period in range(1, min(LONGEST_PERIOD, (len(kinds) - i) // 2) + 1):
            times = 1
            while kinds[i + times * period : i + (times + 1) * period] == kinds[
                i : i + period
            ] and i + (times + 1) * period <= len(kinds):
                times += 1
            covered = (times - 1) * period
            if times >= least and covered > best[0]:
                best = (covered, period, times)
        covered, period, times = best
        if covered:
            runs_found.append((i, period, times))
        i += covered + period if covered else 1
    return runs_found


def _by_unit(
    graph: Graph, ops: Sequence[Op], cuts: list[int], crossing: Sequence[tuple[str, ...]],
    blocks: Sequence[str],
) -> list[int]:  # fmt: skip
    """Of a repeated pattern only the cuts between its runs; they begin where blocks do.

    Where a pattern is found to begin hangs on what stands before it; any of its cuts may be the
    one that is kept, and only one of them is of use to who wants blocks to stay whole.
    """
    kinds = _kinds(graph, ops, cuts, crossing)
    dropped: set[int] = set()
    for first, period, times in runs(kinds):
        covered = range(first, first + period * times)
        begins = Counter((i - first) % period for i in covered if _begins(blocks, cuts[i]))
        kept = min(range(period), key=lambda place: (-begins[place], place))
        dropped.update(i for i in covered if (i - first) % period != kept and i != first)
    return [cut for i, cut in enumerate(cuts) if i not in dropped]


def _begins(blocks: Sequence[str], i: int) -> bool:
    """Does a block begin with this op?"""
    return bool(blocks[i]) and (i == 0 or blocks[i] != blocks[i - 1])


def _merged(graph: Graph, ops: Sequence[Op], cuts: list[int], most: int) -> list[int]:
    """At most so many segments: the lightest one joins its lighter neighbour, again and again."""
    work = [flops(graph.call(op)) + 1.0 for op in ops]
    ends = [*cuts[1:], len(ops)]
    weight = [sum(work[a:b]) for a, b in zip(cuts, ends, strict=True)]
    cuts = list(cuts)
    while len(cuts) > most:
        i = min(range(len(weight)), key=lambda k: weight[k])
        before = weight[i - 1] if i else float("inf")
        after = weight[i + 1] if i + 1 < len(weight) else float("inf")
        j = i if before <= after else i + 1  # the cut that goes
        weight[j - 1] += weight.pop(j)
        cuts.pop(j)
    return cuts


def folded(chain: Chain) -> Folded:
    """The chain with only the first, one middle and the last run of every repeated pattern."""
    kinds = [segment.kind for segment in chain.segments]
    like = list(range(len(kinds)))
    for first, period, times in runs(kinds, KEPT_RUNS + 1):
        if not _closes(chain, first, period, times):
            continue
        for run in range(2, times - 1):
            for k in range(period):
                like[first + run * period + k] = first + period + k
    kept = [i for i in range(len(kinds)) if like[i] == i]
    number = {i: k for k, i in enumerate(kept)}
    segments = tuple(chain.segments[i].ops for i in kept)
    op_like: dict[str, str] = {}
    for i, segment in enumerate(chain.segments):
        op_like.update(zip(segment.ops, chain.segments[like[i]].ops, strict=True))
    graph = _short(chain, kept)
    return Folded(graph, segments, tuple(number[i] for i in like), op_like)


@dataclass(frozen=True)
class Repeat:
    """A range of ops in which one pattern repeats: where it begins, how long, how often.

    `entering[k]` are the activations that the k-th run reads of those before it.
    """

    first: int
    length: int  # ops of one run
    times: int
    entering: tuple[tuple[str, ...], ...]

    def without(self, kept: int) -> tuple[range, dict[str, str]]:
        """The ops to leave out so that `kept` runs remain, and what their follower reads then."""
        gone = range(self.first + kept * self.length, self.first + self.times * self.length)
        end = self.entering[self.times] if len(self.entering) > self.times else ()
        return gone, dict(zip(end, self.entering[kept], strict=True))


def longest_repeat(graph: Graph, ops: Sequence[Op]) -> Repeat | None:
    """The repeated pattern that covers most of some consecutive forward ops."""
    crossing = _crossing(graph, ops)
    sizes = [sum(graph.tensor(name).size_bytes for name in names) for names in crossing]
    cuts = _small(graph, ops, crossing, sizes, [""] * len(ops))  # wherever it repeats
    kinds = _kinds(graph, ops, cuts, crossing)
    ends = [*cuts[1:], len(ops)]
    best: Repeat | None = None
    for first, period, times in runs(kinds):
        begin, after = cuts[first], ends[first + period * times - 1]
        if after == len(ops):  # what leaves at the very end must stay
            times -= 1
            after = ends[first + period * times - 1]
        length = (after - begin) // times
        entering = tuple(crossing[begin + k * length] for k in range(times + 1))
        alike = {tuple(_look(graph.tensor(n)) for n in names) for names in entering[1:]}
        if len(alike) == 1 and (best is None or times * length > best.times * best.length):
            best = Repeat(begin, length, times, entering)
    return best


def _closes(chain: Chain, first: int, period: int, times: int) -> bool:
    """Can runs be left out: does as much, of the same shapes, cross every cut between them?"""
    shapes = [
        tuple(_look(chain.graph.tensor(n)) for n in chain.segments[first + run * period].entering)
        for run in range(1, times)
    ]
    return len(set(shapes)) == 1


def _short(chain: Chain, kept: Sequence[int]) -> Graph:
    """The forward graph of some segments: what was left out is bridged, place by place."""
    graph = chain.graph
    renamed: dict[str, str] = {}
    ops: list[Op] = []
    previous = -1
    for i in kept:
        segment = chain.segments[i]
        if i != previous + 1:
            before = chain.segments[previous + 1].entering
            bridge = dict(zip(segment.entering, before, strict=True))
            renamed.update({new: renamed.get(old, old) for new, old in bridge.items()})
        for name in segment.ops:
            op = graph.op(name)
            inputs = tuple(renamed.get(n, n) for n in op.inputs)
            ops.append(Op(op.name, op.kind, inputs, op.outputs, op.attrs, op.scope))
        previous = i
    used = {name for op in ops for name in (*op.inputs, *op.outputs)}
    tensors = tuple(tensor for tensor in graph.tensors if tensor.name in used)
    outputs = tuple(name for name in graph.outputs if name in used)
    return Graph(graph.name, tensors, tuple(ops), outputs)
