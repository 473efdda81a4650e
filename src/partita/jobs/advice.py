"""Nothing fits: the smallest changes that would make it fit, as far as candidates tell.

More memory per device, more such devices, or a smaller batch; each is tried by itself, in growing
steps, with a few numbers of stages. Checkpointing and ZeRO are part of every candidate.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

from partita import units
from partita.cluster.presets import several
from partita.costs.collectives import Collectives
from partita.costs.memory import workspace_bytes
from partita.engine import run
from partita.graph.rebatch import rebatch
from partita.jobs.plan_settings import USUAL, AdviceSettings
from partita.jobs.simulate import Attempts
from partita.lower import Memo, lower_plan
from partita.plans import Schedule, Stage
from partita.problems.joint import Cell, JointSolution
from partita.search.joint.candidates import Candidates
from partita.search.joint.cells import divisors
from partita.search.joint.model import JointModel

NO_ADVICE = "use many more or larger devices, or a smaller batch"
Late = Callable[[], bool]


def what_would_fit(
    model: JointModel, max_memory: float, settings: AdviceSettings = USUAL.advice,
    limit_s: float | None = None,
) -> str:  # fmt: skip
    """One sentence: what there is, and what would be enough.

    With the limit of a search that ended early: it does not know that there is no plan.
    """
    memory = min(min(kind.memory_bytes for kind in model.cluster.kinds), max_memory)
    attempt, late = Attempts(), partial(_after, settings.seconds)
    tried = (
        attempt("advice on memory", lambda: _memory(model, memory, settings, late())),
        attempt("advice on devices", lambda: _devices(model, max_memory, settings, late())),
        attempt("advice on the batch", lambda: _batch(model, settings, late())),
    )
    helps = "; ".join(filter(None, tried)) or NO_ADVICE
    have = f"{units.size(memory)} per device"
    if limit_s is not None:
        helps = f"give more time; {helps}"
        return f"no plan that fits {have} was found in the time limit of {limit_s:g} s: {helps}"
    return f"no plan fits {have}, with checkpointing and ZeRO: {helps}"


def what_may_fit(
    model: JointModel, settings: AdviceSettings = USUAL.advice
) -> Iterator[tuple[tuple[Stage, ...], Schedule]]:
    """What fits as far as is known on paper, for a search whose time was too short to see it.

    The first fills the memory; those that follow leave more and more room.
    """
    with_time = replace(model, interrupted=_after(settings.seconds))
    for filled in settings.filled:
        solution = _fitting(with_time, settings, filled)
        if solution is not None:
            yield with_time.stages(solution), with_time.schedule(solution)


def what_would_fit_beyond_splits(model: JointModel, settings: AdviceSettings = USUAL.advice) -> str:
    """The same where only splits have been tried: a plan of stages may fit as it is."""
    if next(what_may_fit(model, settings), None) is not None:
        return "cut into stages, or with checkpointing, it should fit: partita plan says how"
    return what_would_fit(model, math.inf, settings)


def _after(seconds: float) -> Late:
    """Is the time over that may be spent on a piece of advice? Searches ask between their steps.

    That is time of this process: what else runs on the machine must not change what is advised.
    """
    end = time.process_time() + seconds
    return lambda: time.process_time() > end


def _memory(model: JointModel, memory: float, settings: AdviceSettings, late: Late) -> str:
    """The budget grows until a candidate fits; its simulation says how much that is."""
    kinds = model.cluster.kinds
    workspace = max(map(workspace_bytes, kinds))
    whole = min(kind.memory_bytes - workspace_bytes(kind) for kind in kinds)
    uncapped = replace(model, max_memory=math.inf, interrupted=late)
    parameters = sum(tensor.size_bytes for tensor in model.graph.parameters)
    least = max(memory - workspace, parameters / model.cluster.num_devices)

    def fitting(times: float) -> JointSolution | None:
        return _fitting(uncapped, settings, times * least / whole)

    for low, high in pairwise((1.0, *settings.more_memory)):
        joint_solution = fitting(high)
        for _ in range(settings.halvings if joint_solution else 0):
            middle = (low + high) / 2
            smaller = fitting(middle)
            low, high, joint_solution = (
                (middle, high, joint_solution) if smaller is None else (low, middle, smaller)
            )
        if joint_solution is not None:
            peak = _peak(uncapped, joint_solution) * settings.rounding
            if peak <= memory:  # nobody had the time to find it
                return ""
            return f"{units.size(peak)} per device would be enough"
    return ""


def _peak(model: JointModel, solution: JointSolution) -> float:
    """The most that a device holds in a run of a plan."""
    program = lower_plan(
        model.stages(solution), model.schedule(solution), model.graph, model.cluster, run,
        Memo(model.collectives), quick=True, most_devices=1,
    ).program  # fmt: skip
    return float(max(run(program).peaks()))


def _devices(model: JointModel, max_memory: float, settings: AdviceSettings, late: Late) -> str:
    cluster = model.cluster
    if not cluster.is_homogeneous or max_memory < math.inf:
        return ""
    for times in settings.more_devices:
        count = cluster.num_devices * times
        if count > settings.most_devices:
            break
        larger = several(cluster.kinds[0], count)
        other = replace(
            model, cluster=larger, collectives=Collectives(larger), max_memory=math.inf,
            interrupted=late,
        )  # fmt: skip
        if _fitting(other, settings) is not None:
            return f"{count} such devices would be enough"
    return ""


def _batch(model: JointModel, settings: AdviceSettings, late: Late) -> str:
    smaller = [size for size in divisors(model.batch) if size < model.batch]
    for size in sorted(smaller, reverse=True)[: settings.batches]:
        other = replace(model, graph=rebatch(model.graph, size), interrupted=late)
        if _fitting(other, settings) is not None:
            return f"a batch of {size} would fit"
    return ""


def _fitting(
    model: JointModel, settings: AdviceSettings, filled: float = 1.0
) -> JointSolution | None:
    """A candidate that fills so much of the budgets, for a few numbers of stages, if there is one.

    The smallest micro-batches there can be hold least.
    """
    problem, candidates = model.problem, Candidates(model.problem)
    some = range(len(problem.groupings))
    for grouping in some[:: max(1, len(some) // settings.groupings)]:
        least = min(problem.groupings[grouping].num_groups, problem.batch)
        counts = [c.num_microbatches for c in problem.cells if c.grouping == grouping]
        for count in [count for count in counts if count >= least][-2:]:
            if model.interrupted():
                return None
            candidate = candidates.best(Cell(grouping, count), 0, filled=filled)
            if candidate is not None:
                return candidate.solution
    return None
