"""A planning job in words: the plan stage by stage, the next best, how far from optimal."""

from typing import Any

from partita import units
from partita.jobs.plan import Candidate, Planned
from partita.jobs.simulate import RECOMPUTED, Simulation
from partita.report.summary import arrangement, headline

MOST_STAGES = 16
KEPT = {"none": "copies", "states": "states in shares", "gradients": "gradients in shares",
        "parameters": "parameters in shares"}  # fmt: skip


def planned_text(found: Planned) -> str:
    """What to know of a planning job, in a screenful."""
    lines: list[str] = []
    if found.best is not None:
        simulation = found.best.simulation
        lines += [*headline(simulation), "", stages_text(simulation), ""]
        if found.others:
            lines += [others_text(found), ""]
    lines.append(f"{found.status}: {found.why}")
    if found.best is not None and found.gap is not None:
        lines.append(
            f"no plan below {units.seconds(found.lower_bound_s)}, so at most {found.gap:.1%} from "
            f"optimal; {found.num_drafted} drafted, {found.num_simulated} simulated in "
            f"{units.seconds(found.seconds)}"
        )
    return "\n".join(lines)


def stages_text(simulation: Simulation) -> str:
    """A table of the stages."""
    rows = []
    for stage in simulation.stages[:MOST_STAGES]:
        devices = stage.mesh.devices
        names = [simulation.cluster.devices[d].name for d in (devices[0], devices[-1])]
        kept = max(
            (split.sharded for split in stage.splits),
            key=lambda level: sum(s.sharded == level for s in stage.splits),
        )
        rows.append(
            (
                stage.name,
                names[0] if len(devices) == 1 else f"{names[0]} to {names[1]}",
                str(stage.mesh),
                f"{len(stage.splits)}",
                stage.splits[0].op,
                split_words(stage.splits),
                KEPT[kept],
                RECOMPUTED.get(stage.recomputed, ""),
            )
        )
    header = ("stage", "devices", "mesh", "ops", "from", "ops by split", "parameters", "")
    left = len(simulation.stages) - len(rows)
    more = f"\n... and {left} more stages" if left > 0 else ""
    return units.table(header, rows, numbers=(3,)) + more


def split_words(splits: tuple[Any, ...], most: int = 3) -> str:
    """The commonest splits of some ops."""
    counts: dict[str, int] = {}
    for split in splits:
        name = " x ".join(dim or "-" for dim in split.dims)
        counts[name] = counts.get(name, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ranked[:most])


def others_text(found: Planned) -> str:
    """The best and the next best plans."""
    assert found.best is not None, "there is a best where there are others"
    rows = [candidate_row(candidate, found.best) for candidate in (found.best, *found.others)]
    header = ("found by", "plan", "step", "", "memory", "bubble")
    return units.table(header, rows, numbers=(2, 3, 4, 5))


def candidate_row(candidate: Candidate, best: Candidate) -> tuple[str, ...]:
    """One plan in one line, against the best."""
    simulation = candidate.simulation
    return (
        candidate.name,
        arrangement(simulation).rsplit(", bubble", 1)[0],
        units.seconds(candidate.step_s),
        f"x{candidate.objective_s / best.objective_s:.2f}",
        units.size(max(simulation.peak_bytes)),
        f"{simulation.bubble:.0%}",
    )


def planned_json(found: Planned, model: str, cluster: str, written: str | None) -> dict[str, Any]:
    """The same for programs."""
    best = found.best
    return {
        "format": "partita/result@1",
        "problem": model,
        "cluster": cluster,
        "method": "joint" if best is None else best.name,
        "status": str(found.status),
        "objective": None if best is None else best.objective_s,
        "lower_bound": found.lower_bound_s,
        "gap": found.gap,
        "seconds": found.seconds,
        "seed": found.seed,
        "why": found.why,
        "num_drafted": found.num_drafted,
        "num_simulated": found.num_simulated,
        "history": [
            {"seconds": step.seconds, "objective": step.objective, "lower_bound": step.lower_bound}
            for step in found.history
        ],
        "solution": None if best is None else _plan_json(best),
        "others": [_plan_json(candidate) for candidate in found.others],
        "plan": written,
    }


def _plan_json(candidate: Candidate) -> dict[str, Any]:
    simulation = candidate.simulation
    return {
        "found_by": candidate.name,
        "step_s": candidate.step_s,
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
                "recompute": stage.recompute,
                "again": len(stage.again),
            }
            for stage in simulation.stages
        ],
    }
