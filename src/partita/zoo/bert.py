"""BERT with its masked-language-model head: Devlin et al., 2018 (arXiv:1810.04805).

Names as in Hugging Face's `BertForMaskedLM` (which has no pooler); the output layer is tied to the
word embeddings. Scores are computed for every position, as that implementation does. Dropout is
left out.
"""

from dataclasses import dataclass

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.decoder import position_ids
from partita.zoo.parts import finish, sizes_of


@dataclass(frozen=True, slots=True)
class BertSizes:
    """What distinguishes one BERT from another."""

    layers: int
    width: int
    heads: int
    inner: int
    positions: int = 512
    vocab: int = 30522
    token_types: int = 2
    tied: bool = True
    eps: float = 1e-12
    activation: str = "gelu"
    model: str = "bert"
    head: tuple[str, str, str] = ("cls.predictions", "transform.dense", "transform.LayerNorm")
    head_activation: str = "gelu"
    offset: int = 0  # positions begin after it (RoBERTa's come after the padding's)


BERT = {"base": BertSizes(12, 768, 12, 3072), "large": BertSizes(24, 1024, 16, 4096)}


def bert(
    variant: str = "base", batch: int = 8, seq: int = 512, dtype: str = "bf16",
    loss: bool = True, fused_attention: bool = True,
) -> Graph:  # fmt: skip
    """BERT base or large."""
    return encoder(
        f"bert-{variant}", sizes_of("bert", variant, BERT), batch, seq, dtype, loss, fused_attention
    )


def encoder(
    name: str, sizes: BertSizes, batch: int, seq: int, dtype: str, loss: bool,
    fused_attention: bool = True,
) -> Graph:  # fmt: skip
    """A BERT of any sizes."""
    if seq > sizes.positions - sizes.offset:
        raise ModelError(
            f"{seq} positions, and the model has learned {sizes.positions - sizes.offset}",
            fix=f"choose at most {sizes.positions - sizes.offset}",
            field=name,
        )
    g = GraphBuilder(name, dtype)
    ids = g.input("input_ids", (batch, seq), "i64")
    types = g.input("token_type_ids", (batch, seq), "i64")
    with g.scope(f"{sizes.model}.embeddings"):
        table = g.parameter("word_embeddings.weight", (sizes.vocab, sizes.width))
        words = g.lookup(ids, table, "word_embeddings")
        order = position_ids(g, seq, sizes.offset)
        places = g.embedding(order, sizes.positions, sizes.width, "position_embeddings")
        kinds = g.embedding(types, sizes.token_types, sizes.width, "token_type_embeddings")
        x = g.norm(g.add(words, places, kinds), name="LayerNorm", eps=sizes.eps)
    for layer in range(sizes.layers):
        with g.scope(f"{sizes.model}.encoder.layer.{layer}"):
            x = _block(g, x, sizes, fused_attention)
    scope, dense, norm = sizes.head
    with g.scope(scope):
        x = _activated(g, g.linear(x, sizes.width, dense), sizes.head_activation)
        x = g.norm(x, name=norm, eps=sizes.eps)
        head = table if sizes.tied else g.parameter("decoder.weight", table.shape)
        bias = g.parameter("bias" if sizes.tied else "decoder.bias", (sizes.vocab,))
        scores = g.one("linear", x, head, bias, name="decoder")
    return finish(g, scores, loss)


def _activated(g: GraphBuilder, x: Tensor, function: str) -> Tensor:
    return g.elementwise(function, x) if function else x


def _block(g: GraphBuilder, x: Tensor, sizes: BertSizes, fused: bool) -> Tensor:
    with g.scope("attention"):
        with g.scope("self"):
            q, k, v = (g.linear(x, sizes.width, name) for name in ("query", "key", "value"))
            y = g.attention(q, k, v, sizes.heads, fused=fused)
        with g.scope("output"):
            y = g.linear(y, sizes.width, "dense")
            x = g.norm(g.add(y, x), name="LayerNorm", eps=sizes.eps)
    with g.scope("intermediate"):
        y = _activated(g, g.linear(x, sizes.inner, "dense"), sizes.activation)
    with g.scope("output"):
        y = g.linear(y, sizes.width, "dense")
        return g.norm(g.add(y, x), name="LayerNorm", eps=sizes.eps)
