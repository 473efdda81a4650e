"""Branch and bound over labellings, in the order of the model: a proof for small problems.

Nodes get devices one after the other, producers first; a node goes to a device in use or to the
first unused one. What is placed only adds to device times, so a partial labelling is given up if

    its largest device time, or (all its device times + the work not placed) / devices

is no better than the best answer. The first answer is annealed. One tree node is one
evaluation; the tree has at most about P^n / P! leaves; a dozen nodes are finished in a moment.
Otherwise the answer and the bound stand as they are.
"""

from dataclasses import dataclass

import numba
import numpy as np

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.partition.anneal import State, price_of, start
from partita.search.partition.bounds import communication_bound
from partita.search.partition.network import F64, I64, Network
from partita.search.partition.walk import Schedule, Walk, offer_chains, proven

TRIED = "every labelling was tried or ruled out"
_CHUNK = 100_000  # tree nodes between two looks at the clock
_BETTER = 1 - 1e-10  # what is worth finding; and what OPTIMAL means


@dataclass(frozen=True, slots=True)
class Exact:
    """Proves the best labelling of small problems by branch and bound."""

    most_tree_nodes: int = 2_000_000_000

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until the tree is done."""
        run: Run[PartitionSolution] = Run(stop, "exact", seed)
        walk = Walk(problem, run)
        run.bound(communication_bound(problem, walk.net))
        offer_chains(walk, 2, 700, seed)
        steps = min(100_000, 300 * walk.net.num_nodes)
        for index in range(3):
            if not run.done() and not proven(run):
                walk.cycle(None, Schedule(steps, 2e-2), seed + index)
        done = branch(walk, self.most_tree_nodes)
        return run.result(Status.OPTIMAL, TRIED) if done else run.result()


def branch(walk: Walk, most_tree_nodes: int) -> bool:
    """Search the tree for better answers; True if all of it is done, so the best is optimal."""
    run, net = walk.run, walk.net
    if run.objective is None or run.done() or proven(run):
        return False
    tree = start(net, np.zeros(net.num_nodes, np.int64), 0)
    _clear(tree)
    cursor = np.zeros(1, np.int64)
    used = np.zeros(net.num_nodes + 1, np.int64)
    rest_ms = np.concatenate((net.work_ms[::-1].cumsum()[::-1], [0.0]))
    tree.best_ms[0] = run.objective * _BETTER
    spent = 0
    while spent < most_tree_nodes and not run.done():
        chunk = min(_CHUNK, most_tree_nodes - spent)
        if run.stop.evaluations is not None:
            chunk = min(chunk, run.stop.evaluations - run.evaluations)
        known = tree.best_ms[0]
        visited = _search(net, tree, cursor, used, rest_ms, chunk)
        spent += visited
        run.evaluations += visited
        if tree.best_ms[0] < known:
            walk.offer(tree.best_device)
        if cursor[0] < 0:
            return True
    return False


def _clear(tree: State) -> None:
    """Nothing placed yet: device -1 everywhere."""
    tree.device[:] = -1
    tree.consumers[:] = 0
    tree.price_ms[:] = 0.0
    tree.time_ms[:] = 0.0


@numba.njit(cache=True)
def _search(net: Network, tree: State, cursor: I64, used: I64, rest_ms: F64, chunk: int) -> int:
    """Go on for some tree nodes; cursor[0] is -1 when the tree is done."""
    num_nodes = len(net.work_ms)
    visited = 0
    while visited < chunk and cursor[0] >= 0:
        node = cursor[0]
        last = tree.device[node] if node < num_nodes else -1
        if node == num_nodes or last + 1 > min(used[node], net.num_devices - 1):
            if node < num_nodes and last >= 0:
                _take(net, tree, node)
            cursor[0] -= 1
            continue
        if last >= 0:
            _take(net, tree, node)
        visited += 1
        _put(net, tree, node, last + 1)
        used[node + 1] = max(used[node], last + 2)
        largest, total = tree.time_ms.max(), tree.time_ms.sum()
        least = max(largest, (total + rest_ms[node + 1]) / net.num_devices)
        if least >= tree.best_ms[0]:
            continue
        if node + 1 == num_nodes:
            tree.best_ms[0] = largest
            tree.best_device[:] = tree.device
        else:
            cursor[0] = node + 1
    return visited


@numba.njit(cache=True)
def _put(net: Network, tree: State, node: int, device: int) -> None:
    """Place a node whose producers are placed."""
    tree.device[node] = device
    tree.time_ms[device] += net.work_ms[node]
    for at in range(net.used_start[node], net.used_start[node + 1]):
        tree.consumers[net.used_net[at], device] += 1
        _reprice(net, tree, net.used_net[at], device)


@numba.njit(cache=True)
def _take(net: Network, tree: State, node: int) -> None:
    """Undo `_put` of the node placed last."""
    device = tree.device[node]
    tree.device[node] = -1
    tree.time_ms[device] -= net.work_ms[node]
    for at in range(net.used_start[node], net.used_start[node + 1]):
        tree.consumers[net.used_net[at], device] -= 1
        _reprice(net, tree, net.used_net[at], device)


@numba.njit(cache=True)
def _reprice(net: Network, tree: State, each: int, there: int) -> None:
    """Bring the price of a net on one device up to date."""
    price = price_of(net, tree, each, there)
    home = tree.device[net.net_src[each]]
    if home != there:
        more = price - tree.price_ms[each, there]
        tree.time_ms[home] += more
        tree.time_ms[there] += more
    tree.price_ms[each, there] = price
