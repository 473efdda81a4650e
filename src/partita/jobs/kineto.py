"""Kineto traces (the Chrome JSON that torch.profiler writes) beside the prediction of a plan.

On a GPU what counts is the device: kernels by their names, copies, and NCCL's kernels. Where a
trace has no kernels, ops of the CPU count with the time they spend themselves; what runs inside a
product, attention or communication is part of it. Steps are those of the profiler's schedule
(`ProfilerStep#`), or all of the trace. Host gaps are the time of a step in which nothing runs.

    products   attention   elementwise   communication   host gaps
"""

import gzip
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.costs.roofline import op_class
from partita.errors import FileError
from partita.files import decode_json, read_bytes
from partita.jobs.simulate import Simulation, simulate
from partita.meaning import COMMUNICATION, Purpose
from partita.plans import Plan
from partita.program import Program
from partita.showing import plot_of, repr_html, table_of

CATEGORIES = ("products", "attention", "elementwise", "communication", "host gaps")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION = re.compile(r"nccl|gloo|c10d::|record_param_comms|all_?reduce|all_?gather", re.I)
_ATTENTION = re.compile(r"flash|fmha|attention|scaled_dot_product", re.I)
_PRODUCTS = re.compile(
    r"gemm|cutlass|cublas|xmma|wgmma|conv|::(addmm|mm|bmm|matmul|linear|baddbmm|einsum)\b"
    r"|MmBackward|AddmmBackward|ConvolutionBackward", re.I,
)  # fmt: skip
_STEP = re.compile(r"ProfilerStep#\d+")


@dataclass(frozen=True, slots=True)
class Event:
    """One slice of a trace, in seconds."""

    name: str
    category: str
    thread: tuple[str, str]
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class KinetoTrace:
    """The slices of a trace, and the spans of its steps."""

    file: str
    events: tuple[Event, ...]
    steps: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class KinetoComparison:
    """Seconds of a step by category: predicted of the mean device, measured of the trace's."""

    file: str
    num_steps: int
    on_device: bool
    predicted_step_s: float
    measured_step_s: float
    predicted: dict[str, float]
    measured: dict[str, float]

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook


def read_kineto(path: str | Path) -> KinetoTrace:
    """Read a trace, plain or gzipped; what is malformed is named with its field."""
    file = str(path)
    data = read_bytes(path)
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise FileError(f"cannot be unpacked ({error})", file=file) from None
    value = decode_json(data, file)
    listed = value.get("traceEvents")
    if not isinstance(listed, list):
        raise FileError(
            "is missing" if listed is None else "is no list",
            fix="give a trace of torch.profiler (export_chrome_trace)", field="traceEvents",
            file=file,
        )  # fmt: skip
    events = []
    for i, each in enumerate(listed):
        if not isinstance(each, dict):
            raise FileError("is no object", field=f"traceEvents[{i}]", file=file)
        if each.get("ph") == "X":
            events.append(_event(each, f"traceEvents[{i}]", file))
    if not events:
        raise FileError(
            "has no slices (events with ph X)", fix="profile at least one step",
            field="traceEvents", file=file,
        )  # fmt: skip
    steps = sorted({(e.start, e.end) for e in events if _STEP.fullmatch(e.name)})
    counted = [e for e in events if e.category in (*DEVICE, "cpu_op")]
    if not counted:
        raise FileError(
            "has neither kernels nor ops of the CPU",
            fix="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            field="traceEvents", file=file,
        )  # fmt: skip
    whole = (min(e.start for e in counted), max(e.end for e in counted))
    return KinetoTrace(file, tuple(counted), tuple(steps) or (whole,))


def _event(each: dict[str, Any], where: str, file: str) -> Event:
    for field in ("ts", "dur"):
        number = each.get(field)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or (field == "dur" and float(str(number)) < 0):
            raise FileError(
                f"is {number!r}", fix="a number of microseconds is needed",
                field=f"{where}.{field}", file=file,
            )  # fmt: skip
    name = each.get("name")
    if not isinstance(name, str):
        raise FileError(f"is {name!r}", fix="text is needed", field=f"{where}.name", file=file)
    start = each["ts"] / 1e6
    thread = (str(each.get("pid")), str(each.get("tid")))
    return Event(name, str(each.get("cat", "")).lower(), thread, start, start + each["dur"] / 1e6)


