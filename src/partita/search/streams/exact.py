"""The shortest schedule, proven: a sweep over chain counts for every part.

Every part, cut where that loses nothing, is swept once (see `sweep`): with a table over all chain
counts where it has at most 4 million entries, else over the sets of ops that exist, if those are at
most 2 million. What is larger still gets a good schedule (see `windows`) and a lower bound. Parts
that differ in the ids of their ops only are swept once. The limits r and s of the problem hold;
without them the search is over all stages.

    evaluations: schedules of the whole problem that were the best so far or might have been
"""

from dataclasses import dataclass, replace

from partita.problems.streams import StreamsProblem, StreamsSolution, lower_bound
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.streams.sequential import one_by_one
from partita.search.streams.sweep import MAX_TABLE, BestStages, listed, rules, solve
from partita.search.streams.units import OpUnit, units, whole
from partita.search.streams.windows import named, shorter

QUICK = 2**18  # entries of a table that is swept without a look at windows first


@dataclass(frozen=True, slots=True)
class ExactStreams:
    """Sweeps all sets of ops that may be left; optimal wherever these fit into memory."""

    def __call__(
        self, problem: StreamsProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[StreamsSolution]:
        """Search until every part is at its best or too large for that."""
        run: Run[StreamsSolution] = Run(stop, "exact", seed)
        run.bound(lower_bound(problem))
        if run.done():
            return run.result()
        work = _UnitWork(problem, run)
        for number in range(len(work.units)):
            if not run.done():
                work.improve(number)
        if work.unproven:
            most = max(work.unproven, key=lambda unit: len(unit.ops))
            why = f"{len(most.ops)} ops of part {most.part} have too many schedules to prove one"
            return run.result(None, "" if run.done() else why)
        if work.proven < len(work.units):
            return run.result()
        why = f"no schedule is shorter: {work.states:,} states, {work.transitions:,} transitions"
        return run.result(Status.OPTIMAL, why)


class _UnitWork:
    """The units with what is known of them so far."""

    def __init__(self, problem: StreamsProblem, run: Run[StreamsSolution]) -> None:
        self.problem = problem
        self.run = run
        self.units = units(problem)
        self.answers: dict[bytes, BestStages] = {}
        self.unproven: list[OpUnit] = []
        self.proven = self.states = self.transitions = 0
        self.offer()

    def offer(self) -> None:
        self.run.evaluations += 1
        self.run.offer(*whole(self.problem, self.units))

    def improve(self, number: int) -> None:
        """The best stages for one unit, if it can be swept, else better ones."""
        unit = self.units[number]
        if unit.piece is None or unit.piece.entries > QUICK:
            for start in (unit.stages, one_by_one(unit.ops)):  # which is better differs
                stages = shorter(self.problem, start, self.run.done)
                self.units[number] = unit = unit.better(self.problem, stages)
                self.offer()
                if self.run.done():
                    return
        answer = self.sweep(unit)
        if answer is None:
            if not self.run.done():
                self.unproven.append(unit)
            return
        self.proven += 1
        self.states += answer.states
        self.transitions += answer.transitions
        stages = named(answer.stages, unit.ops)
        unit = unit.better(self.problem, stages)
        self.units[number] = replace(unit, bound_us=unit.time_us)
        self.offer()
        self.run.bound(sum(each.bound_us for each in self.units))

    def sweep(self, unit: OpUnit) -> BestStages | None:
        piece = unit.piece
        if piece is None:
            return None
        if piece.key not in self.answers:
            states = None
            if piece.entries > MAX_TABLE:
                states = listed(piece, self.run.done)
                if states is None:
                    return None
            given = rules(self.problem.constants, self.problem.r, self.problem.s)
            answer = solve(piece, given, self.run.done, states=states)
            if answer is None:
                return None
            self.answers[piece.key] = answer
        return self.answers[piece.key]
