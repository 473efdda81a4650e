"""Plans of several stages and micro-batches as programs: a task per block and micro-batch.

Each group of devices has one lane for its blocks and one for the collectives that end a step; each
direction between two groups has a lane for what they send. Devices of a group do the same, so one
lane stands for all of them, with a memory for each kind among them.

    forward      waits for what enters its stage; holds its activations, and what leaves until sent
    backward     waits for its forward and the gradients of what left; gives everything back
    end of step  parameters that several stages hold are exchanged, gradients synchronised, updated

Stages that are alike (in ops, splits and links) are costed once. Of a deep stage whose layers
repeat, two shorter ones are lowered and extended in a line. O(stages x micro-batches).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from partita.cluster import Cluster, DeviceKind
from partita.costs.collectives import Collectives
from partita.costs.layouts import Layout, num_shards
from partita.costs.memory import workspace_bytes
from partita.costs.patterns import Patterns
from partita.errors import PlanError
from partita.graph.chain import Repeat, longest_repeat
from partita.graph.rebatch import batch_of, rebatch
from partita.graph.record import Graph, Op
from partita.lower.blocks import Blocks, Phase, Run, stage_blocks
from partita.lower.orders import order_of
from partita.lower.pieces import WHOLE, Homes, Shorter, homes, piece, shortened
from partita.lower.stage import drawn_devices
from partita.lower.transfer import transfer_seconds
from partita.plans import Mesh, Schedule, Stage, device_groups
from partita.program import Kind, Program, ProgramBuilder
from partita.schedules.actions import Action, Order

COMPARED_BY_LINKS = 64  # devices; larger clusters are compared by their hierarchy
DEEP_OPS, DEEP_RUNS = 100, 6  # from so many forward ops and runs on, a stage is timed in part
RUNS_TIMED = (2, 3)  # with so many runs of its pattern; time and memory are lines from there on
PROBES = (("all_reduce", 1e3), ("all_reduce", 1e8), ("all_gather", 1e7), ("all_to_all", 1e7))


@dataclass(frozen=True)
class Sent:
    """What one stage sends another in each micro-batch; bytes are those of one device."""

    seconds: float
    source_bytes: float
    target_bytes: float


@dataclass(frozen=True)
class Pipelined:
    """A plan's program, with what it was made from."""

    program: Program
    microbatch: Graph
    blocks: tuple[Blocks, ...]
    order: Order
    forward: dict[tuple[int, int], Sent]  # (from stage, to stage)
    backward: dict[tuple[int, int], Sent]


@dataclass
class Memo:
    """What lowering many plans of one model on one cluster may remember."""

    collectives: Collectives
    blocks: dict[tuple[object, ...], Blocks] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)
    sent: dict[tuple[object, ...], float] = field(default_factory=dict)

    @cached_property
    def patterns(self) -> Patterns:
        """How devices lie in the hierarchy."""
        return Patterns.of(self.collectives.cluster)

    def geometry(self, mesh: Mesh) -> tuple[object, ...]:
        """Equal for meshes of like devices on which collectives take the same."""
        cluster, times = self.collectives.cluster, self.collectives
        if cluster.num_devices > COMPARED_BY_LINKS:
            return mesh.axes, self.patterns.pattern(mesh.devices)
        kinds = tuple(cluster.devices[device].kind for device in mesh.devices)
        probes = tuple(
            times.seconds(name, size, mesh.groups(axis))
            for axis in range(len(mesh.axes))
            for name, size in PROBES
        )
        return mesh.axes, kinds[0] if len(set(kinds)) == 1 else kinds, probes

    def transfer_s(
        self, size_bytes: float, source: Mesh, have: Layout, target: Mesh, need: Layout
    ) -> float:
        """Seconds to bring a tensor from one mesh to another; pairs that lie alike once."""
        place: tuple[object, ...] = (*source.devices, *target.devices)
        if self.collectives.cluster.num_devices > COMPARED_BY_LINKS:
            place = self.patterns.pattern((*source.devices, *target.devices))
        key = (size_bytes, source.axes, target.axes, have, need, len(source.devices), place)
        if key not in self.sent:
            self.sent[key] = transfer_seconds(
                size_bytes, source, have, target, need, self.collectives
            )
        return self.sent[key]


