"""The placements among which one must choose: less time, less memory, or fewer devices.

A placement is on the *front* if no other is at least as good in time, in the greatest peak of
memory on any device, and in devices used, and better in one. Fronts come from an archive of
MAP-Elites, or from a sweep: any search is run with every number of devices, and again with ever
less memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from partita.problems.placement import (
    PlacementDevice,
    PlacementProblem,
    PlacementSolution,
    simulate_exprimo,
)
from partita.search.base import UNTIL_DONE, Search, Stop
from partita.search.placement.map_elites import Archive


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One placement of a front, with what it costs; memory over a limit is not priced here."""

    makespan_ms: float
    peak_memory_bytes: float  # of the device that holds most
    devices_used: int
    placement: tuple[int, ...]

    @property
    def aims(self) -> tuple[float, float, int]:
        """What is to be small."""
        return self.makespan_ms, self.peak_memory_bytes, self.devices_used


def front(choices: Iterable[FrontPoint]) -> tuple[FrontPoint, ...]:
    """The choices that no other one is as good as in all aims; by time."""
    ordered = sorted(choices, key=lambda choice: (*choice.aims, choice.placement))
    kept: list[FrontPoint] = []
    for choice in ordered:
        # Whoever could be better in all comes before.
        if not any(_no_worse(other, choice) for other in kept):
            kept.append(choice)
    return tuple(kept)


def front_of_archive(archive: Archive) -> tuple[FrontPoint, ...]:
    """The front among the elites of an archive."""
    return front(
        FrontPoint(
            elite.makespan_ms,
            max(elite.peak_memory_bytes),
            elite.devices_used,
            elite.placement,
        )
        for elite in archive.elites
    )


def sweep(
    problem: PlacementProblem,
    search: Search[PlacementProblem, PlacementSolution],
    stop: Stop = UNTIL_DONE,
    seed: int = 0,
    memory_steps: int = 3,
) -> tuple[FrontPoint, ...]:
    """The front of what a search finds with at most 1, 2, ... devices, each with less memory.

    After each answer the limit of every device is set to four fifths of the greatest peak, up to
    `memory_steps` times, while the next answer still fits. `stop` holds for every run by itself.
    """
    most = problem.constraints.max_devices or len(problem.devices)
    front_points: list[FrontPoint] = []
    for count in range(1, min(most, len(problem.devices)) + 1):
        limited = replace(problem, constraints=replace(problem.constraints, max_devices=count))
        for _ in range(1 + memory_steps):
            if stop.interrupted():
                return front(front_points)
            result = search(limited, stop, seed)
            if result.solution is None:
                break
            choice = _choice(problem, result.solution)
            room = max(device.memory_limit_bytes for device in limited.devices)
            if (
                front_points
                and choice.peak_memory_bytes > room
                and limited.devices != problem.devices
            ):
                break
            front_points.append(choice)
            tighter = 0.8 * choice.peak_memory_bytes
            limited = replace(
                limited,
                devices=tuple(
                    PlacementDevice(
                        min(device.memory_limit_bytes, tighter), device.model, device.type
                    )
                    for device in problem.devices
                ),
            )
    return front(front_points)


def _choice(problem: PlacementProblem, solution: PlacementSolution) -> FrontPoint:
    evaluation = simulate_exprimo(problem, solution.placement)
    used = len(set(solution.placement))
    return FrontPoint(
        evaluation.makespan_ms, max(evaluation.peak_memory_bytes), used, solution.placement
    )


def _no_worse(one: FrontPoint, other: FrontPoint) -> bool:
    return all(a <= b for a, b in zip(one.aims, other.aims, strict=True))
