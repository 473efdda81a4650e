"""IOS on real steps: stages with barriers, found by the lazy search with costs measured on the GPU.

A stage is captured as one CUDA graph: its groups forked over side streams and joined, several
copies of it one after the other, timed in replays in turns with a reference (one step alone), whose
drift is taken out. Equal stages are measured once; times go into the profile.
"""

from collections.abc import Mapping

import torch

from partita.costs.blocks import blocks
from partita.gpu.measure import COPIES, DriftGauge
from partita.gpu.step_times import StepTimes
from partita.gpu.streams import order
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.launch import launch_all
from partita.gpu.streams.order import Depends, LaunchPlan
from partita.gpu.streams.tune import Timed, structure
from partita.gpu.streams.ways import NUM_SMS, Way
from partita.problems.streams import StreamsConstants, StreamsOp, StreamsProblem, StreamStage
from partita.search.base import Stop
from partita.search.streams.lazy import Lazy

MOST_OPS = 3  # of a group (r of IOS)
MOST_GROUPS = 8  # of a stage (s of IOS)
NEVER_US = 1e6  # of a stage that does not fit into memory
PART_OPS = 24  # longer parts are cut, so that the tables stay small


def staged_plan(
    bound: Bound, timed: Mapping[int, Timed], profile: StepTimes, limit_s: float
) -> LaunchPlan:
    """The best stages found within the time."""
    measured = _Measured(bound, timed, profile)
    problem = measured.problem()
    result = Lazy(measured.stage_us, overhead=0.5)(problem, Stop(time_s=limit_s))
    if result.solution is None:
        return order.sequential(bound.flow)
    stages = [
        [[measured.steps[op] for op in group] for group in stage.groups]
        for part in result.solution.parts
        for stage in part
    ]
    return order.staged(bound.flow, stages)


class _Measured:
    """The problem of some steps, and its costs on the GPU."""

    def __init__(self, bound: Bound, timed: Mapping[int, Timed], profile: StepTimes) -> None:
        self.bound, self.timed, self.profile = bound, timed, profile
        self.steps = order.launched(bound.flow)
        self.number = {step: number for number, step in enumerate(self.steps)}
        self.ways: dict[str, Way] = {
            bound.flow.steps[index].name: each.ways[0] for index, each in timed.items()
        }
        self.reference: DriftGauge | None = None

    def problem(self) -> StreamsProblem:
        """Solo times as measured; the work of a step from its time and how wide it is."""
        needs = order.depends(self.bound.flow)
        ops = tuple(
            StreamsOp(
                structure(self.bound, self.bound.flow.steps[step]),
                tuple(self.number[need] for need in needs[step]),
                self.timed[step].times_us[0],
                self.timed[step].times_us[0] * self.width(step),
                self.bound.flow.steps[step].name,
            )
            for step in self.steps
        )
        parts = blocks([op.preds for op in ops], PART_OPS)
        constants = StreamsConstants(NUM_SMS, 1.0, 1.0, 1.0, 1.0, 1.0, 0.02)
        return StreamsProblem(ops, parts, constants, MOST_OPS, MOST_GROUPS)

    def width(self, step: int) -> float:
        """The part of the GPU that a step fills, roughly: its programs over the processors."""
        way, made = self.timed[step].ways[0], self.bound.flow.steps[step]
        shape = self.bound.flow.shapes.get(made.name, ())
        if len(shape) != 4 or not way.block:
            return 0.3
        pixels = shape[0] * shape[2] * shape[3]
        programs = -(-pixels // way.block[0]) * -(-shape[1] // way.block[1]) * way.splits
        return min(1.0, programs / (2 * NUM_SMS))

    def stage_us(self, problem: StreamsProblem, stage: StreamStage) -> float:
        """The time of one stage on the GPU."""
        if len(stage.groups) == 1:
            return sum(self.timed[self.steps[op]].times_us[0] for op in stage.groups[0])
        groups = [[self.steps[op] for op in group] for group in stage.groups]
        key = "stage " + " | ".join(
            sorted(" + ".join(self.described(step) for step in group) for group in groups)
        )
        known = self.profile.get(key, Way())
        if known is None:
            try:
                known = self.measure(groups)
            except torch.OutOfMemoryError:
                known = NEVER_US
            self.profile.put(key, Way(), known)
        return known

    def described(self, step: int) -> str:
        made = self.bound.flow.steps[step]
        return f"{structure(self.bound, made)} {self.ways[made.name]}"

    def measure(self, groups: list[list[int]]) -> float:
        chosen = [(step, stream) for stream, group in enumerate(groups) for step in group]
        inside = {step for step, _ in chosen}
        needs: Depends = tuple(
            tuple(need for need in each if need in inside)
            for each in order.depends(self.bound.flow)
        )
        plan = order.with_waits("stage", chosen, needs)

        def run() -> None:
            for _ in range(COPIES):
                launch_all(self.bound, plan, self.ways)

        if self.reference is None:
            self.reference = DriftGauge(self.bound.captured(self.longest))
        return self.reference.timed_us(self.bound.captured(run).replay) / COPIES

    def longest(self) -> None:
        """The step that takes longest by itself, some times: what drifts, drifts there too."""
        index = max(self.steps, key=lambda step: self.timed[step].times_us[0])
        step = self.bound.flow.steps[index]
        for _ in range(COPIES):
            self.bound.run(step, self.ways[step.name])
