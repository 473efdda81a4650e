"""The lower bound of a whole space: the least bound of its cells, each raised as far as it matters.

An evaluator bounds a cell at several levels, cheap ones first. All cells have a bound at the
cheapest level; the cell with the least is raised to its next level until the least is one that
cannot be raised. So every number of stages and micro-batches of the space is covered, and only
those that matter cost time.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from partita.problems.joint import Cell


class CellBounds(Protocol):
    """Bounds of cells at `num_levels` levels; each holds for every plan of the cell."""

    @property
    def num_levels(self) -> int:
        """How many levels there are."""
        ...

    def bound(self, cell: Cell, level: int, enough: float) -> float:
        """The bound at a level; more than `enough` need not be proven. Infinite: nothing fits."""
        ...


@dataclass
class SpaceBound:
    """What is known of every cell's bound."""

    cells: Sequence[Cell]
    bounds: CellBounds
    far_enough: float = 1.003  # times the bound of the next cell: more is not proven at once
    _known: dict[Cell, tuple[float, int]] = field(default_factory=dict)  # bound, level

    def rules_out(
        self, cell: Cell, objective: float, most_levels: int, hardly: float = 0.0
    ) -> bool:
        """Is nothing of a cell below an objective, by its first levels?

        Where the second leaves less than the part `hardly` of it, dearer ones are not asked.
        """
        return self.up_to(cell, most_levels - 1, objective, hardly * objective) >= objective

    def up_to(self, cell: Cell, last: int, enough: float, hardly: float = 0.0) -> float:
        """The bound of a cell at the first level that is enough, or at the last one asked for."""
        value = 0.0
        for level in range(min(last + 1, self.bounds.num_levels)):
            value = self.at(cell, level, enough)
            if value >= enough or (level == 1 and value < hardly):
                break
        return value

    def at(self, cell: Cell, level: int, enough: float = math.inf) -> float:
        """The best bound of a cell, at least at a level."""
        value, known = self._known.get(cell, (0.0, -1))
        if known < level:
            value = max(value, self.bounds.bound(cell, level, enough))
            self._known[cell] = value, level  # what is enough never grows: objectives only fall
        return value

    def settle(self, cell: Cell, value: float) -> None:
        """The best of a cell is known."""
        self._known[cell] = value, self.bounds.num_levels

    def least(self, best: float, late: Callable[[], bool], most_levels: int | None = None) -> float:
        """No plan of the space, and not the best known, is below; valid whenever time runs out.

        Without time for all cells there is no such bound: 0.
        """
        last = self.bounds.num_levels - 1
        if most_levels is not None:
            last = min(last, most_levels - 1)
        heap = []
        for number, cell in enumerate(self.cells):
            if cell not in self._known and late():
                return 0.0
            heap.append((self.at(cell, 0, best), number))
        heapq.heapify(heap)
        while heap:
            value, number = heap[0]
            cell = self.cells[number]
            level = self._known[cell][1]
            if value >= best:
                return best
            if level >= last or late():
                return value
            next_value = min((other for other, _ in heap[1:3]), default=best)
            heapq.heapreplace(heap, (self._raised(cell, best, next_value), number))
        return best

    def _raised(self, cell: Cell, best: float, next_value: float) -> float:
        """The bound of a cell at its next level.

        The last level need not prove much more than the bound of the next cell, which would be the
        least then. If it comes to be the least again, it goes on from there.
        """
        value, level = self._known[cell]
        if level + 1 < self.bounds.num_levels - 1:
            return self.at(cell, level + 1, best)
        enough = min(best, max(value, next_value) * self.far_enough)
        value = max(value, self.bounds.bound(cell, level + 1, enough))
        self._known[cell] = value, level if enough <= value < best else level + 1
        return value
