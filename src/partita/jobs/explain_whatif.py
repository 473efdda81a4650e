"""What would make a plan faster: the same plan simulated again on something changed.

Nothing here is estimated. Each change is made to the record (a cluster whose links of one level are
twice as fast, a schedule of twice the micro-batches), and the plan's stages are lowered and run on
that. Splits and stages stay as they are, so a new plan could gain more. More memory helps where a
faster plan was refused for want of it: the plan file remembers those.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from partita import units
from partita.cluster import Cluster, DeviceKind
from partita.compiled import work_clock
from partita.costs.collectives import Collectives, Reached
from partita.errors import PartitaError, PlanError
from partita.jobs.explain_account import Links
from partita.jobs.simulate import Simulation, simulate_stages
from partita.lower import Memo
from partita.plans import Plan

TIMES = 2
CLEAR = 5e-4  # of a step: smaller changes are none


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


Change = Callable[[Simulation], Simulation]


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
