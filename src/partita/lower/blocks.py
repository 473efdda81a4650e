"""What a stage takes for one micro-batch: the blocks that a schedule puts in order.

The stage's piece of the graph is lowered op by op as a one-stage plan is, with a barrier between
the phases (forward; backward, or data gradients and weight gradients apart), and run. The seconds
of a phase are its block's; memory is read off the same run: what is held when a phase ends, and
the most within it. Gradients of parameters are added up in place over the micro-batches.

Parameters kept in copies (or with states in shares) synchronise their gradients once a step, while
the last backward goes on. A second run without that barrier gives the step's end: `tail_s` is what
the synchronisation and the update take beyond that last backward. Parameters kept in shares
synchronise in every micro-batch, so that no device ever holds all gradients.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.layouts import Layout, num_shards
from partita.costs.memory import workspace_bytes
from partita.graph.record import Op, Tensor
from partita.graph.splits import PARTIAL, REPLICATE
from partita.lower.pieces import Piece
from partita.lower.stage import StageLowering, drawn_devices
from partita.lower.tasks import Buffer, Made
from partita.plans import Stage
from partita.program import Kind, Program
from partita.timeline import Timeline

Run = Callable[[Program], Timeline]
SHARED_GRADIENTS = ("gradients", "parameters")  # levels at which gradients are kept in shares


@dataclass(frozen=True, slots=True)
class Phase:
    """One block: seconds, and bytes above what always lies there, per device drawn."""

    seconds: float
    peak_bytes: tuple[float, ...]
    held_bytes: tuple[float, ...]  # when it ends


@dataclass(frozen=True)
class Blocks:
    """A stage's blocks; `weight` is there where the backward is taken apart."""

    devices: tuple[int, ...]  # one of each kind
    forward: Phase
    backward: Phase | None
    weight: Phase | None
    sync_s: float  # of the step's end: gradients, and
    update_s: float  # the optimizer
    static_bytes: tuple[float, ...]
    enters: tuple[Layout, ...]  # how the activations that enter must lie
    leaves: tuple[Layout, ...]
    sends: tuple[Layout | None, ...]  # the gradients of what entered, where there are any
    takes: tuple[tuple[Layout, ...], ...]  # of what leaves, the gradients stage by stage
    shared: tuple[Layout, ...]  # parameters that other stages hold too

    @property
    def tail_s(self) -> float:
        """What ends a step, beyond the last backward."""
        return self.sync_s + self.update_s

    @property
    def busy_s(self) -> float:
        """All phases of one micro-batch."""
        phases = (self.forward, self.backward, self.weight)
        return sum(phase.seconds for phase in phases if phase is not None)


def stage_blocks(
    part: Piece,
    stage: Stage,
    cluster: Cluster,
    run: Run,
    collectives: Collectives,
    *,
    apart: bool = False,
) -> Blocks:
    """The blocks of a stage whose piece has the micro-batch's size; `run` is the engine's."""
    local = Stage(stage.name, stage.mesh, part.splits)
    devices = drawn_devices(local, cluster, 1)
    steady = _Lowering(part, local, cluster, devices, collectives, apart=apart, ends=False)
    phases = steady.phases(run)
    tail = update = 0.0
    if any(op.phase == "update" for op in part.graph.ops):
        whole = _Lowering(part, local, cluster, devices, collectives, apart=apart, ends=True)
        tail, update = whole.tail(run, sum(phase.seconds for phase in phases))
    backward = phases[1] if len(phases) > 1 else None
    return Blocks(
        devices,
        phases[0],
        backward,
        phases[2] if len(phases) > 2 else None,
        tail - update,
        update,
        tuple(steady.static_bytes(device) for device in devices),
        *steady.layouts(),
    )