def lower_plan(
    stages: tuple[Stage, ...],
    schedule: Schedule,
    graph: Graph,
    cluster: Cluster,
    run: Run,
    memo: Memo | None = None,
) -> Pipelined:
    """The program of a plan; `run` is the engine's, by which blocks are timed."""
    known = memo or Memo(Collectives(cluster))
    micro = microbatch_graph(graph, schedule.num_microbatches, known)
    groups = device_groups(stages)
    order = order_of(schedule, groups, training=graph.is_training)
    apart = any(action.kind == "I" for row in order for action in row)
    once = len(stages) == schedule.num_microbatches == 1  # must be what it is op by op
    where = homes(micro, stages)
    blocks = tuple(
        _known_blocks(micro, stage, i, where, cluster, run, known, apart, once)
        for i, stage in enumerate(stages)
    )
    sends = _Sends(micro, stages, where, blocks, known)
    program = _Builder(stages, groups, order, cluster, blocks, sends).build()
    return Pipelined(program, micro, blocks, order, sends.forward, sends.backward)


def microbatch_graph(graph: Graph, num_microbatches: int, memo: Memo) -> Graph:
    """The graph for one micro-batch."""
    if num_microbatches not in memo.graphs:
        batch, rest = divmod(batch_of(graph), num_microbatches)
        if rest:
            raise PlanError(
                f"a batch of {batch_of(graph)} in {num_microbatches} micro-batches",
                fix="give a number that divides the batch",
                field="schedule",
            )
        memo.graphs[num_microbatches] = rebatch(graph, batch)
    return memo.graphs[num_microbatches]


def _known_blocks(
    graph: Graph, stage: Stage, number: int, where: Homes, cluster: Cluster, run: Run, memo: Memo,
    apart: bool, once: bool,
) -> Blocks:  # fmt: skip
    short = None if once else _shorter(graph, stage, number, where)
    if short is None:
        found = _timed_blocks(graph, stage, number, where, WHOLE, cluster, run, memo, apart)
    else:
        few, many = (
            _timed_blocks(graph, stage, number, where, part, cluster, run, memo, apart)
            for part in short.parts
        )
        found = extended(few, many, short.times - RUNS_TIMED[1])
    return replace(found, devices=drawn_devices(stage, cluster, 1))


def _timed_blocks(
    graph: Graph, stage: Stage, number: int, where: Homes, part: Shorter, cluster: Cluster,
    run: Run, memo: Memo, apart: bool,
) -> Blocks:  # fmt: skip
    key = (apart, signature(graph, stage, number, where, part), memo.geometry(stage.mesh))
    if key not in memo.blocks:
        own = piece(graph, stage, number, where, part)
        found = stage_blocks(own, stage, cluster, run, memo.collectives, apart=apart)
        memo.blocks[key] = found if not graph.is_training else _with_backward(found, apart)
    return memo.blocks[key]


@dataclass(frozen=True)
class _Short:
    parts: tuple[Shorter, ...]
    times: int


def _shorter(graph: Graph, stage: Stage, number: int, where: Homes) -> _Short | None:
    """Two shorter stages that a deep one is extended from; None where it is not worth it.

    What leaves the stage must not come from what is left out, everything that enters it must still
    be read, and splits and checkpoints must repeat as the ops do.
    """
    ops = where.forward[number]
    if len(ops) < DEEP_OPS:
        return None
    repeat = longest_repeat(graph, ops)
    if repeat is None or repeat.times < DEEP_RUNS or not _same_runs(stage, ops, repeat):
        return None
    entering, leaving = where.borders(number)
    parts = []
    for kept in RUNS_TIMED:
        gone, renamed = repeat.without(kept)
        part = Shorter(frozenset(ops[i].name for i in gone), renamed)
        left = shortened(ops, part)
        made = {name for op in left for name in op.outputs}
        read = {name for op in left for name in op.inputs}
        if not set(leaving) <= made or not set(entering) <= read:
            return None
        parts.append(part)
    return _Short(tuple(parts), repeat.times)


