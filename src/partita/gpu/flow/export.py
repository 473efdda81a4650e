"""A module as a flow of steps: exported in evaluation mode, with static shapes."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn
from torch.export import ExportedProgram

from partita.capture import lines
from partita.capture.torch_program import read_torch_program
from partita.errors import CaptureError, PartitaError
from partita.gpu.flow.read import read_flow
from partita.gpu.flow.steps import Flow, T


def flow_of(module: nn.Module, inputs: tuple[T, ...]) -> Flow:
    """What the module computes for inputs of these shapes."""
    with torch.no_grad():
        return read_flow(read_torch_program(exported_program(module, inputs)))


def exported_program(module: nn.Module, inputs: tuple[T, ...]) -> ExportedProgram:
    """The module as `torch.export` gives it, in evaluation mode."""
    with evaluating(module), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # export's, for its developers
        try:
            program: ExportedProgram = torch.export.export(module, inputs, strict=False)
            decomposed: ExportedProgram = program.run_decompositions({})
            return decomposed
        except Exception as error:
            if isinstance(error, PartitaError):
                raise
            raise _refusal(module, error) from error


def _refusal(module: nn.Module, error: Exception) -> CaptureError:
    """Says which line of the model cannot be followed."""
    line = lines.of_traceback(error.__traceback__)
    said = (str(error).strip().splitlines() or [""])[0]
    return CaptureError(
        f"`{line.code}` of {type(module).__name__} cannot be captured: "
        f"{type(error).__name__}: {said[:200]}",
        fix="give a model without data-dependent control flow or shapes",
        file=line.place,
    )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards every part is as it was."""
    modes = [(each, each.training) for each in module.modules()]
    with suppress(NotImplementedError):  # an exported program: it has only one mode
        module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
