"""Whole recurrent layers among the fallbacks: a persistent kernel of their own, where one fits.

`aten.lstm.input`, `aten.gru.input` and the plain `rnn` operators are loops over a sequence; they
are no tiles of a region, but `recurrent/layers.py` has a kernel for most of them.
"""

from collections.abc import Callable
from typing import Any

import torch

from partita.capture.torch_program import Ref
from partita.errors import PartitaError
from partita.gpu.choose import not_compiled
from partita.gpu.flow.read import Held
from partita.gpu.flow.steps import Step
from partita.gpu.rtasks.arena import LoweredModel

T = torch.Tensor
CELLS = {
    "aten.lstm.input": "lstm",
    "aten.gru.input": "gru",
    "aten.rnn_tanh.input": "rnn_tanh",
    "aten.rnn_relu.input": "rnn_relu",
}
TUNE_S = 15.0  # to time shapes of one spec
StepKernel = Callable[[dict[str, Any]], Any]


def recurrent_kernels(
    lowered: LoweredModel, device: torch.device
) -> tuple[dict[str, StepKernel], dict[str, str]]:
    """By step: what runs its layers, and for the others why nothing does."""
    recurrent_kernels: dict[str, StepKernel] = {}
    refused: dict[str, str] = {}
    for step in lowered.flow.steps:
        if step.target in CELLS:
            try:
                recurrent_kernels[step.name] = _layers(lowered, step, device)
            except PartitaError as error:
                refused[step.name] = str(error)
            except Exception as error:  # of Triton's compiler: the layers stay with PyTorch
                refused[step.name] = not_compiled(error)
    return recurrent_kernels, refused


def _layers(lowered: LoweredModel, step: Step, device: torch.device) -> StepKernel:
    from partita.gpu.recurrent.layers import compile_recurrent
    from partita.gpu.recurrent.spec import Recurrent
    from partita.gpu.recurrent.tune import tune

    flow, cell = lowered.flow, CELLS[step.target]
    x, states, weights, bias, layers, _, _, both, batch_first = step.arguments
    shape = flow.shapes[x.name]
    given = states if cell == "lstm" else [states]
    packed = [flow.constants[each].to(device) for each in weights]
    spec = Recurrent(
        cell=cell,
        input_size=shape[2],
        hidden_size=packed[1].shape[1],
        num_layers=layers,
        bidirectional=both,
        bias=bias,
        batch_first=batch_first,
        batch=shape[0 if batch_first else 1],
        dtype=flow.dtypes[x.name],
    )
    best = None
    if device.type == "cuda":
        best = tune(spec, packed, device, shape[1 if batch_first else 0], TUNE_S)[0][0]
    run = compile_recurrent(spec, packed, device, best)
    constants = {each: flow.constants[each].to(device) for each in given if isinstance(each, Held)}
    zero = {name for name, value in constants.items() if not bool(value.any())}

    def state(values: dict[str, Any], each: Any) -> T | None:
        if isinstance(each, Ref):
            return values[each.name]  # type: ignore[no-any-return]
        return None if each in zero else constants[each]

    def kernel(values: dict[str, Any]) -> Any:
        output, h, c = run(values[x.name], *(state(values, each) for each in given))
        return (output, h, c) if cell == "lstm" else (output, h)

    return kernel
