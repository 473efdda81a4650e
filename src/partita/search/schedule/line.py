"""Does one micro-batch repeat in a given length, where chains run along a line of devices?

Block u starts at q_u P + r_u, 0 <= r_u < P. Devices only look at the r. Once these are chosen, the
q of a chain follow: nothing is gained by waiting longer than to the next r, so for u -> v

    q_v - q_u = c_uv = ceil((r_u + lag - r_v) / P) >= 0,

and what a device d holds just after its block v starts, with memory in pairs (see `pairs`), is

    sum over pairs of amount * ([r_v < r_giver] - [r_v < r_taker] + sum of c from taker to giver).

Its largest value over v is a number that the r on d decide, plus a weighted sum of c. The blocks
that run on all devices get their r first, in every way there is. The other blocks are on one device
each, and the chains only go from a device to itself or a neighbour in the line: devices get their r
one after the other, and of what came before only this matters:

    the r on the last device,
    for each device to come the part of its sum that is known,
    for each device that is done by how much its sum may still grow.

A part of a chain from u to v that is still to come adds at least ceil((r_u + lags - r_v) / P),
which ends most ways early. Devices with the same weights on one side of the cut share one number.
Where two numbers are enough at each cut (one or two chains, there or back, are such), the best
pairs of them are kept for each choice of r, and the question is answered in O(devices * choices^2 *
pairs kept) for each choice of the common blocks. A solver that reasons about single blocks needs
far more steps: it would have to find out about each of these numbers by itself.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partita.problems.schedule import ScheduleProblem
from partita.search.base import Run
from partita.search.schedule.grid import Grid, GridMemory
from partita.search.schedule.line_cuts import (
    MOST_SUM,
    ChainEdge,
    CutRange,
    Need,
    Number,
    chains,
    cut_ranges,
    cuts_of,
    in_line,
    needs_of,
)
from partita.search.schedule.line_pass import PER_DEVICE, PER_EFFORT, Pass, placed
from partita.search.schedule.solver import Allowance, SolverAnswer, SolverOutcome

_MOST_CHOICES = 20_000  # of the blocks on a device
_MOST_WEIGHTS = 10**6  # looked at to find what devices share


@dataclass(frozen=True, slots=True)
class LineProblem:
    """A problem whose chains run along a line of devices."""

    grid: Grid
    common: tuple[int, ...]  # blocks on all devices of the line
    places: tuple[tuple[int, ...], ...]  # the other blocks of each device along the line
    edges: tuple[ChainEdge, ...]
    needs: tuple[Need | None, ...]  # of each place
    alone: tuple[tuple[CutRange, ...], ...]  # the pairs of each place
    cuts: tuple[tuple[Number, ...], ...]  # after each place

    def effort(self, length: int) -> float:
        """What a question takes at most, about; infinite where it is too large to begin with."""
        spans = self.grid.spans
        configs = _ways([spans[b] for b in self.common], length)
        counts = []
        for here in self.places:
            ways = _ways([spans[b] for b in (*self.common, *here)], length)
            counts.append(ways / max(configs, 1) if self.common else ways * length)
        longest = length + max((edge.lag for edge in self.edges), default=0)
        if max(counts, default=0) > _MOST_CHOICES or longest > MOST_SUM // 2:
            return math.inf
        steps = sum(2 * a * b + PER_DEVICE for a, b in itertools.pairwise([1.0, *counts]))
        return max(configs, 1) * steps / PER_EFFORT

    def decide(
        self, length: int, run: Run[Any], allowance: Allowance | None = None
    ) -> SolverAnswer:
        """A start for each block, or that there are none; UNKNOWN if run or allowance end it."""
        allowance = Allowance() if allowance is None else allowance
        run.evaluations += 1
        spans = self.grid.spans
        for residues in placed([(b, spans[b]) for b in self.common], [], length, fixed=True):
            if run.done():
                return SolverAnswer(SolverOutcome.UNKNOWN)
            through = Pass(self, length, dict(residues), allowance).through(run)
            if through is None:
                return SolverAnswer(SolverOutcome.UNKNOWN)
            if through:
                return SolverAnswer(SolverOutcome.SOLVED, self._starts(through, length))
        return SolverAnswer(SolverOutcome.INFEASIBLE)

    def _starts(self, residues: dict[int, int], length: int) -> tuple[int, ...]:
        """Every chain from its first block on, none later than it must be."""
        starts = dict(residues)
        behind = {edge.first: edge for edge in self.edges}
        for root in set(residues) - {edge.second for edge in self.edges}:
            block = root
            while block in behind:
                _, after, lag, _ = behind[block]
                wait = (residues[after] - starts[block] - lag) % length
                starts[after] = starts[block] + lag + wait
                block = after
        return tuple(starts[block] for block in range(len(starts)))


def line_of(
    problem: ScheduleProblem, grid: Grid, memory: Sequence[GridMemory]
) -> LineProblem | None:
    """The problem as chains along a line; None where it is not that, or rounded."""
    devices = sorted({device for block in problem.blocks for device in block.devices})
    common = [b for b, block in enumerate(problem.blocks) if len(block.devices) == len(devices)]
    if len(devices) == 1:
        common = []
    where = {b: block.devices[0] for b, block in enumerate(problem.blocks) if b not in common}
    chained = chains(problem, grid)
    if not grid.exact or chained is None:
        return None
    if any(len(problem.blocks[b].devices) > 1 for b in where):
        return None
    if len(devices) ** 2 * len(chained) > _MOST_WEIGHTS:
        return None
    order = in_line(devices, [(where[a], where[b]) for a, b in chained if {a, b} <= set(where)])
    if order is None:
        return None
    place = {b: order.index(device) for b, device in where.items()}
    edges = tuple(
        ChainEdge(a, b, lag, max(place.get(a, -1), place.get(b, -1)))
        for (a, b), lag in chained.items()
    )
    needs = needs_of(problem, memory, edges, order)
    cuts = None if needs is None else cuts_of(needs, edges)
    if needs is None or cuts is None:
        return None
    places = tuple(tuple(b for b in where if place[b] == at) for at in range(len(order)))
    alone = tuple(() if need is None else cut_ranges(need, edges, -1) for need in needs)
    return LineProblem(grid, tuple(common), places, edges, needs, alone, cuts)


def _ways(spans: Sequence[int], length: int) -> float:
    """In how many ways blocks fit into a repetition, the first of them at 0."""
    idle = length - sum(spans)
    if idle < 0 or not spans:
        return 0
    return float(math.factorial(len(spans) - 1) * math.comb(idle + len(spans) - 1, len(spans) - 1))
