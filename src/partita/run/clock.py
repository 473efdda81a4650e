"""The one clock: what a run takes, by the GPU's own events or by the clock of the host."""

import itertools
import time
from collections.abc import Callable

import torch


def run_times_s(run: Callable[[], object], runs: int, *, on_gpu: bool) -> list[float]:
    """Seconds of some runs back to back; on a GPU between events that the device records."""
    if not on_gpu:
        return [_host_s(run) for _ in range(runs)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def _host_s(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
