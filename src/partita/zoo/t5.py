"""T5 and its sparse sibling, the Switch Transformer.

T5: Raffel et al., 2019 (arXiv:1910.10683), the released 1.0 models. Names as in Hugging Face's
implementation; the first block's relative position bias serves all blocks, attention is not scaled
and linear layers have no bias. Switch: Fedus et al., 2021 (arXiv:2101.03961): T5-Base with experts
in place of the feed-forward of every second block, one of which each token visits; sizes of the
released switch-base-128. Dropout is left out.

`seq` is the length of the text that is read, `target_seq` of the one that is written (512 and 114
in the paper's pre-training).
"""

from dataclasses import dataclass

from partita.graph.build import AttrIn, GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.decoder import ReadBefore, check_cache, check_fused, remembered
from partita.zoo.parts import finish, sizes_of


@dataclass(frozen=True, slots=True)
class T5Sizes:
    """What distinguishes one T5 from another. `gated` feed-forwards have two input layers."""

    layers: int
    width: int
    inner: int
    heads: int
    head_size: int = 64
    decoder_layers: int = 0  # 0: as many as the encoder
    vocab: int = 32128
    buckets: int = 32
    gated: bool = False
    activation: str = "relu"
    tied: bool = True
    scaled: bool = True  # what goes into the tied output layer
    eps: float = 1e-6
    farthest: int = 128  # distances beyond share a bucket
    experts: int = 0  # in the feed-forward of every second block
    capacity_factor: float = 1.0


T5 = {
    "small": T5Sizes(6, 512, 2048, 8),
    "base": T5Sizes(12, 768, 3072, 12),
    "large": T5Sizes(24, 1024, 4096, 16),
    "3b": T5Sizes(24, 1024, 16384, 32, 128),
    "11b": T5Sizes(24, 1024, 65536, 128, 128),
}


def t5(
    variant: str = "base", batch: int = 8, seq: int = 512, dtype: str = "bf16",
    loss: bool = True, target_seq: int = 114, fused_attention: bool = True, cache: int = 0,
    source_seq: int = 512,
) -> Graph:  # fmt: skip
    """T5 small, base, large, 3b or 11b.

    With a `cache` of tokens written before, `seq` new ones are written; `source_seq` were read.
    """
    return encoder_decoder(
        f"t5-{variant}",
        sizes_of("t5", variant, T5),
        batch,
        source_seq if cache else seq,
        seq if cache else target_seq,
        dtype,
        loss,
        fused_attention,
        cache,
    )


def moe(
    batch: int = 64, seq: int = 512, dtype: str = "bf16", loss: bool = True, experts: int = 128,
    target_seq: int = 114, fused_attention: bool = True,
) -> Graph:  # fmt: skip
    """Switch-Base: T5-Base with `experts` experts in every second block."""
    sizes = T5Sizes(12, 768, 3072, 12, experts=experts)
    return encoder_decoder("moe", sizes, batch, seq, target_seq, dtype, loss, fused_attention)


def encoder_decoder(
    name: str, sizes: T5Sizes, batch: int, seq: int, target_seq: int, dtype: str, loss: bool,
    fused_attention: bool = True, cache: int = 0,
) -> Graph:  # fmt: skip
    """A T5 of any sizes; with a `cache` of tokens its decoder alone, which has written those."""
    check_cache(name, target_seq, cache, 0, loss)
    g = GraphBuilder(name, dtype)
    net = _T5(g, sizes, fused_attention, cache)
    table = g.parameter("shared.weight", (sizes.vocab, sizes.width))
    if cache:
        check_fused(name, fused_attention)
        x: Tensor | ReadBefore = ReadBefore(seq)
    else:
        x = g.lookup(g.input("input_ids", (batch, seq), "i64"), table, "encoder.embed_tokens")
        with g.scope("encoder"):
            x = net.stack(x, sizes.layers, None)
    ids = g.input("decoder_input_ids", (batch, target_seq), "i64")
    y = g.lookup(ids, table, "decoder.embed_tokens")
    with g.scope("decoder"):
        y = net.stack(y, sizes.decoder_layers or sizes.layers, x)
    if sizes.scaled:
        y = g.elementwise("scale", y, name="output_scale", factor=sizes.width**-0.5)
    head = table if sizes.tied else g.parameter("lm_head.weight", table.shape)
    return finish(g, g.one("linear", y, head, name="lm_head"), loss)


