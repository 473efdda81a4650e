"""How every model of the zoo ends: with its logits, or with the loss that training starts from."""

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor


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