def _same_runs(stage: Stage, ops: Sequence[Op], repeat: Repeat) -> bool:
    """Are all runs but the first split, kept and checkpointed alike?"""
    splits = {split.op: (split.dims, split.sharded) for split in stage.splits}
    firsts = set(stage.checkpoints)
    first, length = repeat.first, repeat.length
    looks = {
        tuple(
            (splits[op.name], op.name in firsts)
            for op in ops[first + run * length : first + (run + 1) * length]
        )
        for run in range(1, repeat.times)
    }
    return len(looks) == 1


def extended(few: Blocks, many: Blocks, runs: int) -> Blocks:
    """A stage with so many more runs of its pattern than `many`, which has one more than `few`."""

    def line(a: float, b: float) -> float:
        return max(0.0, b + runs * (b - a))

    def lines(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(map(line, a, b))

    def phase(a: Phase | None, b: Phase | None) -> Phase | None:
        if a is None or b is None:
            return b
        return Phase(
            line(a.seconds, b.seconds),
            lines(a.peak_bytes, b.peak_bytes),
            lines(a.held_bytes, b.held_bytes),
        )

    forward = phase(few.forward, many.forward)
    assert forward is not None, "every stage has a forward"
    return replace(
        many,
        forward=forward,
        backward=phase(few.backward, many.backward),
        weight=phase(few.weight, many.weight),
        sync_s=line(few.sync_s, many.sync_s),
        update_s=line(few.update_s, many.update_s),
        static_bytes=lines(few.static_bytes, many.static_bytes),
    )


def _with_backward(blocks: Blocks, apart: bool) -> Blocks:
    """A stage without anything to differentiate still takes its turn, in no time."""
    nothing = tuple(0.0 for _ in blocks.devices)
    if blocks.backward is None:
        blocks = replace(blocks, backward=Phase(0.0, blocks.forward.held_bytes, nothing))
    if apart and blocks.weight is None:
        assert blocks.backward is not None, "given just now"
        blocks = replace(blocks, weight=Phase(0.0, blocks.backward.held_bytes, nothing))
    return blocks


def signature(
    graph: Graph, stage: Stage, number: int, where: Homes, part: Shorter = WHOLE
) -> tuple[object, ...]:
    """Equal for stages that cost the same on like meshes: ops, how they hang together, splits."""
    ids: dict[str, int] = {}
    splits = {split.op: split for split in stage.splits}
    firsts = set(stage.checkpoints)
    rows: list[tuple[object, ...]] = []
    for op in shortened(where.forward[number], part):
        seen = []
        for name in (*op.inputs, *op.outputs):
            if name not in ids:
                ids[name] = len(ids)
                tensor = graph.tensor(name)
                users, givers = where.users.get(name, ()), where.givers.get(name, ())
                made = where.maker.get(name, number) == number
                rows.append((
                    tensor.shape, tensor.dtype, tensor.role, made, name in graph.outputs,
                    len(users), number in users, len(givers), number in givers,
                ))  # fmt: skip
            seen.append(ids[name])
        split = splits[op.name]
        rows.append((op.kind, op.attrs, *seen, split.dims, split.sharded, op.name in firsts))
    return stage.recompute, tuple(rows)


class _Sends:
    """What passes between stages: activations one way, gradients the other, shared parameters."""

    def __init__(
        self, graph: Graph, stages: tuple[Stage, ...], where: Homes, blocks: tuple[Blocks, ...],
        memo: Memo,
    ) -> None:  # fmt: skip
        self.graph, self.stages, self.memo = graph, stages, memo
        self.forward: dict[tuple[int, int], Sent] = {}
        self.backward: dict[tuple[int, int], Sent] = {}
        self.tied: dict[tuple[int, int], float] = {}
        borders = [where.borders(i) for i in range(len(stages))]
        place = [{name: k for k, name in enumerate(leaving)} for _, leaving in borders]
        for j, (entering, _) in enumerate(borders):
            for k, name in enumerate(entering):
                i = where.maker[name]
                at = place[i][name]
                self._add(self.forward, (i, j), name, blocks[i].leaves[at], blocks[j].enters[k])
                sent = blocks[j].sends[k]
                others = [user for user in where.givers.get(name, ()) if user != i]
                if sent is not None and blocks[i].takes[at]:
                    need = blocks[i].takes[at][others.index(j)]
                    self._add(self.backward, (j, i), name, sent, need)
        self._tie(where, blocks)

    def _add(
        self, into: dict[tuple[int, int], Sent], pair: tuple[int, int], name: str, have: Layout,
        need: Layout,
    ) -> None:  # fmt: skip
        source, target = (self.stages[i].mesh for i in pair)
        size = self.graph.tensor(name).size_bytes
        before = into.get(pair, Sent(0.0, 0.0, 0.0))
        into[pair] = Sent(
            before.seconds + self.memo.transfer_s(size, source, have, target, need),
            before.source_bytes + size / num_shards(have, [a.ways() for a in source.axes]),
            before.target_bytes + size / num_shards(need, [a.ways() for a in target.axes]),
        )

    def _tie(self, where: Homes, blocks: tuple[Blocks, ...]) -> None:
        """Gradients of a parameter that several stages hold, from each to the next and back."""
        holders: dict[str, list[tuple[int, Layout]]] = {}
        for i, found in enumerate(blocks):
            if not found.shared:
                continue
            names = dict.fromkeys(
                name
                for op in where.forward[i]
                for name in op.inputs
                if self.graph.tensor(name).role == "parameter" and len(where.users[name]) > 1
            )
            for name, layout in zip(names, found.shared, strict=True):
                holders.setdefault(name, []).append((i, layout))
        for name, held in holders.items():
            size = self.graph.tensor(name).size_bytes
            for (i, have), (j, need) in pairwise(held):
                a, b = self.stages[i].mesh, self.stages[j].mesh
                if a.devices != b.devices and name in where.givers:
                    seconds = self.memo.transfer_s(size, a, have, b, need)
                    self.tied[i, j] = self.tied.get((i, j), 0.0) + seconds


class _Builder:
    def __init__(
        self, stages: tuple[Stage, ...], groups: tuple[tuple[int, ...], ...], order: Order,
        cluster: Cluster, blocks: tuple[Blocks, ...], sends: _Sends,
    ) -> None:  # fmt: skip
        self.stages, self.groups, self.order = stages, groups, order
        self.cluster, self.blocks, self.sends = cluster, blocks, sends
        self.builder = ProgramBuilder()
        self.group_of = {stage: g for g, members in enumerate(groups) for stage in members}
        self.lanes = [self.builder.lane(self._name(g)) for g in range(len(groups))]
        self.memory_of = [self._memories(g) for g in range(len(groups))]
        self.network: dict[tuple[int, int], int] = {}
        self.done: dict[tuple[str, int, int], int] = {}  # (kind, stage, microbatch) -> task
        self.into: list[list[int]] = [[] for _ in stages]  # stages that feed it
        self.from_after: list[list[int]] = [[] for _ in stages]  # stages it gets gradients from
        for i, j in sends.forward:
            self.into[j].append(i)
        for j, i in sends.backward:
            self.from_after[i].append(j)
        self.training = any(block.backward is not None for block in blocks)
        self.sent: dict[tuple[int, int, int], int] = {}  # (from, to, microbatch) -> task

    def build(self) -> Program:
        self.begin = self._begin()
        place = [0] * len(self.order)
        left = sum(map(len, self.order))
        while left:
            before = left
            for g, row in enumerate(self.order):
                while place[g] < len(row) and self._ready(row[place[g]]):
                    self._run(g, row[place[g]])
                    place[g] += 1
                    left -= 1
            if left == before:
                stuck = [
                    str(row[at]) for row, at in zip(self.order, place, strict=True) if at < len(row)
                ]
                raise PlanError(
                    f"the order cannot go on: {', '.join(stuck[:4])} wait for each other",
                    fix="correct the order, or name a known schedule",
                    field="schedule order",
                )
        self._end_step()
        return self.builder.build()

    def _ready(self, action: Action) -> bool:
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            return all(("F", i, m) in self.done for i in self.into[stage])
        if action.kind == "W":
            return ("I", stage, m) in self.done
        return ("F", stage, m) in self.done and all(
            ("I", j, m) in self.done or ("B", j, m) in self.done for j in self.from_after[stage]
        )

    def _run(self, group: int, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            self._forward(group, stage, m)
        elif action.kind == "W":
            self._weight(group, stage, m)
        else:
            self._backward(group, stage, m, whole=action.kind == "B")

    # Blocks.

    def _forward(self, group: int, stage: int, m: int) -> None:
        blocks = self.blocks[stage]
        phase = blocks.forward
        leaving = sum(
            sent.source_bytes for (i, _), sent in self.sends.forward.items() if i == stage
        )
        entered = 0.0 if self.training else self._entered(stage)
        effects = [
            (memory, peak, held - peak + leaving - entered)
            for memory, peak, held in self._rows(group, blocks, phase)
        ]
        if not self.training:  # nothing is kept for a backward
            effects = [(k, peak, leaving - entered - peak) for k, peak, _ in effects]
        waits = [self.sent[i, stage, m] for i in self.into[stage]] or [self.begin]
        self._block(stage, group, phase.seconds, waits, effects, Kind.FORWARD, m, "F")
        for i, j in self.sends.forward:
            if i == stage:
                self._send(i, j, m, self.sends.forward[i, j], self.done["F", i, m], ">")

    def _backward(self, group: int, stage: int, m: int, *, whole: bool) -> None:
        blocks = self.blocks[stage]
        phase = blocks.backward
        assert phase is not None, "an order of training has a backward"
        seconds, last = phase.seconds, phase
        peaks = phase.peak_bytes
        if whole and blocks.weight is not None:
            last = blocks.weight
            seconds += last.seconds
            peaks = tuple(map(max, zip(peaks, last.peak_bytes, strict=True)))
        arrived = sum(
            sent.target_bytes for (_, i), sent in self.sends.backward.items() if i == stage
        )
        leaving = sum(
            sent.source_bytes for (j, _), sent in self.sends.backward.items() if j == stage
        )
        back = arrived + self._entered(stage) - leaving
        effects = [
            (memory, peak - held, after - peak - back)
            for memory, peak, held, after in zip(
                self._places(group, blocks), peaks, blocks.forward.held_bytes, last.held_bytes,
                strict=True,
            )
        ]  # fmt: skip
        waits = [
            self.done["F", stage, m],
            *(self.sent[j, stage, m] for j in self.from_after[stage]),
        ]
        apart = not whole
        kind = Kind.DGRAD if apart else Kind.BACKWARD
        self._block(stage, group, seconds, waits, effects, kind, m, "I" if apart else "B")
        made = self.done["I" if apart else "B", stage, m]
        for j, i in self.sends.backward:
            if j == stage:
                self._send(j, i, m, self.sends.backward[j, i], made, "<")

    def _weight(self, group: int, stage: int, m: int) -> None:
        blocks = self.blocks[stage]
        assert blocks.backward is not None, "an order of training has a backward"
        assert blocks.weight is not None, "the backward was taken apart"
        effects = [
            (memory, peak - held, after - peak)
            for memory, peak, held, after in zip(
                self._places(group, blocks), blocks.weight.peak_bytes,
                blocks.backward.held_bytes, blocks.weight.held_bytes, strict=True,
            )
        ]  # fmt: skip
        waits = [self.done["I", stage, m]]
        self._block(stage, group, blocks.weight.seconds, waits, effects, Kind.WGRAD, m, "W")

    def _block(
        self, stage: int, group: int, seconds: float, waits: list[int],
        effects: list[tuple[int, float, float]], kind: Kind, m: int, letter: str,
    ) -> None:  # fmt: skip
        self.done[letter, stage, m] = self.builder.add(
            self.stages[stage].name, self.lanes[group], seconds, waits, effects, kind, m
        )

    def _send(self, i: int, j: int, m: int, sent: Sent, made: int, arrow: str) -> None:
        a, b = self.group_of[i], self.group_of[j]
        first, second = self.stages[min(i, j)].name, self.stages[max(i, j)].name
        effects = [(memory, 0.0, -sent.source_bytes) for memory in self.memory_of[a].values()]
        for memory in self.memory_of[b].values():
            if a == b:
                place = next(k for k, effect in enumerate(effects) if effect[0] == memory)
                effects[place] = (memory, sent.target_bytes, -sent.source_bytes)
            else:
                effects.append((memory, sent.target_bytes, 0.0))
        lanes = () if a == b else (self._link(a, b),)
        self.sent[i, j, m] = self.builder.add(
            f"{first} {arrow} {second}", lanes, sent.seconds if lanes else 0.0, [made], effects,
            Kind.COLLECTIVE, m,
        )  # fmt: skip

    # Before the first and after the last micro-batch.

    def _begin(self) -> int:
        effects = []
        for g, members in enumerate(self.groups):
            for kind, memory in self.memory_of[g].items():
                total = workspace_bytes(self._kind(g, kind))
                for stage in members:
                    blocks = self.blocks[stage]
                    kinds = [self.cluster.devices[d].kind for d in blocks.devices]
                    total += blocks.static_bytes[kinds.index(kind)]
                effects.append((memory, total, 0.0))
        return self.builder.add("parameters, states and workspace", (), 0.0, (), effects)

    def _end_step(self) -> None:
        last = {
            stage: max(task for (_, s, _), task in self.done.items() if s == stage)
            for stage in range(len(self.stages))
        }
        ready: dict[int, list[int]] = {stage: [task] for stage, task in last.items()}
        for (i, j), seconds in self.sends.tied.items():
            a, b = self.group_of[i], self.group_of[j]
            names = self.stages[i].name, self.stages[j].name
            task = self.builder.add(
                f"{names[0]} <> {names[1]} shared gradients",
                (self._link(a, b), self._link(b, a)), seconds, [last[i], last[j]],
                kind=Kind.COLLECTIVE,
            )  # fmt: skip
            ready[i].append(task)
            ready[j].append(task)
        for stage, blocks in enumerate(self.blocks):
            group, name = self.group_of[stage], self.stages[stage].name
            waits = ready[stage]
            if blocks.sync_s > 0:
                lane = self._link(group, group)
                waits = [
                    self.builder.add(
                        f"{name} gradients", lane, blocks.sync_s, waits, kind=Kind.COLLECTIVE
                    )
                ]
            if blocks.update_s > 0:
                self.builder.add(
                    f"{name} update", self.lanes[group], blocks.update_s, waits, kind=Kind.UPDATE
                )

    # Names and places.

    def _name(self, group: int) -> str:
        devices = self.stages[self.groups[group][0]].mesh.devices
        names = [self.cluster.devices[device].name for device in devices]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def _memories(self, group: int) -> dict[str, int]:
        """A memory for each kind of device in a group."""
        devices = drawn_devices(self.stages[self.groups[group][0]], self.cluster, 1)
        found = {}
        for device in devices:
            kind = self.cluster.kind_of(device)
            name = self._name(group) if len(devices) == 1 else f"{self._name(group)} ({kind.name})"
            found[kind.name] = self.builder.memory(name, float(kind.memory_bytes))
        return found

    def _kind(self, group: int, name: str) -> DeviceKind:
        devices = self.stages[self.groups[group][0]].mesh.devices
        return next(
            self.cluster.kind_of(d) for d in devices if self.cluster.devices[d].kind == name
        )

    def _places(self, group: int, blocks: Blocks) -> list[int]:
        memory_of = self.memory_of[group]
        return [memory_of[self.cluster.devices[device].kind] for device in blocks.devices]

    def _rows(self, group: int, blocks: Blocks, phase: Phase) -> Iterable[tuple[int, float, float]]:
        return zip(self._places(group, blocks), phase.peak_bytes, phase.held_bytes, strict=True)

    def _entered(self, stage: int) -> float:
        return sum(sent.target_bytes for (_, j), sent in self.sends.forward.items() if j == stage)

    def _link(self, a: int, b: int) -> int:
        if (a, b) not in self.network:
            name = f"{self._name(a)} net" if a == b else f"{self._name(a)} > {self._name(b)}"
            self.network[a, b] = self.builder.lane(name, "link")
        return self.network[a, b]
