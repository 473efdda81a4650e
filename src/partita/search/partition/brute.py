"""Tries every assignment of nodes to devices: the oracle of the other searches.

Device times depend on devices only, and every assignment is valid with some staging (see
`partita.problems.partition`), so trying all assignments leaves nothing out. Where they are alike, a
node goes to a device in use or to the first unused one, which leaves out only renamings. Where
devices are unlike, every assignment is tried; where stages are asked for, every way to form them.

    evaluations: the ways to split n nodes into at most P sets, about P^n / P!
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from partita.problems.partition import (
    PartitionProblem,
    PartitionSolution,
    check,
    evaluate,
    infeasible,
    lower_bound,
    stages_from_devices,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop

NONE = "no assignment keeps to what was asked; all were tried"


@dataclass(frozen=True, slots=True)
class BrutePartition:
    """Tries every assignment of nodes to devices; for tiny problems and as oracle."""

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until every assignment was tried."""
        run: Run[PartitionSolution] = Run(stop, "brute", seed)
        any_fits = False
        for solution in solutions(problem):
            if run.done():
                run.bound(lower_bound(problem))  # not earlier: an oracle trusts no bound
                return run.result()
            run.evaluations += 1
            if not check(problem, solution):
                any_fits = True
                run.offer(solution, evaluate(problem, solution))
        if not any_fits:
            return run.result(Status.INFEASIBLE, infeasible(problem) or NONE)
        return run.result(Status.OPTIMAL, f"all {run.evaluations:,} assignments were tried")


def solutions(problem: PartitionProblem) -> Iterator[PartitionSolution]:
    """Every solution worth a look, valid or not."""
    ids = [node.id for node in problem.placed]
    if problem.straight or problem.num_stages is not None:
        yield from _staged(problem, ids)
        return
    every: Iterable[tuple[int, ...]] = assignments(len(ids), problem.num_devices)
    if not problem.alike:
        every = itertools.product(range(problem.num_devices), repeat=len(ids))
    for devices in every:
        yield stages_from_devices(problem, dict(zip(ids, devices, strict=True)))


def _staged(problem: PartitionProblem, ids: list[int]) -> Iterator[PartitionSolution]:
    """Every way to form stages, on every choice of devices."""
    for stages in assignments(len(ids), problem.num_stages or problem.num_devices):
        stage_of = tuple(zip(ids, stages, strict=True))
        choices: Iterable[tuple[int, ...]] = itertools.product(
            range(problem.num_devices), repeat=max(stages) + 1
        )
        if problem.straight:
            choices = itertools.permutations(range(problem.num_devices), max(stages) + 1)
        for devices in choices:
            yield PartitionSolution(stage_of, tuple(enumerate(devices)))


def assignments(num_nodes: int, num_devices: int) -> Iterator[tuple[int, ...]]:
    """A device for every node, in every way that is not a renaming of another."""
    devices = [0] * num_nodes
    while True:
        yield tuple(devices)
        for node in reversed(range(num_nodes)):  # count up, the last node fastest
            highest = min(max(devices[:node], default=-1) + 1, num_devices - 1)
            if devices[node] < highest:
                devices[node] += 1
                devices[node + 1 :] = [0] * (num_nodes - node - 1)
                break
        else:
            return
