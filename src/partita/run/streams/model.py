"""A model named by a user, put on the GPU and optimised."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.errors import InputError
from partita.run.load import load_module
from partita.run.streams.api import Streamed, streams

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


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
    note: Callable[[str], None] | None = None,
) -> Streamed:
    """What a zoo name or `file.py:function` names, faster; the first batch is the example's."""
    if not torch.cuda.is_available():
        raise InputError(
            "there is no CUDA device here, so nothing can be measured",
            fix="use the analytic costs: --device analytic",
            field="--device",
        )
    loaded = load_module(spec, batch=batches[0] if batches else 1, training=False)
    if loaded.kwargs:
        raise InputError(
            f"the arguments {', '.join(loaded.kwargs)} are passed by name",
            fix="give all arguments of the call by position",
            field=spec,
        )
    wanted = DTYPES.get(dtype or "")
    module: Any = loaded.module.cuda()
    module = module.to(memory_format=torch.channels_last)  # which the stubs do not know
    module = module.to(wanted) if wanted is not None else module
    inputs = tuple(_moved(each, wanted) for each in loaded.args)
    return streams(
        module, inputs, batches=batches[1:], time_s=time_s, profile=profile, schedule=schedule,
        compile=compile, seed=seed, note=note,
    )  # fmt: skip


def _moved(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    moved = value.cuda()
    if moved.is_floating_point() and dtype is not None:
        moved = moved.to(dtype)
    return moved.contiguous(memory_format=torch.channels_last) if moved.dim() == 4 else moved
