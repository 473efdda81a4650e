"""The Transformer: Vaswani et al., "Attention is all you need", 2017 (arXiv:1706.03762), table 3.

Post-norm encoder and decoder; one table of 37,000 word pieces serves both embeddings and the
output layer; projections of attention have no bias, as in the authors' implementation. Positions
are sines, given as a constant. Dropout is left out.
"""

from dataclasses import dataclass

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish, sizes_of


@dataclass(frozen=True, slots=True)
class TransformerSizes:
    """What distinguishes the base from the big model."""

    layers: int
    width: int
    inner: int
    heads: int
    vocab: int = 37000


TRANSFORMER = {
    "base": TransformerSizes(6, 512, 2048, 8),
    "big": TransformerSizes(6, 1024, 4096, 16),
}


def transformer(
    variant: str = "big", batch: int = 32, seq: int = 256, dtype: str = "f32",
    loss: bool = True, fused_attention: bool = True,
) -> Graph:  # fmt: skip
    """The translation model, base or big; both texts have `seq` positions."""
    sizes = sizes_of("transformer", variant, TRANSFORMER)
    g = GraphBuilder(f"transformer-{variant}", dtype)
    table = g.parameter("shared.weight", (sizes.vocab, sizes.width))
    (places,) = g.op("constant", name="positions", shape=(seq, sizes.width))
    with g.scope("encoder"):
        x = _embedded(g, "source", (batch, seq), table, places)
        for layer in range(sizes.layers):
            with g.scope(f"layers.{layer}"):
                x = _attend(g, "self_attn", x, x, sizes, False, fused_attention)
                x = _feed_forward(g, x, sizes)
    memory = x
    with g.scope("decoder"):
        x = _embedded(g, "target", (batch, seq), table, places)
        for layer in range(sizes.layers):
            with g.scope(f"layers.{layer}"):
                x = _attend(g, "self_attn", x, x, sizes, True, fused_attention)
                x = _attend(g, "cross_attn", x, memory, sizes, False, fused_attention)
                x = _feed_forward(g, x, sizes)
    return finish(g, g.one("linear", x, table, name="generator"), loss)


def _embedded(
    g: GraphBuilder, name: str, shape: tuple[int, int], table: Tensor, places: Tensor
) -> Tensor:
    words = g.lookup(g.input(f"{name}_ids", shape, "i64"), table, "embed")
    return g.add(g.elementwise("scale", words), places, name="embedded")


def _attend(
    g: GraphBuilder, name: str, x: Tensor, memory: Tensor, sizes: TransformerSizes, causal: bool,
    fused: bool,
) -> Tensor:  # fmt: skip
    with g.scope(name):
        q = g.linear(x, sizes.width, "q_proj", bias=False)
        k = g.linear(memory, sizes.width, "k_proj", bias=False)
        v = g.linear(memory, sizes.width, "v_proj", bias=False)
        y = g.attention(q, k, v, sizes.heads, causal=causal, fused=fused)
        y = g.linear(y, sizes.width, "out_proj", bias=False)
    return g.norm(g.add(x, y, name=f"{name}_residual"), name=f"{name}_norm")


def _feed_forward(g: GraphBuilder, x: Tensor, sizes: TransformerSizes) -> Tensor:
    y = g.relu(g.linear(x, sizes.inner, "linear1"))
    y = g.linear(y, sizes.width, "linear2")
    return g.norm(g.add(x, y, name="ff_residual"), name="ff_norm")
