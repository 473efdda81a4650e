"""A plan that is there already as the first candidate: the answer is never worse than it.

It is simulated as it stands, op by op, on the machine that is asked for, which may have other
figures than the one it was made for. Its collectives are tried in an order made anew, too.
"""

import logging

from partita import units
from partita.errors import InputError
from partita.jobs.check_plan import refuse_wrong_decisions
from partita.jobs.plan_simulator import Simulator
from partita.plans import Plan

log = logging.getLogger("partita")


def start_from(simulator: Simulator, plan: Plan) -> None:
    """Simulate a given plan; refuses one that is of another model or that constraints rule out."""
    workload = simulator.workload
    if plan.model.fingerprint != workload.graph.fingerprint():
        mine, its = workload.ref(), plan.model
        names = ("spec", "batch", "dtype", "training", "optimizer")
        pairs = [(name, getattr(its, name), getattr(mine, name)) for name in names]
        unlike = [f"{name} {old} instead of {new}" for name, old, new in pairs if old != new]
        raise InputError(
            f"the plan to start from is of another model ({', '.join(unlike) or 'other ops'})",
            fix="ask for the model, batch and dtype of that plan, or leave --start out",
            field="start",
        )
    refuse_wrong_decisions(plan, workload.graph, simulator.cluster)
    if not simulator.allowed(plan.stages, plan.schedule):
        raise InputError(
            f"the plan to start from does not keep to {simulator.constraints}",
            fix="leave --start or that constraint out",
            field="start",
        )
    given = simulator.add("start", plan.stages, plan.schedule, quick=False)
    if given is not None and not given.fits:
        peak, capacity = given.simulation.fullest
        log.warning(
            "the plan to start from does not fit: it needs %s of %s per device",
            units.size(peak), units.size(capacity),
        )  # fmt: skip
    anew = tuple(stage.undecided() for stage in plan.stages)
    simulator.add("start", anew, plan.schedule)
