"""What was decided for one model, input shape and GPU: saved and loaded as JSON.

A schedule names steps as they come out of the passes, which are the same every time; the
fingerprint of the steps says whether it belongs to a model. Weights are not part of it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita import files
from partita.errors import PlanError
from partita.gpu.flow.steps import Flow
from partita.gpu.streams.order import Launch, LaunchPlan
from partita.gpu.streams.pieces import Group
from partita.gpu.streams.ways import Way

FORMAT = "streams-schedule"
VERSION = 1
FORMS = {
    "sequential": "sequential graph",  # PyTorch's operators
    "compile": "torch.compile",
    "compiled": "compiled graph",  # torch.compile's kernels in a graph of ours
    "streams": "",  # our own, see label_of
}


@dataclass(frozen=True, slots=True)
class StreamSchedule:
    """The best found for one shape of inputs."""

    shapes: tuple[tuple[int, ...], ...]  # of the inputs
    dtype: str
    on: str  # GPU and versions
    form: str  # one of FORMS
    variant: str  # which passes ran: "fold" or "merge"
    fingerprint: str  # of the steps
    plan: LaunchPlan
    ways: tuple[tuple[str, str], ...]  # step, way
    times_us: tuple[tuple[str, float], ...]  # of every candidate, whole calls, in one run
    error: float  # relative, to the model in float64
    model_error: float  # the given model's own
    seconds: float  # it took to find
    notes: tuple[str, ...] = ()
    pieces: tuple[Group, ...] = ()  # steps that are one launch

    @property
    def time_us(self) -> float:
        """What a call takes."""
        return dict(self.times_us)[self.label]

    @property
    def label(self) -> str:
        """The name of the candidate that was kept."""
        return FORMS.get(self.form) or label_of(self.variant, self.pieces, self.plan)

    def way_of(self) -> dict[str, Way]:
        """The way of every step."""
        return {step: Way.parse(way) for step, way in self.ways}

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "shapes": [list(shape) for shape in self.shapes],
            "dtype": self.dtype,
            "on": self.on,
            "form": self.form,
            "variant": self.variant,
            "fingerprint": self.fingerprint,
            "plan": {
                "name": self.plan.name,
                "launches": [
                    {"step": each.step, "stream": each.stream, "waits": list(each.waits)}
                    for each in self.plan.launches
                ],
            },
            "ways": [list(each) for each in self.ways],
            "times_us": [[name, round(time, 3)] for name, time in self.times_us],
            "error": self.error,
            "model_error": self.model_error,
            "seconds": round(self.seconds, 2),
            "notes": list(self.notes),
            "pieces": [list(each) for each in self.pieces],
        }


def label_of(variant: str, pieces: tuple[Group, ...], plan: LaunchPlan) -> str:
    """The name of a candidate of ours."""
    return f"{variant} with pieces, {plan.name}" if pieces else f"{variant}, {plan.name}"


@dataclass(frozen=True, slots=True)
class _SchedulesFile:
    schedules: tuple[StreamSchedule, ...]
    model: str = ""


def write_schedules(
    path: str | Path, schedules: tuple[StreamSchedule, ...], model: str, *, overwrite: bool = False
) -> None:
    """Save all schedules of a model in one file."""
    value = {
        "format": f"partita/{FORMAT}@{VERSION}",
        "model": model,
        "schedules": [schedule.to_json() for schedule in schedules],
    }
    files.write_atomically(path, files.encode_json(value), overwrite=overwrite)


def read_schedules(path: str | Path) -> tuple[StreamSchedule, ...]:
    """Read what `write_schedules` wrote."""
    value = files.decode_json(files.read_bytes(path), str(path))
    files.check_format(value, FORMAT, VERSION, str(path))
    return files.convert(value, _SchedulesFile, str(path)).schedules


def schedule_of(value: Any) -> StreamSchedule:
    """What `to_json` gave, as a schedule again."""
    return files.convert(value, StreamSchedule, "a schedule")


def fingerprint(flow: Flow) -> str:
    """Equal for equal steps over equal shapes; weights do not count."""
    text = repr([(step, flow.shapes.get(step.name)) for step in flow.steps])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_plan(schedule: StreamSchedule, flow: Flow) -> None:
    """Refuse a schedule that is not for these steps."""
    if fingerprint(flow) != schedule.fingerprint:
        raise other_steps(schedule, f"here {fingerprint(flow)}")


def other_steps(schedule: StreamSchedule, here: str) -> PlanError:
    """The refusal of a schedule that does not belong to the model."""
    return PlanError(
        f"the schedule is for other steps ({schedule.fingerprint}, {here})",
        fix="give the model it was made for, or optimise again",
    )


__all__ = [
    "Launch",
    "StreamSchedule",
    "check_plan",
    "fingerprint",
    "read_schedules",
    "schedule_of",
    "write_schedules",
]
