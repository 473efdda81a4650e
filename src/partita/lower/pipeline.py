"""Plans as programs: one function lowers any plan.

One stage that runs one micro-batch is a program of all its ops (`ops.py`). With several stages or
micro-batches each group of devices has one lane for its blocks and one for the collectives that end
a step; each direction between two groups has a lane for what they send. Devices of a group do the
same, so one lane stands for all of them, with a memory for each kind among them. A block of a stage
that several groups share takes the lanes of all of them.

    forward      waits for what enters its stage; holds its activations, and what leaves until sent
    backward     waits for its forward and the gradients of what left; gives everything back
    end of step  parameters that several stages hold are exchanged, gradients reduced, updated

A block is one task; the tasks inside it are a body of the program, unless lowering is `quick`:
then blocks are known by their numbers only, those of equal stages once and deep ones by two
shorter ones (`known.py`), which is what a search needs to try many plans.

O(stages x micro-batches), and O(ops) for what is inside.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from partita.cluster import Cluster, DeviceKind
from partita.costs.collectives import Collectives
from partita.costs.layouts import paired, sent_pairs, stage_bundles
from partita.costs.memory import workspace_bytes
from partita.costs.roofline import OpCost, Split
from partita.errors import PlanError
from partita.graph.record import Graph
from partita.lower.blocks import Blocks, Run, StageBodies, stage_bodies
from partita.lower.context import MAX_REPRESENTATIVES, first_of_kinds
from partita.lower.known import (
    Memo,
    known_blocks,
    microbatch_graph,
    structure,
    with_backward,
    with_names,
)
from partita.lower.ops import lower_stage
from partita.lower.orders import order_of
from partita.lower.pieces import Homes, homes, piece
from partita.lower.sends import Sends, StageSend, Tied, sends_of
from partita.meaning import Phase, Purpose, Value, Work
from partita.plans import Overlap, Schedule, Stage, device_groups, group_devices, runs_once
from partita.program import Body, Kind, Program, ProgramBuilder
from partita.schedules.actions import Action, Order


@dataclass(frozen=True)
class Lowered:
    """A plan's program, with what it was made from.

    `stages` are those of the plan with every decision said: the order of collectives too. Of one
    stage that runs once `graph`, `splits` and `costs` are those of its ops on the first device; of
    others the graph is that of a micro-batch.
    """

    program: Program
    stages: tuple[Stage, ...]
    schedule: Schedule
    graph: Graph
    blocks: tuple[Blocks, ...] = ()
    order: Order = ()
    sends: Sends = field(default_factory=Sends)
    splits: dict[str, Split] = field(default_factory=dict)
    costs: dict[str, OpCost] = field(default_factory=dict)


def lower_plan(
    stages: tuple[Stage, ...],
    schedule: Schedule,
    graph: Graph,
    cluster: Cluster,
    run: Run,
    memo: Memo | None = None,
    *,
    quick: bool = False,
    most_devices: int = MAX_REPRESENTATIVES,
    execution: str = "graph",
) -> Lowered:
    """The program of a plan; `run` is the engine's, by which blocks are timed."""
    known = memo or Memo(Collectives(cluster))
    known.execution = execution
    if runs_once(stages, schedule):
        stage = _with_bundles(stages[0], graph, cluster, known.collectives)
        one = lower_stage(stage, graph, cluster, most_devices, known.collectives, execution)
        known.written_ops += len(one.graph.ops)
        decided = (replace(stage, overlap=Overlap(one.order)),)
        return Lowered(
            one.program, decided, schedule, one.graph, splits=one.splits, costs=one.costs
        )
    return lower_pipeline(stages, schedule, graph, cluster, run, known, quick=quick)


def _with_bundles(stage: Stage, graph: Graph, cluster: Cluster, collectives: Collectives) -> Stage:
    """The stage with what is gathered together; where an order was written without, each op's."""
    if stage.bundles is not None:
        return stage
    alone = stage.overlap is not None
    firsts = () if alone else stage_bundles(stage, graph, cluster, collectives)
    return replace(stage, bundles=firsts)


