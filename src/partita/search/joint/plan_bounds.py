"""Bounds of the cells of a model's space, for plans that are simulated: cheap ones first."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from partita.problems.joint import Cell
from partita.search.joint.bounds import CellBound, LineRanges
from partita.search.joint.compute_bounds import ComputeBounds
from partita.search.joint.model import JointModel

ROUNDING = 1 - 1e-9  # sums in another order round differently


@dataclass
class PlanBounds:
    """Bounds of the cells of one model's space, for simulated plans, from cheap to strong.

    On equal devices: all work over all devices; computing alone, with every op at its quickest
    split (both `compute_bounds`); `CellBound` without multipliers, of one mesh with its tables and
    then of all; the same after dual ascent. On heterogeneous devices: computing alone; the same
    over all cuts.
    """

    model: JointModel
    busy_only: bool = False  # is the objective the steady-state throughput?
    _cells: dict[Cell, CellBound | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.computing = ComputeBounds(self.model, self.busy_only)

    @property
    def num_levels(self) -> int:
        """How many there are."""
        return len(self._levels())

    def bound(self, cell: Cell, level: int, enough: float) -> float:
        """The bound at a level; infinite where no plan of the cell fits."""
        return self._levels()[level](cell, enough)

    def _levels(self) -> tuple[Callable[[Cell, float], float], ...]:
        computing = self.computing
        if not self.model.cluster.is_homogeneous:
            return (
                lambda cell, _: computing.computing_s(cell) * ROUNDING,
                lambda cell, _: computing.cuts_s(cell) * ROUNDING,
            )
        return (
            lambda cell, _: computing.ideal_s(cell) * ROUNDING,
            lambda cell, _: computing.computing_s(cell) * ROUNDING,
            self._of_first_mesh,
            self._without_multipliers,
            self._with_multipliers,
        )

    def _of_first_mesh(self, cell: Cell, enough: float) -> float:
        bound = self.cell_bound(cell)
        return math.inf if bound is None else bound.first_s

    def _without_multipliers(self, cell: Cell, enough: float) -> float:
        bound = self.cell_bound(cell)
        return math.inf if bound is None else bound.quick_s

    def _with_multipliers(self, cell: Cell, enough: float) -> float:
        bound = self.cell_bound(cell)
        return math.inf if bound is None else bound.climbed_s(enough)

    def cell_bound(self, cell: Cell) -> CellBound | None:
        """The bounds of a cell by multipliers; None where there is no such plan."""
        if cell not in self._cells:
            self._cells[cell] = self._cell_bound(cell)
        return self._cells[cell]

    def _cell_bound(self, cell: Cell) -> CellBound | None:
        model, computing = self.model, self.computing
        meshes = computing.meshes(cell)
        if not meshes:
            return None
        grouping = model.problem.groupings[cell.grouping]
        line = virtual = seconds = None
        if grouping.num_groups > 1:
            if any(each.virtual_stages == 1 for each in model.schedules):
                line = LineRanges(*computing.line_paths(cell))
            if computing.has_virtual_stages(cell):
                virtual, seconds = computing.orders(cell), computing.quickest(cell)
        return CellBound(
            meshes,
            grouping.num_groups,
            cell.num_microbatches,
            max(map(model.memory_bytes, grouping.devices)),
            model.training,
            line,
            virtual,
            seconds,
            self.busy_only,
        )