class _Lowering(StageLowering):
    """One micro-batch of a stage, phase by phase; with `ends`, the step's end after it."""

    def __init__(
        self, part: Piece, stage: Stage, cluster: Cluster, devices: tuple[int, ...],
        collectives: Collectives, *, apart: bool, ends: bool,
    ) -> None:  # fmt: skip
        super().__init__(stage, part.graph, cluster, devices, collectives)
        self.part, self.apart, self.ends_step = part, apart, ends
        self.borders = {*part.entering, *(name for _, _, name in part.gradients_in)}
        self.sent_for = {name: tensor for tensor, _, name in part.gradients_in}
        self.leaves: dict[str, Layout] = {}
        self.floor: int | None = None
        self.cuts: list[int] = []

    def phases(self, run: Run) -> list[Phase]:
        """The blocks' seconds and bytes."""
        self._lower()
        timeline = run(self._build())
        moments = [float(timeline.end[cut + 1]) for cut in self.cuts]  # task 0 is the start
        found = []
        held = [0.0] * len(self.devices)
        first, before = 0, 0.0
        for cut, moment in zip(self.cuts, moments, strict=True):
            peaks, held = self._memory(range(first, cut), timeline, held)
            found.append(Phase(moment - before, tuple(peaks), tuple(held)))
            first, before = cut, moment
        return found

    def tail(self, run: Run, steady_s: float) -> tuple[float, float]:
        """Seconds that the step's end takes beyond its phases, and how much of it is updates."""
        self._lower()
        over = max(0.0, run(self._build()).makespan - steady_s)
        updates = sum(t.seconds for t in self.tasks if t.kind is Kind.UPDATE)
        return over, min(over, updates / len(self.devices))

    def layouts(
        self,
    ) -> tuple[
        tuple[Layout, ...],
        tuple[Layout, ...],
        tuple[Layout | None, ...],
        tuple[tuple[Layout, ...], ...],
        tuple[Layout, ...],
    ]:
        """How everything lies that other stages give or get, in the order of the piece."""
        part, lies = self.part, {name: buffer.layout for name, buffer in self.buffers.items()}
        out = dict(part.gradients_out)
        return (
            tuple(lies[name] for name in part.entering),
            tuple(self.leaves[name] for name in part.leaving),
            tuple(self.leaves.get(out.get(name, "")) for name in part.entering),
            tuple(
                tuple(lies[sent] for tensor, _, sent in part.gradients_in if tensor == name)
                for name in part.leaving
            ),
            tuple(lies[name] for name in part.shared),
        )

    def _lower(self) -> None:
        ops, first = self.graph.ops, self.part.num_forward
        self._run_ops(ops[:first])
        self._settle(self.part.leaving)
        self._barrier()
        rest = [op for op in ops[first:] if op.phase != "update"]
        if rest:
            self._backward(rest)
        if self.ends_step:
            self._flush_all()
            for number, (gradients, ready) in enumerate(self.synced):
                self._update(number, gradients, ready)

    def _backward(self, ops: list[Op]) -> None:
        late = self._late(ops) if self.apart else set()
        later = [op for op in ops if op.name in late]
        self._run_ops([op for op in ops if op.name not in late])
        self._settle(name for _, name in self.part.gradients_out)
        if self.apart:
            self._drain()
            self._barrier()
            self._run_ops(later)
        if not self.ends_step:
            self._flush_all()
            self._barrier()

    def _late(self, ops: list[Op]) -> set[str]:
        """Weight gradients, and what runs again for nothing else."""
        late: set[str] = set()
        for op in reversed(ops):
            users = (user for name in op.outputs for user in self.graph.consumers(name))
            alone = op.name in self.part.light and all(user.name in late for user in users)
            if op.phase == "wgrad" or alone:
                late.add(op.name)
        return late

    def _barrier(self) -> None:
        """All that comes later waits for all that came before."""
        since = 0 if self.floor is None else self.floor
        waits = tuple(range(since, len(self.tasks)))
        self.floor = self._task(f"phase {len(self.cuts)}", (), 0.0, waits, Kind.OTHER)
        self.cuts.append(self.floor)
        self.last_compute = {}
        self.gathered.clear()  # parameters kept in shares are gathered anew in each phase

    def _task(
        self, block: str, lanes: tuple[int, ...], seconds: float, waits: Iterable[int], kind: Kind
    ) -> int:
        known = tuple(waits)
        if self.floor is not None:
            known = (*known, self.floor)
        return super()._task(block, lanes, seconds, known, kind)

    def _settle(self, names: Iterable[str]) -> None:
        """What leaves is whole or in shares: summands are added first."""
        for name in names:
            buffer = self.buffers[name]
            layout = tuple(REPLICATE if p == PARTIAL else p for p in buffer.layout)
            if layout != buffer.layout:
                self._convert(buffer, layout)
            self.leaves[name] = layout

    def _add_gradients(self, op: Op) -> None:
        """Gradients from other stages arrive as the activation lies here."""
        for name in op.inputs:
            if name in self.sent_for and name not in self.buffers:
                have = self.buffers[self.sent_for[name]].layout
                layout = tuple(REPLICATE if p == PARTIAL else p for p in have)
                self.buffers[name] = Buffer(name, layout, self._held_bytes(name, layout))
        super()._add_gradients(op)

    def _is_free(self, tensor: Tensor) -> bool:
        return super()._is_free(tensor) and tensor.name not in self.borders

    def _produce(self, op: Op, name: str, layout: Layout, made: Made, inputs: list[Buffer]) -> None:
        """Gradients of parameters are added to what lies there already."""
        if name not in self.update_of:
            super()._produce(op, name, layout, made, inputs)
            return
        level = self.levels[self.update_of[name].inputs[0]]
        buffer = Buffer(name, layout, self._held_bytes(name, layout), dict(made))
        self.buffers[name] = buffer
        if level in SHARED_GRADIENTS:
            self._take(buffer, made)
        if level in SHARED_GRADIENTS or self.ends_step:
            self._collect(buffer)

    def _take(self, buffer: Buffer, made: Made) -> None:
        owned = buffer.name in self.update_of and self.buffers.get(buffer.name) is not buffer
        if not owned:  # the shares of a gradient are added to those that lie there
            super()._take(buffer, made)

    def _memory(
        self, tasks: range, timeline: Timeline, held: list[float]
    ) -> tuple[list[float], list[float]]:
        """(peak, held at the end) of each device over some tasks, from what is held before."""
        peaks, after = [], []
        for memory in range(len(self.devices)):
            events: list[tuple[float, float]] = []
            for i in tasks:
                task = self.tasks[i]
                if memory in task.takes:
                    events.append((float(timeline.start[i + 1]), task.takes[memory]))
                if memory in task.gives:
                    events.append((float(timeline.end[i + 1]), -task.gives[memory]))
            level = peak = held[memory]
            for _, change in sorted(events):
                level += change
                peak = max(peak, level)
            peaks.append(peak)
            after.append(max(0.0, level))
        return peaks, after

    def static_bytes(self, device: int) -> float:
        """Parameters, states and the sums of gradients; the workspace is the device's."""
        total = self._static_bytes(device) - workspace_bytes(self.kinds[device])
        for op in self.update_of.values():
            layout = self._stored_layout(op)
            level = self.levels[op.inputs[0]]
            size = self.graph.tensor(op.inputs[1]).size_bytes / num_shards(layout, self.ways)
            total += size / (self._copies(layout) if level in SHARED_GRADIENTS else 1)
        return total