def lower_pipeline(
    stages: tuple[Stage, ...], schedule: Schedule, graph: Graph, cluster: Cluster, run: Run,
    known: Memo, *, quick: bool = False,
) -> Lowered:  # fmt: skip
    """A task per block and micro-batch, also of one stage and one micro-batch."""
    stages = tuple(_with_bundles(stage, graph, cluster, known.collectives) for stage in stages)
    micro = microbatch_graph(graph, schedule.num_microbatches, known)
    groups = device_groups(stages)
    order = order_of(schedule, groups, training=graph.is_training)
    apart = any(action.kind == "I" for row in order for action in row)
    where = homes(micro, stages)
    bodies: tuple[StageBodies, ...] = ()
    if quick:
        blocks = tuple(
            known_blocks(micro, stage, i, where, cluster, run, known, apart)
            for i, stage in enumerate(stages)
        )
        sends = sends_of(micro, stages, where, blocks, known)
    else:
        bodies = _bodies(micro, stages, where, cluster, run, known, apart)
        blocks = tuple(
            with_backward(body.blocks, apart) if graph.is_training else body.blocks
            for body in bodies
        )
        sends = sends_of(micro, stages, where, blocks, known, [body.part for body in bodies])
        stages = tuple(
            replace(stage, overlap=body.overlap) for stage, body in zip(stages, bodies, strict=True)
        )
    program = _PipelineBuilder(stages, groups, order, cluster, blocks, sends, bodies).build()
    return Lowered(program, stages, schedule, micro, blocks, order, sends)


def _bodies(
    micro: Graph, stages: tuple[Stage, ...], where: Homes, cluster: Cluster, run: Run, known: Memo,
    apart: bool,
) -> tuple[StageBodies, ...]:  # fmt: skip
    """Every stage op by op, however deep it is; those that differ in names alone once."""
    written: dict[tuple[object, ...], StageBodies] = {}
    bodies = []
    for i, stage in enumerate(stages):
        own = piece(micro, stage, i, where)
        key = structure(own, stage)
        if key in written:
            bodies.append(with_names(written[key], own, stage, i))
            continue
        written[key] = stage_bodies(
            own, stage, i, cluster, run, known.collectives, apart=apart, execution=known.execution
        )
        bodies.append(written[key])
    return tuple(bodies)


BLOCK_PHASES = {
    "F": Phase.FORWARD, "B": Phase.BACKWARD, "I": Phase.BACKWARD, "W": Phase.WEIGHT,
}  # fmt: skip


