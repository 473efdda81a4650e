"""How every search here begins and ends where not every labelling is an answer.

Where memory is short or stages are asked for, a method may find nothing that is valid. So a cut of
the model's own order is looked at first, and if that is no answer, the whole question is put to
CP-SAT (`model`), which finds one or proves that there is none; briefly at the beginning, at length
at the end.
"""

from partita.problems.partition import PartitionSolution
from partita.search.base import Result, Status
from partita.search.partition.model import PartitionCpModel
from partita.search.partition.walk import LabelWalk, offer_chains
from partita.search.schedule.solver import SolverOutcome

_EFFORT = 60.0  # of the solver, in its own count: about a minute or two
_FIRST_EFFORT = 2.0


def answered(walk: LabelWalk) -> bool:
    """Look for any answer before the best is looked for; False if there is none, proven."""
    problem, run = walk.problem, walk.run
    if walk.hopeless or not (problem.memory_bytes or walk.in_order):
        return not walk.hopeless
    if run.solution is None:
        offer_chains(walk, 1, 700, run.seed)
    if run.solution is None and not run.done():
        outcome = PartitionCpModel(walk).solve(_FIRST_EFFORT)
        walk.hopeless = _none(walk) if outcome is SolverOutcome.INFEASIBLE else ""
    return not walk.hopeless


def ending(walk: LabelWalk) -> Result[PartitionSolution]:
    """The result of a search that has nothing more to try."""
    run = walk.run
    if walk.hopeless:
        return run.result(Status.INFEASIBLE, walk.hopeless)
    if run.solution is None and not run.done():
        outcome = PartitionCpModel(walk).solve(_EFFORT)
        if outcome is SolverOutcome.INFEASIBLE:
            return run.result(Status.INFEASIBLE, _none(walk))
        if run.solution is None and not run.done():
            why = f"no answer was found with the effort spent; {_fix(walk)} would make it easier"
            return run.result(Status.STOPPED, why)
    return run.result()


def _none(walk: LabelWalk) -> str:
    return f"proven: no assignment keeps to what was asked; {_fix(walk)} is needed"


def _fix(walk: LabelWalk) -> str:
    problem = walk.problem
    remedies = []
    if problem.memory_bytes:
        remedies += ["more memory", "more devices"] + ([] if problem.recompute else ["recompute"])
    if walk.in_order:
        remedies.append("another number of stages or several stages on a device")
    return " or ".join(remedies) or "more time"
