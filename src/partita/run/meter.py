"""Timing one operation alone: warm-up, repeats, medians, and the bytes it takes.

The forward is timed on inputs cut off from whatever computed them, the backward by itself with
gradients of ones. On a GPU the clock is the device's events, on a CPU the process's monotonic
clock. Nothing of one repeat is kept for the next.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from partita.run.clock import run_times_s

T = torch.Tensor


@dataclass(frozen=True, slots=True)
class Timing:
    """How often something is run: `repeats` times after `warmup`, fewer once `most_s` are spent."""

    warmup: int = 2
    repeats: int = 10
    most_s: float = 1.0
    least_repeats: int = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the distance between the quartiles, in seconds."""

    median_s: float = 0.0
    spread_s: float = 0.0
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class Metered:
    """What running an operation alone showed."""

    forward: Spread
    backward: Spread
    peak_bytes: int
    resident_bytes: int
    output_bytes: int


class Meter:
    """Times operations on one device."""

    def __init__(self, device: torch.device, timing: Timing | None = None) -> None:
        self.device = device
        self.timing = timing or Timing()

    def run(
        self,
        operation: Callable[..., Any],
        inputs: Sequence[Any],
        wanted: Sequence[bool],
        parameters: Sequence[bool],
    ) -> Metered:
        """Time `operation(*inputs)`; gradients are asked for where they are `wanted`."""
        leaves = [_leaf(value, asks) for value, asks in zip(inputs, wanted, strict=True)]
        own = {_address(leaf) for leaf, is_own in zip(leaves, parameters, strict=True) if is_own}
        forward = self._repeat(lambda: operation(*leaves))
        resident, outputs = _kept(operation, leaves, own)
        backward = Spread()
        if outputs:
            asked = [leaf for leaf in leaves if isinstance(leaf, T) and leaf.requires_grad]
            ones = [torch.ones_like(output) for output in outputs]
            backward = self._repeat(
                lambda: torch.autograd.grad(
                    outputs, asked, ones, retain_graph=True, allow_unused=True
                )
            )
        produced = _size(tree_flatten(operation(*leaves))[0])
        return Metered(forward, backward, self._peak(operation, leaves), resident, produced)

    def _repeat(self, action: Callable[[], Any]) -> Spread:
        rule = self.timing
        for _ in range(rule.warmup):
            action()
        times: list[float] = []
        while len(times) < rule.repeats:
            times += run_times_s(action, 1, on_gpu=self.device.type == "cuda")
            if len(times) >= rule.least_repeats and sum(times) > rule.most_s:
                break
        return Spread(statistics.median(times), _quartiles(times), len(times))

    def _peak(self, operation: Callable[..., Any], inputs: Sequence[Any]) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before: int = torch.cuda.memory_allocated()
            operation(*inputs)
            torch.cuda.synchronize()
            peak: int = torch.cuda.max_memory_allocated()
            return peak - before
        with _Allocations() as seen:
            operation(*inputs)
        peak_bytes: int = seen.peak_bytes
        return peak_bytes


def _leaf(value: Any, wanted: bool) -> Any:
    if not isinstance(value, T):
        return value
    return value.detach().requires_grad_(wanted and value.is_floating_point())


def _kept(
    operation: Callable[..., Any], leaves: Sequence[Any], own: set[int]
) -> tuple[int, list[T]]:
    """Bytes saved for the backward besides parameters, and the outputs that have one."""
    saved: dict[int, int] = {}

    def remember(tensor: T) -> T:
        if _address(tensor) not in own:
            saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        leaves_made = tree_flatten(operation(*leaves))[0]
    outputs = [value for value in leaves_made if isinstance(value, T) and value.requires_grad]
    return sum(saved.values()), outputs


def _address(tensor: T) -> int:
    return tensor.untyped_storage().data_ptr()


def _size(values: Sequence[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, T))


def _quartiles(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low


class _Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then see what is alive."""
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, T) and _address(value) not in self._alive:
                self._given.add(_address(value))
        made = func(*args, **(kwargs or {}))
        for value in tree_flatten(made)[0]:
            if isinstance(value, T) and _address(value) not in self._given:
                storage = value.untyped_storage()
                self._alive[_address(value)] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return made
