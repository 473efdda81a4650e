"""GPT-2 and GPT-3: decoders with learned positions, pre-norm, GELU and a tied output layer.

GPT-2: Radford et al., "Language models are unsupervised multitask learners", 2019, as released.
GPT-3: Brown et al., 2020 (arXiv:2005.14165), table 2.1. Two of its rows contradict themselves and
are read so that the parameter counts of its table D.1 come out: 1.3B with 16 heads of 128 (not 24),
13B with a width of 5,120 (not 5,140). GPT-3's alternating banded attention is taken as dense, and
dropout is left out. Parameters: 12 L d^2 + 13 L d + (vocabulary + positions) d + 2 d.
"""

from dataclasses import dataclass

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.decoder import check_cache, position_ids, remembered
from partita.zoo.parts import finish, sizes_of


@dataclass(frozen=True, slots=True)
class GptSizes:
    """What distinguishes one GPT from another; `inner` 0 means four times the width."""

    layers: int
    width: int
    heads: int
    positions: int = 1024
    vocab: int = 50257
    inner: int = 0
    tied: bool = True


GPT2 = {
    "small": GptSizes(12, 768, 12),
    "medium": GptSizes(24, 1024, 16),
    "large": GptSizes(36, 1280, 20),
    "xl": GptSizes(48, 1600, 25),
}
GPT3 = {
    "125m": GptSizes(12, 768, 12, 2048),
    "350m": GptSizes(24, 1024, 16, 2048),
    "760m": GptSizes(24, 1536, 16, 2048),
    "1.3b": GptSizes(24, 2048, 16, 2048),
    "2.7b": GptSizes(32, 2560, 32, 2048),
    "6.7b": GptSizes(32, 4096, 32, 2048),
    "13b": GptSizes(40, 5120, 40, 2048),
    "175b": GptSizes(96, 12288, 96, 2048),
}


def gpt2(
    variant: str = "small", batch: int = 8, seq: int = 1024, dtype: str = "bf16",
    loss: bool = True, fused_attention: bool = True, cache: int = 0,
) -> Graph:  # fmt: skip
    """GPT-2 small, medium, large or xl."""
    name = "gpt2" if variant == "small" else f"gpt2-{variant}"
    sizes = sizes_of("gpt2", variant, GPT2)
    return gpt(name, sizes, batch, seq, dtype, loss, fused_attention, cache)


def gpt3(
    variant: str = "175b", batch: int = 1, seq: int = 2048, dtype: str = "bf16",
    loss: bool = True, fused_attention: bool = True, cache: int = 0,
) -> Graph:  # fmt: skip
    """GPT-3 of one of its eight sizes."""
    sizes = sizes_of("gpt3", variant, GPT3)
    return gpt(f"gpt3-{variant}", sizes, batch, seq, dtype, loss, fused_attention, cache)


def gpt(
    name: str, sizes: GptSizes, batch: int, seq: int, dtype: str, loss: bool, fused_attention: bool,
    cache: int = 0,
) -> Graph:  # fmt: skip
    """A GPT of any sizes; `cache` tokens have been read before (see `decoder.py`)."""
    check_cache(name, seq, cache, sizes.positions, loss)
    g = GraphBuilder(name, dtype)
    ids = g.input("input_ids", (batch, seq), "i64")
    table = g.parameter("wte.weight", (sizes.vocab, sizes.width))
    order = position_ids(g, seq, cache)
    places = g.embedding(order, sizes.positions, sizes.width, "wpe")
    x = g.add(g.lookup(ids, table, "wte"), places, name="embedding")
    for layer in range(sizes.layers):
        with g.scope(f"h.{layer}"):
            x = _block(g, x, sizes, fused_attention, cache)
    x = g.norm(x, name="ln_f")
    head = table if sizes.tied else g.parameter("lm_head.weight", table.shape)
    return finish(g, g.one("linear", x, head, name="lm_head"), loss)


def _block(g: GraphBuilder, x: Tensor, sizes: GptSizes, fused: bool, cache: int) -> Tensor:
    y = g.norm(x, name="ln_1")
    with g.scope("attn"):
        q, k, v = (g.linear(y, sizes.width, name) for name in ("q", "k", "v"))
        k, v = (remembered(g, t, cache, name) for t, name in ((k, "k"), (v, "v")))
        y = g.attention(q, k, v, sizes.heads, causal=True, fused=fused)
        y = g.linear(y, sizes.width, "c_proj")
    x = g.add(x, y, name="attn_residual")
    y = g.norm(x, name="ln_2")
    with g.scope("mlp"):
        y = g.linear(y, sizes.inner or 4 * sizes.width, "c_fc")
        y = g.linear(g.elementwise("gelu", y), sizes.width, "c_proj")
    return g.add(x, y, name="mlp_residual")
