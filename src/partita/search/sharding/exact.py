"""The exact best split of every op: bound, rule out, eliminate, and branch where all that fails.

    1  network    flat arrays without what is repeated                        network.py
    2  sweeps     message passing: a rising lower bound, answers, and         dual.py
                  reduced costs that rule out choices
    3  eliminate  what is left, op by op, if the tables stay small            eliminate.py
    4  fold       ops with up to two neighbours into edges, and sweep again
    5  branch     on the choices of one op after another                      branch.py

Most problems that come from models end in step 2, with an answer that costs what the bound says;
densely connected ones too, whose tables no elimination could hold. Each step keeps an optimum, so
that whichever ends the search proves it. Nothing is random: the seed changes nothing.
"""

import math
from dataclasses import dataclass

from partita.errors import ProblemError
from partita.problems.sharding import ShardingProblem, ShardingSolution, own_costs
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop, relative_gap
from partita.search.sharding.branch import Branching, eliminate_all
from partita.search.sharding.dual import Ascent, Choices, Dual, Keeper, View
from partita.search.sharding.eliminate import (
    Elimination,
    Order,
    best_order,
    narrow_order,
    quick_order,
)
from partita.search.sharding.network import Pairwise, SearchStopped, network_of

MOST_CELLS = 2**40
QUICK_CELLS = 100_000_000  # to join in an elimination without further thought, about 0.1 s
FIRST_CLIMB = 16  # sweeps before elimination is thought of; then twice as many, and so on
LAST_CLIMB = 512
PROVEN = 1e-9  # a gap that counts as none


@dataclass(frozen=True, slots=True)
class ExactSharding:
    """Proves the best choice of every op by bounds, elimination and branching."""

    max_cells: int = 100_000_000  # in all tables of an elimination, at 8 bytes each
    max_joined: int = 5_000_000_000  # cells an elimination goes through: some seconds

    def __post_init__(self) -> None:
        for field in ("max_cells", "max_joined"):
            value = getattr(self, field)
            if not 1 <= value <= MOST_CELLS:
                fix = f"1 to {MOST_CELLS:,} cells are possible"
                raise ProblemError(f"is {value}", fix=fix, field=field)

    def __call__(
        self, problem: ShardingProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ShardingSolution]:
        """Search until the optimum is proven."""
        run: Run[ShardingSolution] = Run(stop, "exact", seed)
        own = own_costs(problem)
        bound = float(sum(cost.min() for cost in own))
        if bound == math.inf:
            return run.result(Status.INFEASIBLE, "an op is left with forbidden choices only")
        run.bound(bound)
        keeper = Keeper(run, problem)
        if not keeper.done():
            keeper.offer(tuple(int(cost.argmin()) for cost in own))
        try:
            why = self._prove(keeper)
        except (SearchStopped, MemoryError) as error:
            return _cut_short(keeper, error)
        if run.solution is None:
            return run.result(Status.INFEASIBLE, f"every combination is forbidden; {why}")
        return run.result(Status.OPTIMAL, why)

    def _prove(self, keeper: Keeper) -> str:
        """Find the optimum; how it was proven. Raises `SearchStopped`."""
        keeper.check()
        problem = keeper.problem
        costs = Pairwise(problem.costs, problem.edges, problem.matrix_of, problem.matrices)
        network = network_of(costs, keeper.done)
        if network is None:
            return "an op has forbidden choices only"
        view = View(network, 0.0, lambda choices: choices)
        return self._solve(keeper, view, may_fold=True)

    def _solve(self, keeper: Keeper, view: View, *, may_fold: bool) -> str:
        """Sweep, and eliminate as soon as that is quick."""
        ascent = Ascent(keeper, view, report=keeper.run.bound)
        num_sweeps = FIRST_CLIMB
        while True:
            if ascent.climb(num_sweeps):
                return f"{_sweeps(ascent)} of message passing proved it"
            here = ascent.reduced()
            if ascent.stalled or num_sweeps >= LAST_CLIMB:
                break
            order = quick_order(here.network, QUICK_CELLS, self.max_cells, keeper.done)
            if not order.core:
                return _eliminated(keeper, view, here, order)
            num_sweeps *= 2
        max_joined = QUICK_CELLS if may_fold else self.max_joined
        order = best_order(here.network, max_joined, self.max_cells, keeper.done)
        if not order.core:
            return _eliminated(keeper, view, here, order)
        gap = relative_gap(keeper.run.objective, ascent.bound)
        if gap is not None and gap <= PROVEN:
            return f"after {_sweeps(ascent)} the bound was within {gap:.1e} of the answer"
        further = self._fold if may_fold else self._branch
        return further(keeper, here, ascent.dual)

    def _fold(self, keeper: Keeper, view: View, dual: Dual) -> str:
        """Join ops of one or two neighbours into edges and solve what is left."""
        network = view.network
        order = narrow_order(network, QUICK_CELLS, self.max_cells, keeper.done)
        if not order.steps:
            return self._branch(keeper, view, dual)
        elimination = Elimination(network, keeper.done)
        elimination.run(order.steps)
        rest, ops = elimination.rest()
        core = network_of(rest, keeper.done)
        if core is None:
            return "folding proved it"

        def lift(choices: Choices) -> Choices:
            labels = elimination.labels(dict(zip(ops, choices, strict=True)))
            return view.lift(network.assignment(labels))

        folded = View(core, view.offset + elimination.constant, lift)
        return self._solve(keeper, folded, may_fold=False)

    def _branch(self, keeper: Keeper, view: View, dual: Dual) -> str:
        """Try the choices of one op after another."""
        branching = Branching(keeper, view, dual, self.max_cells)
        branching.run()
        return f"{branching.num_branches:,} branches proved it"


def _eliminated(keeper: Keeper, before: View, view: View, order: Order) -> str:
    eliminate_all(keeper, view, order)
    left, count = len(view.network.costs), len(before.network.costs)
    return (
        f"bounds ruled out {count - left:,} of {count:,} choices, and elimination of the rest "
        f"proved it; the largest table had {order.largest_cells:,} cells, and none spans more than "
        f"{order.width} ops"
    )


def _sweeps(ascent: Ascent) -> str:
    return "1 sweep" if ascent.num_sweeps == 1 else f"{ascent.num_sweeps} sweeps"


def _cut_short(keeper: Keeper, error: SearchStopped | MemoryError) -> Result[ShardingSolution]:
    """The best so far; optimal where the bound says so all the same."""
    gap = relative_gap(keeper.run.objective, keeper.run.lower_bound)
    status = Status.OPTIMAL if gap is not None and gap <= PROVEN else Status.STOPPED
    why = "the tables do not fit in memory" if isinstance(error, MemoryError) else keeper.reason
    return keeper.run.result(status, why or "")
