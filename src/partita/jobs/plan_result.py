"""What a search for a plan answers: the plan, the next best, how far from optimal it can be."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from partita import __version__
from partita.degrees import axis_names, stage_degrees, zero_words
from partita.jobs.advice import what_would_fit
from partita.jobs.carried import cluster_ref
from partita.jobs.plan_simulator import SimulatedPlan, Simulator, rank
from partita.jobs.simulate import Simulation
from partita.jobs.tried import alternatives
from partita.plans import Alternative, Origin, Plan, Progress, device_groups
from partita.problems.joint import JointProblem
from partita.search.base import Improvement, Result, Status, relative_gap
from partita.showing import plot_of, repr_html, table_of


@dataclass(frozen=True)
class Planned:
    """The best plan found, the next best, and how far from optimal it can be."""

    status: Status
    why: str
    plan: Plan | None
    best: SimulatedPlan | None
    others: tuple[SimulatedPlan, ...]
    lower_bound_s: float
    seconds: float
    seed: int
    history: tuple[Improvement, ...]
    num_simulated: int
    num_drafted: int
    objective: str
    space: str = ""  # the plans that the lower bound speaks of, in words
    problem: JointProblem | None = None  # the joint problem, with the tables that were made

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def gap(self) -> float | None:
        """How far from optimal the best is at most, as a fraction of it."""
        return relative_gap(
            None if self.best is None else self.best.objective_s, self.lower_bound_s
        )


def planned(simulator: Simulator, result: Result[Any], spec: str, space: str = "") -> Planned:
    """The answer, from all that was simulated; `space` where it is not the joint problem's."""
    best, work_s = _in_full(simulator), simulator.work_s
    simulator.attempt.refuse_if_all_failed(simulator.candidates)
    bound = max(work_s, (result.lower_bound or 0.0) if simulator.bounds_hold else 0.0)
    if best is not None:
        bound = min(bound, best.objective_s)  # a named plan may be outside of the space
    simulator.raise_bound(bound)
    problem = simulator.model.problem
    status, why = _ending(simulator, result, bound)
    space = space or problem.space()
    said = (status, f"{why}; no plan of this space is below: {space}")
    plan = None if best is None else _plan(simulator, best, said, bound, spec)
    ranked = differing(simulator.candidates)
    return Planned(
        status, why, plan, best, tuple(ranked[1 : simulator.settings.next_best + 1]), bound,
        simulator.clock.seconds(), simulator.seed, tuple(simulator.history),
        len(simulator.candidates), result.evaluations, simulator.objective, space, problem,
    )  # fmt: skip


