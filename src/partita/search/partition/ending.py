"""How every search here ends: with its answer, or after looking for any answer at all.

Where memory is short or stages are asked for, a method may have found nothing that is valid. Then
the whole question is put to CP-SAT (`model`), which finds an answer or proves that there is none.
"""

from partita.problems.partition import PartitionSolution
from partita.search.base import Result, Status
from partita.search.partition.model import Model
from partita.search.partition.walk import Walk
from partita.search.schedule.solver import Outcome

_EFFORT = 60.0  # of the solver, in its own count: about a minute or two


def ending(walk: Walk) -> Result[PartitionSolution]:
    """The result of a search that has nothing more to try."""
    run = walk.run
    if walk.hopeless:
        return run.result(Status.INFEASIBLE, walk.hopeless)
    if run.solution is None and not run.done():
        outcome = Model(walk).solve(_EFFORT)
        if outcome is Outcome.INFEASIBLE:
            return run.result(Status.INFEASIBLE, _none(walk))
        if run.solution is None and not run.done():
            why = f"no answer was found with the effort spent; {_fix(walk)} would make it easier"
            return run.result(Status.STOPPED, why)
    return run.result()


def _none(walk: Walk) -> str:
    return f"proven: no assignment keeps to what was asked; {_fix(walk)} is needed"


def _fix(walk: Walk) -> str:
    problem = walk.problem
    wishes = []
    if problem.memory_bytes:
        wishes += ["more memory", "more devices"] + ([] if problem.recompute else ["recompute"])
    if walk.in_order:
        wishes.append("another number of stages or several stages on a device")
    return " or ".join(wishes) or "more time"
