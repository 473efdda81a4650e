"""`partita.accelerate`: a module made faster on one GPU, as something to call like it."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from partita import files
from partita.errors import InputError
from partita.gpu.accelerate.report import AcceleratedReport
from partita.gpu.accelerate.search import AccelerateSearch, AccelerateSettings, Acceleration
from partita.gpu.accelerate.weights import WeightWatch
from partita.gpu.flow.export import evaluating
from partita.gpu.streams.record import StreamSchedule
from partita.showing import plot_of, repr_html, table_of

T = torch.Tensor
FORMAT, VERSION = "accelerated", 1


def accelerate(
    module: nn.Module,
    example: T | Sequence[T],
    *,
    time_s: float = 60.0,
    compile: bool = True,
    isolate: bool = True,
    seed: int = 0,
    decided: str | Path | None = None,
    note: Callable[[str], None] | None = None,
) -> "Accelerated":
    """The module as the fastest of several ways to run it that is right, measured as it is called.

    `example` has the inputs of a call, on the GPU, in the shapes that will be used. Tried are CUDA
    graphs over several streams, fused regions as persistent kernels, the sequential CUDA graph,
    torch.compile (unless `compile` is False) and the module as it is. Kernels of ours run for the
    first time in a child process (unless `isolate` is False). Calls that do not fit, and calls
    after the weights have changed, run the module itself, with a warning. `decided` is a file that
    `Accelerated.save` wrote: what was kept then is built again, and nothing is searched.
    """
    inputs = checked_inputs(module, example)
    settings = AccelerateSettings(time_s=time_s, compile=compile, isolate=isolate, seed=seed)
    search = AccelerateSearch(module, inputs, settings, note or _silent)
    best, report = search.run() if decided is None else search.decided(*_read(decided))
    return Accelerated(module, inputs, best, report)


class Accelerated:
    """A module and the fastest way to run it that was found."""

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def __init__(
        self, module: nn.Module, example: tuple[T, ...], best: Acceleration,
        report: AcceleratedReport,
    ) -> None:  # fmt: skip
        self.module, self.example = module, example
        self._best, self._report = best, report
        self._keys = [_key(each) for each in example]
        self._weights = WeightWatch(module)
        self._said: set[str] = set()
        with evaluating(module), torch.no_grad():
            self._shape = tree_flatten(module(*example))[1]

    @property
    def inputs(self) -> tuple[T, ...]:
        """The tensors that are read where they lie: write into them, call with them."""
        return getattr(self._best.call, "inputs", self.example)

    def report(self) -> AcceleratedReport:
        """What was tried, what is called, and what it takes."""
        return self._report

    def stale(self) -> bool:
        """Have the weights changed since, so that what is called would have the earlier ones?"""
        return self._best.form != "module" and self._weights.changed()

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write what was decided as JSON; weights are not part of it."""
        schedule = self._best.schedule
        value = {
            "format": f"partita/{FORMAT}@{VERSION}",
            "form": self._best.form,
            "schedule": None if schedule is None else schedule.to_json(),
            "report": self._report.to_json(),
        }
        files.write_atomically(path, files.encode_json(value), overwrite=overwrite)

    def __call__(self, *inputs: T) -> Any:
        """What the module gives for these inputs."""
        reason = self._unfit(inputs)
        if reason:
            return self._as_it_is(inputs, reason)
        with torch.no_grad():
            return tree_unflatten(list(self._best.call(*inputs)), self._shape)

    def _unfit(self, inputs: tuple[T, ...]) -> str:
        """Why the module itself must run, or nothing."""
        keys = [_key(each) for each in inputs]
        if keys != self._keys:
            if len(keys) != len(self._keys):
                return f"{len(keys)} inputs were given, the example has {len(self._keys)}"
            at = next(i for i, key in enumerate(keys) if key != self._keys[i])
            return (
                f"input {at} is {_in_words(inputs[at])}, the example has "
                f"{_in_words(self.example[at])}: accelerate for it as well"
            )
        if self.stale():
            return "the weights have changed since: accelerate again"
        return ""

    def _as_it_is(self, inputs: tuple[T, ...], reason: str) -> Any:
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"{reason}; the module runs as it is", stacklevel=3)
        with evaluating(self.module), torch.no_grad():
            return self.module(*inputs)


def checked_inputs(module: nn.Module, example: T | Sequence[T]) -> tuple[T, ...]:
    """The tensors of an example, or why they cannot be one."""
    inputs = (example,) if isinstance(example, T) else tuple(example)
    if not inputs or not all(isinstance(each, T) for each in inputs):
        raise InputError("the example has no tensors", fix="give what the module is called with")
    if any(each.training for each in module.modules()):
        raise InputError(
            "the module is in training mode, in which it computes something else",
            fix="call module.eval() first",
        )
    tensors = (*inputs, *module.parameters(), *module.buffers())
    places = sorted({str(each.device) for each in tensors})
    if len(places) > 1 or not places[0].startswith("cuda"):
        raise InputError(
            f"the module and its example are on {', '.join(places)}",
            fix="put both on one GPU: module.cuda(), example.cuda()",
        )
    return inputs


@dataclass(frozen=True, slots=True)
class _AccelerateFile:
    form: str
    schedule: StreamSchedule | None = None


def _read(path: str | Path) -> tuple[str, StreamSchedule | None]:
    """What `Accelerated.save` wrote."""
    value = files.decode_json(files.read_bytes(path), str(path))
    files.check_format(value, FORMAT, VERSION, str(path))
    wire = files.convert(value, _AccelerateFile, str(path))
    return wire.form, wire.schedule


def _key(value: T) -> tuple[torch.Size, torch.dtype, torch.device]:
    return value.shape, value.dtype, value.device


def _in_words(value: T) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{list(value.shape)} {dtype} on {value.device}"


def _silent(text: str) -> None:
    """Nobody listens."""
