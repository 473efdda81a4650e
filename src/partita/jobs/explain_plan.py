"""A whole plan, explained: what bounds it, what stood against the others, what would help most.

Time is accounted for on the busiest group of devices, where every second of the step is work,
exposed communication, or idle; memory on the fullest device. Computing is divided by the
roofline of its ops into arithmetic, rows that do not lie on 16 bytes, memory bandwidth and
launches. What would help is simulated, and so is what the choice hangs on.

Rows that do not lie on 16 bytes, as those of 50,257 words, make products wait for loads. Matrix
units read 16 bytes at a time. Where the rows of a half-precision product are no multiple of
8 elements they are fed by plain loads, and twice the arithmetic would gain nothing. The roofline
counts that to computing; here it is told apart, since padding the dim is the cure.

What would help (`what_ifs`) is the same plan simulated again on something changed; nothing is
estimated. Each change is made to the record (a cluster whose links of one level are
twice as fast, a schedule of twice the micro-batches), and the plan's stages are lowered and run on
that. Splits and stages stay as they are, so a new plan could gain more. More memory helps where a
faster plan was refused for want of it: the plan file remembers those.

What the choice hangs on (`sensitivity`) is its step with one assumption worse, and whether another
plan wins then. The rivals are named strategies, each by its fastest plan that fits. They and the
plan are simulated again with what is least sure made worse: interference, the fixed cost of
collectives, bandwidth of links, the host, products. A plan that stays ahead in all of them is a
safe choice; where another one wins the sentence says under which assumption.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from partita import units
from partita.cluster import Cluster, DeviceKind
from partita.compiled import work_clock
from partita.costs.collectives import Collectives, Reached, reached
from partita.costs.physics import alike
from partita.costs.roofline import CONTRACTIONS, op_cost
from partita.errors import PartitaError, PlanError
from partita.graph.record import Graph, Op
from partita.jobs.compare import named_plans
from partita.jobs.explain import MemoryAccount, memory_account
from partita.jobs.explain_account import (
    Account,
    GroupAccount,
    Links,
    TimePart,
    account_of,
    parts_of,
)
from partita.jobs.simulate import Attempts, OpReport, Simulation, simulate_plan, simulate_stages
from partita.jobs.workload import load_cluster
from partita.lower import Memo
from partita.plans import Alternative, Plan, Schedule, Stage
from partita.showing import plot_of, repr_html, table_of

Change = Callable[[Simulation], Simulation]
Worse = Callable[[Simulation], Simulation]

TOGETHER = 8  # elements of 2 bytes: what matrix units read at a time
ODD = "rows off 16 bytes"
ROOFLINE = {"compute": "arithmetic", "memory": "memory bandwidth", "launch": "launching kernels"}

# What would help, and what it changes.
TIMES = 2
FASTER = 1024.0
CLEAR = 5e-4  # of a step: smaller changes are none

# What the choice hangs on: against whom, and how much worse each assumption is.
RIVALS = 4  # the fastest named strategies that fit
PLANS = 4  # of each: meshes and depths, evenly
INTERFERENCE = 1.5  # times as much, and a tenth of the computing beside it at least
FIXED = 2.0
FIXED_S = 1e-5  # where nothing is known of a kind
LINKS = 0.75  # of the bandwidth that is assumed
HOST = 2.0
PRODUCTS = 0.85
BUDGET_S = 15.0


@dataclass(frozen=True, slots=True)
class Rows:
    """A size that is no multiple of 8, the first op that has it, the seconds of all that do."""

    op: str
    size: int
    seconds: float

    @property
    def padded(self) -> int:
        """The size that would lie on 16 bytes."""
        return -(-self.size // TOGETHER) * TOGETHER


def unaligned_rows(simulation: Simulation) -> tuple[Rows, ...]:
    """The sizes that slow products of the busiest devices down, the costliest first."""
    graph = simulation.workload.graph
    ops = {op.name: op for op in graph.ops}
    kind = simulation.cluster.kind_of(simulation.stage.mesh.devices[0])
    known: dict[int, Rows] = {}
    for report in simulation.ops:
        if report.name in ops and _is_fed_slowly(graph, ops[report.name], report, kind):
            size = _odd_size(graph, ops[report.name])
            first = known.get(size, Rows(report.name, size, 0.0))
            known[size] = replace(first, seconds=first.seconds + report.cost.seconds)
    return tuple(sorted(known.values(), key=lambda rows: (-rows.seconds, rows.size)))


def _is_fed_slowly(graph: Graph, op: Op, report: OpReport, kind: DeviceKind) -> bool:
    """Would a product take as long with any arithmetic?"""
    if report.kind not in CONTRACTIONS or report.cost.bound != "compute":
        return False
    rates = tuple((dtype, rate * FASTER) for dtype, rate in kind.flops_per_s)
    now = op_cost(graph, op, kind, report.split).compute_s
    then = op_cost(graph, op, replace(kind, flops_per_s=rates), report.split).compute_s
    return then > now / 2


def _odd_size(graph: Graph, op: Op) -> int:
    """The length of the rows that are no multiple of 8; images lie channels last."""
    call = graph.call(op)
    place = 1 if call.kind == "conv" else -1
    rows = [shape[place] for shape in (call.inputs[0], *call.outputs) if len(shape) > 1]
    return max((size for size in rows if size % TOGETHER), default=max(rows))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change, and what a step would take with it."""

    change: str
    step_s: float
    gain: float  # the part of the step that is saved; negative where it gets longer
    peak_memory_bytes: float
    fits: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Untried:
    """A change that was not simulated, and why."""

    change: str
    why: str


