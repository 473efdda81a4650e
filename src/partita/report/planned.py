"""A planning job in words: the plan stage by stage, the next best, how far from optimal."""

from typing import Any

from partita import units
from partita.costs.physics import alike, around
from partita.degrees import copied_bytes
from partita.graph.record import Graph
from partita.jobs.fewer import FewerDevices
from partita.jobs.plan import Planned, SimulatedPlan
from partita.jobs.simulate import Simulation
from partita.plans import Stage
from partita.report.summary import (
    CHECKPOINTED,
    INTERVAL,
    KEPT,
    MEMORY_HEADER,
    headline,
    likely_range,
    predicted_words,
    throughput,
)

MOST_STAGES = 16
STAGE_HEADER = ("stage", "devices", "mesh", "ops", "from", "ops by split", "parameters", "")


def planned_text(planned: Planned) -> str:
    """What to know of a planning job, in a screenful."""
    lines: list[str] = []
    if planned.best is not None:
        simulation = planned.best.simulation
        lines += [*headline(simulation), *_interval(planned), "", stages_text(simulation), ""]
        if planned.others:
            lines += [others_text(planned), ""]
    lines.append(f"{planned.status}: {planned.why}")
    if planned.best is not None and planned.gap is not None:
        lines.append(
            f"on this cost model no plan of the space is below "
            f"{units.seconds(planned.lower_bound_s)}, so at most {planned.gap:.1%} from optimal; "
            f"{units.counted(planned.num_drafted, 'candidate')}, "
            f"{planned.num_simulated} simulated in "
            f"{units.seconds(planned.seconds)}"
        )
    return "\n".join(lines)


def fewer_text(fewer: FewerDevices) -> str:
    """That fewer devices are faster, and what to do about it."""
    return (
        f"fewer devices are faster: {fewer.num_devices} of these {fewer.of_devices} as "
        f"{fewer.arrangement} take {units.seconds(fewer.step_s)} (x{fewer.times:.2f}); plan for "
        f"{fewer.num_devices}, or with a batch that {fewer.of_devices} devices can share"
    )


def stages_text(simulation: Simulation) -> str:
    """A table of the stages."""
    rows = stage_rows(simulation, MOST_STAGES)
    left = len(simulation.stages) - len(rows)
    more = f"\n... and {left} more stages" if left > 0 else ""
    return units.table(STAGE_HEADER, rows, numbers=(3,)) + more


def stage_rows(simulation: Simulation, most: int) -> list[tuple[str, ...]]:
    """The first stages, each with its devices, ops and splits, as `STAGE_HEADER` says."""
    rows: list[tuple[str, ...]] = []
    for stage in (simulation.decided or simulation.stages)[:most]:
        devices = stage.mesh.devices
        names = [simulation.cluster.devices[d].name for d in (devices[0], devices[-1])]
        rows.append(
            (
                stage.name,
                names[0] if len(devices) == 1 else f"{names[0]} to {names[1]}",
                str(stage.mesh),
                f"{len(stage.splits)}",
                stage.splits[0].op,
                split_words(stage.splits),
                kept_words(stage, simulation.workload.graph),
                CHECKPOINTED.get(stage.checkpointing, ""),
            )
        )
    return rows


def kept_words(stage: Stage, graph: Graph) -> str:
    """How most of a stage's parameters are kept, by their size; nothing where it has none.

    Those of which no device has a copy are split with their ops, whatever the ZeRO stage.
    """
    sizes: dict[int, float] = {}
    split_bytes = 0.0
    for split in stage.splits:
        tensors = [graph.tensor(name) for name in graph.op(split.op).inputs]
        own = sum(tensor.size_bytes for tensor in tensors if tensor.role == "parameter")
        copied = copied_bytes(graph, stage, split)
        split_bytes += own - copied
        if copied:
            sizes[split.zero] = sizes.get(split.zero, 0.0) + copied
    if sizes:
        return KEPT[max(sizes, key=lambda level: sizes[level])]
    if not split_bytes:
        return "none"
    return "split" if len(stage.mesh.devices) > 1 else KEPT[0]


