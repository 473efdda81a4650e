"""The best cuts of a cell of the space, for one schedule: plans on paper.

Dynamic programming over cuts chooses, stage by stage, strategy and checkpointing within the memory
budgets (`cuts`; for virtual stages `interleaved`). A candidate carries the record's estimate; where
a simulator has the last word, it may take more memory, and a candidate is made again that fills
less of the budgets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from partita.problems.joint import (
    Cell,
    FlightKey,
    JointProblem,
    JointSolution,
    StageChoice,
    estimate_s,
    pace_s,
    stage_cost,
)
from partita.search.joint.cuts import SLACKS, Option, Table, best_cuts, table_of
from partita.search.joint.interleaved import USUAL, Interleaved, InterleavedSettings


@dataclass(frozen=True, slots=True)
class JointCandidate:
    """A plan on paper, and how it was asked for."""

    solution: JointSolution
    estimate_s: float
    ideal_s: float  # the busiest group, if it never had to wait
    filled: float = 1.0  # of the budgets
    selective: bool = True  # might stages have been checkpointed selectively?

    @property
    def cell(self) -> Cell:
        """Where it lies in the space."""
        return self.solution.cell


@dataclass
class Candidates:
    """Makes candidates for one problem, and remembers the tables they share."""

    problem: JointProblem
    slacks: tuple[float, ...] = SLACKS
    interleaving: InterleavedSettings = USUAL
    kept_tables: int = 4  # beside those of a cell: one of a large model takes some 50 MB
    _tables: dict[object, Table | None] = field(default_factory=dict)

    def flights(self, cell: Cell, schedule: int) -> tuple[float, ...]:
        """Per group, the micro-batches in flight; nothing where the schedule is not there."""
        p = self.problem.groupings[cell.grouping].num_groups
        if p * self.problem.schedules[schedule].virtual_stages > self.problem.num_segments:
            return ()
        return self.problem.in_flight.get(FlightKey(schedule, p, cell.num_microbatches), ())

    def best(
        self, cell: Cell, schedule: int, *, filled: float = 1.0, selective: bool = True
    ) -> JointCandidate | None:
        """The best cuts of a cell; None where nothing fits."""
        grouping, known = self.problem.groupings[cell.grouping], self.problem.schedules[schedule]
        p, m = grouping.num_groups, cell.num_microbatches
        flights = self.flights(cell, schedule)
        if not flights:
            return None
        tables: list[Table] = []
        for group in range(p):
            table = self.table(cell, group)
            if table is not None and not selective:
                table = table.without_selective
            if table is None:
                return None
            tables.append(table)
        groups = [known.group_of(k, p) for k in range(p * known.virtual_stages)]
        ranges = [tables[group].ranges for group in groups]
        held = [flights[group] for group in groups]
        budgets = [filled * budget for budget in grouping.budget_bytes]
        sends = self.problem.send_s(cell)
        if known.virtual_stages == 1:
            cuts = best_cuts(ranges, held, budgets, sends, m, self.slacks)
        else:
            looped = known.layout == "looped"
            cuts = Interleaved(
                ranges, held, groups, budgets, sends, m, looped, self.interleaving
            ).best()
        if cuts is None:
            return None
        own = np.array([
            float(r.seconds[option][a, b] + r.tail[option][a, b] / (m * known.virtual_stages))
            for r, (a, b, option) in zip(ranges, cuts.stages, strict=True)
        ])  # fmt: skip
        sent = float(sum(sends[a] for a, _, _ in cuts.stages))
        stages = tuple(
            StageChoice(a, b, *tables[group].options[option])
            for group, (a, b, option) in zip(groups, cuts.stages, strict=True)
        )
        estimate = estimate_s(known, p, m, own, sent)
        ideal = m * pace_s(known, p, own)
        return JointCandidate(
            JointSolution(cell, schedule, stages), estimate, ideal, filled, selective
        )

    def on_each_mesh(self, cell: Cell, schedule: int) -> Iterator[JointCandidate]:
        """Of a single stage the best on each mesh; those with replicated parameters apart."""
        problem, m = self.problem, cell.num_microbatches
        flights = self.flights(cell, schedule)
        if not flights:
            return
        budget = problem.groupings[cell.grouping].budget_bytes[0]
        for number, mesh in enumerate(problem.meshes_of(cell, 0)):
            known = problem.strategies[problem.key(cell, 0, mesh)]
            least: dict[bool, tuple[float, Option]] = {}
            for place, strategy in enumerate(known):
                for checkpointing in problem.options(strategy):
                    whole = stage_cost(problem, strategy, checkpointing, 0, problem.num_segments)
                    if whole.static + flights[0] * whole.saved + whole.moment > budget:
                        continue
                    seconds = m * whole.seconds + whole.tail
                    if seconds < least.get(strategy.replicated, (np.inf,))[0]:
                        option = Option(number, place, checkpointing)
                        least[strategy.replicated] = seconds, option
            for replicated in (False, True):
                if replicated in least:
                    seconds, option = least[replicated]
                    yield self._single(cell, schedule, option, seconds)

    def _single(self, cell: Cell, schedule: int, option: Option, estimate: float) -> JointCandidate:
        stage = StageChoice(0, self.problem.num_segments, *option)
        return JointCandidate(JointSolution(cell, schedule, (stage,)), estimate, estimate)

    def table(self, cell: Cell, group: int) -> Table | None:
        """Every option on every layer range of a group; the last few are remembered."""
        problem = self.problem
        meshes = problem.meshes_of(cell, group)
        keys = tuple(problem.key(cell, group, mesh) for mesh in meshes)
        if keys in self._tables:
            table = self._tables.pop(keys)  # and back in as the last that was asked for
        else:
            own = [(number, problem.strategies[key]) for number, key in enumerate(keys)]
            table = table_of(problem, own)
        self._tables[keys] = table
        patterns = set(problem.groupings[cell.grouping].patterns)
        while len(self._tables) > self.kept_tables + len(patterns):
            del self._tables[next(iter(self._tables))]
        return table
