"""`partita.rtasks`: a model's small ops as persistent kernels, as something to call like it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from partita.cluster import DeviceKind, resolve
from partita.errors import InputError
from partita.gpu.rtasks.fused import FusedModel
from partita.gpu.rtasks.job import Job
from partita.gpu.rtasks.launches import need_triton

T = torch.Tensor
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
Example = T | Sequence[T]


def rtasks(
    module: nn.Module | Sequence[nn.Module],
    example: Example | Sequence[Example],
    *,
    time_s: float = 3.0,
    method: str = "search",
    dtype: str | None = None,
    device: str | None = None,
    kind: str = "H200",
    per_unit: int = 2,
    num_warps: int = 4,
    seed: int = 0,
    note: Callable[[str], None] | None = None,
) -> FusedModel:
    """The module with its small ops fused into persistent kernels, one CUDA graph in all.

    `example` has the inputs in the shapes that will be used. Several modules with as many examples
    run side by side in one program; the callable then takes the inputs of all and gives a tuple of
    their outputs. On a GPU every region is timed against its own steps unfused, the whole against
    the sequential CUDA graph, and what is slower is not used. `device="cpu"` plans for a GPU of
    `kind` and runs tile by tile, which is slow. Weights are copied: fuse again after a change.
    """
    modules, examples = _several(module, example, dtype)
    where = torch.device(device) if device is not None else examples[0][0].device
    _check_place(modules, examples, where)
    kind_here = _kind_of(where, kind)

    def fused(some: Sequence[nn.Module], given: Sequence[tuple[T, ...]]) -> FusedModel:
        job = Job(some, given, where, note or _silent)
        job.lower()
        job.plan(kind_here, method, time_s, per_unit, seed)
        if where.type == "cpu":
            return job.interpret(seed)
        return job.measure(job.compile(num_warps))

    fused_models = fused(modules, examples)
    if len(modules) == 1:
        return fused_models
    return fused_models.beside([fused([m], [x]) for m, x in zip(modules, examples, strict=True)])


def _several(
    module: nn.Module | Sequence[nn.Module], example: Any, dtype: str | None
) -> tuple[list[nn.Module], list[tuple[T, ...]]]:
    """Modules and their inputs, in the element type that is wanted."""
    if isinstance(module, nn.Module):
        modules, examples = [module], [example]
    else:
        modules, examples = list(module), list(example)
    if not modules or len(modules) != len(examples):
        raise InputError(
            f"{len(modules)} modules and {len(examples)} examples", fix="give one for each"
        )
    inputs = [(each,) if isinstance(each, T) else tuple(each) for each in examples]
    if not all(each and all(isinstance(value, T) for value in each) for each in inputs):
        raise InputError("the example has no tensors", fix="give what the model is called with")
    if dtype is None:
        return modules, inputs
    if dtype not in DTYPES:
        raise InputError(f"found {dtype!r}", fix=f"use one of {', '.join(DTYPES)}", field="dtype")
    wanted = DTYPES[dtype]
    modules = [copy.deepcopy(each).to(wanted) for each in modules]
    return modules, [tuple(_cast(value, wanted) for value in each) for each in inputs]


def _cast(value: T, dtype: torch.dtype) -> T:
    return value.to(dtype) if value.is_floating_point() else value


def _check_place(
    modules: Sequence[nn.Module], examples: Sequence[tuple[T, ...]], device: torch.device
) -> None:
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"found {device}", fix="use cuda, or cpu to interpret", field="device")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                "there is no CUDA device here",
                fix='plan and interpret with device="cpu"',
                field="device",
            )
        need_triton()
    tensors = [each for example in examples for each in example]
    tensors += [each for module in modules for each in module.parameters()]
    places = {each.device.type for each in tensors}
    if places != {device.type}:
        raise InputError(
            f"the model and its example are on {', '.join(sorted(places))}",
            fix=f"put both on {device.type}",
        )


def _kind_of(device: torch.device, name: str) -> DeviceKind:
    """The kind of the GPU at hand, with its own number of units; or the named one."""
    if device.type == "cpu":
        return resolve(name).kinds[0]
    properties = torch.cuda.get_device_properties(device)
    kind = resolve(name).kinds[0]
    for word in torch.cuda.get_device_name(device).replace("-", " ").split()[1:]:
        try:
            kind = resolve(word).kinds[0]
            break
        except InputError:
            continue
    return replace(kind, num_units=properties.multi_processor_count)


def _silent(text: str) -> None:
    """Nobody listens."""