def kind_of_event(name: str) -> str:
    """The category of a kernel or op, by its name."""
    for category, pattern in (
        ("communication", _COMMUNICATION), ("attention", _ATTENTION), ("products", _PRODUCTS),
    ):  # fmt: skip
        if pattern.search(name):
            return category
    return "elementwise"


def measured_categories(trace: KinetoTrace) -> tuple[dict[str, float], bool]:
    """Seconds of a step by category, and whether they are a device's."""
    on_device = any(event.category in DEVICE for event in trace.events)
    wanted = DEVICE if on_device else ("cpu_op",)
    first, last = trace.steps[0][0], trace.steps[-1][1]
    events = [e for e in trace.events if e.category in wanted and e.end > first and e.start < last]
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    busy = 0.0
    if on_device:
        for event in events:
            seconds[kind_of_event(event.name)] += event.end - event.start
    else:
        _own_times(events, seconds)
    busy = sum(b - a for a, b in _joined((e.start, e.end) for e in events))
    length = sum(b - a for a, b in _joined(trace.steps))
    seconds["host gaps"] = max(0.0, length - busy)
    return {name: each / len(trace.steps) for name, each in seconds.items()}, on_device


def _own_times(events: Sequence[Event], seconds: dict[str, float]) -> None:
    """Each op's time without that of the ops it calls, which have its category if it has one."""
    threads: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        threads.setdefault(event.thread, []).append(event)
    for own in threads.values():
        stack: list[tuple[Event, str]] = []
        for event in sorted(own, key=lambda e: (e.start, -e.end)):
            while stack and stack[-1][0].end <= event.start:
                stack.pop()
            category = kind_of_event(event.name)
            length = event.end - event.start
            if stack:
                outer = stack[-1][1]
                category = outer if outer != "elementwise" else category
                seconds[outer] -= min(length, stack[-1][0].end - event.start)
            seconds[category] += length
            stack.append((event, category))


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def predicted_categories(simulation: Simulation) -> dict[str, float]:
    """Seconds of a step of the mean device by category; host gaps are the launches."""
    program = simulation.timeline.program
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    graph = simulation.workload.graph
    classes = {
        op.name: {"product": "products"}.get(name := op_class(graph.call(op)), name)
        for op in graph.ops
    }
    launch = simulation.cluster.kind_of(simulation.stage.mesh.devices[0]).launch_s
    runs: list[tuple[Program, float]] = [(program, 1.0)]
    if program.bodies:
        # What is inside a stage's blocks runs once per micro-batch.
        used = {program.works[n].body for n in program.work.tolist() if n >= 0}
        steady = {w.body for w in program.works if w.purpose is Purpose.COMPUTE}
        count = float(simulation.schedule.num_microbatches)
        runs += [(program.bodies[b].program, count) for b in sorted(used & steady) if b >= 0]
    devices = len({lane.name for lane in program.lanes if lane.kind == "device"}) or 1
    for within, times in runs:
        for task, number in enumerate(within.work.tolist()):
            if number < 0:
                continue
            work, length = within.works[number], float(within.duration[task]) * times
            if work.purpose in COMMUNICATION:
                seconds["communication"] += length / devices
            elif work.op in classes or work.purpose is Purpose.UPDATE:
                start = min(length, launch * times)
                seconds[classes.get(work.op, "elementwise")] += (length - start) / devices
                seconds["host gaps"] += start / devices
    return seconds


def compare_kineto(plan: Plan, trace: KinetoTrace) -> KinetoComparison:
    """A plan's prediction beside the categories of a trace of one rank."""
    simulation = simulate(plan)
    measured, on_device = measured_categories(trace)
    length = sum(b - a for a, b in _joined(trace.steps)) / len(trace.steps)
    return KinetoComparison(
        trace.file, len(trace.steps), on_device, simulation.step_s, length,
        predicted_categories(simulation), measured,
    )  # fmt: skip
