"""The zoo: well-known models as graphs, built by plain functions from their published sizes.

`build("resnet50", batch=64)`, `build("gpt2@512")`, `build("path/to/config.json")`. `MODELS` lists
them; a module of a family is loaded when one of its models is built. Dropout inside transformers is
left out; batch norms are those of training where the graph ends in a loss.
"""

from typing import TYPE_CHECKING, Any

from partita.zoo.catalogue import ALIASES, MODELS
from partita.zoo.model import ZooModel

if TYPE_CHECKING:
    from partita.graph.record import Graph

__all__ = ["ALIASES", "MODELS", "ZooModel", "build"]


def build(
    spec: str, batch: int | None = None, dtype: str | None = None, loss: bool = True, **options: Any
) -> "Graph":
    """The graph that `spec` names: a model, `model@size`, a configuration or a saved graph."""
    from partita.zoo import spec as reader

    return reader.build(spec, batch, dtype, loss, **options)
