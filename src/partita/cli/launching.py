"""How a plan is launched: `partita run`, and the frameworks that can be told it."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partita.jobs.plan_simulator import Planned


def launch_of(planned: "Planned") -> dict[str, str]:
    """For each target of an export nothing if the plan's degrees fit it, else why they do not."""
    from partita.export.job import fitting_targets

    if planned.plan is None or planned.best is None or not planned.plan.model.training:
        return {}
    return fitting_targets(planned.plan, planned.best.simulation.workload)


def launch_lines(launch: dict[str, str], run: str | None, written: Path | None) -> list[str]:
    """What to type: the last lines of `partita plan`."""
    kept = written is not None
    lines = []
    if run is not None:
        first = "" if kept else "-o plan.json keeps the plan; "
        lines.append(f"{first}run it with: {run}")
    names = [name for name, why in launch.items() if not why]
    others = [name for name, why in launch.items() if why]
    if names:
        command = f"partita export {written or 'plan.json'} --to {' | '.join(names)}"
        lines.append(f"to launch: {command}")
        if others:  # a line of its own, which may wrap
            told = ", ".join(others)
            lines.append(f"for {told} the nearest plan is written, and what it costs said")
    return lines
