"""Model: an entry of the zoo, and the published figures that its graph is tested against."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # entries are listed without loading what builds them
    from partita.graph.record import Graph

COMMON = ("batch", "dtype", "loss")  # what every model can be asked for


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One model: what builds it, what may be chosen, and what has been published about it.

    `builder` is `module:function` within the zoo, called with `preset`. `option` is what `name@n`
    sets: the image size or the sequence length, `default` unless given. `flops` is the published
    count of the forward pass per item of the batch, a multiply-add counted as two; a tolerance of
    0 means equal.
    """

    name: str
    summary: str
    builder: str
    option: str
    default: int
    batch: int
    parameters: float
    source: str
    parameters_tolerance: float = 0.0
    flops: float | None = None
    flops_tolerance: float = 0.005
    flops_source: str = ""
    preset: tuple[tuple[str, str | int], ...] = ()

    @property
    def family(self) -> str:
        """The module that builds it."""
        return self.builder.partition(":")[0]

    @property
    def function(self) -> Callable[..., "Graph"]:
        """The plain function that builds it; loads its module."""
        module, _, name = self.builder.partition(":")
        builder: Callable[..., Graph] = getattr(
            importlib.import_module(f"partita.zoo.{module}"), name
        )
        return builder

    def options(self) -> dict[str, Any]:
        """What may be chosen besides batch, dtype and loss, with the defaults."""
        given = dict(self.preset)
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.function).parameters.items()
            if name not in COMMON and name not in given
        } | {self.option: self.default}

    def build(self, **chosen: Any) -> "Graph":
        """Its graph, with what was chosen in place of the defaults (`spec.py` checks it first)."""
        defaults = {"batch": self.batch, self.option: self.default}
        return self.function(**{**defaults, **dict(self.preset), **chosen})
