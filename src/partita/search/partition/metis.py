"""METIS's undirected k-way partition, then stages that form no cycle.

METIS (Karypis and Kumar 1998, through pymetis) cuts the graph without directions into P parts of
about equal integer weight with little cut. Its parts are labels, and every labelling has stages
without a cycle (see `partita.problems.partition`), so it never fails; where stages in order or
caps are asked for, annealing goes on from there. Several allowed imbalances are tried.
"""

from dataclasses import dataclass

import numpy as np

from partita.errors import MissingExtraError
from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Stop
from partita.search.partition.ending import answered, ending
from partita.search.partition.network import I64, PartitionNetwork
from partita.search.partition.stage_walk import InOrder, anneal_in_order
from partita.search.partition.walk import AnnealingSchedule, LabelWalk, proven

_UNITS = 10_000  # the heaviest node or edge, as METIS counts


@dataclass(frozen=True, slots=True)
class Metis:
    """Real METIS on integer weights, made acyclic; border moves only where caps demand it."""

    imbalances: tuple[float, ...] = (1.001, 1.01, 1.03, 1.1, 1.3)

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until every imbalance was tried."""
        walk = LabelWalk(problem, Run(stop, "metis", seed))
        run, net = walk.run, walk.net
        if not answered(walk):
            return ending(walk)
        if walk.in_order:
            anneal_in_order(walk, InOrder(restarts=1), seed)
            return ending(walk)
        labels = np.zeros(net.num_nodes, np.int64)
        for imbalance in self.imbalances:
            if run.done() or proven(run):
                break
            labels = parts(net, imbalance, seed)
            walk.count_and_offer(labels)
        if run.solution is None and not run.done():
            steps = AnnealingSchedule(200 * net.num_nodes, 1e-3)
            walk.anneal(net, np.arange(net.num_nodes), labels, steps, seed)
        return ending(walk)


def parts(net: PartitionNetwork, imbalance: float, seed: int) -> I64:
    """METIS's part for every node."""
    try:
        import pymetis
    except ImportError:
        raise MissingExtraError("pymetis", "metis", "the method metis") from None
    if net.num_devices == 1 or net.num_nodes <= net.num_devices:
        return np.arange(net.num_nodes) % net.num_devices
    neighbours = _neighbours(net)
    heaviest = max((price for each in neighbours for price in each.values()), default=0.0)
    work = net.mean_ms
    _, parts = pymetis.part_graph(
        net.num_devices,
        adjacency=[list(each) for each in neighbours],
        vweights=_units(work, float(work.max())).tolist(),
        eweights=_units(
            np.array([price for each in neighbours for price in each.values()]), heaviest
        ).tolist(),
        options=pymetis.Options(seed=seed % 2**31, ufactor=round((imbalance - 1) * 1000)),
        recursive=False,
    )
    return np.array(parts, np.int64)


def _units(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", largest: float) -> I64:
    """As whole numbers, at least 1: METIS refuses edges without weight."""
    scaled = values / largest * _UNITS if largest > 0 else np.zeros(len(values))
    return np.maximum(1, np.rint(scaled)).astype(np.int64)


def _neighbours(net: PartitionNetwork) -> list[dict[int, float]]:
    """Per node: what flows between it and every other, without directions."""
    neighbours: list[dict[int, float]] = [{} for _ in range(net.num_nodes)]
    prices = net.pin_ms.tolist()
    for each, src in enumerate(net.net_src.tolist()):
        for at in range(int(net.pin_start[each]), int(net.pin_start[each + 1])):
            dst = int(net.pin_node[at])
            for one, other in ((src, dst), (dst, src)):
                neighbours[one][other] = neighbours[one].get(other, 0.0) + prices[at]
    return [dict(sorted(each.items())) for each in neighbours]
