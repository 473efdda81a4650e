"""From what a user types to a PyTorch module with arguments to call it with, and its capture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from partita import zoo
from partita.capture import export_module
from partita.capture.exported import Captured
from partita.capture.python_file import is_python_spec, read_module
from partita.capture.reference_module import example_inputs, reference_module
from partita.emit.plans import capture_reference
from partita.graph.record import Graph


@dataclass(frozen=True)
class Loaded:
    """A module and the arguments of one call; a reference module has its `graph` of the zoo."""

    spec: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: Graph | None = None


def load_module(
    spec: str, batch: int | None = None, dtype: str | None = None, training: bool = True
) -> Loaded:
    """The module that `spec` names: a user's own, or the reference module of a model of the zoo."""
    if is_python_spec(spec):
        module, args, kwargs = read_module(spec, batch)
        return Loaded(spec, module.train(training), args, kwargs)
    graph = zoo.build(spec, batch=batch, dtype=dtype, loss=training)
    return Loaded(spec, reference_module(graph).train(training), example_inputs(graph), {}, graph)


def capture_loaded(loaded: Loaded) -> tuple[Captured, Mapping[str, str]]:
    """The module captured; of a reference module also the op that every captured op comes from."""
    if loaded.graph is None:
        return export_module(
            loaded.module, loaded.args, loaded.kwargs, name=loaded.spec, checkpointing="inline"
        ), {}
    return capture_reference(loaded.graph, loaded.module.training, device="cpu")
