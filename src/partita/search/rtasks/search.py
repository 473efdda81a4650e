"""`search`: tile sizes and assignment together, judged by the simulation.

Operators with equal alternatives form a class and choose together (the 1,000 cells of an LSTM are
one class). From the fastest tilings and from Rammer's selection, one class at a time changes its
tiling; the list scheduler places the tiles and the exact simulation judges. When no single change
helps, urgencies are disturbed at random and the best order is kept. A list schedule costs
O(tiles log tiles), so a few hundred of them take about a second for thousands of tiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from partita.problems.rtasks import (
    RtasksProblem,
    RtasksSolution,
    lower_bound,
    programs_per_unit,
    simulate,
)
from partita.search.base import UNTIL_DONE, Result, Run, Stop
from partita.search.rtasks.critical import fastest
from partita.search.rtasks.lists import RTaskArrays, list_schedule, urgency
from partita.search.rtasks.wavefront import in_waves, selected


@dataclass(frozen=True)
class TileSearch:
    """Changes of tilings, then `shakes` disturbed orders; `rounds` of both at most."""

    shakes: int = 24
    rounds: int = 4

    def __call__(
        self, problem: RtasksProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[RtasksSolution]:
        """Improve until nothing helps or the stop rule holds."""
        run: Run[RtasksSolution] = Run(stop, "search", seed)
        run.bound(lower_bound(problem))
        work = _TileSearch(problem, run, np.random.default_rng(seed))
        work.start()
        for _ in range(self.rounds):
            if run.done() or not (work.change_tilings() | work.shake(self.shakes)):
                break
        return run.result()


class _TileSearch:
    def __init__(
        self, problem: RtasksProblem, run: Run[RtasksSolution], random: np.random.Generator
    ) -> None:
        self.problem, self.run, self.random = problem, run, random
        self.tables = RTaskArrays.of(problem)
        self.classes = _classes(problem)

    def start(self) -> None:
        """The fastest tilings, Rammer's, and Rammer's own queues."""
        for tilings in dict.fromkeys((fastest(self.problem), selected(self.problem))):
            self.try_tilings(tilings)
        if not self.run.done():
            self.judge(in_waves(self.problem))

    def change_tilings(self) -> bool:
        """Every class tries its other tilings once; True if one helped."""
        helped = False
        for members, choice in self.alternatives():
            if self.run.done() or self.run.solution is None:
                break
            tilings = list(self.run.solution.tilings)
            for operator in members:
                tilings[operator] = choice
            helped |= self.try_tilings(tuple(tilings))
        return helped

    def alternatives(self) -> Iterator[tuple[list[int], int]]:
        for members in self.classes:
            for choice, tiling in enumerate(self.problem.operators[members[0]].tilings):
                if programs_per_unit(self.problem.device, [tiling]):
                    yield members, choice

    def shake(self, times: int) -> bool:
        """Orders by urgencies that are disturbed a little; True if one helped."""
        helped = False
        for _ in range(times):
            if self.run.done() or self.run.solution is None:
                break
            tilings = self.run.solution.tilings
            plain = urgency(self.problem, tilings)
            noise = self.random.uniform(0.8, 1.2, len(plain))
            helped |= self.judge(
                list_schedule(self.problem, self.tables, tilings, plain * noise)[1]
            )
        return helped

    def try_tilings(self, tilings: tuple[int, ...]) -> bool:
        if self.run.done():
            return False
        order = urgency(self.problem, tilings)
        return self.judge(list_schedule(self.problem, self.tables, tilings, order)[1])

    def judge(self, solution: RtasksSolution) -> bool:
        self.run.evaluations += 1
        ends, stuck = simulate(self.problem, solution)
        assert not stuck, "a list schedule cannot wait for itself"
        return self.run.offer(solution, max(ends.values()))


def _classes(problem: RtasksProblem) -> list[list[int]]:
    classes: dict[object, list[int]] = {}
    for index, operator in enumerate(problem.operators):
        classes.setdefault(operator.tilings, []).append(index)
    return list(classes.values())
