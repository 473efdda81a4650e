"""What is left of a machine without some nodes, in words: the plan, and what moving costs."""

from typing import Any

from partita import units
from partita.jobs.vanish import Vanished
from partita.report.summary import likely_seconds

MOST_LINKS = 3
LOST = "no device that is left holds it: read from a checkpoint, not counted in the seconds"


def vanished_text(answer: Vanished) -> str:
    """A paragraph."""
    num_left = answer.cluster.num_devices + len(answer.idle)
    gone, left = answer.num_before - num_left, units.counted(num_left, "device")
    title = f"without {', '.join(answer.names)}: {gone} of {answer.num_before} gone, {left} left"
    best, cost = answer.planned.best, answer.moves
    if best is None or cost is None:
        return f"{title}\n  {answer.planned.why}"
    rows = [
        ("plan", best.simulation.arrangement),
        (
            "step",
            f"{likely_seconds(best.simulation)}; {answer.slowdown:.2f} times the "
            f"{units.seconds(answer.step_before_s)} of all",
        ),
        (
            "moving",
            f"{units.size(cost.moved_bytes)} of {units.size(cost.needed_bytes)} parameters and "
            f"states: {units.seconds(cost.seconds)}",
        ),
        *(
            ("", f"{load.link}: {units.size(load.bytes_sent)}, {units.seconds(load.seconds)}")
            for load in cost.links[:MOST_LINKS]
        ),
    ]
    if answer.idle:
        rows.insert(1, ("idle", f"{', '.join(answer.idle)}: with them a step takes longer"))
    if cost.lost_bytes:
        rows.append(("lost", f"{units.size(cost.lost_bytes)}; {LOST}"))
    return "\n".join([title, *(f"  {name:8}{text}" for name, text in rows)])


def vanished_json(answer: Vanished, written: str | None) -> dict[str, Any]:
    """The same for programs, with every link and pair."""
    best, cost = answer.planned.best, answer.moves
    return {
        "without": list(answer.names),
        "cluster": answer.cluster.name,
        "num_devices": answer.cluster.num_devices,
        "idle": list(answer.idle),
        "status": str(answer.planned.status),
        "why": answer.planned.why,
        "plan": None if best is None else best.simulation.arrangement,
        "step_s": None if best is None else best.step_s,
        "slowdown": answer.slowdown,
        "output": written,
        "moving": None
        if cost is None
        else {
            "needed_bytes": cost.needed_bytes,
            "kept_bytes": cost.kept_bytes,
            "moved_bytes": cost.moved_bytes,
            "lost_bytes": cost.lost_bytes,
            "seconds": cost.seconds,
            "links": [
                {"link": load.link, "bytes": load.bytes_sent, "seconds": load.seconds}
                for load in cost.links
            ],
            "pairs": [
                {"from": source, "to": target, "bytes": size} for source, target, size in cost.pairs
            ],
        },
    }
