"""From what a user types to a PyTorch module with arguments to call it with."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from partita import zoo
from partita.capture.twin import example_inputs, twin


@dataclass(frozen=True)
class Loaded:
    """A module and the arguments of one call."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_module(
    spec: str, batch: int | None = None, dtype: str | None = None, training: bool = True
) -> Loaded:
    """The module that `spec` names: the twin of a model of the zoo, or a user's own."""
    from partita.capture.python_file import is_python_spec, read_module

    if is_python_spec(spec):
        module, args, kwargs = read_module(spec, batch)
        return Loaded(spec, module.train(training), args, kwargs)
    graph = zoo.build(spec, batch=batch, dtype=dtype, loss=training)
    return Loaded(graph.name, twin(graph).train(training), example_inputs(graph), {})
