"""Nothing fits: the smallest changes that would make it fit, as far as candidates tell.

More memory per device, more such devices, or a smaller batch; each is tried by itself, in growing
steps, with a few numbers of stages. Checkpointing and ZeRO are part of every candidate.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from partita import units
from partita.cluster.presets import several
from partita.costs.collectives import Collectives
from partita.costs.memory import workspace_bytes
from partita.engine import run
from partita.graph.rebatch import rebatch
from partita.lower import Memo, lower_plan
from partita.problems.joint import Cell, JointSolution
from partita.search.joint.candidates import Candidates
from partita.search.joint.groupings import divisors
from partita.search.joint.model import JointModel

Late = Callable[[], bool]
MORE_MEMORY = (1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 16)
ROUNDING = 1.005
ADVICE_S = 5.0  # for each kind of advice
HALVINGS = 3  # between the last that was too little and the first that was enough
MORE_DEVICES = (2, 4, 8, 16)
MOST_DEVICES = 1024
MOST_BATCHES = 6


def what_would_fit(model: JointModel, max_memory: float) -> str:
    """One sentence: what there is, and what would be enough."""
    memory = min(min(kind.memory_bytes for kind in model.cluster.kinds), max_memory)
    tried = (
        _memory(model, memory, _after(ADVICE_S)),
        _devices(model, max_memory, _after(ADVICE_S)),
        _batch(model, _after(ADVICE_S)),
    )
    helps = "; ".join(filter(None, tried))
    helps = helps or "use many more or larger devices, or a smaller batch"
    have = units.size(memory)
    return f"no plan fits {have} per device, with checkpointing and ZeRO: {helps}"


def _after(seconds: float) -> Late:
    """Is the time over that may be spent on a piece of advice? Searches ask between their steps."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def _memory(model: JointModel, memory: float, late: Late) -> str:
    """The budget grows until a candidate fits; its simulation says how much that is."""
    kinds = model.cluster.kinds
    workspace = max(map(workspace_bytes, kinds))
    whole = min(kind.memory_bytes - workspace_bytes(kind) for kind in kinds)
    uncapped = replace(model, max_memory=math.inf, interrupted=late)
    parameters = sum(tensor.size_bytes for tensor in model.graph.parameters)
    least = max(memory - workspace, parameters / model.cluster.num_devices)

    def fitting(times: float) -> JointSolution | None:
        return _fitting(uncapped, times * least / whole)

    for low, high in pairwise((1.0, *MORE_MEMORY)):
        joint_solution = fitting(high)
        for _ in range(HALVINGS if joint_solution else 0):
            middle = (low + high) / 2
            smaller = fitting(middle)
            low, high, joint_solution = (
                (middle, high, joint_solution) if smaller is None else (low, middle, smaller)
            )
        if joint_solution is not None:
            return f"{units.size(_peak(uncapped, joint_solution))} per device would be enough"
    return ""


def _peak(model: JointModel, solution: JointSolution) -> float:
    """The most that a device holds in a run of a plan, and a little more to be shown rounded."""
    program = lower_plan(
        model.stages(solution), model.schedule(solution), model.graph, model.cluster, run,
        Memo(model.collectives), quick=True, most_devices=1,
    ).program  # fmt: skip
    return float(max(run(program).peaks())) * ROUNDING


def _devices(model: JointModel, max_memory: float, late: Late) -> str:
    cluster = model.cluster
    if not cluster.is_homogeneous or max_memory < math.inf:
        return ""
    for times in MORE_DEVICES:
        count = cluster.num_devices * times
        if count > MOST_DEVICES:
            break
        larger = several(cluster.kinds[0], count)
        other = replace(
            model, cluster=larger, collectives=Collectives(larger), max_memory=math.inf,
            interrupted=late,
        )  # fmt: skip
        if _fitting(other) is not None:
            return f"{count} such devices would be enough"
    return ""


def _batch(model: JointModel, late: Late) -> str:
    smaller = [size for size in divisors(model.batch) if size < model.batch]
    for size in sorted(smaller, reverse=True)[:MOST_BATCHES]:
        other = replace(model, graph=rebatch(model.graph, size), interrupted=late)
        if _fitting(other) is not None:
            return f"a batch of {size} would fit"
    return ""


def _fitting(model: JointModel, filled: float = 1.0) -> JointSolution | None:
    """A candidate that fills so much of the budgets, for a few numbers of stages, if there is one.

    The smallest micro-batches there can be hold least.
    """
    problem, candidates = model.problem, Candidates(model.problem)
    some = range(len(problem.groupings))
    for grouping in some[:: max(1, len(some) // 3)]:
        least = min(problem.groupings[grouping].num_groups, problem.batch)
        counts = [c.num_microbatches for c in problem.cells if c.grouping == grouping]
        for count in [count for count in counts if count >= least][-2:]:
            if model.interrupted():
                return None
            candidate = candidates.best(Cell(grouping, count), 0, filled=filled)
            if candidate is not None:
                return candidate.solution
    return None
