"""From what a user types to a PyTorch module with arguments to call it with, and its capture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from partita import zoo
from partita.capture import export_module
from partita.capture.exported import Captured
from partita.capture.python_file import is_python_spec, read_module
from partita.capture.twin import example_inputs, twin
from partita.emit.plans import capture_twin
from partita.graph.record import Graph


@dataclass(frozen=True)
class Loaded:
    """A module and the arguments of one call; `graph` is that of the zoo if it is a twin."""

    spec: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: Graph | None = None


def load_module(
    spec: str, batch: int | None = None, dtype: str | None = None, training: bool = True
) -> Loaded:
    """The module that `spec` names: a user's own, or the twin of a model of the zoo."""
    if is_python_spec(spec):
        module, args, kwargs = read_module(spec, batch)
        return Loaded(spec, module.train(training), args, kwargs)
    graph = zoo.build(spec, batch=batch, dtype=dtype, loss=training)
    return Loaded(spec, twin(graph).train(training), example_inputs(graph), {}, graph)


def capture_loaded(loaded: Loaded) -> tuple[Captured, Mapping[str, str]]:
    """The module captured; for a twin also which op of its graph every captured op comes from."""
    if loaded.graph is None:
        return export_module(loaded.module, loaded.args, loaded.kwargs, name=loaded.spec), {}
    return capture_twin(loaded.graph, loaded.module.training, device="cpu")
