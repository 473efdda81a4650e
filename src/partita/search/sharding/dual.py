"""Message passing: a lower bound that rises, reduced costs that rule out choices, rough answers.

Each edge is lent part of the costs of its two ops, `sent(x)` for every choice x at each end:

    op     left(x) = cost(x) - sum over its edges of sent(x)
    edge   left(x, y) = table(x, y) + sent(x) + sent(y)

Whatever is lent, an answer costs the sum of what is left. While nothing below 0 is left on edges,
the sum over ops of the least left(x) is a lower bound. A sweep visits the ops in order, the next
one in reverse. An op takes back all that its edges towards visited ops can spare,

    sent(x) = - min over y of (table(x, y) + sent(y)),

keeps the least of what is left as its part of the bound, and lends the rest in equal parts to its
edges towards ops not yet visited. This is TRW-S (V. Kolmogorov, "Convergent Tree-Reweighted Message
Passing for Energy Minimization", PAMI 2006) written as moves of costs: the bound never falls, and
on a path whose ops are in order it is the optimum after one sweep.

An answer that takes x costs at least bound - least + left(x) while the op of x is visited: where
that is above the best answer known, x is ruled out. A rough answer falls out of each sweep: every
op takes what is best with the choices of visited ops and the messages of the others. A sweep costs
O(cells of the tables of all edges); it can be done in parts.

`Ascent` sweeps one network until its bound meets the best answer, or stalls. Every sweep raises the
bound, offers an answer (rounded, then improved op by op) and rules out choices; once enough of them
are gone the network is made smaller.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from partita.compiled import compiled
from partita.problems.sharding import (
    Floats,
    Ints,
    ShardingProblem,
    ShardingSolution,
    check,
    evaluate,
)
from partita.search.base import Run
from partita.search.sharding.network import (
    SMALL,
    Flags,
    SearchStopped,
    ShardingNetwork,
    add_costs,
    copy_costs,
    lists,
    restricted,
)

ROUNDING = 1e-12  # by how much a sum may be off, relative to what was added up
CHUNK_CELLS = 30_000_000  # read between two looks at the clock, about 10 ms
SHRINK = 0.7  # make the network smaller once less than this share of its choices lives
ENOUGH = 0.02  # of the gap: what four sweeps must close to be worth four more
MOST_ROUNDS = 20  # of op by op improvement of an answer
Choices = tuple[int, ...]  # of a problem, op by op


class Dual(NamedTuple):
    """What sweeps change; a ruled out choice is lent inf."""

    sent: Floats  # per end of an edge and choice there
    least: Floats  # per op: the least that is left, its part of the bound
    grain: Floats  # per op: the size of what was added up for it
    alive: Flags  # per choice
    labels: Ints  # per op: its choice in the rough answer
    work: Floats  # scratch: four rows as long as the longest op or side of a table


def dual_of(network: ShardingNetwork) -> Dual:
    """Nothing lent yet."""
    sent, grain = np.zeros(network.sent_at[-1]), np.zeros(network.num_ops)
    return _dual(network, sent, network.costs, grain)


def resumed(network: ShardingNetwork, sent: Floats, grain: Floats) -> Dual:
    """Go on with what was lent in a network of the same ops."""
    choice_of = lists(network.first[network.op_at], np.diff(network.sent_at))
    lent = np.bincount(choice_of, sent, len(network.costs))
    return _dual(network, sent, network.costs - lent, grain)


def _dual(network: ShardingNetwork, sent: Floats, left: Floats, grain: Floats) -> Dual:
    longest = max(network.num_choices.max(), network.tables.num_classes.max(initial=0))
    return Dual(
        sent=sent,
        least=np.minimum.reduceat(left, network.first[:-1]),
        grain=grain,
        alive=np.ones(len(network.costs), np.bool_),
        labels=np.zeros(network.num_ops, np.int64),
        work=np.empty((4, longest)),
    )


@compiled(small=SMALL)
def sweep(
    network: ShardingNetwork, dual: Dual, forward: bool, begin: int, budget: int, best: float
) -> int:
    """Visit ops from the one `begin` steps into the sweep, until about `budget` cells were read.

    Rules out choices that no answer of cost `best` or less takes. Returns how far the sweep is
    now, or -1 where an op has no choice left. Nothing is ruled out by cost before the edges have
    been visited once: until then their least is not known, and `best` must be inf.
    """
    num_ops = len(network.first) - 1
    bound = 0.0
    for op in range(num_ops):  # `sum` of numpy adds in another order than numba's
        bound += dual.least[op]
    done = begin
    while done < num_ops and budget > 0:
        op = done if forward else num_ops - 1 - done
        count = network.first[op + 1] - network.first[op]
        left, value = dual.work[0, :count], dual.work[1, :count]
        budget -= _collect(network, dual, op, forward, left, value)
        bound -= dual.least[op]
        if not _keep(network, dual, op, left):
            return -1
        bound += dual.least[op]
        dual.labels[op] = _least_alive(value, dual.alive[network.first[op] :])
        _rule_out(network, dual, op, left, best - bound)
        _lend(network, dual, op, forward, left)
        done += 1
    return done


@compiled()
def _collect(
    network: ShardingNetwork, dual: Dual, op: int, forward: bool, left: Floats, value: Floats
) -> int:
    """Take back from the edges towards visited ops; how many cells were read.

    `left` becomes what is left of each choice, `value` what it costs with the visited ops' labels.
    """
    copy_costs(network, op, left)
    copy_costs(network, op, value)
    read: int = len(left)
    for end in network.near[network.near_at[op] : network.near_at[op + 1]]:
        sent = dual.sent[network.sent_at[end] : network.sent_at[end + 1]]
        if (end & 1) == forward:
            read += _take_back(network, dual, end, sent)
            add_costs(network, end, dual.labels[network.op_at[end ^ 1]], value)
        else:
            _subtract(value, sent)
        _subtract(left, sent)
    for x in range(len(left)):
        if left[x] == np.inf:  # forbidden together with every choice of a neighbour
            dual.alive[network.first[op] + x] = False
    return read


def _subtract_in_numpy(values: Floats, sent: Floats) -> None:
    values -= sent


@compiled(plain=_subtract_in_numpy)
def _subtract(values: Floats, sent: Floats) -> None:
    """values -= sent"""
    for x in range(len(values)):
        values[x] -= sent[x]


@compiled()
def _take_back(network: ShardingNetwork, dual: Dual, end: int, sent: Floats) -> int:
    """sent(x) = - min over y of (table(x, y) + sent(y)); how many cells were read."""
    tables, edge, other = network.tables, end >> 1, end ^ 1
    rows, columns = tables.num_classes[2 * edge], tables.num_classes[2 * edge + 1]
    cells = tables.cells[tables.cells_at[edge] : tables.cells_at[edge] + rows * columns]
    given, taken = dual.work[2], dual.work[3]
    given[:] = np.inf
    lent = dual.sent[network.sent_at[other] : network.sent_at[other + 1]]
    for y in range(len(lent)):
        place = tables.class_of[tables.class_at[other] + y]
        given[place] = min(given[place], lent[y])
    if end & 1:
        _least_of_columns(cells.reshape(rows, columns), given, taken)
    else:
        _least_of_rows(cells.reshape(rows, columns), given, taken)
    for x in range(len(sent)):
        sent[x] = -taken[tables.class_of[tables.class_at[end] + x]]
    read: int = rows * columns
    return read


# There are no NaNs here, and no zero whose sign matters: knowing that, the compiler can use vector
# instructions for the minima. Their order does not matter, so that results are the same anywhere.
def _least_of_rows_in_numpy(cells: Floats, given: Floats, taken: Floats) -> None:
    taken[: cells.shape[0]] = (cells + given[: cells.shape[1]]).min(axis=1, initial=np.inf)


@compiled(plain=_least_of_rows_in_numpy, fastmath={"nnan", "nsz", "reassoc"})
def _least_of_rows(cells: Floats, given: Floats, taken: Floats) -> None:
    """taken[r] = min over c of cells[r, c] + given[c]."""
    for r in range(cells.shape[0]):
        least = np.inf
        for c in range(cells.shape[1]):
            least = min(least, cells[r, c] + given[c])
        taken[r] = least


def _least_of_columns_in_numpy(cells: Floats, given: Floats, taken: Floats) -> None:
    taken[:] = np.inf
    taken[: cells.shape[1]] = (cells + given[: cells.shape[0], None]).min(axis=0, initial=np.inf)


@compiled(plain=_least_of_columns_in_numpy, fastmath={"nnan", "nsz"})
def _least_of_columns(cells: Floats, given: Floats, taken: Floats) -> None:
    """taken[c] = min over r of cells[r, c] + given[r]."""
    taken[:] = np.inf
    for r in range(cells.shape[0]):
        if given[r] < np.inf:
            for c in range(cells.shape[1]):
                taken[c] = min(taken[c], cells[r, c] + given[r])


@compiled()
def _keep(network: ShardingNetwork, dual: Dual, op: int, left: Floats) -> bool:
    """Keep the least of what is left as the op's part of the bound; False if no choice lives."""
    best = _least_alive(left, dual.alive[network.first[op] :])
    if best < 0:
        return False
    dual.least[op] = left[best]
    size = abs(network.costs[network.first[op] + best])
    for end in network.near[network.near_at[op] : network.near_at[op + 1]]:
        size += abs(dual.sent[network.sent_at[end] + best])
    dual.grain[op] = size
    return True