class _PipelineBuilder:
    def __init__(
        self, stages: tuple[Stage, ...], groups: tuple[tuple[int, ...], ...], order: Order,
        cluster: Cluster, blocks: tuple[Blocks, ...], sends: Sends, bodies: tuple[StageBodies, ...],
    ) -> None:  # fmt: skip
        self.stages, self.groups, self.order = stages, groups, order
        self.cluster, self.blocks, self.sends = cluster, blocks, sends
        self.num_microbatches = 1 + max((a.microbatch for row in order for a in row), default=0)
        self.builder = ProgramBuilder()
        self.builder.stages = tuple(stage.name for stage in stages)
        self.steady = [-1] * len(stages)  # numbers of bodies
        self.ending = [-1] * len(stages)
        for i, own in enumerate(bodies):
            self.steady[i] = self._body(own.steady)
            self.ending[i] = -1 if own.ending is None else self._body(own.ending)
        self.groups_of = {
            stage: tuple(g for g, members in enumerate(groups) if stage in members)
            for stage in range(len(stages))
        }
        self.devices = group_devices(stages)
        self.group_of_device = {d: g for g, own in enumerate(self.devices) for d in own}
        self.lanes = [self.builder.lane(self._name(g)) for g in range(len(groups))]
        self.memory_of = [self._memories(g) for g in range(len(groups))]
        self.network: dict[tuple[int, int], int] = {}
        self.done: dict[tuple[str, int, int], int] = {}  # (kind, stage, microbatch) -> task
        self.separate = {  # stages and micro-batches whose weight gradients come by themselves
            (action.stage, action.microbatch)
            for row in self.order
            for action in row
            if action.kind == "I"
        }
        self.into: list[list[int]] = [[] for _ in stages]  # stages that feed it
        self.from_after: list[list[int]] = [[] for _ in stages]  # stages it gets gradients from
        for i, j in sends.forward:
            self.into[j].append(i)
        for j, i in sends.backward:
            self.from_after[i].append(j)
        self.training = any(block.backward is not None for block in blocks)
        self.sent: dict[tuple[int, int, int], int] = {}  # (from, to, microbatch) -> its receive
        self.messages: dict[tuple[int, int, str], tuple[Work, Work, tuple[int, ...]]] = {}

    def build(self) -> Program:
        self.begin = self._begin()
        place = [0] * len(self.order)
        left = sum(map(len, self.order))
        while left:
            before = left
            for g, row in enumerate(self.order):
                while place[g] < len(row) and self._ready(row[place[g]], place):
                    action = row[place[g]]
                    self._run(action)
                    for other in self.groups_of[action.stage]:
                        place[other] += 1
                        left -= 1
            if left == before:
                raise PlanError(
                    f"the order cannot go on: {self._circle(place)}",
                    fix="correct the order, or name a known schedule",
                    field="schedule order",
                )
        self._end_step()
        return self.builder.build()

    def _ready(self, action: Action, place: list[int]) -> bool:
        """Has all that an action needs run, and is it the next one of all its groups?"""
        together = all(self._next(g, place) == action for g in self.groups_of[action.stage])
        return together and all(map(self._is_done, self._needs(action)))

    def _is_done(self, action: Action) -> bool:
        return (action.kind, action.stage, action.microbatch) in self.done

    def _next(self, group: int, place: list[int]) -> Action | None:
        row = self.order[group]
        return row[place[group]] if place[group] < len(row) else None

    def _circle(self, place: list[int]) -> str:
        """The circle of waits that an order has come to, in words."""
        group = next(g for g, row in enumerate(self.order) if place[g] < len(row))
        steps: list[str] = []
        seen: dict[int, int] = {}
        while group not in seen:
            seen[group] = len(steps)
            action = self.order[group][place[group]]
            missing = next((a for a in self._needs(action) if not self._is_done(a)), action)
            # Of the groups that run what is missing together, one that is not there yet.
            group = next(
                (g for g in self.groups_of[missing.stage] if self._next(g, place) != missing),
                self.groups_of[missing.stage][0],
            )
            behind = self.order[group][place[group]]
            if missing == action:  # the others are there, and one group is not
                steps.append(f"{action} waits for {self._name(group)}, which runs {behind} first")
            else:
                comes = "" if behind == missing else f", which comes after {behind}"
                steps.append(f"{action} waits for {missing}{comes}")
        return "; ".join(steps[seen[group] :])

    def _needs(self, action: Action) -> list[Action]:
        """What an action waits for, each as the order of its stage calls it."""
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            return [Action(i, "F", m) for i in self.into[stage]]
        if action.kind == "W":
            return [Action(stage, "I", m)]
        kinds = ((j, "I" if (j, m) in self.separate else "B") for j in self.from_after[stage])
        return [Action(stage, "F", m), *(Action(j, kind, m) for j, kind in kinds)]

    def _run(self, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            self._forward(stage, m)
        elif action.kind == "W":
            self._weight(stage, m)
        else:
            self._backward(stage, m, whole=action.kind == "B")

    # Blocks.

    def _forward(self, stage: int, m: int) -> None:
        blocks = self.blocks[stage]
        phase = blocks.forward
        leaving = sum(
            sent.source_bytes for (i, _), sent in self.sends.forward.items() if i == stage
        )
        entered = 0.0 if self.training else self._entered(stage)
        effects = [
            (memory, peak, held - peak + leaving - entered)
            for memory, peak, held in self._rows(stage, phase.peak_bytes, phase.held_bytes)
        ]
        if not self.training:  # nothing is kept for a backward
            effects = [(k, peak, leaving - entered - peak) for k, peak, _ in effects]
        waits = [self.sent[i, stage, m] for i in self.into[stage]] or [self.begin]
        self._block(stage, phase.seconds, waits, effects, Kind.FORWARD, m, "F")
        for i, j in self.sends.forward:
            if i == stage:
                self._send(i, j, m, self.sends.forward[i, j], self.done["F", i, m], Phase.FORWARD)

    def _backward(self, stage: int, m: int, *, whole: bool) -> None:
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
            for memory, peak, held, after in self._rows(
                stage, peaks, blocks.forward.held_bytes, last.held_bytes
            )
        ]
        waits = [
            self.done["F", stage, m],
            *(self.sent[j, stage, m] for j in self.from_after[stage]),
        ]
        apart = not whole
        kind = Kind.DGRAD if apart else Kind.BACKWARD
        self._block(stage, seconds, waits, effects, kind, m, "I" if apart else "B")
        made = self.done["I" if apart else "B", stage, m]
        for j, i in self.sends.backward:
            if j == stage:
                self._send(j, i, m, self.sends.backward[j, i], made, Phase.BACKWARD)

    def _weight(self, stage: int, m: int) -> None:
        blocks = self.blocks[stage]
        assert blocks.backward is not None, "an order of training has a backward"
        assert blocks.weight is not None, "the backward was taken apart"
        effects = [
            (memory, peak - held, after - peak)
            for memory, peak, held, after in self._rows(
                stage, blocks.weight.peak_bytes, blocks.backward.held_bytes,
                blocks.weight.held_bytes,
            )
        ]  # fmt: skip
        waits = [self.done["I", stage, m]]
        self._block(stage, blocks.weight.seconds, waits, effects, Kind.WGRAD, m, "W")

    def _block(
        self, stage: int, seconds: float, waits: list[int],
        effects: list[tuple[int, float, float]], kind: Kind, m: int, letter: str,
    ) -> None:  # fmt: skip
        phase = BLOCK_PHASES[letter]
        work = Work(Purpose.COMPUTE, phase, stage=stage, body=self.steady[stage])
        self.done[letter, stage, m] = self.builder.add(
            work, self._lanes(stage), seconds, waits, effects, kind, m
        )

    def _send(self, i: int, j: int, m: int, sent: StageSend, made: int, phase: Phase) -> None:
        """A message between stages: its send, and the receive that the next block waits for."""
        takes = dict.fromkeys(self._memories_of(j), sent.target_bytes)
        gives = dict.fromkeys(self._memories_of(i), -sent.source_bytes)
        effects = [
            (memory, takes.get(memory, 0.0), gives.get(memory, 0.0)) for memory in gives | takes
        ]
        send, receive, lanes = self._message(i, j, sent, phase)
        seconds = sent.seconds if lanes else 0.0
        first = self.builder.add(send, lanes, seconds, [made], effects, Kind.SEND, m)
        # A receive has the order of the sends on its link, so that neither waits for the other.
        second = self.builder.add(receive, lanes, 0.0, [first], (), Kind.RECEIVE, m)
        self.builder.pair(first, second)
        self.sent[i, j, m] = second

    def _message(
        self, i: int, j: int, sent: StageSend, phase: Phase
    ) -> tuple[Work, Work, tuple[int, ...]]:
        """What a message and its receive are, and the lanes that they take."""
        key = (i, j, phase.name)
        if key not in self.messages:
            here, there = [], []
            for crossing in sent.tensors:
                of = crossing.gradient_of
                sends = Value(crossing.source, crossing.have, gradient_of=of)
                takes = Value(crossing.target, crossing.need, "received", gradient_of=of)
                here.append(self.builder.value(sends))
                there.append(self.builder.value(takes))
            source, target = self.stages[i].mesh, self.stages[j].mesh
            each = (
                pair
                for crossing in sent.tensors
                for pair in sent_pairs(source, crossing.have, target, crossing.need)
            )
            pairs = tuple(dict.fromkeys(each))
            group = self.builder.group(pairs)
            send = Work(
                Purpose.SEND, phase, stage=i, peer=j, group=group, size_bytes=sent.source_bytes,
                reads=tuple(here),
            )  # fmt: skip
            receive = replace(
                send, purpose=Purpose.RECEIVE, stage=j, peer=i, reads=(), writes=tuple(there)
            )
            self.messages[key] = send, receive, self._between(i, j, pairs)
        return self.messages[key]

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
                    total += (self.num_microbatches - 1) * blocks.cache_bytes
                effects.append((memory, total, 0.0))
        return self.builder.add(Work(Purpose.RESIDENT), (), 0.0, (), effects)

    def _end_step(self) -> None:
        last = {
            stage: max(task for (_, s, _), task in self.done.items() if s == stage)
            for stage in range(len(self.stages))
        }
        ready: dict[int, list[int]] = {stage: [task] for stage, task in last.items()}
        for pair, tied in self.sends.added.items():
            self._tie(pair, tied, ready, "all_reduce")
        for pair, tied in self.sends.returned.items():
            self._tie(pair, tied, ready, "broadcast")
        for stage in sorted(ready, key=lambda s: max(ready[s])):  # whose gradients come first
            blocks, waits = self.blocks[stage], ready[stage]
            body = self.ending[stage]
            if blocks.sync_s > 0 or body >= 0:
                work = Work(Purpose.GRADIENT_REDUCTION, Phase.REDUCE, stage=stage, body=body)
                lanes = tuple(self._link(g, g) for g in self.groups_of[stage])
                lanes = lanes if blocks.sync_s > 0 else ()
                task = self.builder.add(
                    work, lanes, blocks.sync_s if lanes else 0.0, waits, kind=Kind.COLLECTIVE
                )
                waits = [task]
            if blocks.update_s > 0 or body >= 0:
                work = Work(Purpose.UPDATE, Phase.UPDATE, stage=stage, body=body)
                self.builder.add(work, self._lanes(stage), blocks.update_s, waits, kind=Kind.UPDATE)

    def _tie(
        self, pair: tuple[int, int], tied: Tied, ready: dict[int, list[int]], collective: str
    ) -> None:
        """Two stages that hold a parameter add up its gradients, or one hands on the whole sum."""
        i, j = pair
        here, there = [], []
        for name, have, need in tied.parameters:
            here.append(self.builder.value(Value(name, have, "parameter")))
            there.append(self.builder.value(Value(name, need, "parameter")))
        pairs = paired(self.stages[i].mesh, self.stages[j].mesh)
        work = Work(
            Purpose.GRADIENT_REDUCTION, Phase.REDUCE, stage=i, peer=j, collective=collective,
            group=self.builder.group(pairs),
            size_bytes=tied.size_bytes, reads=tuple(here), writes=tuple(there),
        )  # fmt: skip
        lanes: tuple[int, ...] = ()
        if tied.seconds > 0:
            both = pairs if collective == "broadcast" else (*pairs, *((b, a) for a, b in pairs))
            lanes = self._links(both, inside=True)
        task = self.builder.add(
            work, lanes, tied.seconds, [*ready[i], *ready[j]], kind=Kind.COLLECTIVE
        )
        ready[i].append(task)
        ready[j].append(task)

    # Names and places.

    def _body(self, body: Body) -> int:
        self.builder.bodies.append(body)
        return len(self.builder.bodies) - 1

    def _name(self, group: int) -> str:
        names = [self.cluster.devices[device].name for device in self.devices[group]]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def _memories(self, group: int) -> dict[str, int]:
        """A memory for each kind of device in a group."""
        devices = first_of_kinds(self.devices[group], self.cluster)
        memories = {}
        for device in devices:
            kind = self.cluster.kind_of(device)
            name = self._name(group) if len(devices) == 1 else f"{self._name(group)} ({kind.name})"
            memories[kind.name] = self.builder.memory(name, float(kind.memory_bytes))
        return memories

    def _kind(self, group: int, name: str) -> DeviceKind:
        return next(
            self.cluster.kind_of(device)
            for device in self.devices[group]
            if self.cluster.devices[device].kind == name
        )

    def _lanes(self, stage: int) -> tuple[int, ...]:
        """The lanes that a block of a stage takes: of all its devices."""
        return tuple(self.lanes[g] for g in self.groups_of[stage])

    def _rows(self, stage: int, *columns: tuple[float, ...]) -> Iterable[Any]:
        """(memory, bytes, ...) of a stage: group by group, kind by kind as its blocks have them."""
        kinds = [self.cluster.devices[device].kind for device in self.blocks[stage].devices]
        for g in self.groups_of[stage]:
            for k, kind in enumerate(kinds):
                if kind in self.memory_of[g]:
                    yield self.memory_of[g][kind], *(column[k] for column in columns)

    def _memories_of(self, stage: int) -> list[int]:
        return [memory for g in self.groups_of[stage] for memory in self.memory_of[g].values()]

    def _entered(self, stage: int) -> float:
        return sum(sent.target_bytes for (_, j), sent in self.sends.forward.items() if j == stage)

    def _between(self, i: int, j: int, pairs: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The lanes of a message between stages; none where both have the same devices."""
        if self.groups_of[i] == self.groups_of[j]:
            return ()
        return self._links(pairs, inside=False)

    def _links(self, pairs: Sequence[tuple[int, ...]], *, inside: bool) -> tuple[int, ...]:
        """The lanes between the groups of pairs of devices, each once.

        What stays in a group takes its own lane, where that counts or where it moves at all.
        """
        lanes: dict[int, None] = {}
        for source, target in pairs:
            a, b = self.group_of_device[source], self.group_of_device[target]
            if a != b or inside or source != target:
                lanes[self._link(a, b)] = None
        return tuple(lanes)

    def _link(self, a: int, b: int) -> int:
        if (a, b) not in self.network:
            name = f"{self._name(a)} net" if a == b else f"{self._name(a)} > {self._name(b)}"
            self.network[a, b] = self.builder.lane(name, "link")
        return self.network[a, b]
