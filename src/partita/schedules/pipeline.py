"""Which blocks of a schedule problem are the stages of a pipeline, and how devices hold them.

A pipeline is a chain of forward blocks, each on one device, then the backward blocks of the same
stages the other way round, each on the device of its forward; a weight block may follow each
backward. A problem may hold several such chains side by side.

Layouts that named schedules are made for, p devices (ranks are in the order of the first p stages):

    line      p stages, stage s on rank s
    looped    v p stages, stage s on rank s mod p
    wave      v p stages, there and back: 0 ... p-1, p-1 ... 0, 0 ...
    two-way   two chains of p stages, the second in the opposite direction
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import ProblemError
from partita.problems.schedule import ScheduleProblem
from partita.schedules.actions import Action, Order
from partita.schedules.named import Layout


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A stage's device and its blocks by index; inference has no backward."""

    device: int
    forward: int
    backward: int | None = None
    weight: int | None = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The chains of a problem; stages are numbered on from one chain to the next."""

    num_devices: int
    chains: tuple[tuple[PipelineStage, ...], ...]

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """All stages, by number."""
        return tuple(stage for chain in self.chains for stage in chain)

    @property
    def training(self) -> bool:
        """Is there a backward pass?"""
        return self.stages[0].backward is not None

    @property
    def split(self) -> bool:
        """Are weight gradients blocks of their own?"""
        return self.stages[0].weight is not None


@dataclass(frozen=True, slots=True)
class StageHolding:
    """How devices hold the stages: the layout, chunks on each device, the device of each rank."""

    layout: Layout
    chunks: int
    ranks: tuple[int, ...]


def pipeline_of(problem: ScheduleProblem) -> Pipeline:
    """The pipeline that a problem is; a `ProblemError` says why it is none."""
    for index, block in enumerate(problem.blocks):
        if len(block.devices) != 1:
            raise _not_one(f"{problem.label(index)} occupies {len(block.devices)} devices")
        if block.kind not in ("forward", "backward", "weight"):
            raise _not_one(f"{problem.label(index)} is of kind {block.kind!r}")
    after: list[list[int]] = [[] for _ in problem.blocks]
    for first, second in problem.deps:
        after[first].append(second)
    chains = [_stages(problem, chain, after) for chain in _chains(problem)]
    stages = [stage for chain in chains for stage in chain]
    if len({(stage.backward is None, stage.weight is None) for stage in stages}) > 1:
        raise _not_one("some stages have a backward or weight block and others have none")
    _check_complete(problem, stages)
    _check_dependencies(problem, chains)
    return Pipeline(problem.num_devices, tuple(chains))


def held(pipeline: Pipeline) -> StageHolding | None:
    """The layout of a pipeline, if it is one of those that are known."""
    p = pipeline.num_devices
    devices = [[stage.device for stage in chain] for chain in pipeline.chains]
    ranks = devices[0][:p]
    if sorted(ranks) != list(range(p)):
        return None
    chunks, rest = divmod(len(devices[0]), p)
    if rest:
        return None
    if len(devices) == 2 and devices == [ranks, ranks[::-1]] and p > 1:
        return StageHolding("two-way", 1, tuple(ranks))
    if len(devices) > 1:
        return None
    if chunks == 1:
        return StageHolding("line", 1, tuple(ranks))
    if devices[0] == ranks * chunks:
        return StageHolding("looped", chunks, tuple(ranks))
    if devices[0] == [d for chunk in range(chunks) for d in ranks[:: -1 if chunk % 2 else 1]]:
        return StageHolding("wave", chunks, tuple(ranks))
    return None


def order_of(pipeline: Pipeline, starts: Sequence[tuple[int, int, float]]) -> Order:
    """The order of (micro-batch, block, start) on each device, as actions."""
    action_of: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(pipeline.stages):
        action_of[stage.forward] = (number, "F")
        if stage.backward is not None:
            action_of[stage.backward] = (number, "I" if stage.weight is not None else "B")
        if stage.weight is not None:
            action_of[stage.weight] = (number, "W")
    rows: list[list[Action]] = [[] for _ in range(pipeline.num_devices)]
    for _, microbatch, block in sorted((start, m, block) for m, block, start in starts):
        number, kind = action_of[block]
        rows[pipeline.stages[number].device].append(Action(number, kind, microbatch))
    return tuple(map(tuple, rows))


def on_devices(order: Order, ranks: Sequence[int]) -> Order:
    """The rows of an order by rank, put where the ranks are."""
    rows: list[tuple[Action, ...]] = [()] * len(order)
    for rank, row in enumerate(order):
        rows[ranks[rank]] = row
    return tuple(rows)


def _not_one(why: str) -> ProblemError:
    return ProblemError(
        f"this is no pipeline: {why}",
        fix="a chain of stages is needed, each on one device, and its backward the other way round",
        field="placement",
    )


def _chains(problem: ScheduleProblem) -> list[list[int]]:
    """Forward blocks, chain by chain."""
    forward = {i for i, block in enumerate(problem.blocks) if block.kind == "forward"}
    after: dict[int, int] = {}
    waiting: set[int] = set()
    for first, second in sorted(set(problem.deps)):
        if first in forward and second in forward:
            if first in after or second in waiting:
                raise _not_one(f"forwards branch at {problem.label(first)}")
            after[first] = second
            waiting.add(second)
    chains = []
    for index in sorted(forward - waiting):
        chain = [index]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        chains.append(chain)
    if not chains:
        raise _not_one("there is no forward block")
    return chains


def _stages(
    problem: ScheduleProblem, chain: Sequence[int], after: list[list[int]]
) -> tuple[PipelineStage, ...]:
    """Pair the forwards with the backwards that follow from the end of the chain."""
    stages: list[PipelineStage] = []
    paired: set[int] = set()
    before = chain[-1]
    for forward in reversed(chain):
        device = problem.blocks[forward].devices[0]
        follows = [b for b in after[before] if problem.blocks[b].kind == "backward"]
        # The mirror image of a stage runs where it does; another may wait for its forward too.
        here = [b for b in follows if problem.blocks[b].devices == (device,) and b not in paired]
        backward = here[0] if here else None
        if backward is None and set(follows) - paired:
            label = problem.label(min(set(follows) - paired))
            raise _not_one(f"{label} is not on the device of {problem.label(forward)}")
        weights = [] if backward is None else after[backward]
        weights = [b for b in weights if problem.blocks[b].kind == "weight"]
        stages.append(PipelineStage(device, forward, backward, weights[0] if weights else None))
        if backward is not None:
            paired.add(backward)
            before = backward
    return tuple(reversed(stages))


def _check_complete(problem: ScheduleProblem, stages: Sequence[PipelineStage]) -> None:
    used = Counter(b for s in stages for b in (s.forward, s.backward, s.weight) if b is not None)
    for index in range(len(problem.blocks)):
        if used[index] != 1:
            raise _not_one(f"{problem.label(index)} belongs to {used[index]} stages")
    for stage in stages:
        if stage.weight is not None and problem.blocks[stage.weight].devices != (stage.device,):
            raise _not_one(f"{problem.label(stage.weight)} is not on the device of its stage")


def _check_dependencies(
    problem: ScheduleProblem, chains: Sequence[Sequence[PipelineStage]]
) -> None:
    """Every block waits for what its stage needs, and for nothing else."""
    needed: set[tuple[int, int]] = set()
    implied: set[tuple[int, int]] = set()
    for chain in chains:
        for place, stage in enumerate(chain):
            if stage.backward is not None:
                last = place == len(chain) - 1
                (needed if last else implied).add((stage.forward, stage.backward))
                if stage.weight is not None:
                    needed.add((stage.backward, stage.weight))
            if place:
                needed.add((chain[place - 1].forward, stage.forward))
                before = chain[place - 1].backward
                if stage.backward is not None and before is not None:
                    needed.add((stage.backward, before))
    for first, second in sorted(set(problem.deps) - needed - implied):
        raise _not_one(f"{problem.label(second)} waits for {problem.label(first)}")
    for first, second in sorted(needed - set(problem.deps)):
        raise _not_one(f"{problem.label(second)} does not wait for {problem.label(first)}")