@compiled()
def _least_alive(values: Floats, alive: Flags) -> int:
    """The first living choice of least value, -1 where none lives."""
    best = -1
    for x in range(len(values)):
        if alive[x] and (best < 0 or values[x] < values[best]):
            best = x
    return best


@compiled()
def _rule_out(network: ShardingNetwork, dual: Dual, op: int, left: Floats, room: float) -> None:
    """Bury the choices with more left above the least than there is room."""
    alive = dual.alive[network.first[op] : network.first[op + 1]]
    for x in range(len(left)):
        left[x] -= dual.least[op]
        alive[x] = alive[x] and left[x] <= room


@compiled()
def _lend(network: ShardingNetwork, dual: Dual, op: int, forward: bool, left: Floats) -> None:
    """Lend what is left above the least, in equal parts, to the edges towards later ops."""
    ends = network.near[network.near_at[op] : network.near_at[op + 1]]
    alive = dual.alive[network.first[op] : network.first[op + 1]]
    onward = 0
    for end in ends:
        onward += (end & 1) != forward
    share = 1.0 / max(onward, len(ends) - onward, 1)
    for end in ends:
        sent = dual.sent[network.sent_at[end] : network.sent_at[end + 1]]
        for x in range(len(left)):
            if not alive[x]:
                sent[x] = np.inf
            elif (end & 1) != forward:
                sent[x] += share * left[x]


