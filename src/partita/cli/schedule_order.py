"""Orders on the command line: CSV files of torch's pipelining, named schedules, plans.

`partita schedule` runs and draws them, `partita verify` says what torch's runtimes make of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita import files
from partita.errors import InputError, PlanError, VerificationError
from partita.schedules.actions import Order
from partita.schedules.named import NAMED
from partita.schedules.order_problem import in_flight
from partita.schedules.torch_csv import TorchSchedule, read_torch_csv, torch_schedule
from partita.verify.torch_schedules import TorchVerdict, verify_torch_schedule

NEEDS_BACKWARD = "torch's runtime asks for a backward of every forward; this runs as inference"


@dataclass(frozen=True, slots=True)
class GivenOrder:
    """An order that is given, not searched: where it is from, and what torch makes of it."""

    name: str
    schedule: TorchSchedule
    verdict: TorchVerdict | None  # None: it has no backward, which torch asks for

    @property
    def order(self) -> Order:
        """What computes, row by row."""
        return self.schedule.order

    def to_json(self) -> dict[str, Any]:
        """What `--json` holds of it."""
        verdict = self.verdict
        return {
            "form": self.schedule.form,
            "ranks": len(self.schedule.rows),
            "stages": self.schedule.num_stages,
            "microbatches": self.schedule.num_microbatches,
            "in_flight": list(in_flight(self.order)),
            "verified": verdict is not None and not verdict.refusals,
            "nccl": [str(r) for r in verdict.in_order] if verdict else [NEEDS_BACKWARD],
            "lockstep": [str(r) for r in verdict.lockstep] if verdict else [NEEDS_BACKWARD],
            "notes": list(verdict.notes) if verdict else [NEEDS_BACKWARD],
        }


def order_of_file(path: Path) -> GivenOrder:
    """The order in a CSV file; one that torch would not run to its end is refused."""
    return _judged(path.stem, read_torch_csv(path), str(path))


def order_of_plan(path: str | Path) -> GivenOrder:
    """The order that a plan's schedule is, a row for each group of devices."""
    from partita.jobs.torch_schedule import schedule_of_plan
    from partita.plans import read_plan

    try:
        schedule = schedule_of_plan(read_plan(path))
    except PlanError as error:
        raise error.within(str(path)) from None
    return _judged(Path(path).stem, schedule, str(path))


def order_of_name(name: str, devices: int, chunks: int, microbatches: int) -> GivenOrder:
    """A published schedule for so many devices, stages on each of them, and micro-batches."""
    named = NAMED[name]
    why = "holds the model twice, which torch does not" if named.layout == "two-way" else ""
    why = why or named.refuses(devices, chunks, microbatches)
    if why:
        raise InputError(f"{named.title} {why}", fix="choose other numbers", field="PLACEMENT")
    return _judged(name, torch_schedule(named.order(devices, chunks, microbatches)), name)


def is_plan(path: Path) -> bool:
    """Is this file a plan?"""
    if not path.name.endswith(".json") or not path.is_file():
        return False
    value = files.decode_json(files.read_bytes(path), str(path))
    return isinstance(value, Mapping) and str(value.get("format", "")).startswith("partita/plan@")


def _judged(name: str, schedule: TorchSchedule, file: str) -> GivenOrder:
    if not any(place.action.kind in ("B", "I") for place in schedule.places()):
        return GivenOrder(name, schedule, None)
    verdict = verify_torch_schedule(schedule)
    if verdict.refusals:
        raise VerificationError(tuple(f"{file}: {refusal}" for refusal in verdict.refusals))
    return GivenOrder(name, schedule, verdict)


def order_text(given: GivenOrder) -> list[str]:
    """What torch makes of an order, and how many micro-batches are in flight: a line each."""
    counts = in_flight(given.order)
    held = ", ".join(map(str, counts[:16])) + (", ..." if len(counts) > 16 else "")
    return [f"in flight {held} micro-batches at most on each rank", *verdict_text(given)]


def verdict_text(given: GivenOrder) -> list[str]:
    """What each of torch's runtimes makes of an order."""
    schedule, verdict = given.schedule, given.verdict
    if verdict is None:
        return [f"torch     {NEEDS_BACKWARD}"]
    sizes = ", ".join(
        f"{count:,} {one if count == 1 else many}"
        for count, one, many in (
            (len(schedule.rows), "rank", "ranks"),
            (schedule.num_stages, "stage", "stages"),
            (schedule.num_microbatches, "micro-batch", "micro-batches"),
        )
    )
    right = "messages match, nobody waits for ever, gradients are complete"
    lines = [f"torch     {schedule.form}, {sizes}: {right}"]
    if verdict.in_order:
        lines.append("  NCCL    hangs, if messages of two ranks run one at a time: ")
        lines[-1] += str(verdict.in_order[0])
    if verdict.lockstep and schedule.form == "compute_only":
        lines.append(f"  older   PipelineScheduleMulti cannot run it: {verdict.lockstep[0]}")
    return lines + [f"  note    {note}" for note in verdict.notes]
