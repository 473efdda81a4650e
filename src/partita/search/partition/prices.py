"""Better prices for the bound of `covers`: a bundle method with a trust region.

What the devices can hold beyond all prices is a convex function of the prices, and every dearest
set is a plane below it. The next prices are the lowest point of all planes known, no farther
from the best prices so far than a radius, which grows while that helps and shrinks where it does
not (a box in place of the usual quadratic term: the step is a linear program, for GLOP). Planes of
sets that take longer than the time that is tried are left out.
"""

from typing import NamedTuple

import numpy as np

from partita.search.partition.network import F64

_FIRST_RADIUS, _LEAST_RADIUS, _MOST_RADIUS = 0.3, 0.002, 3.0
_GROW, _SHRINK = 1.3, 0.85
_MOST_PLANES = 300
_PROMISE = 0.03  # of what is to go
_PROGRESS = 1e-3  # of the whole: less of a gain is none


class Plane(NamedTuple):
    """A function below the excess: constant + slope @ point, for times from `from_ms` on."""

    constant: float
    slope: F64
    from_ms: float


class Bundle:
    """Planes below a convex function, and the best point so far."""

    def __init__(self, point: F64, sizes: F64) -> None:
        """Begin at a point; sizes @ point stays what it is."""
        self.point, self.sizes = point, sizes
        self.whole = float(sizes @ point)
        self.planes: list[Plane] = []
        self.best, self.radius = np.inf, _FIRST_RADIUS
        self.lowest = -np.inf  # of the planes, in the box
        self.tried = point
        self.master: _Master | None = None

    def begin(self, within_ms: float) -> None:
        """Another time, for which the function is another one."""
        known = [plane for plane in self.planes if plane.from_ms <= within_ms]
        self.planes = known[-_MOST_PLANES:]
        self.best, self.radius = np.inf, max(self.radius, 0.1)
        self.lowest = -np.inf
        self.master = None

    def next_point(self) -> F64:
        """Where to look next."""
        if self.best == np.inf:
            self.tried = self.point
            return self.point
        if self.master is None:
            self.master = _Master(self.sizes, self.whole, self.planes)
        self.tried, self.lowest = self.master.lowest(self.point, self.radius)
        return self.tried

    @property
    def hopeless(self) -> bool:
        """Do the planes promise so little that many more steps would not bring it below 0?"""
        return self.best < np.inf and self.best - self.lowest < _PROMISE * self.best

    def add(self, value: float, slope: F64, from_ms: float) -> bool:
        """What was found there; True if it is much better than what was known."""
        plane = Plane(value - float(slope @ self.tried), slope, from_ms)
        self.planes.append(plane)
        if self.master is not None:
            self.master.add(plane)
        if value >= self.best:
            self.radius = max(_LEAST_RADIUS, self.radius * _SHRINK)
            return False
        if self.best < np.inf:
            self.radius = min(_MOST_RADIUS, self.radius * _GROW)
        progress = value < self.best - _PROGRESS
        self.best, self.point = value, self.tried
        return progress


class _Master:
    """The linear program: the lowest point of the planes in a box."""

    def __init__(self, sizes: F64, whole: float, planes: list[Plane]) -> None:
        from ortools.linear_solver import pywraplp

        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity = self.solver.infinity()
        self.at = [self.solver.NumVar(-infinity, infinity, "") for _ in sizes]
        self.height = self.solver.NumVar(-infinity, infinity, "")
        share = self.solver.Constraint(1.0, 1.0)
        for variable, size in zip(self.at, (sizes / whole).tolist(), strict=True):
            share.SetCoefficient(variable, size)
        self.solver.Minimize(self.height)
        for plane in planes:
            self.add(plane)

    def add(self, plane: Plane) -> None:
        """One more plane."""
        row = self.solver.Constraint(plane.constant, self.solver.infinity())
        row.SetCoefficient(self.height, 1.0)
        for index in np.flatnonzero(plane.slope).tolist():
            row.SetCoefficient(self.at[index], -float(plane.slope[index]))

    def lowest(self, center: F64, radius: float) -> tuple[F64, float]:
        """The lowest point no farther from the center than the radius, and how low it is."""
        for variable, value in zip(self.at, center.tolist(), strict=True):
            variable.SetBounds(value - radius, value + radius)
        if self.solver.Solve() != self.solver.OPTIMAL:
            return center, -np.inf
        point = np.array([variable.solution_value() for variable in self.at])
        return point, float(self.height.solution_value())
