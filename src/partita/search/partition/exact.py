"""Branch and bound over labellings, in the order of the model: a proof for small problems.

Nodes get devices one after the other, producers first; a node goes to a device in use or to the
first unused one. What is placed only adds to device times, so a partial labelling is given up if

    its largest device time, or (all its device times + the work not placed) / devices

is no better than the best answer. The first answer is annealed. One tree node is one
evaluation; the tree has at most about P^n / P! leaves; a dozen nodes are finished in a moment.
Otherwise the answer and the bound stand as they are. Where stages are asked for, CP-SAT is given
the whole problem instead (`model`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.compiled import compiled
from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.partition.anneal import State, inner, keep, recount, start
from partita.search.partition.ending import answered, ending
from partita.search.partition.model import PartitionCpModel
from partita.search.partition.network import F64, I64, PartitionNetwork
from partita.search.partition.stage_walk import InOrder, anneal_in_order
from partita.search.partition.walk import AnnealingSchedule, LabelWalk, offer_chains, proven

TRIED = "every labelling was tried or ruled out"
_CHUNK = 100_000  # tree nodes between two looks at the clock
_BETTER = 1 - 1e-10  # what is worth finding; and what OPTIMAL means
_FIRST_GAP = 1e-3  # between the bound and the first goal
_LONGEST = 8  # how many long nodes are looked at


@dataclass(frozen=True, slots=True)
class ExactPartition:
    """Proves the best labelling of small problems by branch and bound."""

    most_tree_nodes: int = 2_000_000_000
    effort: float = 600.0  # of CP-SAT, in its own count, where stages are asked for

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until the tree is done."""
        run: Run[PartitionSolution] = Run(stop, "exact", seed)
        walk = LabelWalk(problem, run)
        if not walk.hopeless:
            offer_chains(walk, 2, 700, seed)
        if not answered(walk):
            return ending(walk)
        if walk.in_order:
            anneal_in_order(walk, InOrder(restarts=1, steps_per_node=300), seed)
            if not proven(run):
                PartitionCpModel(walk, timed=True).solve(self.effort)
            return ending(walk)
        steps = min(100_000, 300 * walk.net.num_nodes)
        for index in range(3):
            if not run.done() and not proven(run):
                walk.cycle(None, AnnealingSchedule(steps, 2e-2), seed + index)
        if run.solution is None:
            result = ending(walk)
            if run.solution is None:
                return result
        done = branch(walk, self.most_tree_nodes)
        return run.result(Status.OPTIMAL, TRIED) if done else run.result()


def branch(
    walk: LabelWalk, most_tree_nodes: int, most_first: int | None = None, share: float = 1.0
) -> bool:
    """Search trees for better answers; True if one was finished, so the best is optimal.

    A tree that looks only for answers better than a goal is small if the goal is near the bound,
    and finishing it without an answer proves the goal as a bound: so goals climb from the bound to
    the best known answer, each gap twice the last. The first tree may have no more than
    `most_first` nodes: where it is larger, the others are out of reach. At most that share of the
    time left is used.
    """
    done = walk.done_after(share)
    run, net = walk.run, walk.net
    left = most_tree_nodes
    share = _FIRST_GAP
    while left > 0 and run.objective is not None and not done() and not proven(run):
        known = run.objective * _BETTER
        bound = run.lower_bound
        assert bound is not None, "every search begins with a bound"
        goal = min(known, bound * (1 + share))
        tree = Tree(net, goal)
        left -= tree.search(walk, left if most_first is None else min(left, most_first), done)
        most_first = None
        if not tree.finished:
            return False
        if tree.improved or goal == known:
            return True
        run.bound(goal * _BETTER)
        share *= 2
    return False


class Tree:
    """All labellings better than a goal, searched in chunks."""

    def __init__(self, net: PartitionNetwork, goal_ms: float) -> None:
        self.net = net
        self.state = start(net, np.zeros(net.num_nodes, np.int64), 0)
        _clear(self.state)
        self.state.best_ms[0] = goal_ms
        self.cursor = np.zeros(1, np.int64)
        self.used = np.zeros(net.num_nodes + 1, np.int64)
        self.rest = _Rest(net)
        self.improved = False

    @property
    def finished(self) -> bool:
        """Is nothing left of the tree?"""
        return bool(self.cursor[0] < 0)

    def step(self, most_tree_nodes: int) -> int:
        """Go on for at most that many tree nodes; how many were visited."""
        arrays = self.rest.arrays
        visited: int = _search(
            self.net, self.state, self.cursor, self.used, *arrays, most_tree_nodes
        )
        return visited

    def search(self, walk: LabelWalk, most_tree_nodes: int, done: Callable[[], bool]) -> int:
        """Go on until finished, done or that many tree nodes; how many were visited."""
        run, spent = walk.run, 0
        while spent < most_tree_nodes and not self.finished and not done():
            chunk = min(_CHUNK, most_tree_nodes - spent)
            if run.stop.evaluations is not None:
                chunk = min(chunk, run.stop.evaluations - run.evaluations)
            known = self.state.best_ms[0]
            visited = self.step(chunk)
            spent += visited
            run.evaluations += visited
            if self.state.best_ms[0] < known:
                self.improved = True
                walk.offer(self.state.best_device)
        return spent


