"""What has the last word on a plan: a simulator that is handed in, or the record's own formula."""

import math
from dataclasses import dataclass
from typing import Protocol

from partita.problems.joint import Cell, JointProblem, JointSolution, cell_bound, check, objective_s
from partita.search.joint.cells import CellBounds


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a plan really takes."""

    objective_s: float
    over: float = 1.0  # the most that a device holds, by what it has: above 1 it does not fit
    order_bound_s: float = 0.0  # no order of the same stages is below

    @property
    def fits(self) -> bool:
        """Does every device hold what it has to?"""
        return self.over <= 1.0


class Evaluator(CellBounds, Protocol):
    """Has the last word on what a plan takes: a simulator, or the record's formula."""

    @property
    def is_cheap(self) -> bool:
        """May every cell be looked at?"""
        ...

    def __call__(self, solution: JointSolution) -> Evaluation | None:
        """Evaluate a plan; None where it is known already, cannot fit or cannot be the best."""
        ...

    def reorder(self, solution: JointSolution) -> None:
        """Try orders of its own for the stages of a plan."""
        ...

    def incumbent_s(self) -> float:
        """The best plan it knows of, also from elsewhere; infinite without one."""
        ...


@dataclass
class Formula:
    """The record's own objective and bound: what a saved problem is solved by."""

    problem: JointProblem
    is_cheap: bool = True
    num_levels: int = 1
    best_s: float = math.inf

    def __call__(self, solution: JointSolution) -> Evaluation | None:
        """The objective of a solution that keeps to the budgets."""
        if check(self.problem, solution):
            return None
        value = objective_s(self.problem, solution)
        self.best_s = min(self.best_s, value)
        return Evaluation(value)

    def bound(self, cell: Cell, level: int, enough: float) -> float:
        """The record's bound of a cell."""
        return cell_bound(self.problem, cell)

    def reorder(self, solution: JointSolution) -> None:
        """There are no orders but those of the record."""

    def incumbent_s(self) -> float:
        """The best so far."""
        return self.best_s
