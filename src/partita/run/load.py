"""From what a user types to a captured PyTorch module with arguments to call it with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita import zoo
from partita.capture import export_module
from partita.capture.exported import Captured
from partita.capture.python_file import is_python_spec, read_module
from partita.capture.twin import example_inputs
from partita.emit.plans import capture_twin
from partita.graph.record import Graph


@dataclass(frozen=True)
class Loaded:
    """A captured module, the arguments of one call, and the graph that a MODEL's name stands for.

    For the twin of a graph `op_of` says which op of it every captured op comes from.
    """

    captured: Captured
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: Graph
    op_of: Mapping[str, str]


def load_module(
    spec: str, batch: int | None = None, dtype: str | None = None, training: bool = True
) -> Loaded:
    """The module that `spec` names: a user's own, or the twin of a model of the zoo."""
    if is_python_spec(spec):
        module, args, kwargs = read_module(spec, batch)
        captured = export_module(module.train(training), args, kwargs, name=spec)
        return Loaded(captured, args, kwargs, captured.graph, {})
    graph = zoo.build(spec, batch=batch, dtype=dtype, loss=training)
    captured, op_of = capture_twin(graph, training, device="cpu")
    return Loaded(captured, example_inputs(graph), {}, graph, op_of)
