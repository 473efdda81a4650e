"""What placing a model gives: the best placement, what it was compared with, and a front."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from partita.costs.physics import around, sets_of, spread_of
from partita.costs.placement import PlacementModel
from partita.jobs.place_file import SavedPlacement
from partita.jobs.place_subject import Subject
from partita.plans import Plan
from partita.problems.placement import PlacementProblem
from partita.search.base import Improvement, Status, relative_gap
from partita.showing import plot_of, repr_html, table_of
from partita.timeline import Timeline


@dataclass(frozen=True)
class SimulatedPlacement:
    """One placement that was simulated."""

    name: str
    placement: tuple[int, ...]  # a device per layer
    step_s: float
    peak_bytes: tuple[float, ...]  # per device of the cluster
    excess_bytes: float  # over what the devices have
    dispatch: str = ""  # the rule by which ops were run as they became ready

    @property
    def fits(self) -> bool:
        """Is there memory for it?"""
        return self.excess_bytes == 0

    @property
    def num_devices(self) -> int:
        """How many devices it uses."""
        return len(set(self.placement))


@dataclass(frozen=True)
class Placed:
    """The best placement found, what it was compared with, and how far from optimal it can be."""

    subject: Subject
    model: PlacementModel
    problem: PlacementProblem  # what the search saw
    semantics: str
    method: str
    status: Status
    why: str
    best: SimulatedPlacement | None
    tried: tuple[SimulatedPlacement, ...]
    timeline: Timeline | None
    dispatch: str
    lower_bound_s: float
    seconds: float
    seed: int
    evaluations: int
    saved: SavedPlacement | None
    history: tuple[Improvement, ...] = ()
    archive: Any = field(default=None, compare=False)  # of a method that keeps one

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def plan(self) -> Plan | None:
        """The placement as a plan: a stage per device."""
        return None if self.saved is None else self.saved.plan

    @property
    def gap(self) -> float | None:
        """How far from optimal at most."""
        return relative_gap(None if self.best is None else self.best.step_s, self.lower_bound_s)

    @property
    def likely_step_s(self) -> tuple[float, float] | None:
        """The step lies in here with 80 %; Exprimo's rules were never held against runs."""
        if self.best is None or self.semantics != "partita":
            return None
        cluster, used = self.model.cluster, sorted(set(self.best.placement))
        sets = sets_of(cluster.devices[device].kind for device in used)
        return around(self.best.step_s, spread_of(sets, len(used), exposed=0.0))

    def devices(self) -> dict[str, int]:
        """The device of every forward op."""
        if self.best is None:
            return {}
        return {
            name: device
            for names, device in zip(self.model.layers, self.best.placement, strict=True)
            for name in names
        }

    def front(self) -> tuple[SimulatedPlacement, ...]:
        """Of all that fit, those that none beats in time, memory and devices at once."""
        return front(self.tried)


def front(candidates: Iterable[SimulatedPlacement]) -> tuple[SimulatedPlacement, ...]:
    """The fitting candidates that no other beats in time, largest memory and devices used."""

    def costs(item: SimulatedPlacement) -> tuple[float, float, int]:
        return item.step_s, max(item.peak_bytes), item.num_devices

    fitting = {costs(item): item for item in reversed(list(candidates)) if item.fits}
    kept = [
        mine
        for mine in fitting
        if not any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for other in fitting
        )
    ]
    return tuple(fitting[key] for key in sorted(kept))