@compiled(small=SMALL)
def improve(network: ShardingNetwork, labels: Ints, rounds: int, value: Floats) -> float:
    """Let one op after another take what is best with its neighbours' choices; the cost.

    Ends when nobody moves any more (ICM), or after so many rounds. `value` is scratch.
    """
    for _ in range(rounds):
        moved = False
        for op in range(len(labels)):
            costs = value[: network.first[op + 1] - network.first[op]]
            copy_costs(network, op, costs)
            for end in network.near[network.near_at[op] : network.near_at[op + 1]]:
                add_costs(network, end, labels[network.op_at[end ^ 1]], costs)
            for x in range(len(costs)):
                if costs[x] < costs[labels[op]]:
                    labels[op] = x
                    moved = True
        if not moved:
            break
    total = 0.0
    for op in range(len(labels)):
        costs = value[: network.first[op + 1] - network.first[op]]
        copy_costs(network, op, costs)
        for end in network.near[network.near_at[op] : network.near_at[op + 1]]:
            if end & 1:  # each edge once
                add_costs(network, end, labels[network.op_at[end ^ 1]], costs)
        total += costs[labels[op]]
    return total


class Keeper:
    """The run together with its problem: takes answers, knows the best, says when to stop."""

    def __init__(self, run: Run[ShardingSolution], problem: ShardingProblem) -> None:
        self.run, self.problem = run, problem
        self.reason: str | None = None

    @property
    def best(self) -> float:
        """The cost of the best answer, inf without one."""
        return math.inf if self.run.objective is None else self.run.objective

    def done(self) -> bool:
        """Does a stop rule hold, or did one before?"""
        self.reason = self.reason or self.run.reason()
        return self.reason is not None

    def check(self) -> None:
        """Raise `SearchStopped` if done."""
        if self.done():
            raise SearchStopped

    def offer(self, choices: Choices) -> None:
        """Count an answer and keep it if it is valid and the best."""
        self.run.evaluations += 1
        solution = ShardingSolution(choices)
        if not check(self.problem, solution):
            self.run.offer(solution, evaluate(self.problem, solution))


