"""Sweeps of message passing over one network until its bound meets the best answer, or stalls.

Every sweep raises the bound, offers an answer (rounded, then improved op by op) and rules out
choices; once enough of them are gone the network is made smaller.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from partita.problems.sharding import ShardingProblem, ShardingSolution, check, evaluate
from partita.search.base import Run
from partita.search.sharding.dual import ROUNDING, Dual, dual_of, improve, resumed, sweep
from partita.search.sharding.network import SearchStopped, ShardingNetwork
from partita.search.sharding.restrict import restricted

CHUNK_CELLS = 30_000_000  # read between two looks at the clock, about 10 ms
SHRINK = 0.7  # make the network smaller once less than this share of its choices lives
ENOUGH = 0.02  # of the gap: what four sweeps must close to be worth four more
MOST_ROUNDS = 20  # of op by op improvement of an answer

Choices = tuple[int, ...]  # of a problem, op by op


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
