"""What a plan hangs on: its step with one assumption worse, and whether another plan wins then.

The rivals are named strategies, each by its fastest plan that fits. They and the plan are simulated
again with what is least sure made worse: interference, the fixed cost of collectives, bandwidth of
links, the host, products. A plan that stays ahead in all of them is a safe choice; where another
one wins the sentence says under which assumption.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from partita.compiled import work_clock
from partita.costs.collectives import Collectives, Reached, reached
from partita.costs.physics import alike
from partita.errors import PartitaError
from partita.jobs.compare import named_plans
from partita.jobs.explain_whatif import again
from partita.jobs.simulate import Attempts, Simulation, simulate_stages
from partita.lower import Memo
from partita.plans import Schedule, Stage

RIVALS = 4  # the fastest named strategies that fit
PLANS = 4  # of each: meshes and depths, evenly
INTERFERENCE = 1.5  # times as much, and a tenth of the computing beside it at least
FIXED = 2.0
FIXED_S = 1e-5  # where nothing is known of a kind
LINKS = 0.75  # of the bandwidth that is assumed
HOST = 2.0
PRODUCTS = 0.85

Worse = Callable[[Simulation], Simulation]


@dataclass(frozen=True, slots=True)
class Rival:
    """A named strategy's best plan, as the parameters are."""

    name: str
    simulation: Simulation


@dataclass(frozen=True, slots=True)
class WorseAssumption:
    """One assumption made worse: the plan's step then, and the fastest of all compared."""

    assumption: str
    step_s: float
    winner: str  # empty where it is still the plan itself
    winner_s: float
    is_equal: bool  # within the interval of the prediction


@dataclass(frozen=True, slots=True)
class PlanSensitivity:
    """What the plan was compared with, and what became of it."""

    rivals: tuple[tuple[str, str, float], ...]  # name, arrangement and step, the fastest first
    shifts: tuple[WorseAssumption, ...]
    untried: tuple[str, ...]  # assumptions for which no time was left

    @property
    def flips(self) -> tuple[WorseAssumption, ...]:
        """Where another plan is clearly faster."""
        return tuple(shift for shift in self.shifts if shift.winner and not shift.is_equal)


def sensitivity(
    simulation: Simulation, budget_s: float, say: Callable[[str], None] = lambda _: None
) -> PlanSensitivity:
    """Simulate the plan and its rivals with one assumption after the other made worse.

    A third of the time is for finding rivals; no simulation is begun after `budget_s`.
    """
    began = work_clock()

    def is_late(part: float) -> bool:
        return work_clock() - began > part * budget_s

    say("named strategies to compare with")
    against = rivals(simulation, lambda: is_late(1 / 3))
    shifts, untried = [], []
    for assumption, worse in assumptions(simulation):
        if is_late(1.0):
            untried.append(assumption)
            continue
        say(f"with {assumption}")
        own_s = worse(simulation).step_s
        winner, winner_s = "", own_s
        for rival in against:
            if is_late(1.0):
                break
            if (step_s := worse(rival.simulation).step_s) < winner_s:
                winner, winner_s = rival.name, step_s
        is_equal = alike(own_s, winner_s, simulation.spread)
        shifts.append(WorseAssumption(assumption, own_s, winner, winner_s, is_equal))
    rows = [(one.name, one.simulation.arrangement, one.simulation.step_s) for one in against]
    return PlanSensitivity(tuple(rows), tuple(shifts), tuple(untried))


def rivals(simulation: Simulation, is_late: Callable[[], bool]) -> list[Rival]:
    """The fastest named strategies that fit, by the best of their plans."""
    work, cluster = simulation.workload, simulation.cluster
    memo = Memo(Collectives(cluster))
    best: list[Rival] = []
    attempt = Attempts()
    for name, _, make in named_plans(work, cluster):
        plans = attempt(name, make) or ()
        count = min(len(plans), PLANS)
        simulated = []
        for stages, schedule in (plans[i * len(plans) // count] for i in range(count)):
            if is_late():
                break
            one = _simulated(simulation, stages, schedule, memo)
            if one is not None and one.fits:
                simulated.append(one)
        fastest = min(simulated, key=lambda other: other.step_s, default=None)
        if fastest is not None and not _same(simulation, fastest):
            best.append(Rival(name, fastest))
    ordered = sorted(best, key=lambda rival: (rival.simulation.step_s, rival.name))
    different: dict[str, Rival] = {}  # families have plans in common
    for rival in ordered:
        different.setdefault(rival.simulation.arrangement, rival)
    return list(different.values())[:RIVALS]


def _same(plan: Simulation, other: Simulation) -> bool:
    """Is it the plan itself, found under a name?"""
    splits = [[(stage.mesh, stage.splits) for stage in one.stages] for one in (plan, other)]
    return splits[0] == splits[1] and plan.schedule == other.schedule


def _simulated(
    like: Simulation, stages: tuple[Stage, ...], schedule: Schedule, memo: Memo
) -> Simulation | None:
    try:
        one = simulate_stages(
            like.workload, like.cluster, stages, schedule, memo, most_devices=1, quick=True
        )
    except PartitaError:  # a named strategy that cannot run here is no rival
        return None
    return replace(one, cap_bytes=like.cap_bytes)


def assumptions(simulation: Simulation) -> Iterator[tuple[str, Worse]]:
    """What a prediction hangs on, each with what makes it worse."""
    used = {device for stage in simulation.stages for device in stage.mesh.devices}
    if len(used) > 1:
        known = reached(simulation.cluster)
        slower = replace(known, interference=min(1.0, INTERFERENCE * known.interference + 0.1))
        dearer = replace(
            known,
            inside_s=FIXED * known.inside_s + FIXED_S,
            across_s=FIXED * known.across_s + FIXED_S,
            hop_s=FIXED * known.hop_s,
        )
        narrow = replace(known, inside=LINKS * known.inside, across=LINKS * known.across)
        yield f"communication beside computing slows it {INTERFERENCE:g} times", _assumed(slower)
        yield f"every collective at {FIXED:g} times its fixed cost", _assumed(dearer)
        yield f"links give {LINKS:.0%} of their bandwidth", _assumed(narrow)
    if simulation.workload.execution == "graph":
        yield "the host starts every kernel by itself (eager)", _eager
    yield f"launching a kernel takes {HOST:g} times as long", _on_slower_host
    yield f"products reach {PRODUCTS:.0%} of what is assumed", _with_slower_products


def _assumed(worse: Reached) -> Worse:
    return lambda simulation: again(simulation, assumed=worse, quick=True)


def _eager(simulation: Simulation) -> Simulation:
    started = replace(simulation.workload, execution="eager")
    return again(replace(simulation, workload=started), quick=True)


def _on_slower_host(simulation: Simulation) -> Simulation:
    kinds = tuple(replace(kind, launch_s=HOST * kind.launch_s) for kind in simulation.cluster.kinds)
    return again(simulation, cluster=replace(simulation.cluster, kinds=kinds), quick=True)


def _with_slower_products(simulation: Simulation) -> Simulation:
    kinds = tuple(
        replace(
            kind, flops_per_s=tuple((dtype, PRODUCTS * rate) for dtype, rate in kind.flops_per_s)
        )
        for kind in simulation.cluster.kinds
    )
    return again(simulation, cluster=replace(simulation.cluster, kinds=kinds), quick=True)
