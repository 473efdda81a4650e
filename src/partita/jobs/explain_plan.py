"""A whole plan, explained: what bounds it, what stood against the others, what would help most.

Time is accounted for on the busiest group of devices, where every second of the step is work,
exposed communication, or idle; memory on the fullest device. Computing is divided by the
roofline of its ops into arithmetic, rows that do not lie on 16 bytes, memory bandwidth and
launches. What would help is simulated, and so is what the choice hangs on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.jobs.explain import MemoryAccount, memory_account
from partita.jobs.explain_account import Account, GroupAccount, TimePart, account_of, parts_of
from partita.jobs.explain_rows import Rows, unaligned_rows
from partita.jobs.explain_shifts import PlanSensitivity, sensitivity
from partita.jobs.explain_whatif import CLEAR, Untried, WhatIf, what_ifs
from partita.jobs.simulate import Simulation, simulate_plan
from partita.jobs.workload import load_cluster
from partita.plans import Alternative, Plan
from partita.showing import plot_of, repr_html, table_of

BUDGET_S = 15.0
ODD = "rows off 16 bytes"
ROOFLINE = {"compute": "arithmetic", "memory": "memory bandwidth", "launch": "launching kernels"}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Something that a step is bound by: its seconds on the busiest devices, its share."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Explained:
    """All there is to say of a plan."""

    simulation: Simulation
    objective_s: float  # what the plan was made to be short in, and
    lower_bound_s: float  # its bound, as the plan file has it; 0 where nothing is known
    busiest: GroupAccount
    groups: tuple[GroupAccount, ...]
    bubble: float  # the share of the step that groups of devices are idle, on average
    bounds: tuple[Bottleneck, ...]  # largest first; add up to the step
    parts: tuple[TimePart, ...]  # of the busiest group, largest first; add up to the step
    memory: MemoryAccount
    alternatives: tuple[Alternative, ...]
    what_ifs: tuple[WhatIf, ...]  # the most helpful first
    untried: tuple[Untried, ...]
    odd_rows: tuple[Rows, ...]  # sizes to pad
    sensitivity: PlanSensitivity

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.simulation.step_s

    @property
    def helpful(self) -> tuple[WhatIf, ...]:
        """What shortens the step by more than nothing."""
        return tuple(what for what in self.what_ifs if what.gain > CLEAR)


def explain_plan(
    plan: Plan,
    cluster: Cluster | None = None,
    budget_s: float = BUDGET_S,
    say: Callable[[str], None] = lambda _: None,
) -> Explained:
    """Explain a plan; changes that would be simulated after `budget_s` seconds are left out.

    `say` hears what is simulated next.
    """
    machine = load_cluster(plan) if cluster is None else cluster
    told = account_of(simulate_plan(plan, machine))
    simulation = told.simulation
    helps, untried = what_ifs(simulation, plan, told.links, budget_s / 2, say)
    is_steady = plan.prediction.interval_s is not None  # what counts is a batch after the other
    objective_s = simulation.interval_s if is_steady else simulation.step_s
    odd = unaligned_rows(simulation)
    return Explained(
        simulation,
        objective_s,
        min(max(0.0, plan.prediction.lower_bound_s), objective_s),
        told.busiest,
        told.groups,
        told.bubble,
        bounds_of(told, odd),
        parts_of(told.busiest.shares),
        memory_account(simulation),
        plan.origin.alternatives,
        helps,
        untried,
        odd,
        sensitivity(simulation, budget_s / 2, say),
    )


def bounds_of(told: Account, odd: tuple[Rows, ...] = ()) -> tuple[Bottleneck, ...]:
    """The step by what bounds it: arithmetic, loads, memory, launches, each link, the bubble."""
    shares = told.busiest.shares
    compute = told.busiest.seconds("compute") + told.busiest.seconds("update")
    roofline = {name: told.simulation.op_bounds()[key] for key, name in ROOFLINE.items()}
    slow = min(sum(rows.seconds for rows in odd), roofline[ROOFLINE["compute"]])
    roofline = {**roofline, ROOFLINE["compute"]: roofline[ROOFLINE["compute"]] - slow, ODD: slow}
    total = sum(roofline.values())
    seconds_of = {name: compute * s / total for name, s in roofline.items()} if total else {}
    if not total and compute:
        seconds_of = {ROOFLINE["compute"]: compute}
    for item, seconds in shares.items():
        if item.kind == "communication":
            name = item.where or "links"
        elif item.kind == "idle":
            name = item.what
        else:
            continue
        seconds_of[name] = seconds_of.get(name, 0.0) + seconds
    step = sum(shares.values())
    rows = [
        Bottleneck(name, s, s / step if step else 0.0) for name, s in seconds_of.items() if s > 0
    ]
    return tuple(sorted(rows, key=lambda bound: (-bound.seconds, bound.name)))
