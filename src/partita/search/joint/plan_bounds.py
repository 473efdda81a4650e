"""Bounds of the cells of a model's space, for plans that are simulated: cheap ones first."""

import math
from dataclasses import dataclass, field

from partita.problems.joint import Cell
from partita.search.joint.bounds import CellBound
from partita.search.joint.model import JointModel


@dataclass
class PlanBounds:
    """Bounds of the cells of one model's space, for simulated plans, at three levels.

    0  launches, computing alone with every op at its quickest split, and the longest path of one
       micro-batch
    1  `CellBound` without multipliers
    2  the same after dual ascent

    On heterogeneous devices there is the first only.
    """

    model: JointModel
    busy_only: bool = False  # is the objective the steady-state throughput?
    _cells: dict[Cell, CellBound | None] = field(default_factory=dict)

    @property
    def num_levels(self) -> int:
        """How many there are."""
        return 3 if self.model.cluster.is_homogeneous else 1

    def bound(self, cell: Cell, level: int, enough: float) -> float:
        """The bound at a level; infinite where no plan of the cell fits."""
        if level == 0:
            num_groups = self.model.problem.groupings[cell.grouping].num_groups
            quick = self.model.launch_bound_s(cell)
            if quick >= enough:
                return quick
            compute = self.model.compute_bound_s(cell)
            path = 0.0
            if not self.busy_only and cell.num_microbatches < num_groups:
                path = self.model.longest_path_s(cell)  # else groups are busy for longer
                if not self.model.cluster.is_homogeneous:
                    path = max(path, self.model.path_and_compute_s(cell))
            in_line = num_groups > 1 and not self.model.has_virtual_stages(cell)
            if in_line and self.model.training and self.num_levels > 1:
                compute = max(compute, self.model.waiting_bound_s(cell))
            return max(compute, path) * (1 - 1e-9)  # sums in another order round differently
        cell_bound = self.cell_bound(cell)
        if cell_bound is None:
            return math.inf
        return cell_bound.quick_s if level == 1 else cell_bound.climbed_s(enough)

    def cell_bound(self, cell: Cell) -> CellBound | None:
        """The bounds of a cell by multipliers; None where there is no such plan."""
        if cell not in self._cells:
            self._cells[cell] = self.model.cell_bound(cell, busy_only=self.busy_only)
        return self._cells[cell]
