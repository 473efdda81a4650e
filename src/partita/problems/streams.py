"""Streams: which ops of one GPU run together, and in which order (the problem of IOS, MLSys 2021).

The ops are given in parts, each scheduled by itself, one after the other. A schedule of a part is a
list of stages with a barrier between them. Seen from the end, a stage takes away the last of what
is left to schedule; what is left before stage k is the ops of stages 0 to k.

    concurrent stage  groups, each on a stream of its own, its ops in order. A group is one op with
                      everything that follows from it in what is left; groups share no op; at most
                      s groups of at most r ops each
    merge stage       two or more convs with equal `merge_key`, the same input and equal `groups`,
                      from which nothing follows in what is left: they become one conv, with the sum
                      of their output channels and the largest kernel

Synthetic cost in us. A kernel of b thread blocks uses u = min(1, max(1, b) / SMS) of the GPU and is
busy max(flops / (PEAK EFF u), bytes / (BW min(1, 2u))); it takes t = T0 + busy by itself and does
w = u * busy of work. An op has the sums of its kernels as `t_us` and `w_us`.

    concurrent stage  max(max over groups of sum t, sum of all w) (1 + ALPHA (groups - 1))
                      + SYNC if there is more than one group
    merge stage       the t of the one conv
    objective         the sum over all stages of all parts

Another form of answer knows no stages and no parts: all ops on some streams, kept apart by their
dependencies alone (`run_streams`). It is scored by its own clock: a shortest schedule of stages
may be longer than one without barriers, and the two are not compared in proofs.

Without barriers what runs together shares the GPU. Each stream runs its ops one after the other; an
op starts when the one before it on its stream and all its producers have ended, `sync_us` later if
a producer was on another stream. An op has a solo time t and work w: by itself it takes m = max(t,
w) and uses u = w / m of the GPU. While ops run together, all go at

    1 / (max(1, sum of their u) (1 + alpha (how many - 1)))

of their solo speed. No op ends before the sum of the m on any path to it, and nothing is shorter
than the sum of all w.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from partita import files
from partita.errors import FileError, InputError, ProblemError

ROUNDING = 1e-12
FORMAT = "streams-problem"
INPUT = "input"
LARGEST = 1e30  # of any one figure; products of several must not overflow
MAX_SIZE = 2**40
BYTES_PER_VALUE = 4
Term = tuple[tuple[int, int, int], ...]  # values to be summed: (source op, channel begin, end)


@dataclass(frozen=True, slots=True)
class Load:
    """An op as this model sees it."""

    t_us: float
    w_us: float
    preds: tuple[int, ...]

    @property
    def solo_us(self) -> float:
        """What it takes by itself."""
        return max(self.t_us, self.w_us)

    @property
    def use(self) -> float:
        """The part of the GPU it uses by itself."""
        return self.w_us / self.solo_us if self.solo_us > 0 else 0.0


def run_streams(
    loads: Mapping[int, Load], streams: Sequence[Sequence[int]], sync_us: float, alpha: float
) -> dict[int, tuple[float, float]]:
    """Start and end of every op; ops that can never start are left out."""
    run = _FluidState(loads, streams, sync_us)
    now = 0.0
    run.look(now)
    while run.ready or run.left:
        run.begin(now)
        used = sum(loads[op].use for op in run.left)
        slow = max(1.0, used) * (1 + alpha * max(0, len(run.left) - 1))
        shortest = min(run.left.values(), default=math.inf) * slow
        then = min(now + shortest, *run.ready.values()) if run.ready else now + shortest
        ended = run.advance((then - now) / slow, now + shortest <= then)
        now = then
        for op in ended:
            run.end[op] = now
        if ended:
            run.look(now)
    return {op: (run.start[op], run.end[op]) for op in run.end}


class _FluidState:
    """The state at one instant."""

    def __init__(
        self, loads: Mapping[int, Load], streams: Sequence[Sequence[int]], sync_us: float
    ) -> None:
        self.loads, self.sync_us = loads, sync_us
        self.stream_of = {op: number for number, ops in enumerate(streams) for op in ops}
        self.waiting = [list(reversed(ops)) for ops in streams]
        self.start: dict[int, float] = {}
        self.end: dict[int, float] = {}
        self.ready: dict[int, float] = {}  # heads of streams, and when they may start
        self.left: dict[int, float] = {}  # solo time to go, of what runs

    def look(self, now: float) -> None:
        """Which heads of streams have all they need?"""
        busy = {self.stream_of[op] for op in self.left}
        for number, queue in enumerate(self.waiting):
            if not queue or number in busy or queue[-1] in self.ready:
                continue
            op = queue[-1]
            needs = [pred for pred in self.loads[op].preds if pred in self.stream_of]
            if all(pred in self.end for pred in needs):
                others = [self.end[pred] for pred in needs if self.stream_of[pred] != number]
                self.ready[op] = max([now, *(at + self.sync_us for at in others)])

    def begin(self, now: float) -> None:
        """Start what may start."""
        for op in [op for op, at in self.ready.items() if at <= now]:
            del self.ready[op]
            self.waiting[self.stream_of[op]].pop()
            self.start[op], self.left[op] = now, self.loads[op].solo_us

    def advance(self, solo_us: float, ends: bool) -> list[int]:
        """Let everything run for so much solo time; which ops have ended?"""
        least = min(self.left.values(), default=0.0)
        gone = [op for op, left in self.left.items() if ends and left <= least + ROUNDING * least]
        for op in gone:
            del self.left[op]
        for op in self.left:
            self.left[op] = max(0.0, self.left[op] - solo_us)
        return gone


@dataclass(frozen=True, slots=True)
class StreamsConstants:
    """The GPU of the synthetic cost."""

    num_sms: float
    peak_flop_per_us: float
    efficiency: float
    bytes_per_us: float
    launch_us: float
    sync_us: float
    alpha: float  # what each further group costs, as a fraction


@dataclass(frozen=True, slots=True)
class Conv:
    """The shape of a convolution, for what it costs to merge it."""

    cin: int
    hin: int
    win: int
    cout: int
    hout: int
    wout: int
    kh: int
    kw: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class StreamsOp:
    """What is launched as one: its producers, its solo time and its work."""

    type: str
    preds: tuple[int, ...]
    t_us: float
    w_us: float
    name: str = ""
    inputs: tuple[Term, ...] = ()
    merge_key: str | None = None  # JSON text
    conv: Conv | None = None


@dataclass(frozen=True, slots=True)
class StreamStage:
    """One stage: groups of ops that run side by side, or ops merged into one."""

    groups: tuple[tuple[int, ...], ...] = ()
    merge: tuple[int, ...] = ()

    @property
    def ops(self) -> tuple[int, ...]:
        """All ops of the stage."""
        return self.merge + tuple(op for group in self.groups for op in group)

    def to_json(self) -> dict[str, Any]:
        """As one stage of the `solution` of an answer."""
        if self.merge:
            return {"merge": list(self.merge)}
        return {"groups": [list(group) for group in self.groups]}


@dataclass(frozen=True, slots=True)
class StreamsSolution:
    """The stages of every part, in the order in which they run; or the ops of every stream."""

    parts: tuple[tuple[StreamStage, ...], ...] = ()
    streams: tuple[tuple[int, ...], ...] = ()  # without barriers, instead of parts

    def to_json(self) -> dict[str, Any]:
        """As the `solution` of an answer."""
        if self.streams:
            return {"streams": [list(ops) for ops in self.streams]}
        return {"parts": [[stage.to_json() for stage in part] for part in self.parts]}

    @classmethod
    def from_json(cls, value: object, file: str = "") -> "StreamsSolution":
        """Read what `to_json` wrote."""
        return files.convert(value, cls, file)


@dataclass(frozen=True, slots=True)
class StreamsProblem:
    """Ops in topological order, in parts, with the synthetic GPU and the pruning of the search."""

    ops: tuple[StreamsOp, ...]
    parts: tuple[tuple[int, ...], ...]
    constants: StreamsConstants
    r: int | None = None  # most ops of a group; None: no limit
    s: int | None = None  # most groups of a stage; None: no limit
    model: str = ""
    successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_constants(self.constants)
        for name, limit in (("r", self.r), ("s", self.s)):
            if limit is not None and (not isinstance(limit, int) or limit < 1):
                fix = "give 1 or more, or leave it out for no limit"
                raise ProblemError(f"is {limit}", fix=fix, field=name)
        for index, op in enumerate(self.ops):
            _check_op(op, index)
        _check_parts(self)
        followers: list[list[int]] = [[] for _ in self.ops]
        for index, op in enumerate(self.ops):
            for pred in dict.fromkeys(op.preds):
                followers[pred].append(index)
        object.__setattr__(self, "successors", tuple(map(tuple, followers)))

    def closure(self, source: int, left: frozenset[int]) -> frozenset[int]:
        """The op and everything that follows from it in what is left."""
        closure, waiting = {source}, [source]
        while waiting:
            for op in self.successors[waiting.pop()]:
                if op in left and op not in closure:
                    closure.add(op)
                    waiting.append(op)
        return frozenset(closure)

    def merge_class(self, op: int) -> tuple[object, ...] | None:
        """Equal for ops that may become one; None for an op that cannot be merged."""
        each = self.ops[op]
        if each.merge_key is None or each.conv is None:
            return None
        return each.merge_key, each.inputs, tuple(sorted(set(each.preds))), _frame(each.conv)

    def to_json(self) -> dict[str, Any]:
        """As plain values: one block whose parts are the parts."""
        limits = {name: value for name, value in (("r", self.r), ("s", self.s)) if value}
        edges = [[pred, op] for op, each in enumerate(self.ops) for pred in each.preds]
        return {
            "format": f"partita/{FORMAT}@1",
            "model": self.model,
            **limits,
            "syn_constants": {
                wire: getattr(self.constants, name) for name, wire in _CONSTANTS.items()
            },
            "ops": [_op_to_json(index, op) for index, op in enumerate(self.ops)],
            "edges": edges,
            "blocks": [{"parts": [list(part) for part in self.parts]}],
        }


def check(problem: StreamsProblem, solution: StreamsSolution) -> tuple[str, ...]:
    """What is wrong with this solution, one sentence each; empty if nothing is."""
    if solution.streams:
        return _stream_violations(problem, solution)
    if len(solution.parts) != len(problem.parts):
        return (f"the solution has {len(solution.parts)} parts for {len(problem.parts)}",)
    wrong: list[str] = []
    for number, (part, stages) in enumerate(zip(problem.parts, solution.parts, strict=True)):
        wrong += [f"part {number}: {each}" for each in _part_violations(problem, part, stages)]
    return tuple(wrong)


def evaluate(problem: StreamsProblem, solution: StreamsSolution) -> float:
    """The objective of a valid solution, in us: the sum of all stage times, or the last end."""
    violations = check(problem, solution)
    if violations:
        raise ProblemError(violations[0], fix="give a valid solution", field="solution")
    if solution.streams:
        return max(end for _, end in stream_times(problem, solution.streams).values())
    return sum(stage_us(problem, stage) for part in solution.parts for stage in part)


def stream_times(
    problem: StreamsProblem, streams: tuple[tuple[int, ...], ...]
) -> dict[int, tuple[float, float]]:
    """Start and end of every op without barriers, in us; ops in a circle have none."""
    loads = {op: Load(*_load(problem.ops[op])) for ops in streams for op in ops}
    return run_streams(loads, streams, problem.constants.sync_us, problem.constants.alpha)


def _load(op: StreamsOp) -> tuple[float, float, tuple[int, ...]]:
    return op.t_us, op.w_us, op.preds


def free_bound(problem: StreamsProblem) -> float:
    """No answer without barriers is shorter: the longest path of all, or all of the work."""
    until: dict[int, float] = {}
    work = 0.0
    for op in sorted(op for part in problem.parts for op in part):
        each = problem.ops[op]
        before = max((until.get(pred, 0.0) for pred in each.preds), default=0.0)
        until[op] = before + max(each.t_us, each.w_us)
        work += each.w_us
    return max(work, max(until.values(), default=0.0))


def stage_us(problem: StreamsProblem, stage: StreamStage) -> float:
    """The time of one stage."""
    constants = problem.constants
    if stage.merge:
        return solo_us(constants, merged([problem.ops[op].conv for op in stage.merge]))
    longest = max(sum(problem.ops[op].t_us for op in group) for group in stage.groups)
    work = sum(problem.ops[op].w_us for op in stage.ops)
    further = len(stage.groups) - 1
    slowdown = 1 + constants.alpha * further
    return max(longest, work) * slowdown + (constants.sync_us if further else 0.0)


def solo_us(constants: StreamsConstants, conv: Conv) -> float:
    """The time of one convolution that has the GPU for itself."""
    pixels = conv.hout * conv.wout
    weights = conv.cout * conv.cin / conv.groups * conv.kh * conv.kw
    values = conv.cin * conv.hin * conv.win + weights + conv.cout + conv.cout * pixels
    if conv.groups == 1:
        blocks = math.ceil(conv.cout / 64) * math.ceil(pixels / 64)
    else:
        blocks = math.ceil(conv.cout * pixels / 1024)
    used = min(1.0, max(1, blocks) / constants.num_sms)
    computing = _flops(conv) / (constants.peak_flop_per_us * constants.efficiency * used)
    moving = BYTES_PER_VALUE * values / (constants.bytes_per_us * min(1.0, 2 * used))
    return constants.launch_us + max(computing, moving)


def merged(convs: list[Conv | None]) -> Conv:
    """One conv in place of several: all output channels, the largest kernel."""
    known = [conv for conv in convs if conv is not None]
    first = known[0]
    return Conv(
        *_frame(first)[:3],
        sum(conv.cout for conv in known),
        first.hout,
        first.wout,
        max(conv.kh for conv in known),
        max(conv.kw for conv in known),
        first.groups,
    )


def lower_bound(problem: StreamsProblem) -> float:
    """Per part the longer of its longest path and all of its work.

    Ops on one path run one after the other: in the same group or in different stages. A merged conv
    takes at least a launch, lies on a path once, and its one conv has at least the flops of all.
    """
    return sum(part_bound(problem, part) for part in problem.parts)


def part_bound(problem: StreamsProblem, part: tuple[int, ...]) -> float:
    """The same for some ops that are scheduled together."""
    constants, left = problem.constants, frozenset(part)
    mergeable = Counter(problem.merge_class(op) for op in part)
    until: dict[int, float] = {}
    work = 0.0
    for op in sorted(part):
        each = problem.ops[op]
        t_us, w_us = each.t_us, each.w_us
        if each.conv is not None and mergeable[problem.merge_class(op)] > 1:
            t_us = min(t_us, constants.launch_us)
            w_us = min(w_us, _flops(each.conv) / constants.peak_flop_per_us / constants.efficiency)
        before = max((until[pred] for pred in each.preds if pred in left), default=0.0)
        until[op] = before + t_us
        work += w_us
    return max(work, max(until.values(), default=0.0))


@dataclass(frozen=True, slots=True)
class _ConstantsWire:
    SMS: float
    PEAK_flop_per_us: float
    EFF: float
    BW_byte_per_us: float
    T0_us: float
    SYNC_us: float
    ALPHA: float


_CONSTANTS = {
    "num_sms": "SMS",
    "peak_flop_per_us": "PEAK_flop_per_us",
    "efficiency": "EFF",
    "bytes_per_us": "BW_byte_per_us",
    "launch_us": "T0_us",
    "sync_us": "SYNC_us",
    "alpha": "ALPHA",
}


@dataclass(frozen=True, slots=True)
class _AttrsWire:
    kernel: tuple[int, int] | None = None
    groups: int = 1


@dataclass(frozen=True, slots=True)
class _OpWire:
    id: int
    type: str
    preds: tuple[int, ...]
    syn_t_us: float
    syn_w_us: float
    name: str = ""
    inputs: tuple[Term, ...] = ()
    merge_key: Any = None
    attrs: dict[str, Any] = field(default_factory=dict)
    in_shape: tuple[int, ...] | None = None
    out_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _BlockWire:
    parts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _StreamsWire:
    syn_constants: _ConstantsWire
    ops: tuple[_OpWire, ...]
    blocks: tuple[_BlockWire, ...]
    edges: tuple[tuple[int, int], ...] | None = None
    model: str = ""
    r: int | None = None
    s: int | None = None


def read(path: str | Path, *, r: int | None = None, s: int | None = None) -> StreamsProblem:
    """Read a problem from JSON; limits given here go before those in the file."""
    value = files.decode_json(files.read_bytes(path), str(path))
    return from_json(value, str(path), r=r, s=s)


def from_json(
    value: dict[str, Any], file: str = "", *, r: int | None = None, s: int | None = None
) -> StreamsProblem:
    """A problem from plain values; limits given here go before those they say."""
    files.check_format(value, FORMAT, 1, file)
    wire = files.convert(value, _StreamsWire, file)
    try:
        ops = tuple(_op_from_wire(op, index) for index, op in enumerate(wire.ops))
        _check_wire_edges(wire)
        return StreamsProblem(
            ops,
            tuple(part for block in wire.blocks for part in block.parts),
            StreamsConstants(
                **{name: getattr(wire.syn_constants, key) for name, key in _CONSTANTS.items()}
            ),
            wire.r if r is None else r,
            wire.s if s is None else s,
            wire.model,
        )
    except InputError as error:
        raise error.within(file) from None


def _op_from_wire(op: _OpWire, index: int) -> StreamsOp:
    if op.id != index:
        fix = "an op's id is its position, and ops are listed in topological order"
        raise ProblemError(f"is {op.id}", fix=fix, field=f"ops[{index}].id")
    mergeable = op.merge_key is not None
    return StreamsOp(
        op.type,
        op.preds,
        op.syn_t_us,
        op.syn_w_us,
        op.name,
        op.inputs,
        msgspec.json.encode(op.merge_key).decode() if mergeable else None,
        _conv_from_wire(op, index) if mergeable else None,
    )


def _conv_from_wire(op: _OpWire, index: int) -> Conv:
    """The shape of an op that may be merged; only those need one."""
    field = f"ops[{index}]"
    if op.in_shape is None or len(op.in_shape) != 3:
        fix = "an op with a merge_key needs channels, height and width here"
        raise ProblemError(f"is {op.in_shape}", fix=fix, field=f"{field}.in_shape")
    if op.out_shape is None or len(op.out_shape) != 3:
        fix = "an op with a merge_key needs channels, height and width here"
        raise ProblemError(f"is {op.out_shape}", fix=fix, field=f"{field}.out_shape")
    try:
        attrs = files.convert(op.attrs, _AttrsWire)
    except FileError as error:
        inner = f"{field}.attrs.{error.field}"
        raise ProblemError(error.found, fix=error.fix, field=inner) from None
    if attrs.kernel is None:
        fix = "an op with a merge_key needs its kernel's height and width here"
        raise ProblemError("is missing", fix=fix, field=f"{field}.attrs.kernel")
    return Conv(*op.in_shape, *op.out_shape, *attrs.kernel, attrs.groups)


def _op_to_json(index: int, op: StreamsOp) -> dict[str, Any]:
    value: dict[str, Any] = {
        "id": index,
        "name": op.name,
        "type": op.type,
        "inputs": [[list(each) for each in term] for term in op.inputs],
        "preds": list(op.preds),
        "syn_t_us": op.t_us,
        "syn_w_us": op.w_us,
        "merge_key": None if op.merge_key is None else msgspec.json.decode(op.merge_key),
    }
    if op.conv is not None:
        conv = op.conv
        value["in_shape"] = [conv.cin, conv.hin, conv.win]
        value["out_shape"] = [conv.cout, conv.hout, conv.wout]
        value["attrs"] = {"kernel": [conv.kh, conv.kw], "groups": conv.groups}
    return value


def _check_wire_edges(wire: _StreamsWire) -> None:
    """`edges` says the same as `preds`, where it is given."""
    if wire.edges is None:
        return
    from_preds = {(pred, op.id) for op in wire.ops for pred in op.preds}
    different = sorted(from_preds.symmetric_difference(wire.edges))
    if different:
        src, dst = different[0]
        where = "only preds have" if different[0] in from_preds else "preds do not have"
        fix = "edges and preds must say the same, or leave edges out"
        raise ProblemError(f"{where} {src} -> {dst}", fix=fix, field="edges")


def _check_constants(constants: StreamsConstants) -> None:
    for name, wire in _CONSTANTS.items():
        value = getattr(constants, name)
        least = 0.0 if name in ("launch_us", "sync_us", "alpha") else 1 / LARGEST
        if not least <= value <= LARGEST:
            needed = "a number that is not negative" if least == 0 else "a positive number"
            raise ProblemError(
                f"is {value}", fix=f"{needed} is needed", field=f"syn_constants.{wire}"
            )


def _check_op(op: StreamsOp, index: int) -> None:
    field = f"ops[{index}]"
    for name, value in (("syn_t_us", op.t_us), ("syn_w_us", op.w_us)):
        if not 0 <= value <= LARGEST:
            fix = f"a number from 0 to {LARGEST:g} is needed"
            raise ProblemError(f"is {value}", fix=fix, field=f"{field}.{name}")
    for pred in op.preds:
        if not 0 <= pred < index:
            fix = "list ops in topological order: an op comes after its producers, without cycles"
            raise ProblemError(
                f"op {index} names {pred}, which is no earlier op", fix=fix, field=f"{field}.preds"
            )
    sources = {source for term in op.inputs for source, _, _ in term}
    if op.inputs and sources != set(op.preds):
        wrong = f"come from the ops {sorted(sources)} where preds are {sorted(set(op.preds))}"
        raise ProblemError(wrong, fix="both must name the same ops", field=f"{field}.inputs")
    if op.type == INPUT and op.preds:
        raise ProblemError("an input has producers", fix="leave them out", field=f"{field}.preds")
    _check_merge(op, field)


def _check_merge(op: StreamsOp, field: str) -> None:
    if (op.merge_key is None) != (op.conv is None):
        fix = "a merge_key and the shape of a conv come together"
        raise ProblemError("has one of the two", fix=fix, field=f"{field}.merge_key")
    if op.merge_key is None or op.conv is None:
        return
    try:
        msgspec.json.decode(op.merge_key)
    except msgspec.DecodeError:
        raise ProblemError("is not JSON text", field=f"{field}.merge_key") from None
    for name in Conv.__slots__:
        size = getattr(op.conv, name)
        if not 1 <= size <= MAX_SIZE:
            fix = f"sizes of a conv are 1 to {MAX_SIZE:,}"
            raise ProblemError(f"has {name} = {size}", fix=fix, field=field)


def _check_parts(problem: StreamsProblem) -> None:
    part_of: dict[int, int] = {}
    for number, part in enumerate(problem.parts):
        for op in part:
            field = f"blocks.parts[{number}]"  # counted over all blocks
            if not 0 <= op < len(problem.ops) or problem.ops[op].type == INPUT:
                fix = "name ops that are no inputs, by their ids"
                raise ProblemError(f"names {op}, which cannot be scheduled", fix=fix, field=field)
            if op in part_of:
                fix = "every op belongs to one part"
                raise ProblemError(f"has op {op}, as part {part_of[op]} has", fix=fix, field=field)
            part_of[op] = number
    for index, each in enumerate(problem.ops):
        if index not in part_of:
            if each.type == INPUT:
                continue
            fix = "every op that is no input belongs to one part"
            raise ProblemError(f"leave out op {index}", fix=fix, field="blocks.parts")
        for pred in each.preds:
            if part_of.get(pred, -1) > part_of[index]:
                raise ProblemError(
                    f"op {index} of part {part_of[index]} needs op {pred} of part {part_of[pred]}",
                    fix="parts run in order: list the producer's part first",
                    field="blocks.parts",
                )
    if not part_of:
        fix = f'give at least one op whose type is not "{INPUT}"'
        raise ProblemError("hold nothing to schedule", fix=fix, field="ops")


def _stream_violations(problem: StreamsProblem, solution: StreamsSolution) -> tuple[str, ...]:
    if solution.parts:
        return ("the solution has both parts and streams",)
    wanted = {op for part in problem.parts for op in part}
    times = Counter(op for ops in solution.streams for op in ops)
    wrong = [f"op {op} is not scheduled" for op in sorted(wanted) if not times[op]]
    wrong += [f"op {op} is scheduled {n} times" for op, n in sorted(times.items()) if n > 1]
    wrong += [f"op {op} does not belong here" for op in sorted(set(times) - wanted)]
    if problem.s is not None and len(solution.streams) > problem.s:
        wrong.append(f"there are {len(solution.streams)} streams, more than s = {problem.s}")
    if not wrong:
        ends = stream_times(problem, solution.streams)
        wrong = [f"op {op} waits for itself" for op in sorted(wanted) if op not in ends]
    return tuple(wrong)


def _part_violations(
    problem: StreamsProblem, part: tuple[int, ...], stages: tuple[StreamStage, ...]
) -> list[str]:
    times = Counter(op for stage in stages for op in stage.ops)
    wrong = [f"op {op} is not scheduled" for op in part if not times[op]]
    wrong += [f"op {op} is scheduled {n} times" for op, n in sorted(times.items()) if n > 1]
    wrong += [f"op {op} does not belong here" for op in sorted(set(times) - set(part))]
    if wrong:
        return wrong
    left = frozenset(part)
    for number in reversed(range(len(stages))):
        stage = stages[number]
        wrong += [f"stage {number}: {each}" for each in _stage_violations(problem, stage, left)]
        left -= set(stage.ops)
    return wrong


def _stage_violations(
    problem: StreamsProblem, stage: StreamStage, left: frozenset[int]
) -> list[str]:
    if bool(stage.groups) == bool(stage.merge):
        return ["needs either groups or a merge"]
    if stage.merge:
        return _merge_violations(problem, stage.merge, left)
    wrong = []
    if problem.s is not None and len(stage.groups) > problem.s:
        wrong.append(f"has {len(stage.groups)} groups, more than s = {problem.s}")
    for group in stage.groups:
        shown = list(group)
        if problem.r is not None and len(group) > problem.r:
            wrong.append(f"the group {shown} has more ops than r = {problem.r}")
        if not group:
            wrong.append("has a group without ops")
        elif problem.closure(min(group), left) != set(group):
            wrong.append(f"the group {shown} is not all that follows from one op")
        elif any(
            pred in group[at:] for at, op in enumerate(group) for pred in problem.ops[op].preds
        ):
            wrong.append(f"the group {shown} runs an op before what it needs")
    return wrong


def _merge_violations(
    problem: StreamsProblem, merge: tuple[int, ...], left: frozenset[int]
) -> list[str]:
    if len(merge) < 2:
        return ["a merge needs at least two ops"]
    kind = problem.merge_class(merge[0])
    wrong = [
        f"ops {merge[0]} and {op} cannot be merged"
        for op in merge[1:]
        if kind is None or problem.merge_class(op) != kind
    ]
    wrong += [
        f"something still follows from op {op}, which is merged"
        for op in merge
        if problem.closure(op, left) != {op}
    ]
    return wrong


def _flops(conv: Conv) -> float:
    pixels = conv.hout * conv.wout
    return 2 * conv.cout * pixels * conv.cin / conv.groups * conv.kh * conv.kw


def _frame(conv: Conv) -> tuple[int, int, int, int, int, int]:
    """What convs must have in common to be merged."""
    return conv.cin, conv.hin, conv.win, conv.hout, conv.wout, conv.groups
