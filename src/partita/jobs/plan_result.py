"""What a search for a plan answers: the plan, the next best, how far from optimal it can be."""

from dataclasses import dataclass, replace

from partita import __version__, units
from partita.jobs.advice import what_would_fit
from partita.jobs.plan_pipelines import Pipelines
from partita.jobs.plan_tried import Candidate, Tried, rank
from partita.jobs.simulate import simulate_stages
from partita.plans import Alternative, ClusterRef, Origin, Plan, Progress
from partita.search.base import Improvement, Status, relative_gap

NEXT_BEST = 10


@dataclass(frozen=True)
class Planned:
    """The best plan found, the next best, and how far from optimal it can be."""

    status: Status
    why: str
    plan: Plan | None
    best: Candidate | None
    others: tuple[Candidate, ...]
    lower_bound_s: float
    seconds: float
    seed: int
    history: tuple[Improvement, ...]
    num_simulated: int
    num_drafted: int
    objective: str

    @property
    def gap(self) -> float | None:
        """How far from optimal the best is at most, as a fraction of it."""
        return relative_gap(
            None if self.best is None else self.best.objective_s, self.lower_bound_s
        )


def planned(tried: Tried, pipelines: Pipelines, spec: str, seed: int) -> Planned:
    """The answer, from all that was tried."""
    best, bound = tried.best(), pipelines.bound_s(quick=tried.cut)  # no time is left
    tried.raise_bound(bound)
    ranked = sorted((c for c in tried.candidates if c.fits), key=rank)
    if best is None:
        cut = tried.reason and not pipelines.complete
        status, why = (Status.STOPPED if cut else Status.INFEASIBLE), _why_not(tried)
    elif best.objective_s <= bound * (1 + 1e-9) and (
        not pipelines.passed_over or best.objective_s <= tried.work_s * (1 + 1e-9)
    ):
        status, why = Status.OPTIMAL, "no plan can be faster"
    elif tried.reason:
        status, why = Status.STOPPED, tried.reason
    else:
        status = Status.FEASIBLE
        fitting, out = len(ranked), len(pipelines.ruled_out)
        why = (
            f"the fastest of {fitting} plans that fit" if fitting > 1 else "the only plan that fits"
        )
        if out:
            pairs = "numbers" if out > 1 else "number"
            why += f"; bounds rule out {out} {pairs} of stages and micro-batches"
    if best is not None:
        best = _drawn(tried, best)
    found = None if best is None else _plan(tried, best, (status, why), bound, (spec, seed))
    return Planned(
        status, why, found, best, tuple(ranked[1 : NEXT_BEST + 1]), bound, tried.seconds(), seed,
        tuple(tried.history), len(tried.candidates), pipelines.num_drafted, tried.objective,
    )  # fmt: skip


def _drawn(tried: Tried, best: Candidate) -> Candidate:
    """The winner again: every op of every stage, with all its devices where it runs once."""
    simulation = best.simulation
    whole = simulate_stages(tried.workload, tried.cluster, simulation.stages, simulation.schedule)
    value = whole.interval_s if tried.in_a_row else whole.step_s
    return replace(best, simulation=whole.capped(tried.max_memory), objective_s=value)


def _plan(
    tried: Tried, best: Candidate, said: tuple[Status, str], bound: float, asked: tuple[str, int]
) -> Plan:
    simulation, (status, why), (spec, seed) = best.simulation, said, asked
    prediction = simulation.prediction(bound, best.objective_s if tried.in_a_row else None)
    cluster = ClusterRef(spec, tried.cluster.num_devices, tried.cluster.fingerprint())
    origin = Origin(
        best.name, str(status), why, seed, tried.seconds(), __version__,
        tuple(Progress(s.seconds, s.objective, s.lower_bound) for s in tried.history),
        _alternatives(tried, best),
    )  # fmt: skip
    return Plan(
        tried.workload.ref(), cluster, simulation.decided, prediction, origin, simulation.schedule
    )


def _alternatives(tried: Tried, best: Candidate) -> tuple[Alternative, ...]:
    """The next best, and what stood against each; those that do not fit too."""
    others = sorted((c for c in tried.candidates if c is not best), key=lambda c: c.objective_s)
    found = (
        Alternative(
            other.name,
            other.simulation.arrangement,
            other.step_s,
            other.simulation.fullest[0],
            rejection(other, best),
            other.objective_s if tried.in_a_row else None,
        )
        for other in others
        if not _alike(other, best)
    )
    return tuple(dict.fromkeys(found))[:NEXT_BEST]


def _why_not(tried: Tried) -> str:
    if tried.wishes:
        return f"nothing fits with what was asked for ({tried.wishes}); drop one of these wishes"
    return what_would_fit(tried.drafting, tried.max_memory)


def _alike(one: Candidate, other: Candidate) -> bool:
    mine, its = one.simulation, other.simulation
    return mine.stages == its.stages and mine.schedule == its.schedule


def rejection(other: Candidate, best: Candidate) -> str:
    """What stands against a plan: memory, or what it loses most by."""
    mine, its = other.simulation, best.simulation
    if not other.fits:
        peak, room = mine.fullest
        return f"needs {units.size(peak)} of {units.size(room)} per device"
    lost = {
        "longer in computing": mine.compute_s - its.compute_s,
        "longer idle": mine.bubble * mine.step_s - its.bubble * its.step_s,
    }
    if not mine.is_pipelined and not its.is_pipelined:  # else stages wait for each other, too
        lost["longer in waiting for communication"] = mine.exposed_s - its.exposed_s
    what, seconds = max(lost.items(), key=lambda item: item[1])
    if other.step_s <= best.step_s * (1 + 1e-6) or seconds <= 0:
        return "no faster"
    return f"{units.seconds(seconds)} {what}"
