"""Branch and bound: split a network by the choices of one op, lowest bound first.

A branch is the set of choices it leaves, one bit each. It is swept until its bound reaches the best
answer (nothing to find in it) or stalls. Then elimination finishes it where the tables stay small;
elsewhere the op with the most choices around it is fixed to each of its choices in turn. The bound
of the whole is the least of the open branches'. Of equal bounds the deepest branch is taken first.
"""

import heapq
import math

import numpy as np
import numpy.typing as npt

from partita.search.sharding.dual import Ascent, Choices, Dual, Keeper, View, resumed
from partita.search.sharding.eliminate import Elimination, Order, quick_order
from partita.search.sharding.network import Flags, ShardingNetwork, restricted

SWEEPS = 24  # of a branch at most
QUICK_CELLS = 3_000_000  # to join in the elimination of a branch: a few ms

Branch = tuple[float, int, int, npt.NDArray[np.uint8]]  # bound, -depth, number, choices in bits


class Branching:
    """The open branches of one network."""

    def __init__(self, keeper: Keeper, view: View, dual: Dual, max_cells: int) -> None:
        self.keeper, self.dual, self.max_cells = keeper, dual, max_cells
        self.view = view
        # In branches a choice goes by its number in the trunk.
        self.trunk = view.network._replace(choices=np.arange(len(view.network.costs)))
        self.num_branches = 0
        self.open: list[Branch] = []

    def run(self) -> None:
        """Close every branch. Raises `Stopped`."""
        self._push(-math.inf, 0, np.ones(len(self.trunk.costs), np.bool_))
        while self.open:
            bound, height, _, bits = heapq.heappop(self.open)
            if bound >= self.keeper.best:
                return  # nor is anything better in the others
            alive = np.unpackbits(bits, count=len(self.trunk.costs)).astype(np.bool_)
            self._visit(bound, 1 - height, alive)
            if self.open:
                self.keeper.run.bound(min(self.open[0][0], self.keeper.best))

    def _visit(self, bound: float, depth: int, alive: Flags) -> None:
        """Close a branch or split it."""
        self.keeper.check()
        network, sent = restricted(self.trunk, alive, self.dual.sent)
        dual = resumed(network, sent, self.dual.grain.copy())
        ascent = Ascent(self.keeper, View(network, self.view.offset, self._lift), dual)
        if ascent.climb(SWEEPS):
            return
        here = ascent.reduced()
        order = quick_order(here.network, QUICK_CELLS, self.max_cells, self.keeper.done)
        if order.core:
            self._split(max(bound, ascent.bound), depth, here.network, _widest(here.network))
        else:
            eliminate_all(self.keeper, here, order)

    def _split(self, bound: float, depth: int, network: ShardingNetwork, op: int) -> None:
        """One branch for each choice of an op."""
        alive = np.zeros(len(self.trunk.costs), np.bool_)
        alive[network.choices] = True
        own = network.choices[network.first[op] : network.first[op + 1]]
        alive[own] = False
        for choice in own:
            alive[choice] = True
            self._push(bound, depth, alive)
            alive[choice] = False

    def _lift(self, numbers: Choices) -> Choices:
        return self.view.lift(tuple(self.view.network.choices[list(numbers)].tolist()))

    def _push(self, bound: float, depth: int, alive: Flags) -> None:
        self.num_branches += 1
        heapq.heappush(self.open, (bound, -depth, self.num_branches, np.packbits(alive)))


def _widest(network: ShardingNetwork) -> int:
    """The op with the most choices around it, as bits."""
    bits = np.log2(network.num_choices)
    other = network.op_at.reshape(-1, 2)[:, ::-1].ravel()
    return int(np.bincount(network.op_at, bits[other], network.num_ops).argmax())


def eliminate_all(keeper: Keeper, view: View, order: Order) -> None:
    """Close a network by elimination: offer its best answer. Raises `Stopped`."""
    elimination = Elimination(view.network, keeper.done)
    elimination.run(order.steps)
    keeper.check()
    if elimination.constant < math.inf:
        keeper.offer(view.lift(view.network.assignment(elimination.labels())))
