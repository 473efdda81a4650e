"""One rank's walk over the program of a plan: its tasks, in the program's order.

All ranks walk parts of one total order, in which a send stands before its receive and sends do not
wait: whatever is first in that order and not done can be done, so no rank waits for ever. A task
of a block runs its body (op by op, or as segments where nothing is sent inside); sends start when
their block has ended; gradients of tied parameters are exchanged, reduced and applied at the end.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch

from partita.graph.record import Graph
from partita.graph.splits import REPLICATE, placements
from partita.lower.pipeline import Lowered
from partita.meaning import Phase, Purpose, Value, Work
from partita.plans import Stage
from partita.program import Kind, Program
from partita.run.distributed.comm import Communicator
from partita.run.distributed.convert import MeshPlace
from partita.run.distributed.held import MakeOptimizer, Shapes, StageState, roots
from partita.run.distributed.messages import Mailbox, message_table, receives_of
from partita.run.distributed.opwise import (
    TORCH_DTYPES,
    BodyPlan,
    Frame,
    RankContext,
    body_plan,
)
from partita.run.distributed.segments import SegmentFrame, SegmentPlan, segment_plan
from partita.run.distributed.ties import tie

T = torch.Tensor
INSIDE = {
    Kind.FORWARD: (Phase.FORWARD,),
    Kind.BACKWARD: (Phase.BACKWARD, Phase.WEIGHT),
    Kind.DGRAD: (Phase.BACKWARD,),
    Kind.WGRAD: (Phase.WEIGHT,),
}


class Recorder(Protocol):
    """What is told of every task of a rank when it starts and when it ends."""

    def start(self, task: int, name: str) -> None:
        """A task begins."""

    def end(self, task: int, name: str) -> None:
        """A task has ended."""


@runtime_checkable
class StepRecorder(Recorder, Protocol):
    """A recorder that is told of steps too, and sees the walk before the first one."""

    def attach(self, walk: "RankWalk") -> None:
        """The rank is ready to take its first step."""

    def begin_step(self) -> None:
        """All tasks until `end_step` are of one step."""

    def end_step(self) -> None:
        """All tasks of a step have ended, and everything is sent."""


class PartRecorder(Protocol):
    """What is told of the parts of a backward, in a step for which it takes them apart."""

    def start_part(self, task: int, phase: Phase, microbatch: int) -> None:
        """The data or the weight gradients of a backward begin."""

    def end_part(self) -> None:
        """They have ended."""


@dataclass
class RankWalk:
    """The tasks of one rank, and all that it holds."""

    lowered: Lowered
    run: RankContext
    device: int  # of the plan
    rank_of: dict[int, int]
    shapes: Shapes
    recorder: Recorder | None = None
    states: dict[int, StageState] = field(default_factory=dict)
    at: dict[int, MeshPlace] = field(default_factory=dict)
    plans: dict[tuple[int, int], BodyPlan] = field(default_factory=dict)
    frames: dict[tuple[int, int], Frame] = field(default_factory=dict)
    ended: list[tuple[int, int]] = field(default_factory=list)
    losses: list[T] = field(default_factory=list)
    current: str = "the start"
    note: Callable[[str], None] = lambda name: None
    in_segments: bool = True
    op_by_op: bool = False  # in this step, whatever could run in segments
    parts: PartRecorder | None = None
    taken_apart: bool = False  # in this step, weight gradients after the next block
    late: list[tuple[int, int, SegmentFrame]] = field(default_factory=list)  # those: task, m

    def __post_init__(self) -> None:
        self.program, self.stages = self.lowered.program, self.lowered.stages
        self.is_single = not self.program.bodies
        self.count = self.lowered.schedule.num_microbatches
        for number, stage in enumerate(self.stages):
            if self.device in stage.mesh.devices:
                place = stage.mesh.place(self.device)
                self.states[number] = StageState(number, stage, place, self.shapes)
                self.at[number] = MeshPlace(stage.mesh, place, self.rank_of)
        self.steady, self.ending = bodies_of(self.program)
        self.kept = _kept(self.program, self.run.small)
        table = message_table(self.program, self.stages, self.rank_of, self.shapes)
        dtypes = {tensor.name: TORCH_DTYPES[tensor.dtype] for tensor in self.run.small.tensors}
        devices = tuple(sorted(self.rank_of, key=lambda d: self.rank_of[d]))
        self.mail = Mailbox(
            self.program, self.stages, table, self.shapes, self.run.comm, dtypes, devices
        )
        self.tasks = self._own_tasks()
        self.steps = self.recorder if isinstance(self.recorder, StepRecorder) else None
        self.segments: dict[int, SegmentPlan | None] = {}
        self.segments_apart: dict[int, SegmentPlan | None] = {}
        self.phases: dict[int, frozenset[Phase]] = {}  # that the ops of each stage have
        blocks = [task for task in self.tasks if self._is_block(task)]
        self.following = dict(pairwise(blocks))
        self.incoming = {task: receives_of(self.program, task) for task in blocks}
        self.overlaps = self._overlaps() if self.run.small.is_training else {}

    # What a rank holds.

    def hold(self, whole: dict[str, T], optimizer: MakeOptimizer | None) -> None:
        """Take this rank's parts of the parameters and buffers, and make optimizers for them."""
        for number, state in self.states.items():
            body = self._body(number, self.steady.get(number, -1))
            for name, value in roots(body).items():
                state.keep(value, whole[name], self.run.device)
            for value in self._hidden_states(state):
                state.keep(value, whole[value.tensor], self.run.device)
            end = self._body(number, self.ending.get(number, -1))
            state.make_parts(end)
            if optimizer is not None:
                state.make_optimizer(optimizer)

    def _hidden_states(self, state: StageState) -> list[Value]:
        """Buffers that nodes read beside what their ops say: of batch norms, as weights lie."""
        captured, small = self.run.model.captured, self.run.small
        known = set(state.stored)
        hidden = []
        for split in state.stage.splits:
            for ref in captured.record.node[captured.node_of(split.op)].reads:
                name = captured.places.get(ref)
                if not isinstance(name, str) or name in known:
                    continue
                tensor = small.tensor(name)
                if tensor.role != "state":
                    continue
                layout = (REPLICATE,) * len(state.axes)
                op = small.op(split.op)
                if op.kind == "batch_norm" and len(tensor.shape) == 1 and len(op.inputs) > 1:
                    layout = placements(small.call(op), split.dims)[0][1]
                known.add(name)
                hidden.append(Value(name, layout, "parameter"))
        return hidden

    def _body(self, stage: int, body: int) -> Program:
        return self.program if body < 0 else self.program.bodies[body].program

    def _plan(self, stage: int, body: int) -> BodyPlan:
        key = (stage, body)
        if key not in self.plans:
            kept = self.kept.get(stage, frozenset())
            self.plans[key] = body_plan(
                self._body(stage, body),
                lambda value: (value.tensor, value.layout) in kept,
                lambda value: 4 * math.prod(self.shapes.shape(value.tensor)),
                {op.name: op.forward for op in self.run.small.ops if op.forward},
            )
        return self.plans[key]

    def _own_tasks(self) -> list[int]:
        """The tasks that this rank takes part in."""
        own = []
        for task in range(self.program.num_tasks):
            work = self.program.work_of(task)
            if work is None or work.purpose in (Purpose.OTHER, Purpose.RESIDENT):
                continue
            if work.stage in self.states or (work.peer in self.states and work.collective):
                own.append(task)
        return own

    # One step.

    def step(self) -> list[T]:
        """Run all tasks of a step; the losses of the micro-batches that this rank knows."""
        self.losses = []
        if self.steps is not None:
            self.steps.begin_step()
        if self.is_single:
            self._single()
        else:
            for task in self.tasks:
                self._task(task)
        self._weigh_late()
        self.mail.finish()
        if self.steps is not None:
            self.steps.end_step()
        self.frames.clear()
        for state in self.states.values():
            state.clear_gradients()
        return self.losses

    def _is_block(self, task: int) -> bool:
        work = self.program.work_of(task)
        return work is not None and work.purpose is Purpose.COMPUTE

    def _begin(self, task: int, name: str) -> None:
        self.current = name
        self.note(name)
        if self.recorder is not None:
            self.recorder.start(task, name)

    def _end(self, task: int, name: str) -> None:
        if self.recorder is not None:
            self.recorder.end(task, name)

    def _single(self) -> None:
        """One stage that runs once: the program has all ops itself."""
        state = self.states[0]
        self._begin(0, "step")
        frame = Frame(self.run, state, self.at[0], self._plan(0, -1), 0)
        frame.do_all(tuple(Phase))
        self._note_loss(frame)
        self._end(0, "step")

    def _task(self, task: int) -> None:
        work = self.program.work_of(task)
        assert work is not None, "own tasks say what they are"
        m = int(self.program.microbatch[task])
        name = self.program.task_name(task)
        if work.purpose is Purpose.RECEIVE:
            return  # taken by the block that waits for it
        self._begin(task, name)
        if work.purpose is Purpose.SEND:
            self.mail.send(task, work, self._leaving(work, m))
        elif work.purpose is Purpose.COMPUTE:
            self._block(task, work, m)
        elif work.peer >= 0:
            self._weigh_late()
            tie(self, work)
        elif work.body >= 0 and work.stage in self.states:
            self._weigh_late()
            self._finish(work)
        self._end(task, name)

    def _block(self, task: int, work: Work, m: int) -> None:
        for key in self.ended:
            self.frames.pop(key, None)
        self.ended.clear()
        incoming = self.incoming[task]
        for receive in (*incoming, *self.incoming.get(self.following.get(task, -1), ())):
            self.mail.post(receive)
        frame = self._frame(work.stage, m)
        for receive in incoming:
            got = self.program.work_of(receive)
            assert got is not None, "a receive says what it is"
            if self.recorder is not None:
                self.recorder.start(receive, self.program.task_name(receive))
            for value, tensor in self.mail.receive(receive, got):
                frame.received[value.tensor, value.layout] = tensor
            if self.recorder is not None:
                self.recorder.end(receive, self.program.task_name(receive))
        kind = Kind(int(self.program.kind[task]))
        if kind is not Kind.FORWARD and self._is_last(work.stage, Kind.FORWARD):
            self.ended.append((work.stage, m))
            return  # nothing in this stage is differentiated, and its forward has gone
        last = self._is_last(work.stage, kind)
        reduces = last and self.overlaps.get(work.stage) == m
        if self.taken_apart and kind is Kind.BACKWARD and isinstance(frame, SegmentFrame):
            self._backward_apart(task, m, frame)
        else:
            if reduces:
                self._weigh_late()
            frame.do_all((*INSIDE[kind], Phase.REDUCE) if reduces else INSIDE[kind])
            self._weigh_late()
        frame.settle()
        if last:
            self._note_loss(frame)
            self.ended.append((work.stage, m))
        if reduces:
            self.frames[work.stage, -1] = frame

    def _backward_apart(self, task: int, m: int, frame: SegmentFrame) -> None:
        """The data gradients; the weight gradients of the backward before, and these ones later."""
        self._part(task, m, frame, Phase.BACKWARD)
        self._weigh_late()
        self.late.append((task, m, frame))

    def _weigh_late(self) -> None:
        """The weight gradients that were put off."""
        for task, m, frame in self.late:
            self._part(task, m, frame, Phase.WEIGHT)
        self.late.clear()

    def _part(self, task: int, m: int, frame: SegmentFrame, phase: Phase) -> None:
        assert self.parts is not None, "who takes parts apart records them"
        self.parts.start_part(task, phase, m)
        frame.do_all((phase,))
        self.parts.end_part()

    def _is_last(self, stage: int, kind: Kind) -> bool:
        """Does nothing of the micro-batch come after this block?"""
        if not self.run.small.is_training:
            return True
        if stage not in self.phases:
            works = self._body(stage, self.steady[stage]).works
            self.phases[stage] = frozenset(work.phase for work in works if work.op)
        has_backward = Phase.BACKWARD in self.phases[stage]
        has_weight = Phase.WEIGHT in self.phases[stage]
        if kind is Kind.FORWARD:
            return not (has_backward or has_weight)
        return kind is not Kind.DGRAD or not has_weight

    def _frame(self, stage: int, m: int) -> Frame:
        if (stage, m) not in self.frames:
            self.frames[stage, m] = self._new_frame(stage, m)
        return self.frames[stage, m]

    def _new_frame(self, stage: int, m: int) -> Frame:
        state, at = self.states[stage], self.at[stage]
        if self.overlaps.get(stage) == m:
            return Frame(self.run, state, at, self._plan(stage, self.ending[stage]), m)
        plan = self._plan(stage, self.steady[stage])
        known = self.segments_apart if self.taken_apart else self.segments
        if stage not in known:
            leaving = [
                self.program.values[number].tensor
                for work in self.program.works
                if work.purpose is Purpose.SEND
                and work.stage == stage
                and work.phase is Phase.FORWARD
                for number in work.reads
            ]
            known[stage] = (
                segment_plan(
                    self.run, state, at, plan.program, leaving, taken_apart=self.taken_apart
                ) if self.in_segments else None
            )  # fmt: skip
        segments = known[stage]
        if segments is not None and not self.op_by_op:
            return SegmentFrame(self.run, state, at, plan, m, segments)
        return Frame(self.run, state, at, plan, m)

    def _overlaps(self) -> dict[int, int]:
        """The micro-batch of each stage during whose backward its gradients are reduced.

        It is the last one, and its blocks run as those of the step's end: there the reductions
        stand between the ops. Parameters that stages share are exchanged before, so theirs wait.
        """
        tied = {
            stage
            for work in self.program.works
            if work.purpose is Purpose.GRADIENT_REDUCTION and work.peer >= 0
            for stage in (work.stage, work.peer)
        }
        last: dict[int, int] = {}
        for task in self.tasks:
            work = self.program.work_of(task)
            if work is not None and work.purpose is Purpose.COMPUTE:
                last[work.stage] = int(self.program.microbatch[task])
        overlaps = {}
        for stage, body in self.ending.items():
            inside = self.program.bodies[body].program.works
            reduces = any(w.phase is Phase.REDUCE and w.collective for w in inside)
            if stage in self.states and stage not in tied and reduces:
                overlaps[stage] = last[stage]
        return overlaps

    def _leaving(self, work: Work, m: int) -> list[T]:
        frame = self._frame(work.stage, m)
        return [frame.leaving(self.program.values[number]) for number in work.reads]

    def _note_loss(self, frame: Frame) -> None:
        if isinstance(frame, SegmentFrame):
            if isinstance(frame.loss, torch.Tensor):
                self.losses.append(frame.loss)
            return
        for name in self.run.small.outputs[:1]:
            number = settled_output(frame, name)
            if number >= 0:
                self.losses.append(frame.read(number).detach())

    def _finish(self, work: Work) -> None:
        """What ends a step: gradients reduced, parameters updated."""
        key = (work.stage, -1)
        if key not in self.frames:
            plan = self._plan(work.stage, self.ending[work.stage])
            self.frames[key] = Frame(
                self.run, self.states[work.stage], self.at[work.stage], plan, self.count - 1
            )
        if work.phase is Phase.UPDATE or work.stage not in self.overlaps:
            self.frames[key].do_all((work.phase,))


