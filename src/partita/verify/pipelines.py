"""What the program of a plan means: its stages, what passes between them, how a step ends.

A plan of one stage that runs once is followed op by op (`layouts`). Of others every block is
looked into, at any depth:

- the tasks inside a stage's blocks are right by themselves, and their run is a true one; a block
  lasts as long as its phase in that run, and takes as much memory;
- a block takes the lanes of all devices of its stage, so that no device runs two blocks at once;
- what a stage receives is what its ops read; every receive has a send of the same micro-batch from
  the stage that makes the tensor, settled, and waits for it; blocks wait for what they receive;
- gradients of a parameter that several stages hold are added up, each once, before each of them
  updates its own; updates come after the reductions of their stage, and after all its backwards.

Dispatches to experts and their combines must route the same groups of tokens (`unlike_routings`). A
device that has a share of the tokens routes it by itself, and fills its share of every expert's
places. What a combine gives back is right only if its shares of the tokens are those of the
dispatch; else places are read as other tokens' than those that were put there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from partita.errors import VerificationError
from partita.graph.loops import loop_nest
from partita.graph.rebatch import batch_of, rebatch
from partita.graph.record import Graph, Op
from partita.graph.splits import PARTIAL, routed_pairs
from partita.meaning import Layout, Phase, Purpose, Value, Work
from partita.plans import Schedule, Stage
from partita.program import Body, Kind, Memory, Program
from partita.timeline import Timeline
from partita.verify.layouts import Fact, ModelFacts, StageCheck, model_facts
from partita.verify.timelines import verify_timeline

TOLERANCE = 1e-9
FEW = 20


def unlike_routings(graph: Graph, stages: Sequence[Stage]) -> list[str]:
    """A sentence for every dispatch and combine that a plan splits unlike."""
    where = {split.op: (stage, split.dims) for stage in stages for split in stage.splits}
    sentences = []
    for dispatch, combine in routed_pairs(graph):
        if dispatch.name not in where or combine.name not in where:
            continue
        sent, back = (_shares(graph, op, *where[op.name]) for op in (dispatch, combine))
        if sent != back:
            dim = _token_dims(graph, combine)[0]
            sentences.append(
                f"{dispatch.name} routes tokens in {_words(sent)} and {combine.name} gives them "
                f"back in {_words(back)}; split both along {dim!r} into the same shares"
            )
    return sentences


def _shares(graph: Graph, op: Op, stage: Stage, dims: tuple[str, ...]) -> tuple[int, ...]:
    """The sizes of an op's groups of tokens, in whole numbers without a common divisor."""
    shares: tuple[int, ...] = (1,)
    for axis, dim in zip(stage.mesh.axes, dims, strict=True):
        if dim in _token_dims(graph, op):
            weights = axis.weights or (1,) * axis.size
            shares = tuple(share * weight for share in shares for weight in weights)
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


def _token_dims(graph: Graph, op: Op) -> list[str]:
    """The dims of a dispatch or combine that run over tokens: those of its gates but the last."""
    gates = loop_nest(graph.call(op)).inputs[1]
    return [name for names in gates.dims[:-1] for name in names]


def _words(shares: tuple[int, ...]) -> str:
    if len(shares) == 1:
        return "one group"
    if len(set(shares)) == 1:
        return f"{len(shares)} groups"
    return f"groups of {':'.join(map(str, shares))}"


INSIDE = {  # the phases of a body that a block of a kind stands for
    Kind.FORWARD: (Phase.FORWARD,),
    Kind.BACKWARD: (Phase.BACKWARD, Phase.WEIGHT),
    Kind.DGRAD: (Phase.BACKWARD,),
    Kind.WGRAD: (Phase.WEIGHT,),
}


def check_meaning(
    program: Program, graph: Graph, stages: Sequence[Stage], schedule: Schedule
) -> None:
    """Raise `VerificationError` unless the program computes the model as the plan says."""
    if wrong := verify_meaning(program, graph, stages, schedule):
        raise VerificationError(wrong)


