"""Choosing a shape by timing: the rule's first few on the device, within a budget of seconds.

The rule of `recurrent_spec.shapes` knows no compiler and no cache; where a call matters, the few
shapes it puts first are compiled and timed in CUDA graphs. Answers are kept for the process, by
spec and device; a caller may store them: a `Shape` is plain numbers.
"""

import time
from collections.abc import Sequence

import torch

from partita.errors import ProblemError
from partita.gpu.graphs import capture
from partita.gpu.measure import replay_us
from partita.gpu.recurrent.layers import Persistent, compile_recurrent, num_units
from partita.gpu.recurrent.spec import Recurrent, Shape, recurrent_refusal, shapes

T = torch.Tensor
TRIED = 4
REPEATS, CALLS = 9, 3  # of a captured call: times that are taken, calls in each


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
    timed: list[tuple[Shape, float]] = []
    failures: list[str] = []
    for shape in shapes(spec, num_units(device))[:most]:
        if timed and time.perf_counter() - begin > budget_s:
            break
        layers = compile_recurrent(spec, weights, device, shape)
        try:
            timed.append((shape, call_ms(layers, x)))
        except ProblemError as failure:  # its programs are not all resident
            failures.append(str(failure))
    if not timed:
        reason = recurrent_refusal(spec, num_units(device)) or "; ".join(failures)
        raise ProblemError(reason, fix="run these layers as they are")
    return sorted(timed, key=lambda pair: pair[1])


def call_ms(layers: Persistent, x: T) -> float:
    """The median time of a call on the device, captured in a graph; some calls at a time."""
    replay = capture(lambda: layers(x)).replay

    def some() -> None:
        for _ in range(CALLS):
            replay()

    some()
    return replay_us(some, REPEATS) / CALLS / 1e3


tune = Tuned()