def what_if(simulation: Simulation, name: str, change: Change) -> WhatIf:
    """Simulate a changed plan or machine."""
    other = change(simulation)
    # Of heterogeneous devices the one that lacks most is told, by share.
    both = zip(other.peak_bytes, other.capacity_bytes, strict=True)
    peak, room = max(both, key=lambda pair: pair[0] / max(1.0, pair[1]))
    gain = 1 - other.step_s / simulation.step_s if simulation.step_s else 0.0
    note = (
        "" if other.fits else f"does not fit: {units.size(peak)} of {units.size(room)} per device"
    )
    return WhatIf(name, other.step_s, gain, max(other.peak_bytes), other.fits, note)


def again(
    simulation: Simulation, *, cluster: Cluster | None = None, microbatches: int | None = None,
    recompute: bool | None = None, assumed: Reached | None = None, quick: bool = False,
) -> Simulation:  # fmt: skip
    """The same plan once more, with another machine, number of micro-batches or no recompute.

    `assumed` is what collectives reach and cost, instead of what the kinds are known for.
    """
    machine = cluster or simulation.cluster
    stages, schedule = simulation.stages, simulation.schedule
    if microbatches is not None and schedule.order:
        raise PlanError(
            f"the order was searched for exactly {schedule.num_microbatches} micro-batches",
            fix="plan again with --pin microbatches",
        )
    if microbatches is not None:
        schedule = replace(schedule, num_microbatches=microbatches)
    if recompute is False:
        stages = tuple(
            replace(stage, checkpointing="none", segments=(), recomputed=()) for stage in stages
        )
    if microbatches is not None or recompute is False:  # other collectives have another order
        stages = tuple(stage.undecided() for stage in stages)
    memo = Memo(Collectives(machine, assumed))
    other = simulate_stages(simulation.workload, machine, stages, schedule, memo, quick=quick)
    return replace(other, cap_bytes=simulation.cap_bytes)


def what_ifs(
    simulation: Simulation,
    plan: Plan,
    links: Links,
    budget_s: float,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[WhatIf, ...], tuple[Untried, ...]]:
    """Every change that applies, the most helpful first; none is begun after `budget_s`."""
    began = work_clock()
    tried, left = [], []
    for name, change in changes(simulation, links):
        if work_clock() - began > budget_s:
            left.append(Untried(name, f"the {budget_s:g} s for this were used up"))
            continue
        say(f"what if: {name}")
        try:
            tried.append(what_if(simulation, name, change))
        except PartitaError as error:
            left.append(Untried(name, str(error)))
    tried += more_memory(simulation, plan)
    return tuple(sorted(tried, key=lambda what: (-what.gain, what.change))), tuple(left)


