"""A model named by a user (a zoo name, `file.py:function`), put where it runs and optimised."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.errors import InputError
from partita.gpu.accelerate.api import Accelerated, accelerate
from partita.gpu.rtasks.api import DTYPES, rtasks
from partita.gpu.rtasks.fused import FusedModel
from partita.gpu.streams.api import Streamed, streams
from partita.run.load import load_module

T = torch.Tensor
Note = Callable[[str], None]


def streams_of(
    spec: str,
    *,
    batches: Sequence[int] = (),
    dtype: str | None = None,
    time_s: float = 60.0,
    profile: str | None = None,
    schedule: str | None = None,
    compile: bool = True,
    seed: int = 0,
    note: Note | None = None,
) -> Streamed:
    """A named model over streams; the first batch is the example's."""
    _need_cuda("use the analytic costs: --device analytic", "--device")
    module, inputs = _loaded(spec, batches[0] if batches else 1, "cuda", dtype)
    return streams(
        module, inputs, batches=batches[1:], time_s=time_s, profile=profile, schedule=schedule,
        compile=compile, seed=seed, note=note,
    )  # fmt: skip


def accelerate_of(
    spec: str, *, batch: int = 1, dtype: str | None = None, **options: Any
) -> Accelerated:
    """A named model, run the fastest way that is found."""
    _need_cuda("run this where there is one, or plan: partita streams MODEL --device analytic", "")
    module, inputs = _loaded(spec, batch, "cuda", dtype)
    return accelerate(module, inputs, **options)


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
    note: Note | None = None,
) -> FusedModel:
    """Named models fused; several run in one program."""
    if device == "cuda":
        _need_cuda("leave --run out to plan, or use --interpret to run it tile by tile", "--run")
    loaded = [_loaded(each, batch, device, dtype) for each in (spec, *beside)]
    options: dict[str, Any] = {} if time_s is None else {"time_s": time_s}
    return rtasks(
        [module for module, _ in loaded], [inputs for _, inputs in loaded], device=device,
        kind=kind, method=method or "search", seed=seed, note=note, **options,
    )  # fmt: skip


def _need_cuda(fix: str, field: str) -> None:
    if not torch.cuda.is_available():
        raise InputError(
            "there is no CUDA device here, so nothing can be measured", fix=fix, field=field
        )


def _loaded(spec: str, batch: int, device: str, dtype: str | None) -> tuple[Any, tuple[T, ...]]:
    """The module and its inputs on a device, images with their channels last."""
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"found {dtype!r}", fix=f"use one of {', '.join(DTYPES)}", field="--dtype")
    wanted = DTYPES.get(dtype or "")
    loaded = load_module(spec, batch=batch, training=False)
    if loaded.kwargs:
        raise InputError(
            f"the arguments {', '.join(loaded.kwargs)} are passed by name",
            fix="give all arguments of the call by position",
            field=spec,
        )
    module: Any = loaded.module.to(device)
    module = module.to(memory_format=torch.channels_last)  # which the stubs do not know
    module = module.to(wanted) if wanted is not None else module
    return module, tuple(_moved(each, device, wanted) for each in loaded.args)


def _moved(value: T, device: str, dtype: torch.dtype | None) -> T:
    moved = value.to(device)
    if moved.is_floating_point() and dtype is not None:
        moved = moved.to(dtype)
    return moved.contiguous(memory_format=torch.channels_last) if moved.dim() == 4 else moved