def split_words(splits: tuple[Any, ...], most: int = 3) -> str:
    """The commonest splits of some ops."""
    counts: dict[str, int] = {}
    for split in splits:
        name = " x ".join(dim or "-" for dim in split.dims)
        counts[name] = counts.get(name, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ranked[:most])


def others_text(planned: Planned) -> str:
    """The best and the next best plans."""
    assert planned.best is not None, "there is a best where there are others"
    everything = (planned.best, *planned.others)
    steady = any(other.objective_s != other.step_s for other in everything)
    rows = [candidate_row(candidate, planned.best, steady) for candidate in everything]
    interval = ("steady state",) if steady else ()
    header = ("found by", "plan", "step", INTERVAL, *interval, "", MEMORY_HEADER, "bubble")
    return units.table(header, rows, numbers=range(2, len(header)))


def candidate_row(candidate: SimulatedPlan, best: SimulatedPlan, steady: bool) -> tuple[str, ...]:
    """One plan in one line, against the best; with the time from steady state where it counts."""
    simulation = candidate.simulation
    return (
        candidate.name,
        simulation.arrangement,
        units.seconds(candidate.step_s),
        likely_range(simulation),
        *((units.seconds(candidate.objective_s),) if steady else ()),
        f"x{candidate.objective_s / best.objective_s:.2f}{_equal(candidate, best)}",
        units.size(simulation.fullest[0]),
        f"{simulation.bubble:.0%}",
    )


def _equal(candidate: SimulatedPlan, best: SimulatedPlan) -> str:
    """Plans within each other's 80 % intervals are called equal."""
    spread = best.simulation.spread
    same = candidate is not best and alike(candidate.objective_s, best.objective_s, spread)
    return " equal" if same else ""


def _interval(planned: Planned) -> tuple[str, ...]:
    """A line for the time from steady state, where that is what counts and not the step."""
    assert planned.best is not None, "there is a best to speak of"
    seconds = planned.best.objective_s
    if seconds == planned.best.step_s or not seconds:
        return ()
    simulation = planned.best.simulation
    rate = throughput(simulation, seconds, digits=1)
    every = predicted_words(seconds, around(seconds, simulation.spread))
    return (f"steady     a batch every {every}   ({rate})",)


def planned_json(planned: Planned, model: str, cluster: str, written: str | None) -> dict[str, Any]:
    """The same for programs."""
    best = planned.best
    return {
        "format": "partita/result@1",
        "problem": model,
        "cluster": cluster,
        "method": "joint" if best is None else best.name,
        "status": str(planned.status),
        "objective": None if best is None else best.objective_s,
        "lower_bound": planned.lower_bound_s,
        "gap": planned.gap,
        "seconds": planned.seconds,
        "seed": planned.seed,
        "why": planned.why,
        "num_drafted": planned.num_drafted,
        "num_simulated": planned.num_simulated,
        "history": [
            {"seconds": step.seconds, "objective": step.objective, "lower_bound": step.lower_bound}
            for step in planned.history
        ],
        "solution": None if best is None else _plan_json(best),
        "others": [_plan_json(candidate) for candidate in planned.others],
        "plan": written,
    }


def _plan_json(candidate: SimulatedPlan) -> dict[str, Any]:
    simulation = candidate.simulation
    return {
        "found_by": candidate.name,
        "step_s": candidate.step_s,
        "step_interval_s": list(simulation.likely_step_s),
        "objective_s": candidate.objective_s,
        "bubble": simulation.bubble,
        "peak_memory_bytes": list(simulation.peak_bytes),
        "schedule": simulation.schedule.name,
        "num_microbatches": simulation.schedule.num_microbatches,
        "stages": [
            {
                "name": stage.name,
                "mesh": [axis.size for axis in stage.mesh.axes],
                "devices": list(stage.mesh.devices),
                "num_ops": len(stage.splits),
                "recompute": (stage.checkpointing == "full"),
                "again": len(stage.recomputed),
            }
            for stage in (simulation.decided or simulation.stages)
        ],
    }
