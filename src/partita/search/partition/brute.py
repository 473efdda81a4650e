"""Tries every assignment of nodes to devices: the referee of the other searches.

Device times depend on devices only, and every assignment is valid with some staging (see
`partita.problems.partition`), so trying all assignments leaves nothing out. Devices are alike: a
node goes to a device in use or to the first unused one, which leaves out only renamings.

    evaluations: the ways to split n nodes into at most P sets, about P^n / P!
"""

from collections.abc import Iterator
from dataclasses import dataclass

from partita.problems.partition import (
    PartitionProblem,
    PartitionSolution,
    evaluate,
    lower_bound,
    stages_from_devices,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop


@dataclass(frozen=True, slots=True)
class Brute:
    """Tries every assignment of nodes to devices; for tiny problems and as referee."""

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until every assignment was tried."""
        run: Run[PartitionSolution] = Run(stop, "brute", seed)
        ids = [node.id for node in problem.placed]
        for devices in assignments(len(ids), problem.num_devices):
            if run.done():
                run.bound(lower_bound(problem))  # not earlier: a referee trusts no bound
                return run.result()
            solution = stages_from_devices(problem, dict(zip(ids, devices, strict=True)))
            run.evaluations += 1
            run.offer(solution, evaluate(problem, solution))
        return run.result(Status.OPTIMAL, f"all {run.evaluations:,} assignments were tried")


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