class _Rest:
    """What is known of the nodes that are not placed yet, before every node.

    With any weights of the devices, the weighted sum of their times is at least that of the placed
    nodes plus, for every other node, its cheapest weighted time. Where devices are alike, the
    longest nodes must also fit in one by one: j of them take at least the time of the j-th.
    """

    def __init__(self, net: PartitionNetwork) -> None:
        totals = net.work_ms.sum(axis=0)
        weights = np.ones(net.num_devices)
        if not net.alike_devices and totals.min() > 0:
            weights = totals[0] / totals
        least = (net.work_ms * weights).min(axis=1)
        rest = np.concatenate((least[::-1].cumsum()[::-1], [0.0]))
        longest = np.zeros((net.num_nodes + 1, _LONGEST))
        if net.alike_devices:
            for node in range(net.num_nodes):
                first = np.sort(net.work_ms[node:, 0])[::-1][:_LONGEST]
                longest[node, : len(first)] = first
        self.arrays = weights, rest, longest


def _clear(tree: State) -> None:
    """Nothing placed yet: device -1 everywhere."""
    tree.device[:] = -1
    tree.consumers[:] = 0
    tree.fwd[:] = 0.0
    tree.bwd[:] = 0.0
    tree.time_ms[:] = 0.0
    tree.held_bytes[:] = 0.0


@compiled()
def _search(
    net: PartitionNetwork,
    tree: State,
    cursor: I64,
    used: I64,
    weights: F64,
    rest: F64,
    longest: F64,
    chunk: int,
) -> int:
    """Go on for some tree nodes; cursor[0] is -1 when the tree is done."""
    num_nodes = len(net.held_bytes)
    visited = 0
    while visited < chunk and cursor[0] >= 0:
        node = cursor[0]
        last = tree.device[node] if node < num_nodes else -1
        most = net.num_devices - 1
        if net.alike_devices:
            most = min(used[node], most)
        if node == num_nodes or last + 1 > most:
            if node < num_nodes and last >= 0:
                _take(net, tree, node)
            cursor[0] -= 1
            continue
        if last >= 0:
            _take(net, tree, node)
        visited += 1
        _put(net, tree, node, last + 1)
        used[node + 1] = max(used[node], last + 2)
        if _hopeless(net, tree, weights, rest[node + 1], longest[node + 1]):
            continue
        if node + 1 == num_nodes:
            tree.best_ms[0] = tree.time_ms.max()
            keep(tree.best_device, tree.device)
        else:
            cursor[0] = node + 1
    return visited


@inner
def _hopeless(net: PartitionNetwork, tree: State, weights: F64, rest: float, longest: F64) -> bool:
    """Can what is placed not become part of an answer better than the goal?"""
    goal = tree.best_ms[0]
    total = room = 0.0
    for device in range(net.num_devices):
        time = tree.time_ms[device]
        if time >= goal or tree.held_bytes[device] > net.caps_bytes[device]:
            return True
        total += weights[device] * time
        room += weights[device] * goal
    if total + rest >= room:
        return True
    for rank in range(len(longest)):
        if longest[rank] <= 0.0:
            break
        places, needed = 0, rank + 1
        for device in range(net.num_devices):
            free = goal - tree.time_ms[device]
            # Never a quotient beyond what is needed: of a tiny time it would be no integer.
            if free >= needed * longest[rank]:
                places += needed
            else:
                places += int(free / longest[rank])
        if places < needed:
            return True
    return False


@inner
def _put(net: PartitionNetwork, tree: State, node: int, device: int) -> None:
    """Place a node whose producers are placed."""
    tree.device[node] = device
    tree.time_ms[device] += net.work_ms[node, device]
    tree.held_bytes[device] += net.held_bytes[node]
    for at in range(net.used_start[node], net.used_start[node + 1]):
        each = net.used_net[at]
        recount(net, tree, each, tree.device[net.net_src[each]], device, 1)


@inner
def _take(net: PartitionNetwork, tree: State, node: int) -> None:
    """Undo `_put` of the node placed last."""
    device = tree.device[node]
    tree.device[node] = -1
    tree.time_ms[device] -= net.work_ms[node, device]
    tree.held_bytes[device] -= net.held_bytes[node]
    for at in range(net.used_start[node], net.used_start[node + 1]):
        each = net.used_net[at]
        recount(net, tree, each, tree.device[net.net_src[each]], device, -1)