def bodies_of(program: Program) -> tuple[dict[int, int], dict[int, int]]:
    """The bodies of each stage's micro-batches, and of its step's end."""
    steady, ending = {}, {}
    for work in program.works:
        if work.purpose is Purpose.COMPUTE and work.body >= 0:
            steady[work.stage] = work.body
        elif work.body >= 0:
            ending[work.stage] = work.body
    return steady, ending


def _kept(program: Program, small: Graph) -> dict[int, frozenset[tuple[str, object]]]:
    """What of a stage is read from outside of its body: what it sends, and the outputs."""
    kept: dict[int, set[tuple[str, object]]] = {}
    for work in program.works:
        if work.purpose is Purpose.SEND:
            values = (program.values[number] for number in work.reads)
            kept.setdefault(work.stage, set()).update((v.tensor, v.layout) for v in values)
    outputs = set(small.outputs[:1])
    bodies = [(body.stage, body.program) for body in program.bodies] or [(0, program)]
    for number, body in bodies:
        for value in body.values:
            if value.tensor in outputs:
                kept.setdefault(number, set()).add((value.tensor, value.layout))
    return {stage: frozenset(each) for stage, each in kept.items()}


def settled_output(frame: Frame, name: str) -> int:
    """The number of the value that holds an output without partial sums; -1 if there is none."""
    axes = frame.at.axes
    for number, value in enumerate(frame.program.values):
        settled = all(
            p.kind != "partial" or axis.size == 1
            for p, axis in zip(value.layout, axes, strict=True)
        )
        if value.tensor == name and settled and not value.flat and number in frame.values:
            return number
    return -1


def stages_of(stages: tuple[Stage, ...], device: int) -> tuple[int, ...]:
    """The stages that a device takes part in."""
    return tuple(i for i, stage in enumerate(stages) if device in stage.mesh.devices)


def lines_of(lowered: Lowered, rank_of: dict[int, int]) -> set[tuple[int, ...]]:
    """All lines of ranks along the axes of the stages' meshes."""
    return {
        tuple(rank_of[device] for device in line)
        for stage in lowered.stages
        for axis in range(len(stage.mesh.axes))
        for line in stage.mesh.groups(axis)
    }


__all__ = ["Communicator", "RankWalk", "Recorder", "bodies_of", "lines_of", "stages_of"]
