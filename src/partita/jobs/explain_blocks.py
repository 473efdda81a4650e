"""What is inside the tasks of a plan: ops, collectives by purpose and link, blocks phase by phase.

A pipeline's block is one task. What it holds is read off the run that timed it; where a deep stage
was timed by two shorter ones, their accounts are extended in a line as its time is.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from partita.cluster import Cluster
from partita.engine import run
from partita.jobs.explain_links import Links, Listening
from partita.jobs.explain_time import Item, Shares, Walk, scaled
from partita.jobs.workload import Workload
from partita.lower import Memo
from partita.lower.blocks import Blocks, Phase
from partita.lower.known import known_blocks, microbatch_graph
from partita.lower.orders import order_of
from partita.lower.pieces import AGAIN, homes
from partita.plans import Schedule, Stage, device_groups
from partita.program import Kind, Program
from partita.timeline import Timeline

BUCKET = re.compile(r"(gradients|parameters)\.[0-9]+")
PHASES = {Kind.FORWARD: "forward", Kind.DGRAD: "data gradient", Kind.WGRAD: "weight gradient"}
RECOMPUTE = Item("compute", "recompute")
UPDATE = Item("update", "optimizer update")


def busiest_lane(timeline: Timeline) -> int:
    """The device's lane with the most to do."""
    lanes = timeline.program.lanes
    devices = np.array([lane.kind == "device" for lane in lanes])
    return int(np.where(devices, timeline.busy(), -1.0).argmax())


@dataclass(frozen=True)
class OpMeaning:
    """What the tasks of a stage lowered op by op are."""

    program: Program
    links: Links
    times: Listening
    parameters: set[str]

    def __call__(self, task: int, seconds: float, own: bool) -> Shares:
        """What so many seconds of a task are, for the lane it runs on or one that waits for it."""
        kind = Kind(int(self.program.kind[task]))
        if kind is Kind.COLLECTIVE:
            return {self._sent(task): seconds}
        if not own and kind is not Kind.OTHER:
            lane = self.program.lanes[self.program.lanes_of(task)[0]].name
            return {Item("idle", "waiting for other devices", lane): seconds}
        if kind is Kind.UPDATE:
            return {UPDATE: seconds}
        if kind is Kind.FORWARD and self.program.blocks[self.program.block[task]].endswith(AGAIN):
            return {RECOMPUTE: seconds}
        return {Item("compute", PHASES.get(kind, kind.words)): seconds}

    def _sent(self, task: int) -> Item:
        label = self.program.blocks[self.program.block[task]]
        name, _, collective = label.rpartition(" ")
        bucket = BUCKET.fullmatch(name)
        what = "activations"
        if bucket and name not in self.parameters:
            what = bucket[1]
        elif name in self.parameters:
            what = "parameters"
        groups = self.times.heard.get((collective, float(self.program.duration[task])))
        where = "" if groups is None else self.links.crossed(groups)
        return Item("communication", f"{collective.replace('_', '-')} of {what}", where)


@dataclass(frozen=True)
class Inside:
    """The accounts of one stage's blocks, and of the end of its step."""

    phases: tuple[Shares, ...]  # forward, backward, weight gradients where apart
    sync: Shares