def verify_meaning(
    program: Program, graph: Graph, stages: Sequence[Stage], schedule: Schedule
) -> tuple[str, ...]:
    """Why the program does not compute the model as the plan says; empty if it does.

    The graph is that of the whole batch. At most a few sentences; more would be the same again.
    """
    count = schedule.num_microbatches
    if not program.works:
        return ("the tasks of the program do not say what they are",)
    micro = graph if count == 1 else rebatch(graph, batch_of(graph) // count)
    wrong = unlike_routings(micro, stages)
    if len(stages) == count == 1 and not program.bodies:
        wrong += StageCheck(program, model_facts(graph), stages[0]).run()
    else:
        wrong += _PipelineCheck(program, model_facts(micro), tuple(stages), count).run()
    return tuple(wrong[:FEW])


@dataclass
class _PipelineCheck:
    program: Program
    model: ModelFacts
    stages: tuple[Stage, ...]
    count: int
    wrong: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        self.tasks: dict[int, list[int]] = {}  # work -> tasks, in their order
        order = range(self.program.num_tasks)
        if self.program.order is not None:
            order = self.program.order.tolist()
        self.position = {task: place for place, task in enumerate(order)}
        for task in order:
            if self.program.work[task] >= 0:
                self.tasks.setdefault(int(self.program.work[task]), []).append(task)
        self.paired = {int(b): int(a) for a, b in self.program.pairs.tolist()}
        self.blocks = self._blocks()
        if not self.wrong:
            self._lanes()
        if not self.wrong:
            self._stages()
            self._messages()
            self._step_end()
        return self.wrong

    def _of(self, purpose: Purpose) -> list[tuple[Work, list[int]]]:
        works = self.program.works
        return [(works[n], tasks) for n, tasks in self.tasks.items() if works[n].purpose is purpose]

    # Blocks: every stage and micro-batch.

    def _blocks(self) -> dict[tuple[int, Kind, int], int]:
        """(stage, kind, micro-batch) -> task."""
        blocks: dict[tuple[int, Kind, int], int] = {}
        for work, tasks in self._of(Purpose.COMPUTE):
            for task in tasks:
                kind = Kind(int(self.program.kind[task]))
                blocks[work.stage, kind, int(self.program.microbatch[task])] = task
        for stage in range(len(self.stages)):
            for m in range(self.count):
                kinds = {k for k in INSIDE if (stage, k, m) in blocks}
                if not self.model.graph.is_training:
                    right = kinds == {Kind.FORWARD}
                else:
                    apart = {Kind.FORWARD, Kind.DGRAD, Kind.WGRAD}
                    right = kinds in ({Kind.FORWARD, Kind.BACKWARD}, apart)
                if not right:
                    name = self.stages[stage].name
                    self.wrong.append(
                        f"{name} does not run forward and backward once for micro-batch {m}"
                    )
                    return blocks
                self._own_order(blocks, stage, m)
        return blocks

    def _own_order(self, blocks: dict[tuple[int, Kind, int], int], stage: int, m: int) -> None:
        """The forward comes before the backward, data gradients before those of weights."""
        chain = [blocks[stage, kind, m] for kind in INSIDE if (stage, kind, m) in blocks]
        for first, second in pairwise(chain):
            if not self._follows(second, first):
                name = self.program.task_name
                self.wrong.append(f"{name(second)} does not wait for {name(first)}")

    def _follows(self, task: int, other: int) -> bool:
        """Does a task wait for another, or come after it on a lane?"""
        if any(waited == other for waited, _ in self.program.waits_of(task)):
            return True
        shared = set(self.program.lanes_of(task)) & set(self.program.lanes_of(other))
        return bool(shared) and self.position[other] < self.position[task]

    def _lanes(self) -> None:
        """A lane stands for the devices that run the same stages: each has one, of no others."""
        lanes_of: dict[int, set[int]] = {}
        updates = [(work.stage, task) for work, tasks in self._of(Purpose.UPDATE) for task in tasks]
        for stage, task in (*((key[0], task) for key, task in self.blocks.items()), *updates):
            own = set(self.program.lanes_of(task))
            if lanes_of.setdefault(stage, own) != own:
                name = self.program.task_name(task)
                self.wrong.append(f"{name} runs on other lanes than {self._named(stage)} does")
                return
        held: dict[int, set[int]] = {}  # device -> stages
        on_lane: dict[int, set[int]] = {}
        for number, stage_record in enumerate(self.stages):
            for device in stage_record.mesh.devices:
                held.setdefault(device, set()).add(number)
            for lane in lanes_of[number]:
                on_lane.setdefault(lane, set()).add(number)
        for device, stages in held.items():
            if stages not in on_lane.values():
                names = " and ".join(self._named(stage) for stage in sorted(stages))
                self.wrong.append(f"device {device} runs {names}, and no lane has just these")
                return
        for lane, stages in on_lane.items():
            if stages not in held.values():
                names = " and ".join(self._named(stage) for stage in sorted(stages))
                where = self.program.lanes[lane].name
                self.wrong.append(f"lane {where} has {names}, which no device runs together")
                return

    # Inside the blocks.

    def _stages(self) -> None:
        """Later stages first: they give gradients to earlier ones."""
        self.made: dict[int, dict[tuple[str, Layout], Fact]] = {}
        self.gradients: dict[int, dict[str, frozenset[str]]] = {}
        for stage in reversed(range(len(self.stages))):
            steady = self._body(stage, Purpose.COMPUTE)
            if steady is None:
                self.wrong.append(f"{self.stages[stage].name} does not say what is inside it")
                return
            received = self._received(stage)
            check = StageCheck(
                steady.program, self.model, self.stages[stage], received, alone=False, ends=False
            )
            self._add(stage, check.run())
            self.made[stage] = {}
            for fact in check.facts.values():
                self.made[stage].setdefault((fact.tensor, fact.layout), fact)
            self._timing(stage, steady)
            ending = self._body(stage, Purpose.UPDATE)
            if ending is not None:
                last = StageCheck(
                    ending.program, self.model, self.stages[stage], received, alone=False
                )
                self._add(stage, last.run())
                self.gradients[stage] = last.gradients
                for name, fact in check.sums.items():
                    other = last.sums.get(name)
                    if other is None or (other.layout, other.flat) != (fact.layout, fact.flat):
                        what = (
                            f"{self.stages[stage].name} ends a step with other gradients of {name}"
                        )
                        self.wrong.append(f"{what} than its micro-batches add up")
                self._ending(stage, steady, ending)
            elif any(self._holds(stage, name) for name in self.model.updates):
                self.wrong.append(f"{self.stages[stage].name} never updates its parameters")
            if len(self.wrong) >= FEW:
                return

    def _holds(self, stage: int, parameter: str) -> bool:
        mine = {split.op for split in self.stages[stage].splits}
        return any(op.name in mine for op in self.model.graph.consumers(parameter))

    def _body(self, stage: int, purpose: Purpose) -> Body | None:
        bodies = {work.body for work, _ in self._of(purpose) if work.stage == stage}
        if len(bodies) != 1 or -1 in bodies:
            return None
        body = self.program.bodies[bodies.pop()]
        return body if body.stage == stage else None

    def _add(self, stage: int, wrong: Iterable[str]) -> None:
        self.wrong += [f"{self.stages[stage].name}: {line}" for line in wrong]

    def _received(self, stage: int) -> dict[tuple[str, Layout], Fact]:
        """What other stages send this one, with what is known of it there."""
        received: dict[tuple[str, Layout], Fact] = {}
        for work, tasks in self._of(Purpose.RECEIVE):
            send = self.program.work_of(self.paired.get(tasks[0], tasks[0]))
            if work.stage != stage or send is None or send.purpose is not Purpose.SEND:
                continue
            for here, there in zip(send.reads, work.writes, strict=False):
                sent, got = self.program.values[here], self.program.values[there]
                fact = Fact(got.tensor, got.layout)
                if work.phase is not Phase.FORWARD:
                    source = self.made.get(work.peer, {}).get((sent.tensor, sent.layout))
                    if source is None:
                        continue
                    fact = Fact(
                        got.tensor, got.layout, (), source.gradient_of, source.givers, work.phase
                    )
                received[got.tensor, got.layout] = fact
        return received

    def _timing(self, stage: int, body: Body) -> None:
        """Blocks last and take what their phases do in the run of the body."""
        run = Timeline(body.program, body.start, body.end)
        self._add(stage, verify_timeline(_uncapped(body.program), run))
        phases = _phases(body)
        for kind, inside in INSIDE.items():
            tasks = [self.blocks.get((stage, kind, m), -1) for m in range(self.count)]
            seconds = sum(phases[p].seconds for p in inside if p in phases)
            for task in tasks:
                if task < 0:
                    continue
                said = float(self.program.duration[task])
                if abs(said - seconds) > TOLERANCE * max(said, seconds):
                    name = self.program.task_name(task)
                    self.wrong.append(f"{name} is said to last {said:g}, inside it are {seconds:g}")
                    return
                self._memory(task, kind, phases)

    def _memory(self, task: int, kind: Kind, phases: "dict[Phase, _PhaseInside]") -> None:
        """What a block takes when it starts, above what its stage holds already."""
        inside = [phases[p] for p in INSIDE[kind] if p in phases]
        if not inside:
            return
        before = {
            Kind.BACKWARD: Phase.FORWARD, Kind.DGRAD: Phase.FORWARD, Kind.WGRAD: Phase.BACKWARD
        }.get(kind)  # fmt: skip
        wanted = []  # per kind of device
        for k in range(len(inside[0].peaks)):
            peak = max(phase.peaks[k] for phase in inside)
            held = phases[before].held[k] if before in phases and before is not None else 0.0
            wanted.append((peak - held, TOLERANCE * max(peak, 1.0)))
        part = slice(self.program.effect_start[task], self.program.effect_start[task + 1])
        said = self.program.effect_at_start[part].tolist()
        if len(said) < len(self.program.lanes_of(task)):
            name = self.program.task_name(task)
            self.wrong.append(f"{name} takes memory on {len(said)} of its groups of devices only")
            return
        for place, takes in enumerate(said):
            # Groups of devices that share a stage have its kinds each, or some, in any order.
            alone = len(self.program.lanes_of(task)) == 1 and place < len(wanted)
            alike = wanted[place : place + 1] if alone else wanted
            if not any(abs(takes - right) <= most for right, most in alike):
                name = self.program.task_name(task)
                self.wrong.append(
                    f"{name} is said to take {takes:.9g} bytes, inside it are {alike[0][0]:.9g}"
                )
                return

    def _ending(self, stage: int, steady: Body, ending: Body) -> None:
        run = Timeline(ending.program, ending.start, ending.end)
        self._add(stage, verify_timeline(_uncapped(ending.program), run))
        steady_s = sum(phase.seconds for phase in _phases(steady).values())
        over = max(0.0, run.makespan - steady_s)
        said = sum(
            float(self.program.duration[task])
            for purpose in (Purpose.GRADIENT_REDUCTION, Purpose.UPDATE)
            for work, tasks in self._of(purpose)
            for task in tasks
            if work.stage == stage and work.peer < 0
        )
        if abs(said - over) > TOLERANCE * max(run.makespan, said):
            name = self.stages[stage].name
            self.wrong.append(f"{name} is said to end a step in {said:g}, inside it are {over:g}")

    # Between the stages.

    def _messages(self) -> None:
        for work, tasks in self._of(Purpose.RECEIVE):
            if self._once_each(work, tasks):
                for task in tasks:
                    self._message(work, task)
        for work, tasks in self._of(Purpose.SEND):
            self._once_each(work, tasks)

    def _once_each(self, work: Work, tasks: Sequence[int]) -> bool:
        if sorted(self.program.microbatch[list(tasks)].tolist()) == list(range(self.count)):
            return True
        name = self.program.task_name(tasks[0])
        self.wrong.append(f"{name} does not run once for every micro-batch")
        return False

    def _message(self, receive: Work, task: int) -> None:
        name = self.program.task_name
        m = int(self.program.microbatch[task])
        sender = self.paired.get(task)
        send = None if sender is None else self.program.work_of(sender)
        if sender is None or send is None:
            self.wrong.append(f"{name(task)} has no send")
            return
        right = (send.stage, send.peer, send.phase) == (receive.peer, receive.stage, receive.phase)
        if not right or int(self.program.microbatch[sender]) != m:
            self.wrong.append(f"{name(task)} is paired with {name(sender)}, another message")
        if not self._follows(task, sender):
            self.wrong.append(f"{name(task)} does not wait for {name(sender)}")
        forward = receive.phase is Phase.FORWARD
        kinds = (Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.DGRAD)
        for stage, here, first in ((send.stage, sender, False), (receive.stage, task, True)):
            block = next(
                (self.blocks[stage, k, m] for k in kinds if (stage, k, m) in self.blocks), -1
            )
            if block >= 0 and not (
                self._follows(block, here) if first else self._follows(here, block)
            ):
                pair = (block, here) if first else (here, block)
                self.wrong.append(f"{name(pair[0])} does not wait for {name(pair[1])}")
        if len(send.reads) != len(receive.writes):
            self.wrong.append(
                f"{name(sender)} sends {len(send.reads)} tensors of {len(receive.writes)}"
            )
        for here, there in zip(send.reads, receive.writes, strict=False):
            self._tensor(send, sender, self.program.values[here], self.program.values[there])

    def _tensor(self, send: Work, task: int, sent: Value, got: Value) -> None:
        name = self.program.task_name(task)
        fact = self.made.get(send.stage, {}).get((sent.tensor, sent.layout))
        axes = self.stages[send.stage].mesh.axes
        if fact is None:
            self.wrong.append(f"{name} sends {sent}, which its stage does not have")
        elif any(p == PARTIAL and a.size > 1 for p, a in zip(sent.layout, axes, strict=True)):
            self.wrong.append(f"{name} sends {sent.tensor} as partial sums")
        elif send.phase is Phase.FORWARD and sent.tensor != got.tensor:
            self.wrong.append(f"{name} sends {sent.tensor} where {got.tensor} is received")

    # The end of a step.

    def _step_end(self) -> None:
        """Gradients of shared parameters are added; reductions and updates follow."""
        ready: dict[int, list[int]] = {stage: [] for stage in range(len(self.stages))}
        for work, tasks in self._of(Purpose.GRADIENT_REDUCTION):
            if work.peer >= 0:
                for task in tasks:
                    self._shared(work, task)
                    self._shared_in_time(task, work, ready)
                    ready[work.stage].append(task)
                    ready[work.peer].append(task)
        for stage, own in self.gradients.items():
            for name, givers in own.items():
                if givers != self.model.givers[name]:
                    lacks = ", ".join(sorted(self.model.givers[name] - givers)[:3])
                    self.wrong.append(
                        f"{self.stages[stage].name} updates {name} without what {lacks} adds to it"
                    )
        for stage in self.gradients:
            self._ends(stage, ready[stage])

    def _shared(self, work: Work, task: int) -> None:
        here, there = self.gradients.get(work.stage, {}), self.gradients.get(work.peer, {})
        for value in work.reads:
            name = self.program.values[value].tensor
            if name not in here or name not in there:
                self.wrong.append(f"{self.program.task_name(task)}: {name} is not held by both")
            elif work.collective == "all_reduce":
                if here[name] & there[name]:
                    self.wrong.append(f"{self.program.task_name(task)} adds gradients twice")
                here[name] = there[name] = here[name] | there[name]
            else:
                there[name] = here[name]

    def _shared_in_time(self, task: int, work: Work, earlier: dict[int, list[int]]) -> None:
        """Gradients are shared once they are whole: after all backwards, one pair after another."""
        waits = {waited for waited, _ in self.program.waits_of(task)}
        name = self.program.task_name(task)
        for stage in (work.stage, work.peer):
            if self._last_backward(stage) not in waits:
                self.wrong.append(f"{name} comes before the last backward of {self._named(stage)}")
            if not set(earlier[stage]) <= waits:
                self.wrong.append(
                    f"{name} does not wait for what {self._named(stage)} shared before"
                )

    def _named(self, stage: int) -> str:
        return self.stages[stage].name

    def _last_backward(self, stage: int) -> int:
        kinds = (Kind.BACKWARD, Kind.DGRAD, Kind.WGRAD)
        last = [task for (s, kind, _), task in self.blocks.items() if s == stage and kind in kinds]
        return max(last, key=self.position.__getitem__)

    def _ends(self, stage: int, shared: list[int]) -> None:
        """A stage's reductions come after its backwards and shared sums, updates after those."""
        ends = {
            work.purpose: tasks[0]
            for purpose in (Purpose.GRADIENT_REDUCTION, Purpose.UPDATE)
            for work, tasks in self._of(purpose)
            if work.stage == stage and work.peer < 0
        }
        name = self.stages[stage].name
        if len(ends) != 2:
            self.wrong.append(f"{name} does not reduce its gradients and update once a step")
            return
        reduce, update = ends[Purpose.GRADIENT_REDUCTION], ends[Purpose.UPDATE]
        waits = {waited for waited, _ in self.program.waits_of(reduce)}
        if self._last_backward(stage) not in waits:
            self.wrong.append(f"{name} reduces its gradients before its last backward")
        if not set(shared) <= waits:
            self.wrong.append(f"{name} updates before gradients that it shares are added")
        if not self._follows(update, reduce):
            self.wrong.append(f"{name} updates before its gradients are reduced")


@dataclass(frozen=True)
class _PhaseInside:
    """A phase of a body: seconds; the most above what is resident, and what is held at its end."""

    seconds: float
    peaks: list[float]
    held: list[float]


def _phases(body: Body) -> dict[Phase, _PhaseInside]:
    """The phases of a steady body, from its own columns."""
    program = body.program
    of_work = np.array([int(work.phase) for work in program.works] or [0])
    phase = np.where(program.work >= 0, of_work[program.work], 0)
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.effect_start))
    insides: dict[Phase, _PhaseInside] = {}
    level = [0.0] * len(program.memories)
    before = 0.0
    for current in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT):
        mine = phase == current
        if not mine.any():
            continue
        until = float(body.end[mine].max())
        peaks, held = [], []
        for memory in range(len(program.memories)):
            own = np.flatnonzero(mine[owner] & (program.effect_memory == memory))
            moments = np.concatenate((body.start[owner[own]], body.end[owner[own]]))
            change = np.concatenate((program.effect_at_start[own], program.effect_at_end[own]))
            order = np.lexsort((change, moments))
            sums = level[memory] + np.cumsum(change[order])
            peaks.append(max(level[memory], float(sums.max(initial=level[memory]))))
            held.append(max(0.0, float(sums[-1]) if len(sums) else level[memory]))
        level = held
        insides[current] = _PhaseInside(until - before, peaks, held)
        before = until
    return insides


def _uncapped(program: Program) -> Program:
    """A block alone may hold more than a device has: that is judged where blocks are together."""
    return replace(program, memories=tuple(Memory(memory.name) for memory in program.memories))
