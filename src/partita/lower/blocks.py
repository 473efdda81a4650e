"""What a stage takes for one micro-batch: the blocks that a schedule puts in order.

The stage's piece of the graph is lowered op by op as a one-stage plan is, with a barrier between
the phases (forward; backward, or data gradients and weight gradients apart), and run. The seconds
of a phase are its block's; memory is read off the same run: what is held when a phase ends, and
the most within it. Gradients of parameters are added up in place over the micro-batches.

Replicated parameters (ZeRO 0 and 1) reduce their gradients once a step, while the last backward
goes on. A second run without that barrier gives the step's end: `tail_s` is what reduction and
update take beyond that last backward. Sharded gradients (ZeRO 2 and 3) are reduced in every
micro-batch, so that no device ever holds all gradients.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.memory import workspace_bytes
from partita.graph.record import Op
from partita.lower.context import Context, context_of, representative_devices
from partita.lower.ops import Collect, Received, network_order, run_ops, settle, settle_outputs
from partita.lower.parameters import (
    SHARDED_GRADIENTS,
    cache_bytes,
    flush_all,
    gradient_bytes,
    join_bucket,
    resident_bytes,
    update_all,
)
from partita.lower.pieces import StageGraph
from partita.lower.writer import Buffer, Writer
from partita.meaning import Layout, Phase
from partita.plans import Overlap, Stage
from partita.program import Body, Kind, Program
from partita.timeline import Timeline

Run = Callable[[Program], Timeline]
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class BlockPhase:
    """One block: seconds, and bytes above what always lies there, per representative rank."""

    seconds: float
    peak_bytes: tuple[float, ...]
    held_bytes: tuple[float, ...]  # when it ends


@dataclass(frozen=True)
class Blocks:
    """A stage's blocks; `weight` is there where the backward is taken apart."""

    devices: tuple[int, ...]  # one of each kind
    forward: BlockPhase
    backward: BlockPhase | None
    weight: BlockPhase | None
    sync_s: float  # of the step's end: gradients, and
    update_s: float  # the optimizer
    static_bytes: tuple[float, ...]
    enters: tuple[Layout, ...]  # how the activations that enter must lie
    leaves: tuple[Layout, ...]
    sends: tuple[Layout | None, ...]  # the gradients of what entered, where there are any
    takes: tuple[tuple[Layout, ...], ...]  # of what leaves, the gradients stage by stage
    shared: tuple[Layout, ...]  # parameters that other stages hold too
    cache_bytes: float = 0.0  # of the static ones, what each micro-batch has of its own

    @property
    def tail_s(self) -> float:
        """What ends a step, beyond the last backward."""
        return self.sync_s + self.update_s

    @property
    def busy_s(self) -> float:
        """All phases of one micro-batch."""
        phases = (self.forward, self.backward, self.weight)
        return sum(phase.seconds for phase in phases if phase is not None)


@dataclass(frozen=True)
class StageBodies:
    """What is inside a stage's blocks: each micro-batch, and the one that ends a step."""

    blocks: Blocks
    part: StageGraph
    steady: Body
    ending: Body | None
    overlap: Overlap


def stage_blocks(
    part: StageGraph, stage: Stage, cluster: Cluster, run: Run, collectives: Collectives, *,
    apart: bool = False, execution: str = "graph",
) -> Blocks:  # fmt: skip
    """The blocks of a stage whose piece has the micro-batch's size; `run` is the engine's."""
    return stage_bodies(
        part, stage, 0, cluster, run, collectives, apart=apart, execution=execution
    ).blocks


def stage_bodies(
    part: StageGraph, stage: Stage, number: int, cluster: Cluster, run: Run,
    collectives: Collectives,
    *, apart: bool = False, execution: str = "graph",
) -> StageBodies:  # fmt: skip
    """The blocks of a stage together with the programs they were read off."""
    local = part.local(stage)
    devices = representative_devices(local, cluster, 1)
    context = context_of(local, part.graph, cluster, devices, collectives, number, part, execution)
    recorded = (None, None) if stage.overlap is None else (stage.overlap.order, stage.overlap.last)
    w = Writer(context, network_order(stage, recorded[0], len(devices)))
    w.keeps_gradients = False
    layouts = _LeavingLayouts()
    cuts = _write(w, part, layouts, apart=apart, ends=False)
    resident = {device: resident_bytes(w, device) for device in devices}
    program = w.build(resident)
    timeline = run(program)
    phases = _phases(w, timeline, cuts)
    order, last, ending, tail, update = w.order.ended(), "", None, 0.0, 0.0
    if context.update_of:
        whole = Writer(context, network_order(stage, recorded[1], len(devices)))
        whole.keeps_gradients = False
        _write(whole, part, _LeavingLayouts(), apart=apart, ends=True)
        last = whole.order.ended()
        end_program = whole.build(resident)
        end_timeline = run(end_program)
        ending = Body(number, end_program, end_timeline.start, end_timeline.end)
        steady_s = sum(phase.seconds for phase in phases)
        tail, update = _tail(whole, end_timeline, steady_s)
    held = gradient_bytes(w)
    blocks = Blocks(
        devices,
        phases[0],
        phases[1] if len(phases) > 1 else None,
        phases[2] if len(phases) > 2 else None,
        tail - update,
        update,
        tuple(resident[d] - workspace_bytes(context.kinds[d]) + held for d in devices),
        *layouts.listed(w, part),
        cache_bytes=cache_bytes(w),
    )
    steady = Body(number, program, timeline.start, timeline.end)
    return StageBodies(blocks, part, steady, ending, Overlap(order, last))