class _Watched(dict[tuple[object, ...], Blocks]):
    """Remembered blocks with the runs that timed them, and which of them are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Timeline] = []
        self.timed: dict[tuple[object, ...], tuple[Timeline, ...]] = {}
        self.asked: list[tuple[object, ...]] = []

    def run(self, program: Program) -> Timeline:
        timeline = run(program)
        self.runs.append(timeline)
        return timeline

    def __setitem__(self, key: tuple[object, ...], blocks: Blocks) -> None:
        super().__setitem__(key, blocks)
        self.timed[key] = tuple(self.runs)
        self.runs.clear()

    def __getitem__(self, key: tuple[object, ...]) -> Blocks:
        self.asked.append(key)
        return super().__getitem__(key)


def inside_blocks(
    workload: Workload, cluster: Cluster, stages: tuple[Stage, ...], schedule: Schedule,
    memo: Memo, links: Links,
) -> tuple[Inside, ...]:  # fmt: skip
    """Time every stage's blocks as lowering does, and read what is in them."""
    assert isinstance(memo.collectives, Listening), "tasks are told apart by what was heard"
    graph = workload.graph
    micro = microbatch_graph(graph, schedule.num_microbatches, memo)
    order = order_of(schedule, device_groups(stages), training=graph.is_training)
    apart = any(action.kind == "I" for row in order for action in row)
    once = len(stages) == schedule.num_microbatches == 1
    where = homes(micro, stages)
    parameters = {tensor.name for tensor in graph.parameters}
    watched = memo.blocks = _Watched()
    read: dict[tuple[object, ...], _Timed] = {}
    found = []
    for number, stage in enumerate(stages):
        watched.asked.clear()
        blocks = known_blocks(micro, stage, number, where, cluster, watched.run, memo, apart, once)
        timed = []
        for key in dict.fromkeys(watched.asked):
            if key not in read:
                read[key] = _read(watched.timed[key], links, memo.collectives, parameters)
            timed.append(read[key])
        found.append(_extended(timed, blocks, _spanned(stage, links)))
    return tuple(found)


@dataclass(frozen=True)
class _Timed:
    """The accounts of what was timed: each phase, and what came after the last."""

    phases: tuple[Shares, ...]
    end: Shares = field(default_factory=dict)


def _read(
    runs: tuple[Timeline, ...], links: Links, times: Listening, parameters: set[str]
) -> _Timed:
    steady = runs[0]
    cuts = [
        task
        for task in range(1, steady.program.num_tasks)  # task 0 is the start
        if steady.program.kind[task] == Kind.OTHER and not steady.program.lanes_of(task)
    ]
    phases: list[Shares] = []
    lane, before = busiest_lane(steady), 0.0
    for cut in cuts:
        moment = float(steady.end[cut])
        meaning = OpMeaning(steady.program, links, times, parameters)
        phases.append(Walk(steady, meaning).lane(lane, before, moment, cut))
        before = moment
    if len(runs) == 1:
        return _Timed(tuple(phases))
    whole = runs[1]
    meaning = OpMeaning(whole.program, links, times, parameters)
    end = Walk(whole, meaning).lane(busiest_lane(whole), min(before, whole.makespan))
    sent = {item: s for item, s in end.items() if item.kind == "communication"}
    return _Timed(tuple(phases), sent)


def _extended(timed: list[_Timed], blocks: Blocks, spanned: str) -> Inside:
    """The accounts of a stage's blocks: as timed, or extended from two shorter stages."""
    phases = [blocks.forward, blocks.backward, blocks.weight]
    found = []
    for place, phase in enumerate(phases):
        if phase is None:
            continue
        accounts = [t.phases[place] if place < len(t.phases) else {} for t in timed]
        found.append(_line(accounts, phase))
    end = scaled(timed[-1].end, blocks.sync_s)
    if not end and blocks.sync_s > 0:
        end = {Item("communication", "synchronising gradients", spanned): blocks.sync_s}
    return Inside(tuple(found), end)


def _line(accounts: list[Shares], phase: Phase) -> Shares:
    last = accounts[-1]
    if len(accounts) > 1:
        few, many = accounts
        step = sum(many.values()) - sum(few.values())
        runs = (phase.seconds - sum(many.values())) / step if step > 0 else 0.0
        last = {item: max(0.0, s + runs * (s - few.get(item, 0.0))) for item, s in many.items()}
    found = scaled(last, phase.seconds)
    return found or ({Item("compute", "forward"): phase.seconds} if phase.seconds else {})


def _spanned(stage: Stage, links: Links) -> str:
    """The level that a stage's devices span."""
    return links.crossed((stage.mesh.devices,)) if len(stage.mesh.devices) > 1 else ""
