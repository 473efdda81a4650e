"""Kernels that a call starts, their time and names, as PyTorch's profiler saw them."""

from collections.abc import Callable
from typing import Any

import torch
from gpu_timing import Clock
from torch.profiler import ProfilerActivity, profile, record_function

MOST_NAMES = 30


def kernels_of(run: Callable[[], object], clock: Clock) -> dict[str, Any]:
    """How many kernels one call starts, and for how many seconds they keep the GPU busy."""
    return phases_of({"all": run}, clock)["all"]


def phases_of(phases: dict[str, Callable[[], object]], clock: Clock) -> dict[str, dict[str, Any]]:
    """The same for calls that follow each other; the device is waited for between them."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * clock.cuda
    clock.sync()
    with profile(activities=activities) as profiler:
        for name, run in phases.items():
            with record_function(f"phase {name}"):
                run()
                clock.sync()
    events = list(_events(profiler))
    spans = {
        name.removeprefix("phase "): (start, start + length)
        for name, on_gpu, start, length in events
        if name.startswith("phase ") and not on_gpu
    }
    # The ranges that PyTorch names on the host come back as ranges on the GPU: they are no kernels.
    ranges = {name for name, on_gpu, _, _ in events if not on_gpu}
    counts: dict[str, dict[str, Any]] = {
        name: {"kernels": 0, "copies": 0, "busy_s": 0.0, "launches": 0, "names": {}}
        for name in phases
    }
    for name, on_gpu, start, length in events:
        phase = next((p for p, (begin, end) in spans.items() if begin <= start <= end), None)
        if phase is None or (on_gpu and name in ranges):
            continue
        count = counts[phase]
        if on_gpu:
            copy = name.startswith(("Memcpy", "Memset"))
            count["copies" if copy else "kernels"] += 1
            count["busy_s"] += length / 1e9
            times = count["names"].setdefault(name[:120], [0, 0.0])
            times[0] += 1
            times[1] += length / 1e9
        elif "aunchKernel" in name:
            count["launches"] += 1
    for count in counts.values():
        longest = sorted(count["names"].items(), key=lambda item: -item[1][1])[:MOST_NAMES]
        count["names"] = {name: [times[0], round(times[1], 9)] for name, times in longest}
    return counts


def _events(profiler: Any) -> Any:
    """(name, on the GPU?, start and length in ns) of all that was seen."""
    cuda = torch.autograd.DeviceType.CUDA
    inner = getattr(profiler, "profiler", None)
    kineto = getattr(inner, "kineto_results", None)
    if kineto is not None and hasattr(kineto.events()[0], "duration_ns"):
        for event in kineto.events():
            yield event.name(), event.device_type() == cuda, event.start_ns(), event.duration_ns()
        return
    for event in profiler.events():  # the public way: slower
        start, end = event.time_range.start * 1e3, event.time_range.end * 1e3
        yield event.name, event.device_type == cuda, start, end - start