class _LeavingLayouts:
    """How everything lies that leaves a stage, by the tensor's name in its piece."""

    def __init__(self) -> None:
        self.leaving: dict[str, Layout] = {}

    def listed(self, w: Writer, part: StageGraph) -> tuple[
        tuple[Layout, ...],
        tuple[Layout, ...],
        tuple[Layout | None, ...],
        tuple[tuple[Layout, ...], ...],
        tuple[Layout, ...],
    ]:  # fmt: skip
        """How everything lies that other stages give or get, in the order of the piece."""
        lies = {name: buffer.layout for name, buffer in w.buffers.items()}
        out = dict(part.gradients_out)
        return (
            tuple(lies[name] for name in part.entering),
            tuple(self.leaving[name] for name in part.leaving),
            tuple(self.leaving.get(out.get(name, "")) for name in part.entering),
            tuple(
                tuple(lies[sent] for tensor, _, sent in part.gradients_in if tensor == name)
                for name in part.leaving
            ),
            tuple(lies[name] for name in part.shared),
        )


def _write(
    w: Writer, part: StageGraph, layouts: _LeavingLayouts, *, apart: bool, ends: bool
) -> list[int]:
    """One micro-batch, phase by phase; with `ends`, the step's end after it. The phases' ends."""
    ops, first = w.context.graph.ops, part.num_forward
    received: Received = dict.fromkeys(part.entering, ())
    accumulate, w.reduces_now = _accumulating(ends), ends
    cuts: list[int] = []
    run_ops(w, ops[:first], received, accumulate)
    layouts.leaving |= settle(w, part.leaving)
    settle_outputs(w, w.context.graph.outputs)
    if not w.context.graph.is_training:  # else a loss is added up while the backward goes on
        w.drain()
    _close(w, cuts, Phase.BACKWARD)
    received |= {sent: w.buffers[tensor].layout for tensor, _, sent in part.gradients_in}
    rest = [op for op in ops[first:] if op.phase != "update"]
    if rest:
        late = _late(w.context, part, rest) if apart else set()
        run_ops(w, [op for op in rest if op.name not in late], received, accumulate)
        layouts.leaving |= settle(w, (name for _, name in part.gradients_out))
        if apart:
            w.drain()
            _close(w, cuts, Phase.WEIGHT)
            run_ops(w, [op for op in rest if op.name in late], received, accumulate)
        if not ends:
            flush_all(w)
            _close(w, cuts, Phase.REDUCE)
    if ends:
        flush_all(w)
        update_all(w)
    return cuts


def _accumulating(ends: bool) -> Collect:
    """What becomes of a gradient: sharded ones are reduced at once, others when a step ends."""

    def accumulate(w: Writer, gradient: Buffer) -> None:
        level = w.context.levels[w.context.update_of[gradient.name].inputs[0]]
        if level in SHARDED_GRADIENTS and gradient.root is None:
            w.take(gradient, gradient.made_by)
        if level in SHARDED_GRADIENTS or ends:
            join_bucket(w, gradient)

    return accumulate


def _late(context: Context, part: StageGraph, ops: list[Op]) -> set[str]:
    """Weight gradients, and what runs again for nothing else."""
    late: set[str] = set()
    for op in reversed(ops):
        users = (user for name in op.outputs for user in context.graph.consumers(name))
        alone = op.name in part.single and all(user.name in late for user in users)
        if op.phase == "wgrad" or alone:
            late.add(op.name)
    return late


def _close(w: Writer, cuts: list[int], following: Phase) -> None:
    """End a phase: sharded parameters are gathered anew in the next one."""
    cuts.append(w.close_phase())
    w.phase = following
    w.last_sharded = {}
    w.gathered.clear()


def _phases(w: Writer, timeline: Timeline, cuts: list[int]) -> list[BlockPhase]:
    """The blocks' seconds and bytes."""
    moments = [float(timeline.end[cut + 1]) for cut in cuts]  # task 0 is what is resident
    phases = []
    held = [0.0] * len(w.context.devices)
    first, before = 0, 0.0
    for cut, moment in zip(cuts, moments, strict=True):
        peaks, held = _memory(w, range(first, cut), timeline, held)
        phases.append(BlockPhase(moment - before, tuple(peaks), tuple(held)))
        first, before = cut, moment
    return phases


def _memory(
    w: Writer, tasks: Iterable[int], timeline: Timeline, held: list[float]
) -> tuple[list[float], list[float]]:
    """(peak, held at the end) of each device over some tasks, from what is held before."""
    start, end = timeline.start.tolist(), timeline.end.tolist()
    events: list[list[tuple[float, float]]] = [[] for _ in w.context.devices]
    for i in tasks:
        task = w.tasks[i]
        for memory, size in task.takes.items():
            events[memory].append((start[i + 1], size))
        for memory, size in task.gives.items():
            events[memory].append((end[i + 1], -size))
    peaks, after = [], []
    for own, level in zip(events, held, strict=True):
        peak = level
        for _, change in sorted(own):
            level += change
            peak = max(peak, level)
        peaks.append(peak)
        after.append(max(0.0, level))
    return peaks, after


def _tail(w: Writer, timeline: Timeline, steady_s: float) -> tuple[float, float]:
    """Seconds that the step's end takes beyond its phases, and how much of it is updates."""
    over = max(0.0, timeline.makespan - steady_s)
    updates = sum(task.seconds for task in w.tasks if task.kind is Kind.UPDATE)
    each = updates / len(w.context.devices)
    # What is left by rounding alone is no reduction.
    return over, over if abs(over - each) < ROUNDING * timeline.makespan else min(over, each)
