"""Plans of several stages and micro-batches as programs: a task per block and micro-batch.

Each group of devices has one lane for its blocks and one for the collectives that end a step; each
direction between two groups has a lane for what they send. Devices of a group do the same, so one
lane stands for all of them, with a memory for each kind among them.

    forward      waits for what enters its stage; holds its activations, and what leaves until sent
    backward     waits for its forward and the gradients of what left; gives everything back
    end of step  parameters that several stages hold are exchanged, gradients synchronised, updated

O(stages x micro-batches).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from partita.cluster import Cluster, DeviceKind
from partita.costs.collectives import Collectives
from partita.costs.memory import workspace_bytes
from partita.errors import PlanError
from partita.graph.record import Graph
from partita.lower.blocks import Blocks, Phase, Run
from partita.lower.known import Memo, known_blocks, microbatch_graph
from partita.lower.orders import order_of
from partita.lower.pieces import homes
from partita.lower.sends import Sends, Sent
from partita.lower.stage import drawn_devices
from partita.plans import Schedule, Stage, device_groups
from partita.program import Kind, Program, ProgramBuilder
from partita.schedules.actions import Action, Order


@dataclass(frozen=True)
class Pipelined:
    """A plan's program, with what it was made from."""

    program: Program
    microbatch: Graph
    blocks: tuple[Blocks, ...]
    order: Order
    forward: dict[tuple[int, int], Sent]  # (from stage, to stage)
    backward: dict[tuple[int, int], Sent]


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
        known_blocks(micro, stage, i, where, cluster, run, known, apart, once)
        for i, stage in enumerate(stages)
    )
    sends = Sends(micro, stages, where, blocks, known)
    program = _Builder(stages, groups, order, cluster, blocks, sends).build()
    return Pipelined(program, micro, blocks, order, sends.forward, sends.backward)


class _Builder:
    def __init__(
        self, stages: tuple[Stage, ...], groups: tuple[tuple[int, ...], ...], order: Order,
        cluster: Cluster, blocks: tuple[Blocks, ...], sends: Sends,
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
        for stage in sorted(ready, key=lambda s: max(ready[s])):  # whose gradients come first
            blocks = self.blocks[stage]
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
