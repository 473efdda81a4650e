"""Operators that read a tensor only for its shape or type, written without it.

`ones_like(y)` waits for `y`; `ones(4, 6)` waits for nothing. Shapes are known when a model is
captured, so a stage need not be sent a tensor only to be told its size.
"""

from typing import Any

import torch

from partita.capture.torch_program import TensorSpec

aten = torch.ops.aten

_LIKE = {
    "zeros_like": aten.zeros.default, "ones_like": aten.ones.default,
    "empty_like": aten.empty.memory_format, "rand_like": aten.rand.default,
    "randn_like": aten.randn.default, "new_zeros": aten.zeros.default,
    "new_ones": aten.ones.default, "new_empty": aten.empty.memory_format,
}  # fmt: skip
_AS = {
    "expand_as": aten.expand.default,
    "view_as": aten.view.default,
    "reshape_as": aten.reshape.default,
}


def without_examples(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The operator and its arguments with tensors that only gave a shape replaced by the shape."""
    name = target.overloadpacket.__name__
    if not isinstance(meta, TensorSpec):
        return target, args, kwargs
    shape = list(meta.shape)  # sizes that follow the batch or the length still say so
    if name.endswith("_like") and not _is_contiguous(meta):
        return target, args, kwargs  # random numbers are drawn as the elements lie in memory
    made = {"dtype": meta.dtype, "device": meta.device}
    if name in _LIKE:
        return _LIKE[name], (shape,), made
    if name in ("full_like", "new_full"):
        return aten.full.default, (shape, args[1 if name == "full_like" else 2]), made
    if name in _AS:
        return _AS[name], (args[0], shape), {}
    if name == "type_as":
        return aten.to.dtype, (args[0], meta.dtype), {}
    return target, args, kwargs


def _is_contiguous(spec: TensorSpec) -> bool:
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
