"""The joint search: candidates of likely cells, the best of them evaluated, bounds for all cells.

1. Likely numbers of stages and micro-batches come first, and one stage before all. A cell whose
   bound is above the best plan is left out; where a candidate is far behind the best, its kin are.
   Single stages, and candidates that are much better than anything so far, are evaluated at once.
2. The candidates that would be fastest if nobody had to wait are made again with more and more
   virtual stages on each group of devices, while that helps.
3. The best estimates are evaluated; what does not fit after all is made again to fill less.
4. Cells that were passed over are looked at in the same way while their bounds ask for it.
5. The numbers of micro-batches next to the best plan's are looked at, as long as that helps.
6. Around the leaders other orders are tried, and with the best order of each number of groups other
   numbers of micro-batches: an order without bubbles pays with fewer of them than 1F1B, or, where
   sends are slow, with more, and estimates of 1F1B chose the cells.

What evaluates, and has the last word on a plan, is handed in (`Evaluator`): a simulator, or
(`Formula`) the record's own objective, so that a saved problem is solved by the same steps. The
bound is that of the whole space (`SpaceBound`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from partita.problems.joint import Cell, JointProblem, JointSolution, cell_bound, check, objective_s
from partita.search.base import (
    PROVEN_GAP,
    UNTIL_DONE,
    Result,
    Run,
    Status,
    Stop,
    relative_gap,
)
from partita.search.joint.brute import num_solutions, solutions
from partita.search.joint.candidates import USUAL_INTERLEAVED as USUAL
from partita.search.joint.candidates import Candidates, InterleavedSettings, JointCandidate
from partita.search.joint.cells import (
    USUAL_CELLS,
    CellBounds,
    LikelyCells,
    SpaceBound,
    likely_groupings,
)
from partita.search.joint.cuts import SLACKS


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


@dataclass(frozen=True, slots=True)
class Auto:
    """Dynamic programming over cuts in likely cells, the best evaluated, bounds for all cells."""

    likely: LikelyCells = USUAL_CELLS  # which numbers of micro-batches are looked at
    more_cells: int = 4  # unlikely ones that are looked at, those with the least bounds first
    neighbours: int = 3  # times that the numbers next to the best plan's are looked at
    far_below: float = 0.9  # of the best plan: bounds from there on are no reason to look
    cheap_levels: int = 4  # of bounds: those that cells are ruled out by
    cheap_levels_heterogeneous: int = 2
    hardly: float = 0.85  # of the best plan: from there on dearer levels will not rule a cell out
    # Which candidates are given up; factors of the best estimate.
    behind: float = 1.08  # with and without waiting: the kin of such candidates are left out
    behind_heterogeneous: float = 1.3  # there estimates differ more
    reach: float = 1.04  # estimates beyond are not evaluated
    close: float = 1.01  # the same for variants of what is evaluated, and virtual stages
    close_heterogeneous: float = 1.05  # there rounds are less even than estimates say
    slow_alone: float = 0.6  # of a single stage: what pipelines may take for it to wait for them
    early: float = 0.7  # of the best plan: an estimate so much better is evaluated at once
    worse: float = 1.01  # more virtual stages will not help any more
    # How many are looked at further.
    evaluated: int = 3  # candidates, and one for each number of stages in reach
    promising: int = 4  # candidates that are tried with virtual stages
    promising_heterogeneous: int = 10
    kept_interleaved: int = 2  # numbers of virtual stages that may be evaluated
    leaders: int = 2  # plain pipelines for which other orders are tried
    # What does not fit after all is made again with less.
    retries: int = 3
    shrunk: int = 6  # how often the budget shrinks until the candidate changes
    shrink: float = 0.95
    hopeless: float = 1.12  # times the memory there is: with so much less it would not be faster
    # The cuts themselves.
    slacks: tuple[float, ...] = SLACKS  # bottlenecks tried, by the least
    interleaving: InterleavedSettings = USUAL
    exhaustive: float = 20_000  # solutions: where nothing was found, so many are all tried

    def __call__(
        self,
        problem: JointProblem,
        stop: Stop = UNTIL_DONE,
        seed: int = 0,
        evaluator: Evaluator | None = None,
    ) -> Result[JointSolution]:
        """Search until done or stopped; deterministic for a seed."""
        return _Search(self, problem, stop, seed, evaluator or Formula(problem)).result()


@dataclass
class _Search:
    """One run: what was made, evaluated and ruled out."""

    settings: Auto
    problem: JointProblem
    stop: Stop
    seed: int
    evaluator: Evaluator
    made: list[JointCandidate] = field(default_factory=list)  # one for each cell
    near: list[tuple[JointCandidate, float]] = field(default_factory=list)  # and how near
    interleaved: list[JointCandidate] = field(default_factory=list)
    promised: set[Cell] = field(default_factory=set)  # looked at with virtual stages
    evaluations: dict[JointSolution, Evaluation] = field(default_factory=dict)
    ruled_out: list[tuple[float, Cell]] = field(default_factory=list)
    unlikely: int = 0  # candidates of cells that had been passed over: they take no other's place

    def __post_init__(self) -> None:
        self.run: Run[JointSolution] = Run(self.stop, "auto", self.seed)
        self.candidates = Candidates(self.problem, self.settings.slacks, self.settings.interleaving)
        self.bounds = SpaceBound(self.problem.cells, self.evaluator)
        self.plain = [k for k, s in enumerate(self.problem.schedules) if s.virtual_stages == 1]
        self.counts_of: dict[int, list[int]] = {}
        for cell in self.problem.cells:
            self.counts_of.setdefault(cell.grouping, []).append(cell.num_microbatches)

    def result(self) -> Result[JointSolution]:
        """All steps in order, and what they came to."""
        steps: tuple[Callable[[], None], ...] = (
            self._every_cell,
            self._virtual_stages,
            self._leaders_evaluated,
            self._unlikely_cells,
            self._virtual_stages,
            self._leaders_evaluated,
            self._neighbours,
            self._other_orders,
            self._other_counts,
            self._one_to_show,
        )
        for step in steps:
            if not self._done():
                step()
        if self.run.solution is None and self.evaluator.is_cheap:
            return self._exhaustive()
        self._raise_bound(None)
        if self.run.solution is None:
            return self.run.result(Status.STOPPED, self.run.reason() or "nothing was found")
        reason, cells = self.run.reason(), len(self.problem.cells)
        why = reason or (
            f"the best of {len(self.evaluations)} evaluated; "
            f"{len(self.made)} of {cells} cells looked at, {len(self.ruled_out)} ruled out"
        )
        return self.run.result(why=why)

    def _exhaustive(self) -> Result[JointSolution]:
        """Nothing was found: where the problem is small, everything is tried."""
        run, tried = self.run, 0
        if not self._done() and num_solutions(self.problem) <= self.settings.exhaustive:
            for solution in solutions(self.problem):
                if self._done():
                    break
                run.evaluations, tried = run.evaluations + 1, tried + 1
                self._evaluated(solution)
            else:
                status = Status.INFEASIBLE if run.solution is None else Status.OPTIMAL
                return run.result(status, f"all {tried:,} solutions were tried")
        self._raise_bound(None)
        if run.lower_bound == math.inf:
            return run.result(Status.INFEASIBLE, "no cell has a strategy for all its groups")
        return run.result(Status.STOPPED, run.reason() or "no candidate fits the budgets")

    # Cells.

    def _every_cell(self) -> None:
        """Every number of stages with likely numbers of micro-batches, likely ones first."""
        for grouping in likely_groupings(self.problem, self.counts_of):
            counts = self.settings.likely.counts(
                self.problem, grouping, self.counts_of, everything=self.evaluator.is_cheap
            )
            few, many = 0.0, math.inf  # numbers beyond these need not be tried
            for count in counts:
                if self._done():
                    return
                cell = Cell(grouping, count)
                if not few < count < many:
                    continue
                if self._cannot_win(cell):
                    many = count if not self.evaluator.is_cheap else many
                    continue
                candidate = self._candidate(cell)
                if candidate is None or not self._is_behind(candidate):
                    continue
                again = any(s.checkpointing != "none" for s in candidate.solution.stages)
                if again or not self.problem.homogeneous:
                    few = count  # larger shares would hold even more
                if not again or not self.problem.homogeneous:
                    many = count
        if not self.made and not self._done():
            self._smallest_microbatches()
        if self.run.solution is not None:
            self._raise_bound(self._levels)

    def _unlikely_cells(self) -> None:
        """Cells that were passed over, while their bounds are far below the best plan."""
        if self.evaluator.is_cheap:
            return
        level = (
            1 if self.problem.homogeneous else 2
        )  # of bounds: paths of orders, where kinds differ
        known = {candidate.cell for candidate in self.made} | {cell for _, cell in self.ruled_out}
        left = [cell for cell in self.problem.cells if cell not in known]
        reach = self.settings.far_below * self.evaluator.incumbent_s()
        for cell in self.bounds.lowest(
            left, self.settings.more_cells, level, reach, self._done
        ):  # fmt: skip
            if self._done():
                return
            if not self._cannot_win(cell):
                self.unlikely += self._candidate(cell) is not None

    def _neighbours(self) -> None:
        """The next numbers of micro-batches, more and fewer, for the grouping of the best plan."""
        if self.evaluator.is_cheap:
            return
        for _ in range(self.settings.neighbours):
            cell = None if self.run.solution is None else self.run.solution.cell
            if cell is None:
                return
            for other in self._next_to(cell):
                if self._done() or self._cannot_win(other):
                    continue
                candidate = self._candidate(other)
                if candidate is not None and len(candidate.solution.stages) > 1:
                    self._look_at_virtual_stages(candidate)
            if not self._done():
                self._leaders_evaluated()
            if self.run.solution is None or self.run.solution.cell == cell:
                return

    def _next_to(self, cell: Cell) -> list[Cell]:
        """Cells with the next number of micro-batches, if nobody has looked at them."""
        known = {candidate.cell for candidate in self.made} | {out for _, out in self.ruled_out}
        counts = sorted(self.counts_of[cell.grouping])
        place = counts.index(cell.num_microbatches)
        near = counts[max(0, place - 1) : place + 2]
        cells = [Cell(cell.grouping, count) for count in near]
        return [other for other in cells if other not in known]

    def _smallest_microbatches(self) -> None:
        """Nothing fits yet: the smallest micro-batches hold least; larger ones while they fit."""
        for grouping in likely_groupings(self.problem, self.counts_of):
            least = min(self.problem.groupings[grouping].num_groups, self.problem.batch)
            for count in sorted(self.counts_of[grouping], reverse=True):
                if self._done():
                    return
                if count < least or self._candidate(Cell(grouping, count)) is None:
                    break
            if self.run.solution is not None:
                return

    def _is_behind(self, candidate: JointCandidate) -> bool:
        """Is a candidate so slow, waiting or not, that its kin need not be looked at?"""
        if len(candidate.solution.stages) == 1 or self.evaluator.is_cheap:
            return False
        settings = self.settings
        alike = self.problem.homogeneous
        behind = settings.behind if alike else settings.behind_heterogeneous
        pipelines = [c for c in self.made if len(c.solution.stages) > 1]
        estimate = min(c.estimate_s for c in pipelines)
        ideal = min(c.ideal_s for c in pipelines)
        return candidate.estimate_s > behind * estimate and candidate.ideal_s > behind * ideal

    def _cannot_win(self, cell: Cell) -> bool:
        """Is everything in a cell slower than the best, by its bound?"""
        best = self.evaluator.incumbent_s()
        # One stage of a large model is dearer to make than to bound, and memory often rules it out.
        alone = self.problem.groupings[cell.grouping].num_groups == 1
        hardly = 0.0 if alone else self.settings.hardly
        if not math.isfinite(best) or not self.bounds.rules_out(cell, best, self._levels, hardly):
            return False
        self.ruled_out.append((self.bounds.at(cell, 0), cell))
        return True

    @property
    def _levels(self) -> int:
        """Of bounds: those that cells are ruled out by."""
        alike = self.problem.homogeneous
        return self.settings.cheap_levels if alike else self.settings.cheap_levels_heterogeneous

    def _candidate(self, cell: Cell) -> JointCandidate | None:
        """The best of a cell, evaluated at once where it is a single stage or far ahead."""
        if not self._may_make():
            return None
        if self.problem.groupings[cell.grouping].num_groups == 1:
            return self._alone(cell)
        candidates = [self.candidates.best(cell, k) for k in self.plain[:1]]
        if not self.plain:  # then only virtual stages are allowed
            candidates = [self.candidates.best(cell, k) for k in range(len(self.problem.schedules))]
        known = [candidate for candidate in candidates if candidate is not None]
        if not known:
            return None
        candidate = min(known, key=lambda c: c.estimate_s)
        self.made.append(candidate)
        if candidate.estimate_s < self.settings.early * self.evaluator.incumbent_s():
            if not self.evaluator.is_cheap and self.problem.homogeneous:
                self._look_at_virtual_stages(candidate)
            variants = (candidate, *(c for c in self.interleaved if c.cell == cell))
            self._evaluate(min(variants, key=lambda c: c.estimate_s))
        return candidate

    def _alone(self, cell: Cell) -> JointCandidate | None:
        """A single stage on the mesh that is best for it, or on others that are nearly as good."""
        settings = self.settings
        candidates: list[JointCandidate] = []
        for schedule in self.plain:
            for candidate in self.candidates.on_each_mesh(cell, schedule):
                candidates.append(candidate)
                if math.isinf(self.evaluator.incumbent_s()):
                    self._evaluate(candidate)  # something to show early
                if self._done():
                    break
        candidates.sort(key=lambda candidate: (self._is_weighted(candidate), candidate.estimate_s))
        least: dict[bool, float] = {}  # estimates of unequal shares say less: by themselves
        # Unequal shares first: where devices differ much, equal ones are far behind them.
        for candidate in sorted(candidates, key=self._is_weighted, reverse=True):
            weighted = self._is_weighted(candidate)
            reach = settings.behind if weighted else settings.reach
            if candidate.estimate_s <= least.setdefault(weighted, candidate.estimate_s) * reach:
                self.near.append((candidate, reach))
        if not self._is_slow_alone(candidates):
            self._near_evaluated()
        self.made += candidates[:1]
        if candidates and self.evaluator.is_cheap and candidates[0].solution in self.evaluations:
            self.bounds.settle(cell, self.evaluations[candidates[0].solution].objective_s)
        return candidates[0] if candidates else None

    def _is_slow_alone(self, candidates: Sequence[JointCandidate]) -> bool:
        """Would a pipeline without bubbles be so much faster that one stage can wait?

        Simulating one stage of a large model takes longer than making a pipeline of it.
        """
        if not candidates or self.evaluator.is_cheap or not self.problem.homogeneous:
            return False
        cells = (c for c in self.problem.cells if c.grouping != candidates[0].cell.grouping)
        least = min((self.bounds.at(cell, 0) for cell in cells), default=math.inf)
        return least < self.settings.slow_alone * candidates[0].estimate_s

    def _near_evaluated(self) -> None:
        """Single stages that are nearly as good as the best of them, and as the best of all."""
        for candidate, reach in self.near:
            if self._done():
                return
            if candidate.estimate_s < self.evaluator.incumbent_s() * reach:
                self._evaluate(candidate)
        self.near.clear()

    def _is_weighted(self, candidate: JointCandidate) -> bool:
        """Has its single stage unequal shares?"""
        mesh = candidate.solution.stages[0].mesh
        return bool(self.problem.meshes_of(candidate.cell, 0)[mesh].weights)

    # Virtual stages.

    def _virtual_stages(self) -> None:
        """Candidates with several stages on each group, for pipelines that may gain by it."""
        if self.problem.training:
            for candidate in self._promising():
                if self._done():
                    return
                self._look_at_virtual_stages(candidate)

    def _look_at_virtual_stages(self, candidate: JointCandidate) -> None:
        """The cell of a pipeline with several stages on each group, unless that was looked at."""
        if candidate.cell in self.promised or candidate.solution.schedule not in self.plain:
            return
        self.promised.add(candidate.cell)
        for numbers in self._by_name().values() if self.problem.training else ():
            if not self._done():
                self.interleaved += self._interleave(candidate, numbers)

    def _by_name(self) -> dict[str, list[int]]:
        """Schedules with virtual stages, few stages first."""
        by_name: dict[str, list[int]] = {}
        for k, schedule in enumerate(self.problem.schedules):
            if schedule.virtual_stages > 1:
                by_name.setdefault(schedule.name, []).append(k)
        return by_name

    def _interleave(self, candidate: JointCandidate, numbers: list[int]) -> list[JointCandidate]:
        """Likely numbers of stages on each group, then more and fewer while estimates do not grow.

        Where nothing fits, the next number on that side is tried.
        """
        candidates: list[JointCandidate] = []
        likely = self._likely_first(candidate.cell, numbers)
        for side in (numbers[likely:], numbers[:likely][::-1]):
            for schedule in side:
                if not self.candidates.flights(candidate.cell, schedule) or not self._may_make():
                    continue
                other = self.candidates.best(candidate.cell, schedule, filled=candidate.filled)
                if other is None:
                    continue
                candidates.append(other)
                if other.estimate_s > self.settings.worse * min(c.estimate_s for c in candidates):
                    break
        return sorted(candidates, key=lambda c: c.estimate_s)[: self.settings.kept_interleaved]

    def _likely_first(self, cell: Cell, numbers: Sequence[int]) -> int:
        """Where to begin: as many virtual stages as blocks, often of two segments."""
        p = self.problem.groupings[cell.grouping].num_groups
        wanted = self.problem.num_segments / (2 * p)
        stages = [self.problem.schedules[k].virtual_stages for k in numbers]
        return min(range(len(stages)), key=lambda k: (abs(stages[k] - wanted), k))

    def _promising(self) -> list[JointCandidate]:
        """Pipelines that would be the fastest if no group ever had to wait, one of each cell."""
        cells: dict[Cell, JointCandidate] = {}
        for candidate in sorted(self.made, key=lambda c: c.ideal_s):
            plain = candidate.solution.schedule in self.plain
            known = candidate.cell in self.promised
            if plain and not known and len(candidate.solution.stages) > 1:
                cells.setdefault(candidate.cell, candidate)
        settings, alike = self.settings, self.problem.homogeneous
        few = settings.promising if alike else settings.promising_heterogeneous + self.unlikely
        most = None if self.evaluator.is_cheap else few
        return list(cells.values())[:most]

    def _one_to_show(self) -> None:
        """A pipeline where all were ruled out, so that it can be told what one would take."""
        groupings = self.problem.groupings
        pipelines = [out for out in self.ruled_out if groupings[out[1].grouping].num_groups > 1]
        if self.evaluator.is_cheap or self.made[1:] or not pipelines or not self.problem.training:
            return
        _, cell = min(pipelines, key=lambda out: (float(f"{out[0]:.4g}"), self._order(out[1])))
        if not self.plain:
            return
        candidate = self.candidates.best(cell, self.plain[0])
        if candidate is None or self._done():
            return
        likely = self._likely_chunks(cell)
        candidates = [candidate, *(self._interleave(candidate, likely) if likely else ())]
        self._evaluate(min(candidates, key=lambda c: c.estimate_s))

    def _order(self, cell: Cell) -> int:
        return next(i for i, (_, out) in enumerate(self.ruled_out) if out == cell)

    def _likely_chunks(self, cell: Cell) -> list[int]:
        """A number of virtual stages: as many as blocks, often of two segments."""
        known = [
            k for k in self._by_name().get("interleaved", []) if self.candidates.flights(cell, k)
        ]
        return [known[self._likely_first(cell, known)]] if known else []

    # Evaluations.

    @property
    def _close(self) -> float:
        """How far behind the best plan an estimate may be to be evaluated."""
        alike = self.problem.homogeneous
        return self.settings.close if alike else self.settings.close_heterogeneous

    def _leaders_evaluated(self) -> None:
        """The best estimates; plain ones also if they would win without waiting."""
        settings = self.settings
        self._near_evaluated()
        for candidate in sorted(self.interleaved, key=lambda c: c.estimate_s):
            if self._done():
                return
            if candidate.estimate_s < self.evaluator.incumbent_s() * self._close:
                self._evaluate_both(candidate)
        self._one_of_each_layout()
        left = (c for c in self.made if c.solution not in self.evaluations)
        ranked = sorted(left, key=lambda c: c.estimate_s)
        if not ranked:
            return
        firsts: dict[int, JointCandidate] = {}
        for candidate in ranked:
            firsts.setdefault(len(candidate.solution.stages), candidate)
        reach = ranked[0].estimate_s * settings.reach
        for candidate in (*ranked[: settings.evaluated], *firsts.values()):
            if self._done():
                return
            near = candidate.estimate_s <= reach or candidate in ranked[: settings.evaluated]
            if near and candidate.ideal_s < self.evaluator.incumbent_s():
                self._evaluate_both(candidate)

    def _one_of_each_layout(self) -> None:
        """The best estimate of each schedule with virtual stages, if none of it was evaluated.

        Estimates add sends that may run beside computing, so that over slow links they say little.
        """
        if self.evaluator.is_cheap:
            return
        names = [schedule.name for schedule in self.problem.schedules]
        seen = {names[solution.schedule] for solution in self.evaluations}
        for candidate in sorted(self.interleaved, key=lambda c: c.estimate_s):
            name = names[candidate.solution.schedule]
            if self._done() or name in seen or candidate.ideal_s >= self.evaluator.incumbent_s():
                continue
            seen.add(name)
            self._evaluate(candidate)

    def _evaluate_both(self, candidate: JointCandidate) -> None:
        """A candidate, and what selective checkpointing was chosen over where that is close."""
        self._evaluate(candidate)
        stages = candidate.solution.stages
        if self._done() or all(stage.checkpointing != "selective" for stage in stages):
            return
        if not self._may_make():
            return
        other = self.candidates.best(
            candidate.cell, candidate.solution.schedule, filled=candidate.filled, selective=False
        )
        best = self.evaluator.incumbent_s()
        if other is not None and other.estimate_s < best * self._close:
            self._evaluate(other)

    def _evaluate(self, candidate: JointCandidate) -> None:
        """Evaluate a candidate; where memory turns out too small, one that fills less."""
        settings = self.settings
        for _ in range(settings.retries):
            evaluation = self._evaluated(candidate.solution)
            if evaluation is None or evaluation.fits or self._done():
                return
            slower = evaluation.objective_s >= self.evaluator.incumbent_s()
            if math.isfinite(self.evaluator.incumbent_s()) and (
                slower or evaluation.over > settings.hopeless
            ):
                return
            smaller = self._smaller(candidate, candidate.filled / (evaluation.over * 1.01))
            if smaller is None:
                return
            candidate = smaller

    def _smaller(self, candidate: JointCandidate, filled: float) -> JointCandidate | None:
        """Another candidate, that fills so much of the budgets or less; None if there is none."""
        for _ in range(self.settings.shrunk):
            other = self.candidates.best(
                candidate.cell, candidate.solution.schedule,
                filled=filled, selective=candidate.selective,
            )  # fmt: skip
            if other is None or other.solution != candidate.solution:
                return other
            filled *= self.settings.shrink  # what is live only for a moment is not in the estimate
        return None

    def _evaluated(self, solution: JointSolution) -> Evaluation | None:
        if solution in self.evaluations:
            return None
        evaluation = self.evaluator(solution)
        if evaluation is not None:
            self.evaluations[solution] = evaluation
            if evaluation.fits:
                self.run.offer(solution, evaluation.objective_s)
        return evaluation

    def _other_orders(self) -> None:
        """Other orders for the best stages so far."""
        for solution in self._leaders() if self.problem.training else ():
            self._in_other_orders(solution)

    def _in_other_orders(self, solution: JointSolution, *, searched: bool = True) -> None:
        """The same stages in every plain order, and in one that is searched for them."""
        for schedule in self.plain:
            there = self.candidates.flights(solution.cell, schedule)
            if self._done():
                return
            if there and schedule != solution.schedule and self._may_make():
                self._evaluated(replace(solution, schedule=schedule))
        if searched and not self._done():
            self.evaluator.reorder(solution)

    def _other_counts(self) -> None:
        """More and fewer micro-batches for the best of each number of groups, while that helps."""
        if self.evaluator.is_cheap or not self.problem.training:
            return
        leaders: dict[int, JointSolution] = {}
        for solution in self._ranked_lines():
            leaders.setdefault(solution.cell.grouping, solution)
        for first in list(leaders.values())[: self.settings.leaders]:
            leader = first
            for _ in range(self.settings.neighbours):
                better = self._with_other_counts(leader)
                if better is None:
                    break
                leader = better
            ahead = self.evaluations[leader].objective_s <= self.evaluator.incumbent_s()
            if leader != first and ahead and not self._done():
                self.evaluator.reorder(leader)

    def _with_other_counts(self, leader: JointSolution) -> JointSolution | None:
        """The next numbers for a leader's grouping in all orders: the best, if that is better."""
        grouping = leader.cell.grouping
        counts = sorted(self.counts_of[grouping])
        place = counts.index(leader.cell.num_microbatches)
        for count in (*counts[place + 1 : place + 2], *counts[max(0, place - 1) : place]):
            cell = Cell(grouping, count)
            if self._done() or self._is_out(cell):
                continue
            lines = [one for one in self._ranked_lines() if one.cell == cell]
            if not lines and self._may_make():
                candidate = self.candidates.best(cell, leader.schedule)
                if candidate is not None and self._evaluated(candidate.solution) is not None:
                    lines = [candidate.solution]
            best = self.evaluator.incumbent_s()
            if lines and self.evaluations[lines[0]].order_bound_s < best:
                self._in_other_orders(lines[0], searched=False)
        first = next(one for one in self._ranked_lines() if one.cell.grouping == grouping)
        return None if first.cell == leader.cell else first

    def _is_out(self, cell: Cell) -> bool:
        """Was a cell ruled out before, or is it now?"""
        return any(cell == out for _, out in self.ruled_out) or self._cannot_win(cell)

    def _leaders(self) -> list[JointSolution]:
        """The best pipelines with a stage on each group: only they have orders without bubbles.

        They need not be ahead yet; those that are behind in any order are left out.
        """
        best = self.evaluator.incumbent_s()
        ranked = self._ranked_lines()
        near = [one for one in ranked if self.evaluations[one].order_bound_s < best]
        return near[: self.settings.leaders]

    def _ranked_lines(self) -> list[JointSolution]:
        """Pipelines with a stage on each group that fit, the fastest first."""
        lines = (
            solution
            for solution, evaluation in self.evaluations.items()
            if evaluation.fits and len(solution.stages) > 1 and solution.schedule in self.plain
        )
        return sorted(lines, key=lambda one: self.evaluations[one].objective_s)

    # Bounds, and when to end.

    def _raise_bound(self, most_levels: int | None) -> None:
        """The bound of the whole space, as far as there is time for it."""
        best = self.evaluator.incumbent_s()
        late = (lambda: False) if self.evaluator.is_cheap else self._is_late
        self.run.bound(self.bounds.least(best, late, most_levels))

    def _done(self) -> bool:
        """Does a stop rule hold, for what was found here or is known from elsewhere?"""
        if self.run.done():
            return True
        gap = relative_gap(self.evaluator.incumbent_s(), self.run.lower_bound)
        return gap is not None and gap <= max(self.stop.gap, PROVEN_GAP)

    def _is_late(self) -> bool:
        limit = self.stop.time_s
        return self.stop.interrupted() or (limit is not None and self.run.seconds >= limit)

    def _may_make(self) -> bool:
        """Count a candidate that is about to be made; False where no more may be."""
        if self._done():
            return False
        self.run.evaluations += 1
        return True