class _T5:
    """A builder with the sizes that all of its parts need."""

    def __init__(self, g: GraphBuilder, sizes: T5Sizes, fused: bool, cache: int = 0) -> None:
        self.cache = cache
        self.g = g
        self.sizes = sizes
        self.fused = fused

    def stack(self, x: Tensor, layers: int, memory: Tensor | ReadBefore | None) -> Tensor:
        """Blocks and a last norm; with `memory` (what the encoder gives) those of the decoder."""
        g = self.g
        bias = None
        for number in range(layers):
            with g.scope(f"block.{number}"):
                with g.scope("layer.0"):
                    y = self._norm(x)
                    with g.scope("SelfAttention"):
                        if bias is None:
                            bias = self._position_bias(x.shape[1], memory is None)
                        y = self._attention(y, y, bias, causal=memory is not None)
                    x = g.add(x, y)
                if memory is not None:
                    with g.scope("layer.1"):
                        y = self._norm(x)
                        with g.scope("EncDecAttention"):
                            y = self._attention(y, memory, None, causal=False)
                        x = g.add(x, y)
                with g.scope(f"layer.{1 if memory is None else 2}"):
                    x = self._feed_forward(x, sparse=self.sizes.experts > 0 and number % 2 == 1)
        return self._norm(x, "final_layer_norm")

    def _norm(self, x: Tensor, name: str = "layer_norm") -> Tensor:
        return self.g.norm(x, "rms_norm", name, eps=self.sizes.eps)

    def _position_bias(self, positions: int, both_ways: bool) -> Tensor:
        """[heads, queries, keys]: a learned number per head and bucket of distances."""
        g = self.g
        shape = (positions, self.cache + positions)
        more: dict[str, AttrIn] = {"start": self.cache} if self.cache else {}
        (buckets,) = g.op(
            "constant", name="position_buckets", dtype="i64", shapes=None, shape=shape,
            buckets=self.sizes.buckets, farthest=self.sizes.farthest, both_ways=both_ways, **more,
        )  # fmt: skip
        bias = g.embedding(buckets, self.sizes.buckets, self.sizes.heads, "relative_attention_bias")
        return g.transpose(bias, (2, 0, 1), "position_bias")

    def _attention(
        self, x: Tensor, memory: Tensor | ReadBefore, bias: Tensor | None, causal: bool
    ) -> Tensor:
        g, heads = self.g, self.sizes.heads
        inner = heads * self.sizes.head_size
        q = g.linear(x, inner, "q", bias=False)
        is_kept = isinstance(memory, ReadBefore)
        if isinstance(memory, ReadBefore):
            k, v = memory.keys_and_values(g, x.shape[0], inner)
        else:
            k, v = (g.linear(memory, inner, name, bias=False) for name in ("k", "v"))
        if causal:
            k, v = (remembered(g, t, self.cache, name) for t, name in ((k, "k"), (v, "v")))
        y = g.attention(
            q, k, v, heads, causal=causal, scale=1.0, bias=bias, fused=self.fused,
            remembered=is_kept,
        )  # fmt: skip
        return g.linear(y, self.sizes.width, "o", bias=False)

    def _feed_forward(self, x: Tensor, sparse: bool) -> Tensor:
        g = self.g
        y = self._norm(x)
        if sparse:
            with g.scope("mlp"):
                return g.add(x, self._experts(y))
        with g.scope("DenseReluDense"):
            if self.sizes.gated:
                gate = g.linear(y, self.sizes.inner, "wi_0", bias=False)
                up = g.linear(y, self.sizes.inner, "wi_1", bias=False)
                y = g.mul(g.elementwise(self.sizes.activation, gate), up)
            else:
                y = g.linear(y, self.sizes.inner, "wi", bias=False)
                y = g.elementwise(self.sizes.activation, y)
            y = g.linear(y, self.sizes.width, "wo", bias=False)
        return g.add(x, y)

    def _experts(self, x: Tensor) -> Tensor:
        g, sizes = self.g, self.sizes
        choice = g.parameter("router.classifier.weight", (sizes.experts, sizes.width))
        gates = g.one("moe_router", x, choice, name="router", top_k=1)
        y = g.one(
            "moe_dispatch", x, gates, name="dispatch",
            top_k=1, capacity_factor=sizes.capacity_factor,
        )  # fmt: skip
        with g.scope("experts"):
            inward = g.parameter("wi.weight", (sizes.experts, sizes.inner, sizes.width))
            outward = g.parameter("wo.weight", (sizes.experts, sizes.width, sizes.inner))
            y = g.elementwise(sizes.activation, g.one("expert_linear", y, inward, name="wi"))
            y = g.one("expert_linear", y, outward, name="wo")
        return g.one("moe_combine", y, gates, name="combine", top_k=1)