def differing(candidates: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """Those that fit, the fastest of each kind, best first: degrees, ZeRO, schedule, recompute."""
    kinds: dict[object, SimulatedPlan] = {}
    for candidate in sorted((c for c in candidates if c.fits), key=rank):
        kinds.setdefault(_kind(candidate.simulation), candidate)
    return list(kinds.values())


def _kind(simulation: Simulation) -> object:
    """What makes a plan another kind of plan; cuts and numbers of micro-batches do not."""
    stages, graph = simulation.stages, simulation.workload.graph
    largest = max(stages, key=lambda stage: len(stage.splits))
    degrees = stage_degrees(largest, axis_names(graph, largest))
    groups = len(device_groups(stages))
    return (
        groups,
        len(stages) // groups,
        tuple(degrees.items()),
        len({stage.mesh.axes for stage in stages}) > 1,
        zero_words(stages, graph),
        tuple(sorted({stage.checkpointing for stage in stages})),
        simulation.schedule.name if groups > 1 else simulation.schedule.num_microbatches > 1,
    )


def _ending(simulator: Simulator, result: Result[Any], bound: float) -> tuple[Status, str]:
    """How the search ended, and one sentence of why."""
    best, cut = simulator.best(), simulator.cut()
    stopped = result.status is Status.STOPPED and bool(simulator.clock.must_end())
    limit = simulator.stop.time_s  # that of the whole; what searched inside of it had less
    if best is None:
        status = Status.STOPPED if cut or stopped else Status.INFEASIBLE
        return status, _why_not(simulator, cut or stopped)
    if best.objective_s <= bound * (1 + 1e-9):
        return Status.OPTIMAL, "no plan of the space can be faster"
    if cut or stopped:
        late = result.why if limit is None else f"the time limit of {limit:g} s is used up"
        return Status.STOPPED, cut or late
    gap = relative_gap(best.objective_s, bound)
    if gap is not None and gap <= simulator.stop.gap:
        return Status.STOPPED, f"within the asked gap of {simulator.stop.gap:.2%}"
    fitting = sum(candidate.fits for candidate in simulator.candidates)
    why = f"the fastest of {fitting} plans that fit" if fitting > 1 else "the only plan that fits"
    return Status.FEASIBLE, why


def _in_full(simulator: Simulator) -> SimulatedPlan | None:
    """The winner, simulated op by op in every stage; candidates are only estimated where deep.

    One that is not the fastest, or does not fit, when looked at in full gives way to the next.
    """
    whole: set[int] = set()  # by identity: candidates are large to compare
    while (best := simulator.best()) is not None and id(best) not in whole:
        place = next(i for i, one in enumerate(simulator.candidates) if one is best)
        simulation = simulator.attempt(
            f"{best.name} as {best.simulation.arrangement}",
            partial(_whole, best, simulator),
        )
        if simulation is None:
            del simulator.candidates[place]
            continue
        value = simulation.interval_s if simulator.steady_state else simulation.step_s
        full = replace(best, simulation=simulation, objective_s=value, fits=simulation.fits)
        simulator.candidates[place] = full
        whole.add(id(full))
    return best


def _whole(candidate: SimulatedPlan, simulator: Simulator) -> Simulation:
    return candidate.simulation.in_full(simulator.memo).capped(simulator.max_memory)


def _plan(
    simulator: Simulator, best: SimulatedPlan, said: tuple[Status, str], bound: float, spec: str
) -> Plan:
    simulation, (status, why) = best.simulation, said
    prediction = simulation.prediction(bound, best.objective_s if simulator.steady_state else None)
    cluster = cluster_ref(spec, simulator.cluster)
    origin = Origin(
        best.name, str(status), why, simulator.seed, simulator.clock.seconds(), __version__,
        tuple(Progress(s.seconds, s.objective, s.lower_bound) for s in simulator.history),
        _alternatives(simulator, best),
    )  # fmt: skip
    return Plan(
        simulator.workload.ref(),
        cluster,
        simulation.decided,
        prediction,
        origin,
        simulation.schedule,
    )


def _alternatives(simulator: Simulator, best: SimulatedPlan) -> tuple[Alternative, ...]:
    """The next best, and what stood against each; those that do not fit too."""
    others = sorted((c for c in simulator.candidates if c is not best), key=lambda c: c.objective_s)
    told = (
        (
            other.name,
            other.simulation,
            other.fits,
            other.objective_s if simulator.steady_state else None,
        )
        for other in others
    )
    return alternatives(told, best.simulation, simulator.settings.next_best)


def _why_not(simulator: Simulator, early: object) -> str:
    """Why there is no plan; a search that ended `early` does not know that there is none."""
    limit = simulator.stop.time_s
    if simulator.constraints and early and limit is not None and not simulator.stop.interrupted():
        return (
            f"nothing that fits with what was asked for ({simulator.constraints}) was found in the "
            f"time limit of {limit:g} s; give more time, or drop one of these constraints"
        )
    if simulator.constraints:
        asked = f"nothing fits with what was asked for ({simulator.constraints})"
        if simulator.constraints.pinned_to("recompute") == "selective":
            asked += ", where selective needs ops that are cheap to run again"
        return f"{asked}; drop one of these constraints"
    return what_would_fit(simulator.model, simulator.max_memory, simulator.settings.advice)