@dataclass(frozen=True, slots=True)
class View:
    """A network with what was taken out of its problem: costs, and ops that follow the others."""

    network: ShardingNetwork
    offset: float  # to be added to the costs of the network
    lift: Callable[[Choices], Choices]  # from the network's choices to the whole problem's


class Ascent:
    """The sweeps over one network; `report` hears of every bound."""

    def __init__(
        self,
        keeper: Keeper,
        view: View,
        dual: Dual | None = None,
        report: Callable[[float], None] | None = None,
    ) -> None:
        self.keeper, self.view, self.report = keeper, view, report
        self.network = view.network
        self.dual = dual_of(self.network) if dual is None else dual
        self.settled = dual is not None  # is nothing below 0 left on any edge?
        self.bound = -math.inf
        self.num_sweeps = 0
        self.stalled = False

    def climb(self, num_sweeps: int) -> bool:
        """Sweep until closed or stalled, at most so many times. Raises `SearchStopped`.

        True: closed, i.e. the network has no better answer than the best known.
        """
        before = self.bound
        self.stalled = False
        for index in range(1, num_sweeps + 1):
            if self._sweep():
                return True
            if index % 4 == 0:
                gap = self.keeper.best - self.bound
                enough = ENOUGH * (gap if gap < math.inf else abs(self.bound))
                self.stalled = self.bound - before <= enough
                if self.stalled:
                    break
                before = self.bound
        return False

    def reduced(self) -> View:
        """The network with the living choices only."""
        self.network, sent = restricted(self.network, self.dual.alive, self.dual.sent)
        self.dual = resumed(self.network, sent, self.dual.grain)
        return replace(self.view, network=self.network)

    def _sweep(self) -> bool:
        """Once, forwards and backwards in turn; is the network closed?"""
        forward = self.num_sweeps % 2 == 0
        self.num_sweeps += 1
        best = self.keeper.best - self.view.offset + self._slack if self.settled else math.inf
        done = 0
        while done < self.network.num_ops:
            self.keeper.check()
            done = sweep(self.network, self.dual, forward, done, CHUNK_CELLS, best)
            if done < 0:
                return True
        self.settled = True
        bound = float(self.dual.least.sum()) + self.view.offset - self._slack
        self.bound = max(self.bound, bound)
        if self.report is not None:
            self.report(self.bound)
        self.keeper.check()
        self._offer()
        if self.keeper.best - self.bound <= 3 * self._slack:
            return True
        if self.dual.alive.mean() < SHRINK:
            self.reduced()
        return False

    @property
    def _slack(self) -> float:
        """By how much the bound may be off."""
        return ROUNDING * float(self.dual.grain.sum() + abs(self.view.offset))

    def _offer(self) -> None:
        """Improve the rough answer of the sweep and offer it."""
        labels = self.dual.labels.copy()
        rounds = min(MOST_ROUNDS, CHUNK_CELLS // max(1, len(self.dual.sent)))
        cost = improve(self.network, labels, rounds, self.dual.work[0])
        if cost + self.view.offset < self.keeper.best:
            self.keeper.offer(self.view.lift(self.network.assignment(labels)))