def changes(simulation: Simulation, links: Links) -> Iterator[tuple[str, Change]]:
    """What to try on a plan, each with its name."""
    used = {device for stage in simulation.stages for device in stage.mesh.devices}
    if len(used) > 1:
        for level, name in enumerate(links.names):
            yield f"{name} twice as fast", _on(links.faster(level, TIMES))
    yield from _devices(simulation, sorted({simulation.cluster.devices[d].kind for d in used}))
    if simulation.is_pipelined:
        count, batch = simulation.schedule.num_microbatches, simulation.workload.batch
        if batch % (2 * count) == 0:
            yield f"{2 * count} micro-batches instead of {count}", _of(2 * count)
        if count % 2 == 0:
            yield f"{count // 2} micro-batches instead of {count}", _of(count // 2)
    if any(stage.checkpointing != "none" for stage in simulation.stages):
        yield "nothing recomputed", lambda old: again(old, recompute=False)


def _devices(simulation: Simulation, kinds: list[str]) -> Iterator[tuple[str, Change]]:
    """Faster devices: all of them, and where there are several kinds each by itself."""
    cluster = simulation.cluster

    def machine(change: Callable[[DeviceKind], DeviceKind], which: list[str]) -> Change:
        new = tuple(change(kind) if kind.name in which else kind for kind in cluster.kinds)
        return _on(replace(cluster, kinds=new))

    yield "arithmetic of the devices twice as fast", machine(_quicker, kinds)
    yield "memory bandwidth of the devices doubled", machine(_wider, kinds)
    if any(kind.launch_s for kind in cluster.kinds if kind.name in kinds):
        yield "launching a kernel in half the time", machine(_lighter, kinds)
    if len(kinds) > 1:
        for name in kinds:
            yield f"arithmetic of {name} twice as fast", machine(_quicker, [name])


def _quicker(kind: DeviceKind) -> DeviceKind:
    return replace(kind, flops_per_s=tuple((d, rate * TIMES) for d, rate in kind.flops_per_s))


def _wider(kind: DeviceKind) -> DeviceKind:
    return replace(
        kind,
        memory_bytes_per_s=kind.memory_bytes_per_s * TIMES,
        cache_bytes_per_s=kind.cache_bytes_per_s * TIMES,
    )


def _lighter(kind: DeviceKind) -> DeviceKind:
    return replace(kind, launch_s=kind.launch_s / TIMES)


def _on(cluster: Cluster) -> Change:
    return lambda simulation: again(simulation, cluster=cluster)


def _of(count: int) -> Change:
    return lambda simulation: again(simulation, microbatches=count)


def more_memory(simulation: Simulation, plan: Plan) -> list[WhatIf]:
    """The fastest plan that was refused for its memory alone, and how much it lacked."""
    room = min(simulation.capacity_bytes)
    missed = [
        other
        for other in plan.origin.alternatives
        if 0 < other.step_s < simulation.step_s and other.peak_memory_bytes > room
    ]
    if not missed:
        return []
    best = min(missed, key=lambda other: (other.step_s, other.peak_memory_bytes))
    least = min(missed, key=lambda other: (other.peak_memory_bytes, other.step_s))
    rows = []
    for other in dict.fromkeys((best, least)):
        lacks = units.size(other.peak_memory_bytes - room)
        rows.append(
            WhatIf(
                f"{lacks} more memory per device",
                other.step_s,
                1 - other.step_s / simulation.step_s,
                other.peak_memory_bytes,
                True,
                f"then {other.name} fits: {other.arrangement}",
            )
        )
    return rows


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
    waiting: float  # the share of the step that groups wait for others computing, on average
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
        told.waiting,
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
    """The step by what bounds it: arithmetic, loads, memory, launches, each link, waiting."""
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
