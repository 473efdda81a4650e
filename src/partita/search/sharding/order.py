"""In which order to eliminate ops: greedy, by what each elimination costs.

Eliminating an op joins the costs of all its neighbours into one table and makes them neighbours of
each other. The order decides how large the tables get; the best order is NP-hard to find, so two
rules are tried, each taking next the op for which it is least:

    weight   the cells to compute, i.e. the choices of the op times those of its neighbours
    fill     the cells of new edges between its neighbours

O(ops x width^2) for the first, a factor width more for the second. Ops whose tables would be too
large are put off; those left over at the end are the core.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from partita.search.sharding.network import Ask, SearchStopped, ShardingNetwork

Scope = tuple[int, ...]
Step = tuple[int, Scope]  # an op, and the ops that depend on its choice in the order of their turn
Graph = dict[int, set[int]]

MOST_DIMS = 62  # of a table, besides the op itself; numpy's limit is 64


@dataclass(frozen=True, slots=True)
class Order:
    """Ops in the order of elimination; `core` are those left over when tables get too large."""

    steps: tuple[Step, ...]
    core: tuple[int, ...]
    joined_cells: int  # to compute, all tables together
    largest_cells: int  # to compute for one table

    @property
    def width(self) -> int:
        """The most ops a table spans, the eliminated one included."""
        return max((len(scope) + 1 for _, scope in self.steps), default=0)


def best_order(network: ShardingNetwork, max_joined: int, max_stored: int, stopped: Ask) -> Order:
    """The cheaper of the two rules' orders, or the one with the smaller core."""
    by_weight = _greedy(network, _weight, max_joined, max_stored, stopped)
    by_fill = _greedy(network, _fill, max_joined, max_stored, stopped)
    return min(by_weight, by_fill, key=lambda order: (len(order.core), order.joined_cells))


def quick_order(network: ShardingNetwork, max_joined: int, max_stored: int, stopped: Ask) -> Order:
    """The order by weight."""
    return _greedy(network, _weight, max_joined, max_stored, stopped)


def narrow_order(network: ShardingNetwork, max_joined: int, max_stored: int, stopped: Ask) -> Order:
    """Only ops with at most two neighbours, so that what is left has edges, not larger tables."""
    return _greedy(network, _weight, max_joined, max_stored, stopped, most_neighbours=2)


Rule = Callable[[int, Graph, list[int]], float]


def _weight(op: int, near: Graph, counts: list[int]) -> float:
    if len(near[op]) > MOST_DIMS:
        return math.inf
    return math.prod((counts[other] for other in near[op]), start=counts[op])


def _fill(op: int, near: Graph, counts: list[int]) -> float:
    if len(near[op]) > MOST_DIMS:
        return math.inf
    pairs = itertools.combinations(near[op], 2)
    return sum(counts[one] * counts[two] for one, two in pairs if two not in near[one])


def _greedy(
    network: ShardingNetwork,
    rule: Rule,
    max_joined: int,
    max_stored: int,
    stopped: Ask,
    most_neighbours: int = MOST_DIMS,
) -> Order:
    """Take the op for which the rule is least while tables are small enough.

    Of equals the one with the least joined into it, so that equal parts of a model are treated
    alike. Raises `SearchStopped` when asked to.
    """
    counts = network.num_choices.tolist()
    near = _neighbours(network, counts)
    far = rule is _fill  # whose figures change with edges two steps away
    depth = dict.fromkeys(near, 0)  # how many eliminations in a row led to the tables of an op
    rank = {op: (rule(op, near, counts), 0) for op in near}
    queue = [(*key, op) for op, key in rank.items()]
    heapq.heapify(queue)
    steps: list[tuple[int, set[int]]] = []
    joined, stored, largest = 0, network.written_cells(), 0
    while queue:
        if stopped():
            raise SearchStopped
        *key, op = heapq.heappop(queue)
        if op not in near or tuple(key) != rank[op] or key[0] == math.inf:
            continue  # gone, from before its neighbourhood changed, or hopeless
        scope = near[op]
        kept = math.prod(counts[other] for other in scope)
        fits = joined + kept * counts[op] <= max_joined and stored + kept <= max_stored
        if not fits or len(scope) > most_neighbours:
            rank[op] = (math.inf, 0)  # put off until its neighbourhood changes
            continue
        joined += kept * counts[op]
        stored += kept
        largest = max(largest, kept * counts[op])
        steps.append((op, scope))
        for other in scope:
            depth[other] = max(depth[other], depth[op] + 1)
        for other in _eliminate(op, near, far):
            new = rule(other, near, counts), depth[other]
            if new != rank[other]:
                rank[other] = new
                heapq.heappush(queue, (*new, other))
    return Order(_in_turn(steps), tuple(sorted(near)), joined, largest)


def _neighbours(network: ShardingNetwork, counts: list[int]) -> Graph:
    """Who shares an edge with whom; ops with one choice are left out."""
    near: Graph = {op: set() for op, count in enumerate(counts) if count > 1}
    for src, dst in network.op_at.reshape(-1, 2).tolist():
        near[src].add(dst)
        near[dst].add(src)
    return near


def _eliminate(op: int, near: Graph, far: bool) -> list[int]:
    """Join the neighbours of an op and drop it; the ops whose figures may have changed."""
    scope = near.pop(op)
    for other in scope:
        near[other] |= scope
        near[other] -= {op, other}
    if not far:
        return sorted(scope)
    return sorted(scope.union(*(near[other] for other in scope)))


def _in_turn(steps: list[tuple[int, set[int]]]) -> tuple[Step, ...]:
    """Scopes in the order in which their ops are eliminated, so that equal parts look equal."""
    turn = {op: index for index, (op, _) in enumerate(steps)}
    last = len(steps)
    return tuple(
        (op, tuple(sorted(scope, key=lambda other: (turn.get(other, last), other))))
        for op, scope in steps
    )
