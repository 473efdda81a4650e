"""The LLaMA family: decoders with rotary positions, RMS norms and SwiGLU, dense or with experts.

LLaMA: Touvron et al., 2023 (arXiv:2302.13971), table 2. Llama 2: arXiv:2307.09288. Llama 3:
arXiv:2407.21783, table 3. Mixtral: Jiang et al., 2024 (arXiv:2401.04088), table 1; 8x22B from its
published configuration. Module names as in Hugging Face's implementations; the weights of the
experts of a layer are one tensor. Mistral and Qwen are read with `hf.py`.

Parameters of a dense layer with g of h heads for keys and values of size e, width d, inner f:
2 d h e + 2 d g e + 3 d f + 2 d.
"""

from dataclasses import dataclass, replace

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.ending import finish
from partita.zoo.variants import sizes_of


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a sparse layer: each token goes to `top_k` of `count`.

    `shared` is the inner width of an expert that every token visits, behind a gate; 0 for none.
    """

    count: int
    top_k: int
    inner: int
    shared: int = 0
    capacity_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What distinguishes one decoder of the family from another; 0 means as its heads and width."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int = 0
    vocab: int = 32000
    head_size: int = 0
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_norm: bool = False
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()  # layers without experts in a model with them
    windows: tuple[int, ...] = ()  # sliding window per layer, 0 for none; empty for none at all

    @property
    def size_of_head(self) -> int:
        """Width of one head."""
        return self.head_size or self.width // self.heads


_LLAMA_3 = DecoderSizes(32, 4096, 14336, 32, 8, vocab=128256)
LLAMA = {
    "7b": DecoderSizes(32, 4096, 11008, 32),
    "13b": DecoderSizes(40, 5120, 13824, 40),
    "33b": DecoderSizes(60, 6656, 17920, 52),
    "65b": DecoderSizes(80, 8192, 22016, 64),
    "2-7b": DecoderSizes(32, 4096, 11008, 32),
    "2-13b": DecoderSizes(40, 5120, 13824, 40),
    "2-70b": DecoderSizes(80, 8192, 28672, 64, 8),
    "3-8b": _LLAMA_3,
    "3-70b": replace(_LLAMA_3, layers=80, width=8192, inner=28672, heads=64),
    "3-405b": replace(_LLAMA_3, layers=126, width=16384, inner=53248, heads=128),
}
MIXTRAL = {
    "8x7b": DecoderSizes(32, 4096, 14336, 32, 8, experts=Experts(8, 2, 14336)),
    "8x22b": DecoderSizes(56, 6144, 16384, 48, 8, experts=Experts(8, 2, 16384)),
}


def llama(
    variant: str = "7b", batch: int = 1, seq: int = 2048, dtype: str = "bf16",
    loss: bool = True, fused_attention: bool = True,
) -> Graph:  # fmt: skip
    """LLaMA 1, 2 or 3 of one of its sizes."""
    return decoder(
        f"llama-{variant}",
        sizes_of("llama", variant, LLAMA),
        batch,
        seq,
        dtype,
        loss,
        fused_attention,
    )


def mixtral(
    variant: str = "8x7b", batch: int = 1, seq: int = 4096, dtype: str = "bf16",
    loss: bool = True, fused_attention: bool = True,
) -> Graph:  # fmt: skip
    """Mixtral 8x7B or 8x22B: each token visits 2 of 8 experts."""
    return decoder(
        f"mixtral-{variant}",
        sizes_of("mixtral", variant, MIXTRAL),
        batch,
        seq,
        dtype,
        loss,
        fused_attention,
    )


def decoder(
    name: str, sizes: DecoderSizes, batch: int, seq: int, dtype: str, loss: bool,
    fused_attention: bool = True,
) -> Graph:  # fmt: skip
    """A decoder of any sizes."""
    g = GraphBuilder(name, dtype)
    ids = g.input("input_ids", (batch, seq), "i64")
    with g.scope("model"):
        table = g.parameter("embed_tokens.weight", (sizes.vocab, sizes.width))
        x = g.lookup(ids, table, "embed_tokens")
        for layer in range(sizes.layers):
            with g.scope(f"layers.{layer}"):
                x = _block(g, x, sizes, layer, fused_attention)
        x = g.norm(x, "rms_norm", "norm")
    head = table if sizes.tied else g.parameter("lm_head.weight", table.shape)
    return finish(g, g.one("linear", x, head, name="lm_head"), loss)


def _block(g: GraphBuilder, x: Tensor, sizes: DecoderSizes, layer: int, fused: bool) -> Tensor:
    y = g.norm(x, "rms_norm", "input_layernorm")
    with g.scope("self_attn"):
        y = _attention(g, y, sizes, sizes.windows[layer] if sizes.windows else 0, fused)
    x = g.add(x, y, name="attn_residual")
    y = g.norm(x, "rms_norm", "post_attention_layernorm")
    if sizes.experts is None or layer in sizes.dense_layers:
        with g.scope("mlp"):
            y = _swiglu(g, y, sizes.inner, sizes.mlp_bias)
    else:
        with g.scope("block_sparse_moe"):
            y = _sparse(g, y, sizes.experts)
    return g.add(x, y, name="mlp_residual")


def _attention(g: GraphBuilder, x: Tensor, sizes: DecoderSizes, window: int, fused: bool) -> Tensor:
    kv_heads = sizes.kv_heads or sizes.heads
    size = sizes.size_of_head
    q = g.linear(x, sizes.heads * size, "q_proj", bias=sizes.qkv_bias)
    k = g.linear(x, kv_heads * size, "k_proj", bias=sizes.qkv_bias)
    v = g.linear(x, kv_heads * size, "v_proj", bias=sizes.qkv_bias)
    if sizes.query_norm:
        q, k = _head_norm(g, q, size, "q_norm"), _head_norm(g, k, size, "k_norm")
    q = g.elementwise("rope", q, name="q_rope", heads=sizes.heads)
    k = g.elementwise("rope", k, name="k_rope", heads=kv_heads)
    y = g.attention(
        q, k, v, sizes.heads, kv_heads=kv_heads, causal=True, window=window, fused=fused
    )
    return g.linear(y, sizes.width, "o_proj", bias=sizes.output_bias)


def _head_norm(g: GraphBuilder, x: Tensor, size: int, name: str) -> Tensor:
    heads = g.reshape(x, (*x.shape[:-1], -1, size), f"{name}_heads")
    return g.reshape(g.norm(heads, "rms_norm", name), x.shape, f"{name}_flat")


def _swiglu(g: GraphBuilder, x: Tensor, inner: int, bias: bool) -> Tensor:
    gate = g.linear(x, inner, "gate_proj", bias=bias)
    up = g.linear(x, inner, "up_proj", bias=bias)
    return g.linear(g.elementwise("swiglu", gate, up), x.shape[-1], "down_proj", bias=bias)


def _sparse(g: GraphBuilder, x: Tensor, experts: Experts) -> Tensor:
    width = x.shape[-1]
    choice = g.parameter("gate.weight", (experts.count, width))
    gates = g.one("moe_router", x, choice, name="gate", top_k=experts.top_k)
    tokens = g.one(
        "moe_dispatch", x, gates, name="dispatch",
        top_k=experts.top_k, capacity_factor=experts.capacity_factor,
    )  # fmt: skip
    with g.scope("experts"):
        first, third, second = (
            g.parameter(f"{name}.weight", (experts.count, rows, columns))
            for name, rows, columns in (
                ("w1", experts.inner, width),
                ("w3", experts.inner, width),
                ("w2", width, experts.inner),
            )
        )
        gate = g.one("expert_linear", tokens, first, name="w1")
        up = g.one("expert_linear", tokens, third, name="w3")
        y = g.one("expert_linear", g.elementwise("swiglu", gate, up), second, name="w2")
    y = g.one("moe_combine", y, gates, name="combine", top_k=experts.top_k)
    if not experts.shared:
        return y
    with g.scope("shared_expert"):
        common = _swiglu(g, x, experts.shared, bias=False)
    share = g.elementwise("sigmoid", g.linear(x, 1, "shared_expert_gate", bias=False))
    return g.add(y, g.mul(common, share, "shared_share"), name="with_shared")
