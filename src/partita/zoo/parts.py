"""What builders of the zoo share: sizes by name, and how a graph ends.

A graph ends with its logits, or with the loss that training starts from.
"""

from typing import TypeVar

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor

T = TypeVar("T")


def finish(g: GraphBuilder, logits: Tensor, loss: bool) -> Graph:
    """The finished graph; with `loss` the mean cross-entropy against an input `targets`."""
    if not loss:
        return g.finish(logits)
    targets = g.input("targets", logits.shape[:-1], "i64")
    return g.finish(g.cross_entropy(logits, targets))


def finish_regression(g: GraphBuilder, values: Tensor, loss: bool) -> Graph:
    """The finished graph; with `loss` the mean squared distance to an input `targets`."""
    if not loss:
        return g.finish(values)
    targets = g.input("targets", values.shape)
    return g.finish(g.one("mse_loss", values, targets, name="loss"))


def sizes_of(family: str, variant: str, table: dict[str, T]) -> T:
    """The sizes of a variant; an unknown one is refused with those there are."""
    if variant not in table:
        raise ModelError(
            f"has no variant {variant!r}", fix=f"use one of {', '.join(table)}", field=family
        )
    return table[variant]
