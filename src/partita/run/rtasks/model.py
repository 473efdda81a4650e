"""A model named by a user: put where it runs, fused and measured, or run tile by tile."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.errors import InputError
from partita.run.load import load_module
from partita.run.rtasks.api import DTYPES, rtasks
from partita.run.rtasks.fused import Fused

T = torch.Tensor


def rtasks_of(
    spec: str,
    *,
    beside: Sequence[str] = (),
    device: str = "cuda",
    kind: str = "H200",
    batch: int = 1,
    dtype: str | None = None,
    method: str | None = None,
    time_s: float | None = None,
    seed: int = 0,
    note: Callable[[str], None] | None = None,
) -> Fused:
    """What zoo names or `file.py:function` name, fused; several run in one program."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "there is no CUDA device here, so nothing can be measured",
            fix="leave --run out to plan, or use --interpret to run it tile by tile",
            field="--run",
        )
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"found {dtype!r}", fix=f"use one of {', '.join(DTYPES)}", field="--dtype")
    loaded = [_loaded(each, batch, device, DTYPES.get(dtype or "")) for each in (spec, *beside)]
    options: dict[str, Any] = {} if time_s is None else {"time_s": time_s}
    modules, examples = [pair[0] for pair in loaded], [pair[1] for pair in loaded]
    return rtasks(
        modules, examples, device=device, kind=kind, method=method or "search", seed=seed,
        note=note, **options,
    )  # fmt: skip


def _loaded(
    spec: str, batch: int, device: str, dtype: torch.dtype | None
) -> tuple[Any, tuple[T, ...]]:
    loaded = load_module(spec, batch=batch, training=False)
    if loaded.kwargs:
        raise InputError(
            f"the arguments {', '.join(loaded.kwargs)} are passed by name",
            fix="give all arguments of the call by position",
            field=spec,
        )
    module: Any = loaded.module.to(device)
    module = module.to(memory_format=torch.channels_last)  # which the stubs do not know
    module = module.to(dtype) if dtype is not None else module
    return module, tuple(_moved(each, device, dtype) for each in loaded.args)


def _moved(value: T, device: str, dtype: torch.dtype | None) -> T:
    moved = value.to(device)
    if moved.is_floating_point() and dtype is not None:
        moved = moved.to(dtype)
    return moved.contiguous(memory_format=torch.channels_last) if moved.dim() == 4 else moved
