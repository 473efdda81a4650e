"""Blocks of stages, each kind of stage once: what lowering many plans of a model remembers.

Stages with equal ops, splits and links have equal blocks. Of a deep stage whose layers repeat, two
shorter ones are lowered, and time and memory extended in a line: exact for what is held and
computed, within a fraction of a percent for the end of the step.

Bodies of stages that are alike are written once, and for the others with their names. With virtual
stages a group of devices has many stages of the same layers. Where the pieces of two stages differ
in names alone, and both lie on the same devices, the tasks inside their blocks differ in names
alone, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from partita.cluster import Cluster
from partita.costs.collectives import Collectives, Patterns
from partita.costs.layouts import Layout, transfer_seconds
from partita.errors import PlanError
from partita.graph.chain import Repeat, longest_repeat
from partita.graph.rebatch import batch_of, rebatch
from partita.graph.record import Graph, Op
from partita.lower.blocks import BlockPhase, Blocks, Run, StageBodies, stage_blocks
from partita.lower.context import representative_devices
from partita.lower.pieces import WHOLE, Homes, Shorter, StageGraph, piece, shortened
from partita.meaning import Value, Work, label
from partita.plans import Mesh, Stage
from partita.program import Body, Program

Names = dict[str, str]
WRITTEN = 2  # times that the ops of a block are: in each micro-batch, and in the last one
RUNS_TIMED = (2, 3)  # a deep stage with so many runs of its pattern: a line has two points
# Collectives that tell meshes apart: one is all latency, one all bandwidth.
PROBES = (("all_reduce", 1e3), ("all_reduce", 1e8), ("all_gather", 1e7), ("all_to_all", 1e7))


def structure(part: StageGraph, stage: Stage) -> tuple[object, ...]:
    """Equal for stages on the same devices whose pieces are the same but for names."""
    graph = part.graph
    tensors = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    ops = {op.name: i for i, op in enumerate(graph.ops)}
    return (
        stage.mesh,
        stage.prefetch,
        stage.bucket_bytes,
        stage.overlap,
        tuple(ops[name] for name in stage.bundles or () if name in ops),
        tuple((t.shape, t.dtype, t.role) for t in graph.tensors),
        tuple(
            (
                op.kind, repr(op.attrs), op.phase, ops.get(op.forward, -1),
                tuple(tensors[name] for name in op.inputs),
                tuple(tensors[name] for name in op.outputs),
            )
            for op in graph.ops
        ),
        tuple((ops[split.op], split.dims, split.zero) for split in part.splits),
        tuple(tensors[name] for name in graph.outputs),
        tuple(tensors[name] for name in part.entering),
        tuple(tensors[name] for name in part.leaving),
        tuple((tensors[name], tensors[sent]) for name, _, sent in part.gradients_in),
        tuple((tensors[name], tensors[sent]) for name, sent in part.gradients_out),
        tuple(tensors[name] for name in part.shared),
        part.num_forward,
        tuple(op.name in part.recomputed for op in graph.ops),
        tuple(op.name in part.single for op in graph.ops),
        tuple(tensors.get(part.original.get(t.name, ""), -1) for t in graph.tensors),
        tuple(ops.get(part.original.get(op.name, ""), -1) for op in graph.ops),
    )  # fmt: skip


def with_names(bodies: StageBodies, part: StageGraph, stage: Stage, number: int) -> StageBodies:
    """The bodies of a stage like another one, whose piece is `part`."""
    tensors = _paired(bodies.part.graph, part.graph, "tensors")
    ops = _paired(bodies.part.graph, part.graph, "ops")
    stages = (stage.name,) * (number + 1)

    def named(body: Body) -> Body:
        program = _renamed(body.program, tensors, ops, number, stages)
        return Body(number, program, body.start, body.end)

    ending = None if bodies.ending is None else named(bodies.ending)
    return replace(bodies, part=part, steady=named(bodies.steady), ending=ending)


def _paired(first: Graph, second: Graph, what: str) -> Names:
    """Names of one graph -> names of the other, by their places."""
    ours, theirs = getattr(first, what), getattr(second, what)
    return {"": ""} | {a.name: b.name for a, b in zip(ours, theirs, strict=True)}


def _renamed(
    program: Program, tensors: Names, ops: Names, number: int, stages: tuple[str, ...]
) -> Program:
    values = tuple(
        Value(
            tensors[v.tensor], v.layout, v.source, v.of, v.flat, tensors[v.gradient_of]
        )
        for v in program.values
    )  # fmt: skip
    works = tuple(
        Work(
            w.purpose, w.phase, ops[w.op], w.dims, number, w.peer, w.collective, w.axis, w.group,
            w.size_bytes, w.reads, w.writes, w.body, w.part,
        )
        for w in program.works
    )  # fmt: skip
    names: dict[str, int] = {}
    blocks = [names.setdefault(label(work, values, stages), len(names)) for work in works]
    block = np.array(blocks, np.int32)[program.work]
    return replace(program, works=works, values=values, blocks=tuple(names), block=block)


@dataclass
class Memo:
    """What lowering many plans of one model on one cluster may remember, and how it is quick."""

    collectives: Collectives
    by_links: int = 64  # devices: meshes of larger clusters are compared by their hierarchy
    deep_ops: int = 100  # from so many forward ops on, and
    deep_runs: int = 6  # so many runs of its pattern, a stage is timed by two shorter ones
    execution: str = "graph"
    blocks: dict[tuple[object, ...], Blocks] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)
    sent: dict[tuple[object, ...], float] = field(default_factory=dict)
    written_ops: int = 0  # how many in all, by which lowering can be foretold

    @cached_property
    def patterns(self) -> Patterns:
        """How devices lie in the hierarchy."""
        return Patterns.of(self.collectives.cluster)

    def geometry(self, mesh: Mesh) -> tuple[object, ...]:
        """Equal for meshes of like devices on which collectives take the same."""
        cluster, times = self.collectives.cluster, self.collectives
        if cluster.num_devices > self.by_links:
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
        common = len(set(source.devices) & set(target.devices))
        in_part = 0 < common < max(len(source.devices), len(target.devices))
        if self.collectives.cluster.num_devices > self.by_links and not in_part:
            place = self.patterns.pattern((*source.devices, *target.devices))
        key = (size_bytes, source.axes, target.axes, have, need, len(source.devices), place)
        if key not in self.sent:
            self.sent[key] = transfer_seconds(
                size_bytes, source, have, target, need, self.collectives
            )
        return self.sent[key]


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


def known_blocks(
    graph: Graph, stage: Stage, number: int, where: Homes, cluster: Cluster, run: Run, memo: Memo,
    apart: bool,
) -> Blocks:  # fmt: skip
    """The blocks of the `number`-th stage."""
    drawn = representative_devices(stage, cluster, 1)
    # Of heterogeneous devices now one is the last to be done and now another, which makes no line.
    short = None if len(drawn) > 1 else _shorter(graph, stage, number, where, memo)
    if short is None:
        block = _timed_blocks(graph, stage, number, where, WHOLE, cluster, run, memo, apart)
    else:
        plain = replace(stage, overlap=None)  # an order of all collectives is none of fewer
        few, many = (
            _timed_blocks(graph, plain, number, where, part, cluster, run, memo, apart)
            for part in short.parts
        )
        block = extended(few, many, short.times - RUNS_TIMED[1])
    return replace(block, devices=drawn)


def _timed_blocks(
    graph: Graph, stage: Stage, number: int, where: Homes, part: Shorter, cluster: Cluster,
    run: Run, memo: Memo, apart: bool,
) -> Blocks:  # fmt: skip
    key = (
        memo.execution,
        apart,
        signature(graph, stage, number, where, part),
        memo.geometry(stage.mesh),
    )
    if key not in memo.blocks:
        own = piece(graph, stage, number, where, part)
        memo.written_ops += WRITTEN * len(own.graph.ops)
        block = stage_blocks(
            own, stage, cluster, run, memo.collectives, apart=apart, execution=memo.execution
        )
        memo.blocks[key] = block if not graph.is_training else with_backward(block, apart)
    return memo.blocks[key]


@dataclass(frozen=True)
class _Short:
    parts: tuple[Shorter, ...]
    times: int


def _shorter(graph: Graph, stage: Stage, number: int, where: Homes, memo: Memo) -> _Short | None:
    """Two shorter stages that a deep one is extended from; None where it is not worth it.

    What leaves the stage must not come from what is left out, everything that enters it must still
    be read, and splits and checkpoints must repeat as the ops do.
    """
    ops = where.forward[number]
    if len(ops) < memo.deep_ops:
        return None
    repeat = longest_repeat(graph, ops)
    if repeat is None or repeat.times < memo.deep_runs or not _same_runs(stage, ops, repeat):
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
    splits = {split.op: (split.dims, split.zero) for split in stage.splits}
    firsts, again = set(stage.segments), set(stage.recomputed)
    bundled = set(stage.bundles or ())
    first, length = repeat.first, repeat.length
    looks = {
        tuple(
            (splits[op.name], op.name in firsts, op.name in again, op.name in bundled)
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

    def phase(a: BlockPhase | None, b: BlockPhase | None) -> BlockPhase | None:
        if a is None or b is None:
            return b
        return BlockPhase(
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
        cache_bytes=line(few.cache_bytes, many.cache_bytes),
    )


def with_backward(blocks: Blocks, apart: bool) -> Blocks:
    """A stage without anything to differentiate still takes its turn, in no time."""
    nothing = tuple(0.0 for _ in blocks.devices)
    if blocks.backward is None:
        blocks = replace(blocks, backward=BlockPhase(0.0, blocks.forward.held_bytes, nothing))
    if apart and blocks.weight is None:
        assert blocks.backward is not None, "given just now"
        blocks = replace(blocks, weight=BlockPhase(0.0, blocks.backward.held_bytes, nothing))
    return blocks


def signature(
    graph: Graph, stage: Stage, number: int, where: Homes, part: Shorter = WHOLE
) -> tuple[object, ...]:
    """Equal for stages that cost the same on like meshes: ops, how they hang together, splits."""
    ids: dict[str, int] = {}
    splits = {split.op: split for split in stage.splits}
    firsts, again = set(stage.segments), set(stage.recomputed)
    bundled = set(stage.bundles or ())
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
        runs = (op.name in firsts, op.name in again, op.name in bundled)
        rows.append((op.kind, op.attrs, *seen, split.dims, split.zero, runs))
    return stage.checkpointing == "full", not stage.bundles, tuple(rows)
