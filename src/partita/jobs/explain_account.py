"""The step of a plan, second by second, for each group of devices that works together.

One stage that runs once is simulated op by op: its busiest device is read off the timeline. In a
pipeline a block is one task; what is inside it is read off the run that timed it, micro-batch by
micro-batch the same. Of a deep stage two shorter runs were timed: their accounts are extended in a
line as its time is. While a group waits for another one's block it is idle: that is the bubble.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from partita.cluster import Cluster
from partita.engine import run
from partita.graph.record import Graph
from partita.jobs.explain_blocks import UPDATE, Inside, OpMeaning, busiest_lane, inside_blocks
from partita.jobs.explain_links import Links, Listening
from partita.jobs.explain_time import Item, Shares, Walk, add, scaled
from partita.jobs.simulate import Simulation, simulate_stage, simulate_stages
from partita.jobs.workload import Workload
from partita.lower import Memo, lower_plan
from partita.lower.transfer import paired
from partita.plans import Schedule, Stage, device_groups, runs_once
from partita.program import Kind

BUBBLE = "bubble"
DUST = 1e-12  # of a step


@dataclass(frozen=True)
class GroupAccount:
    """What a group of devices does in a step; the seconds add up to the step."""

    name: str
    stages: tuple[int, ...]
    busy_s: float
    shares: Shares

    def seconds(self, kind: str) -> float:
        """All that is of one kind: compute, communication, update or idle."""
        return sum(s for item, s in self.shares.items() if item.kind == kind)


@dataclass(frozen=True)
class Account:
    """A simulated plan and where its time goes, group by group."""

    simulation: Simulation
    links: Links
    groups: tuple[GroupAccount, ...]

    @property
    def busiest(self) -> GroupAccount:
        """The group that works longest; the first of equals."""
        return max(self.groups, key=lambda group: group.busy_s)


def account(
    workload: Workload, cluster: Cluster, stages: tuple[Stage, ...], schedule: Schedule
) -> Account:
    """Simulate a plan and account for its step."""
    links, times = Links(cluster), Listening(cluster)
    if runs_once(stages, schedule):
        found = simulate_stage(workload, cluster, stages[0], collectives=times)
        return Account(found, links, _one_stage(found, links, times))
    memo = Memo(times)
    inside = inside_blocks(workload, cluster, stages, schedule, memo, links)
    lowered = lower_plan(stages, schedule, workload.graph, cluster, run, memo)
    found = simulate_stages(workload, cluster, stages, schedule, memo)
    pairs = {*lowered.forward, *lowered.backward, *_tied(workload.graph, stages)}
    meaning = _Blocks(found, links, inside, pairs)
    return Account(found, links, meaning.groups())


def _tied(graph: Graph, stages: tuple[Stage, ...]) -> set[tuple[int, int]]:
    """Stages that exchange gradients of a parameter, each with the next that holds it."""
    home = {split.op: i for i, stage in enumerate(stages) for split in stage.splits}
    holders: dict[str, set[int]] = {}
    for op in graph.ops:
        if op.phase == "forward":
            for name in op.inputs:
                if graph.tensor(name).role == "parameter":
                    holders.setdefault(name, set()).add(home[op.name])
    return {pair for held in holders.values() for pair in pairwise(sorted(held))}


# One stage, op by op.


def _one_stage(found: Simulation, links: Links, times: Listening) -> tuple[GroupAccount, ...]:
    timeline = found.timeline
    parameters = {tensor.name for tensor in found.workload.graph.parameters}
    walk = Walk(timeline, OpMeaning(timeline.program, links, times, parameters))
    lane = busiest_lane(timeline)
    name = timeline.program.lanes[lane].name
    busy = float(timeline.busy()[lane])
    return (GroupAccount(name, (0,), busy, _without_dust(walk.lane(lane))),)


def _without_dust(shares: Shares) -> Shares:
    """Without what is there by rounding alone."""
    least = DUST * sum(shares.values())
    return {item: seconds for item, seconds in shares.items() if seconds > least}


class _Blocks:
    """What the tasks of a pipeline are."""

    def __init__(
        self, found: Simulation, links: Links, inside: tuple[Inside, ...],
        pairs: set[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.found, self.links, self.inside = found, links, inside
        self.program = found.timeline.program
        self.stage_of = {stage.name: i for i, stage in enumerate(found.stages)}
        self.sends: dict[str, Callable[[], Item]] = {}
        for i, j in sorted(pairs):
            self._name_sends(min(i, j), max(i, j))
        self.syncs = {f"{stage.name} gradients": i for i, stage in enumerate(found.stages)}

    def groups(self) -> tuple[GroupAccount, ...]:
        """An account for each group of devices, in the order of their lanes."""
        walk = Walk(self.found.timeline, self)
        busy = self.found.timeline.busy()
        return tuple(
            GroupAccount(
                self.program.lanes[lane].name,
                members,
                float(busy[lane]),
                _without_dust(walk.lane(lane)),
            )
            for lane, members in enumerate(device_groups(self.found.stages))
        )

    def __call__(self, task: int, seconds: float, own: bool) -> Shares:
        label = self.program.blocks[self.program.block[task]]
        kind = Kind(int(self.program.kind[task]))
        if kind is Kind.COLLECTIVE:
            return self._sent(label, seconds)
        if not own:
            name = label.removesuffix(" update") if kind is Kind.UPDATE else label
            return {Item("idle", BUBBLE, name): seconds}
        if kind is Kind.UPDATE:
            return {UPDATE: seconds}
        return scaled(self._block(self.inside[self.stage_of[label]], kind), seconds)

    def _block(self, inside: Inside, kind: Kind) -> Shares:
        if kind is Kind.FORWARD:
            return inside.phases[0]
        if kind is Kind.WGRAD:
            return inside.phases[2]
        if kind is Kind.DGRAD:
            return inside.phases[1]
        both: Shares = {}
        for phase in inside.phases[1:]:
            add(both, phase)
        return both

    def _sent(self, label: str, seconds: float) -> Shares:
        if label in self.syncs:
            known = scaled(self.inside[self.syncs[label]].sync, seconds)
            if known:
                return known
        if label in self.sends:
            return {self.sends[label](): seconds}
        return {Item("communication", "gradients of parameters that stages share"): seconds}

    def _name_sends(self, i: int, j: int) -> None:
        a, b = (self.found.stages[k] for k in (i, j))

        def crossing(what: str) -> Callable[[], Item]:
            def item() -> Item:
                pairs = tuple(p for p in paired(a.mesh, b.mesh) if p[0] != p[1])
                where = self.links.crossed(pairs) if pairs else ""
                return Item("communication", what, where)

            return item

        self.sends[f"{a.name} > {b.name}"] = crossing("activations to the next stage")
        self.sends[f"{a.name} < {b.name}"] = crossing("gradients to the stage before")
        tied = crossing("gradients of parameters that stages share")
        self.sends[f"{a.name} <> {b.name} shared gradients"] = tied
