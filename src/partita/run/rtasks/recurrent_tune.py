"""Choosing a shape by timing: the rule's first few on the device, within a budget of seconds.

The rule of `recurrent_spec.shapes` knows no compiler and no cache; where a call matters, the few
shapes it puts first are compiled and timed in CUDA graphs. Answers are kept for the process, by
spec and device; a caller may store them: a `Shape` is plain numbers.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.errors import ProblemError
from partita.run.rtasks.recurrent import Persistent, compile_recurrent, num_units
from partita.run.rtasks.recurrent_spec import Recurrent, Shape, recurrent_refusal, shapes

T = torch.Tensor
TRIED = 4


class Tuned:
    """What was timed, per spec and device: (shape, milliseconds), the fastest first."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Recurrent, int, str], list[tuple[Shape, float]]] = {}

    def __call__(
        self,
        spec: Recurrent,
        weights: Sequence[T],
        device: torch.device,
        num_steps: int = 100,
        budget_s: float = 30.0,
        most: int = TRIED,
    ) -> list[tuple[Shape, float]]:
        """Time shapes until the budget is spent; the first one always."""
        key = (spec, num_steps, torch.cuda.get_device_name(device))
        if key not in self.kept:
            self.kept[key] = _timed(spec, weights, device, num_steps, budget_s, most)
        return self.kept[key]


def _timed(
    spec: Recurrent,
    weights: Sequence[T],
    device: torch.device,
    num_steps: int,
    budget_s: float,
    most: int,
) -> list[tuple[Shape, float]]:
    begin = time.perf_counter()
    first = (spec.batch, num_steps) if spec.batch_first else (num_steps, spec.batch)
    x = torch.randn(*first, spec.input_size, device=device).to(spec.dtype)
    found: list[tuple[Shape, float]] = []
    failures: list[str] = []
    for shape in shapes(spec, num_units(device))[:most]:
        if found and time.perf_counter() - begin > budget_s:
            break
        layers = compile_recurrent(spec, weights, device, shape)
        try:
            found.append((shape, milliseconds(_captured(layers, x))))
        except ProblemError as failure:  # its programs are not all resident
            failures.append(str(failure))
    if not found:
        reason = recurrent_refusal(spec, num_units(device)) or "; ".join(failures)
        raise ProblemError(reason, fix="run these layers as they are")
    return sorted(found, key=lambda pair: pair[1])


def _captured(layers: Persistent, x: T) -> Callable[[], Any]:
    layers(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(x)
    return graph.replay


def milliseconds(action: Callable[[], Any], repeats: int = 9, inner: int = 3) -> float:
    """Median time of a call on the device."""
    action()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / inner)
    return float(statistics.median(times))


tune = Tuned()
