"""One description of decoder-only language models, and the graph that it makes.

What distinguishes LLaMA, GPT-2, Gemma, Falcon, DeepSeek and their like is data: the kind of norm
and where it stands, how attention is made (grouped queries, biases, norms of queries, windows,
caps, sinks, rotary positions, latent keys), the feed-forward and its experts, scales, and the names
that the checkpoint has for all of it. Where a checkpoint packs several weights into one tensor, the
graph has them apart and says where they lie (`graph/packed.py`).

Parameters of a layer of LLaMA with g of h heads for keys and values of size e, width d, inner f:
2 d h e + 2 d g e + 3 d f + 2 d.
"""

from dataclasses import dataclass, field, replace

from partita.errors import ModelError
from partita.graph.build import AttrIn, GraphBuilder
from partita.graph.packed import PackedPart
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the width: its kind, epsilon, what is learned, what is added to the scale."""

    kind: str = "rms_norm"
    eps: float = 1e-5
    affine: bool = True
    bias: bool = True  # of layer norms
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: how fast pairs turn, how many features of a head do, and in which pairs."""

    theta: float = 10000.0
    frequencies: tuple[float, ...] = ()  # per pair; those of theta where empty
    factor: float = 1.0  # what is turned becomes so much longer
    size: int = 0  # features of a head that turn; 0 for all
    interleaved: bool = False  # pairs are neighbours, not of two halves


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """DeepSeek's attention: queries and keys out of narrow layers, positions in features apart."""

    query_rank: int  # 0: queries directly
    key_rank: int
    rope: int
    nope: int
    value: int
    bias: bool = False
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a sparse layer: each token goes to `top_k` of `count`.

    `shared` is the inner width of an expert that every token visits, behind a gate (`shared_gate`)
    or not; 0 for none. The rest says how a token chooses (`moe_router` in docs/kinds.md). Llama 4
    weights what goes into an expert (`weigh_inputs`), everyone else what comes out.
    """

    count: int
    top_k: int
    inner: int
    shared: int = 0
    capacity_factor: float = 1.0
    score: str = "softmax"
    normalize: bool = True
    normalize_eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    bias: bool = False
    correction: bool = False
    shared_gate: bool = True
    weigh_inputs: bool = False
    clamp: tuple[float, float] | None = None  # alpha and limit of GPT-OSS's activation


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls the parts of a decoder.

    Several names in one text (`qkv`, `gate_up`) are tensors of their own; one name is a packed
    tensor, `packing` says in which way: `rows` one after the other, or `heads`, head by head.
    """

    model: str = "model"
    embed: str = "embed_tokens"
    positions: str = "wpe"
    layers: str = "layers"
    final: str = "norm"
    head: str = "lm_head"
    norms: tuple[str, str, str, str] = (
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip
    attention: str = "self_attn"
    cross: str = "encoder_attn"
    qkv: str = "q_proj k_proj v_proj"
    output: str = "o_proj"
    mlp: str = "mlp"
    gate_up: str = "gate_proj up_proj"
    down: str = "down_proj"
    sparse: str = "mlp"
    router: str = "gate"
    shared: str = "shared_expert"
    packing: str = "rows"
    transposed: bool = False  # linear layers are stored [in, out]
    experts: str = "out_first"  # or in_first, interleaved: how the experts' tensors are stored


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What distinguishes one decoder from another; 0 means as its heads and width.

    `place` is where norms stand: `pre` before attention and feed-forward, `post` after each,
    `both`, `after_add` after the sum with what went in, `parallel` where attention and feed-forward
    read the same norm, `parallel_two` where each has one of its own. Tuples of windows, chunks and
    ropes are per layer, empty where all are alike.
    """

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
    query_norm: str = ""  # "head", "whole" (before heads are parted), or "l2" (after rope)
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()  # layers without experts in a model with them
    dense_inner: int = 0  # their inner width; 0: `inner`
    windows: tuple[int, ...] = ()  # sliding window per layer, 0 for none; empty for none at all
    chunks: tuple[int, ...] = ()
    norm: Norm = Norm()
    place: str = "pre"
    final_norm: bool = True
    activation: str = "silu"
    gated: bool = True
    rope: Rope | None = Rope()
    ropes: tuple[Rope | None, ...] = ()
    latent: LatentAttention | None = None
    attention_scale: float | None = None
    layer_scaled: bool = False  # attention of layer i divided by i + 1
    softcap: float = 0.0
    final_softcap: float = 0.0
    sinks: bool = False
    clip: float = 0.0  # of queries, keys and values
    temperature: tuple[float, float] | None = None  # floor and factor, of layers without rope
    embed_scale: float = 1.0
    embed_width: int = 0  # of the word embeddings, where that is another one
    positions: int = 0  # learned ones; 0 for none
    position_offset: int = 0
    head_bias: bool = False
    causal: bool = True
    key_bias: bool = True  # where queries and values have biases
    names: Names = field(default=Names())

    @property
    def size_of_head(self) -> int:
        """Width of one head."""
        return self.head_size or self.width // self.heads

    def rope_of(self, layer: int) -> Rope | None:
        """The rotary positions of a layer."""
        return self.ropes[layer] if self.ropes else self.rope


def decoder(
    name: str, sizes: DecoderSizes, batch: int, seq: int, dtype: str, loss: bool,
    fused_attention: bool = True, cache: int = 0,
) -> Graph:  # fmt: skip
    """The graph of a decoder of any description.

    With `cache` so many tokens have been read before: keys and values of theirs are inputs, and
    `seq` new tokens (one, where text is generated) look at them and at each other.
    """
    check_cache(name, seq, cache, sizes.positions, loss)
    g = GraphBuilder(name, dtype)
    net = Stack(g, sizes, fused_attention, cache)
    ids = g.input("input_ids", (batch, seq), "i64")
    with g.scope(sizes.names.model):
        table = g.parameter(
            f"{sizes.names.embed}.weight", (sizes.vocab, sizes.embed_width or sizes.width)
        )
        x = net.embedded(ids, table)
        x = net.blocks(x)
        x = net.norm(x, sizes.names.final) if sizes.final_norm else x
        if sizes.embed_width:
            x = g.linear(x, sizes.embed_width, "project_out", bias=False)
    return finish(g, net.logits(x, table), loss)


def check_cache(name: str, seq: int, cache: int, positions: int, loss: bool) -> None:
    """Refuse more positions than the model has learned (0: any number), and a cache in training."""
    if positions and seq + cache > positions:
        raise ModelError(
            f"{seq + cache} positions, and the model has learned {positions}",
            fix=f"choose at most {positions}",
            field=name,
        )
    if cache and loss:
        raise ModelError(
            "has a cache of tokens read before, which training has not",
            fix="plan inference with --infer",
            field=name,
        )


def remembered(g: GraphBuilder, new: Tensor, cache: int, name: str) -> Tensor:
    """Keys or values [b, s, features] behind those of the tokens read before, an input."""
    if not cache:
        return new
    batch, _, width = new.shape
    before = g.input(f"{g.path}.{name}_cache", (batch, cache, width))
    return g.one("concat", before, new, name=f"{name}_all", axis=1, appended=True)


@dataclass(frozen=True, slots=True)
class ReadBefore:
    """What an encoder gave in an earlier call: of so many positions, keys and values are kept."""

    positions: int

    def keys_and_values(self, g: GraphBuilder, batch: int, width: int) -> tuple[Tensor, Tensor]:
        """The inputs that hold them for a layer."""
        k, v = (
            g.input(f"{g.path}.{name}_cache", (batch, self.positions, width)) for name in ("k", "v")
        )
        return k, v


def check_fused(name: str, fused: bool) -> None:
    """Refuse to spell attention out where keys and values of an encoder are kept."""
    if not fused:
        raise ModelError(
            "keeps what its encoder gave, which attention op by op does not tell apart",
            fix="leave fused_attention=false out",
            field=name,
        )


def position_ids(g: GraphBuilder, count: int, start: int = 0) -> Tensor:
    """The numbers of positions, from `start` on."""
    attrs: dict[str, AttrIn] = {"shape": (count,)}
    if start:
        attrs["start"] = start
    (order,) = g.op("constant", name="position_ids", dtype="i64", shapes=None, **attrs)
    return order


class Stack:
    """Layers of one description, with a builder: of a decoder, or of a tower in another model."""

    def __init__(self, g: GraphBuilder, sizes: DecoderSizes, fused: bool, cache: int = 0) -> None:
        self.g = g
        self.sizes = sizes
        self.names = sizes.names
        self.fused = fused
        self.cache = cache

    def norm(self, x: Tensor, name: str) -> Tensor:
        """The model's norm, over the last dim."""
        n = self.sizes.norm
        return self.g.norm(x, n.kind, name, bias=n.bias, affine=n.affine, eps=n.eps, shift=n.shift)

    def embedded(self, ids: Tensor, table: Tensor) -> Tensor:
        """Words, and positions where they are learned."""
        g, sizes = self.g, self.sizes
        x = g.lookup(ids, table, self.names.embed)
        if sizes.embed_scale != 1.0:
            x = g.elementwise("scale", x, name="embed_scale", factor=sizes.embed_scale)
        if sizes.embed_width:
            x = g.linear(x, sizes.width, "project_in", bias=False)
        if not sizes.positions:
            return x
        offset = sizes.position_offset
        order = position_ids(g, ids.shape[1], offset + self.cache)
        places = g.embedding(order, sizes.positions + offset, sizes.width, self.names.positions)
        return g.add(x, places, name="embedding")

    def logits(self, x: Tensor, table: Tensor) -> Tensor:
        """Scores of all words."""
        g, sizes, head = self.g, self.sizes, self.names.head
        weight = table if sizes.tied else g.parameter(f"{head}.weight", table.shape)
        bias = [g.parameter(f"{head}.bias", (sizes.vocab,))] if sizes.head_bias else []
        scores = g.one("linear", x, weight, *bias, name=head)
        if sizes.final_softcap:
            scores = g.elementwise("softcap", scores, cap=sizes.final_softcap)
        return scores

    def blocks(self, x: Tensor, memory: Tensor | ReadBefore | None = None) -> Tensor:
        """All layers, one after the other."""
        for layer in range(self.sizes.layers):
            with self.g.scope(f"{self.names.layers}.{layer}"):
                x = self.block(x, layer, memory)
        return x

    def block(self, x: Tensor, layer: int, memory: Tensor | ReadBefore | None = None) -> Tensor:
        """One layer: attention and feed-forward, with norms in their places.

        With `memory` (what an encoder gives) it is looked at in between.
        """
        g, place = self.g, self.sizes.place
        first, second, third, fourth = self.names.norms
        if place in ("parallel", "parallel_two"):
            y = self.norm(x, first)
            other = y if place == "parallel" else self.norm(x, second)
            return g.add(x, self._attend(y, layer), self._feed(other, layer), name="residual")
        y = self.norm(x, first) if place in ("pre", "both") else x
        y = self._attend(y, layer)
        if place in ("post", "both"):
            y = self.norm(y, second)
        x = g.add(x, y, name="attn_residual")
        if place == "after_add":
            x = self.norm(x, first)
        if memory is not None:
            x = self._look_at(x, layer, memory)
        y = x
        if place in ("pre", "both"):
            y = self.norm(x, second if place == "pre" else third)
        y = self._feed(y, layer)
        if place in ("post", "both"):
            y = self.norm(y, fourth)
        x = g.add(x, y, name="mlp_residual")
        return self.norm(x, second) if place == "after_add" else x

    def _look_at(self, x: Tensor, layer: int, memory: Tensor | ReadBefore) -> Tensor:
        norm, after = f"{self.names.cross}_layer_norm", self.sizes.place == "after_add"
        y = x if after else self.norm(x, norm)
        with self.g.scope(self.names.cross):
            y = self._attention(y, layer, memory)
        x = self.g.add(x, y, name="cross_residual")
        return self.norm(x, norm) if after else x

    def _attend(self, x: Tensor, layer: int) -> Tensor:
        with self.g.scope(self.names.attention):
            if self.sizes.latent is not None:
                return self._latent(x, self.sizes.latent, layer)
            return self._attention(x, layer)

    def _attention(
        self, x: Tensor, layer: int, memory: Tensor | ReadBefore | None = None
    ) -> Tensor:
        g, sizes = self.g, self.sizes
        size, kv_heads = sizes.size_of_head, sizes.kv_heads or sizes.heads
        rope = sizes.rope_of(layer)
        q, k, v = self._queries_keys_values(x, kv_heads, memory)
        if sizes.query_norm == "whole":
            q, k = self.norm(q, "q_norm"), self.norm(k, "k_norm")
        if sizes.clip:
            q, k, v = (
                g.elementwise("clip", t, name=f"{n}_clip", low=-sizes.clip, high=sizes.clip)
                for t, n in ((q, "q"), (k, "k"), (v, "v"))
            )
        if sizes.query_norm == "head":
            q, k = self._head_norm(q, size, "q_norm"), self._head_norm(k, size, "k_norm")
        if rope is not None:
            q = self._turned(q, rope, sizes.heads, "q_rope")
            k = self._turned(k, rope, kv_heads, "k_rope")
        if sizes.query_norm == "l2" and rope is not None:
            q, k = self._head_norm(q, size, "q_norm"), self._head_norm(k, size, "k_norm")
        if sizes.temperature is not None and rope is None:
            floor, factor = sizes.temperature
            more: dict[str, AttrIn] = {"start": self.cache} if self.cache else {}
            q = g.elementwise("temperature", q, name="q_scaled", floor=floor, factor=factor, **more)
        if memory is None:
            k, v = (remembered(g, t, self.cache, n) for t, n in ((k, "k"), (v, "v")))
        sinks = g.parameter("sinks", (sizes.heads,)) if sizes.sinks else None
        y = g.attention(
            q, k, v, sizes.heads, kv_heads=kv_heads, softcap=sizes.softcap,
            causal=sizes.causal and memory is None,
            window=sizes.windows[layer] if sizes.windows else 0,
            chunk=sizes.chunks[layer] if sizes.chunks else 0,
            scale=self._scale(size, layer), sinks=sinks, fused=self.fused,
            remembered=isinstance(memory, ReadBefore),
        )  # fmt: skip
        return self._linear(y, sizes.width, self.names.output, sizes.output_bias)

    def _scale(self, size: int, layer: int) -> float | None:
        scale = self.sizes.attention_scale
        if self.sizes.layer_scaled:
            return (size**-0.5 if scale is None else scale) / (layer + 1)
        return scale

    def _turned(self, x: Tensor, rope: Rope, heads: int, name: str) -> Tensor:
        usual = Rope()
        attrs: dict[str, bool | int | float | tuple[float, ...]] = {"heads": heads}
        if rope.frequencies:
            attrs["frequencies"] = rope.frequencies
        elif rope.theta != usual.theta:
            attrs["theta"] = rope.theta
        if self.cache:
            attrs["start"] = self.cache
        for key in ("factor", "size", "interleaved"):
            if getattr(rope, key) != getattr(usual, key):
                attrs[key] = getattr(rope, key)
        return self.g.elementwise("rope", x, name=name, **attrs)

    def _head_norm(self, x: Tensor, size: int, name: str) -> Tensor:
        g, norm = self.g, self.sizes.norm
        heads = g.reshape(x, (*x.shape[:-1], -1, size), f"{name}_heads")
        affine = self.sizes.query_norm != "l2"
        y = g.norm(heads, "rms_norm", name, affine=affine, eps=norm.eps, shift=norm.shift)
        return g.reshape(y, x.shape, f"{name}_flat")

    def _queries_keys_values(
        self, x: Tensor, kv_heads: int, memory: Tensor | ReadBefore | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes, names = self.sizes, self.names.qkv.split()
        size, bias = sizes.size_of_head, sizes.qkv_bias
        counts = (sizes.heads, kv_heads, kv_heads)
        if len(names) == 3:
            q = self._linear(x, counts[0] * size, names[0], bias)
            if isinstance(memory, ReadBefore):
                return q, *memory.keys_and_values(self.g, x.shape[0], kv_heads * size)
            other = x if memory is None else memory
            k = self._linear(other, counts[1] * size, names[1], bias and sizes.key_bias)
            return q, k, self._linear(other, counts[2] * size, names[2], bias)
        total, starts = sum(counts), (0, sizes.heads, sizes.heads + kv_heads)
        view: tuple[int, ...] = ()
        spans = [
            (start * size, (start + count) * size)
            for start, count in zip(starts, counts, strict=True)
        ]
        if self.names.packing == "heads":  # each key head with its queries, its key, its value
            shared = sizes.heads // kv_heads
            view = (kv_heads, shared + 2, size)
            spans = [(0, shared), (shared, shared + 1), (shared + 1, shared + 2)]
        q, k, v = (
            self._packed_linear(x, names[0], letter, total * size, view, span, count * size, bias)
            for letter, span, count in zip("qkv", spans, counts, strict=True)
        )
        return q, k, v

    def _packed_linear(
        self, x: Tensor, name: str, part: str, total: int, view: tuple[int, ...],
        span: tuple[int, int], features: int, bias: bool,
    ) -> Tensor:  # fmt: skip
        """A linear layer whose rows are some of a packed one's, called `name.part` here."""
        g, width, turned = self.g, x.shape[-1], self.names.transposed
        shape = (width, total) if turned else (total, width)
        rows, axis = ((*view, width) if view else ()), 1 if turned or view else 0
        packed = PackedPart(f"{name}.weight", shape, rows, axis, *span, transposed=turned)
        weights = [g.parameter(f"{name}.{part}.weight", (features, width), packed=packed)]
        if bias:
            packed = PackedPart(f"{name}.bias", (total,), view, 1 if view else 0, *span)
            weights.append(g.parameter(f"{name}.{part}.bias", (features,), packed=packed))
        return g.one("linear", x, *weights, name=f"{name}.{part}")

    def _linear(self, x: Tensor, features: int, name: str, bias: bool) -> Tensor:
        if not self.names.transposed:
            return self.g.linear(x, features, name, bias=bias)
        shape = (x.shape[-1], features)
        packed = PackedPart(f"{name}.weight", shape, transposed=True)
        weights = [self.g.parameter(f"{name}.rows.weight", shape[::-1], packed=packed)]
        if bias:
            weights.append(self.g.parameter(f"{name}.bias", (features,)))
        return self.g.one("linear", x, *weights, name=name)

    def _latent(self, x: Tensor, latent: LatentAttention, layer: int) -> Tensor:
        g, sizes = self.g, self.sizes
        heads, size, rope = sizes.heads, latent.nope + latent.rope, sizes.rope_of(layer)
        q = x
        if latent.query_rank:
            q = g.linear(x, latent.query_rank, "q_a_proj", bias=latent.bias)
            q = g.norm(q, "rms_norm", "q_a_layernorm", eps=latent.norm_eps)
        q = g.linear(q, heads * size, "q_b_proj" if latent.query_rank else "q_proj", bias=False)
        narrow = g.linear(x, latent.key_rank + latent.rope, "kv_a_proj_with_mqa", bias=latent.bias)
        kv, k_turned = g.split(narrow, (latent.key_rank, latent.rope), name="kv_parts")
        kv = g.norm(kv, "rms_norm", "kv_a_layernorm", eps=latent.norm_eps)
        if self.cache:
            return self._absorbed(q, kv, k_turned, latent, layer)
        kv = g.linear(kv, heads * (latent.nope + latent.value), "kv_b_proj", bias=False)
        lead = x.shape[:-1]
        q_heads = g.reshape(q, (*lead, heads, size), "q_heads")
        q_kept, q_turned = g.split(q_heads, (latent.nope, latent.rope), name="q_parts")
        if rope is not None:
            flat = g.reshape(q_turned, (*lead, heads * latent.rope), "q_turned")
            flat = self._turned(flat, rope, heads, "q_rope")
            q_turned = g.reshape(flat, q_turned.shape, "q_rope_heads")
            k_turned = self._turned(k_turned, rope, 1, "k_rope")
        kv_heads = g.reshape(kv, (*lead, heads, latent.nope + latent.value), "kv_heads")
        k_kept, v = g.split(kv_heads, (latent.nope, latent.value), name="k_v")
        one = g.reshape(k_turned, (*lead, 1, latent.rope), "k_one_head")
        one = g.one("expand", one, name="k_all_heads", shape=(*lead, heads, latent.rope))
        q = g.concat([q_kept, q_turned], -1, "q")
        k = g.concat([k_kept, one], -1, "k")
        q, k, v = (
            g.reshape(t, (*lead, -1), f"{n}_flat") for t, n in ((q, "q"), (k, "k"), (v, "v"))
        )
        y = g.attention(
            q, k, v, heads, causal=True, scale=self._scale(size, layer), fused=self.fused
        )
        return g.linear(y, sizes.width, self.names.output, bias=latent.bias)

    def _absorbed(
        self, q: Tensor, kv: Tensor, k_turned: Tensor, latent: LatentAttention, layer: int
    ) -> Tensor:
        """Latent attention behind a cache, which holds the narrow layer and one turned key.

        Keys are W c of narrow features c, so that queries times keys are (W' q) c: the weights of
        keys and values go to the queries and to the result, and all heads read one cache.
        """
        g, sizes, rope = self.g, self.sizes, self.sizes.rope_of(layer)
        heads, size, lead = sizes.heads, latent.nope + latent.rope, q.shape[:-1]
        rank, both = latent.key_rank, latent.nope + latent.value
        q_heads = g.reshape(q, (*lead, heads, size), "q_heads")
        q_kept, q_turned = g.split(q_heads, (latent.nope, latent.rope), name="q_parts")
        if rope is not None:
            flat = g.reshape(q_turned, (*lead, heads * latent.rope), "q_turned")
            flat = self._turned(flat, rope, heads, "q_rope")
            q_turned = g.reshape(flat, q_turned.shape, "q_rope_heads")
            k_turned = self._turned(k_turned, rope, 1, "k_rope")
        stored, view = (heads * both, rank), (heads, both, rank)
        weights = [
            g.parameter(
                f"kv_b_proj.{part}.weight", (heads, stop - start, rank),
                packed=PackedPart("kv_b_proj.weight", stored, view, 1, start, stop),
            )
            for part, start, stop in (("k", 0, latent.nope), ("v", latent.nope, both))
        ]  # fmt: skip
        q_kept = g.one("einsum", q_kept, weights[0], name="q_absorbed", equation="bshn,hnr->bshr")
        q = g.reshape(g.concat([q_kept, q_turned], -1, "q"), (*lead, -1), "q_flat")
        k = remembered(g, g.concat([kv, k_turned], -1, "latent"), self.cache, "latent")
        v = g.one("slice", k, name="v", axis=2, start=0, stop=rank)
        y = g.attention(
            q, k, v, heads, kv_heads=1, causal=True, scale=self._scale(size, layer),
            fused=self.fused, values_in_keys=self.fused,
        )  # fmt: skip
        y = g.reshape(y, (*lead, heads, rank), "y_heads")
        y = g.one("einsum", y, weights[1], name="y_absorbed", equation="bshr,hvr->bshv")
        y = g.reshape(y, (*lead, heads * latent.value), "y_flat")
        return g.linear(y, sizes.width, self.names.output, bias=latent.bias)

    def _feed(self, x: Tensor, layer: int) -> Tensor:
        sizes = self.sizes
        if sizes.experts is None or layer in sizes.dense_layers:
            inner = sizes.dense_inner or sizes.inner
            if not self.names.mlp:
                return self._feed_forward(x, inner)
            with self.g.scope(self.names.mlp):
                return self._feed_forward(x, inner)
        with self.g.scope(self.names.sparse):
            return self._sparse(x, sizes.experts)

    def _feed_forward(self, x: Tensor, inner: int, names: Names | None = None) -> Tensor:
        bias, gate_up = self.sizes.mlp_bias, (names or self.names).gate_up.split()
        if not self.sizes.gated:
            y = self._activated(self._linear(x, inner, gate_up[0], bias))
        elif len(gate_up) == 2:
            y = self._gated(*(self._linear(x, inner, name, bias) for name in gate_up))
        else:
            parts = (("gate", (0, inner)), ("up", (inner, 2 * inner)))
            y = self._gated(*(
                self._packed_linear(x, gate_up[0], part, 2 * inner, (), span, inner, bias)
                for part, span in parts
            ))  # fmt: skip
        return self._linear(y, x.shape[-1], self.names.down, bias)

    def _activated(self, x: Tensor) -> Tensor:
        return self.g.elementwise(self.sizes.activation, x) if self.sizes.activation else x

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.sizes.activation == "silu":
            return self.g.elementwise("swiglu", gate, up)
        return self.g.mul(self._activated(gate), up)

    def _sparse(self, x: Tensor, experts: Experts) -> Tensor:
        g = self.g
        gates = self._routed(x, experts)
        common: dict[str, bool] = {"weighted": False} if experts.weigh_inputs else {}
        tokens = g.one(
            "moe_dispatch", x, gates, name="dispatch", top_k=experts.top_k, dropless=True,
            capacity_factor=experts.capacity_factor,
            **({"weighted": True} if experts.weigh_inputs else {}),
        )  # fmt: skip
        with g.scope("experts"):
            y = self._expert_layers(tokens, experts)
        y = g.one("moe_combine", y, gates, name="combine", top_k=experts.top_k, **common)
        if not experts.shared:
            return y
        plain = replace(self.names, gate_up="gate_proj up_proj")
        with g.scope(self.names.shared):
            shared = self._feed_forward(x, experts.shared, plain)
        if experts.shared_gate:
            share = g.elementwise("sigmoid", g.linear(x, 1, "shared_expert_gate", bias=False))
            shared = g.mul(shared, share, "shared_share")
        return g.add(y, shared, name="with_shared")

    def _routed(self, x: Tensor, experts: Experts) -> Tensor:
        g, name = self.g, self.names.router
        weights = [g.parameter(f"{name}.weight", (experts.count, x.shape[-1]))]
        if experts.bias:
            weights.append(g.parameter(f"{name}.bias", (experts.count,)))
        if experts.correction:
            weights.append(g.parameter(f"{name}.e_score_correction_bias", (experts.count,)))
        given = {
            "normalize": experts.normalize, "eps": experts.normalize_eps,
            "correction": experts.correction,
        }  # fmt: skip
        attrs: dict[str, bool | int | float] = {key: value for key, value in given.items() if value}
        if experts.scale != 1.0:
            attrs["scale"] = experts.scale
        if experts.groups > 1:
            attrs |= {
                "groups": experts.groups, "top_groups": experts.top_groups,
                "group_top": experts.group_top,
            }  # fmt: skip
        return g.one(
            "moe_router", x, *weights, name=name, top_k=experts.top_k, score=experts.score, **attrs
        )

    def _expert_layers(self, tokens: Tensor, experts: Experts) -> Tensor:
        """Gate, input and output layers of all experts, from the two tensors of the checkpoint."""
        g, width, inner = self.g, tokens.shape[-1], experts.inner
        turned = self.names.experts != "out_first"
        shape = (experts.count, width, 2 * inner) if turned else (experts.count, 2 * inner, width)
        axis = 2 if turned else 1
        parts = {"gate": (0, inner, 1), "up": (inner, 2 * inner, 1)}
        if self.names.experts == "interleaved":
            parts = {"gate": (0, 2 * inner, 2), "up": (1, 2 * inner, 2)}
        gate, up = (
            self._expert(
                tokens, name, (experts.count, inner, width),
                PackedPart("gate_up_proj", shape, (), axis, *span, turned),
                PackedPart("gate_up_proj_bias", (experts.count, 2 * inner), (), 1, *span)
                if experts.bias else None,
            )
            for name, span in parts.items()
        )  # fmt: skip
        if experts.clamp is not None:
            alpha, limit = experts.clamp
            y = g.elementwise("clamped_swiglu", gate, up, alpha=alpha, limit=limit)
        else:
            y = self._gated(gate, up)
        down = (experts.count, inner, width)
        packed = PackedPart("down_proj", down, transposed=True) if turned else None
        weights = [
            g.parameter(
                "down_proj.rows" if turned else "down_proj", (experts.count, width, inner),
                packed=packed,
            )
        ]  # fmt: skip
        if experts.bias:
            weights.append(g.parameter("down_proj_bias", (experts.count, width)))
        return g.one("expert_linear", y, *weights, name="down")

    def _expert(
        self, x: Tensor, name: str, shape: tuple[int, int, int], packed: PackedPart,
        bias: PackedPart | None,
    ) -> Tensor:  # fmt: skip
        g = self.g
        weights = [g.parameter(f"{name}.weight", shape, packed=packed)]
        if bias is not None:
            weights.append(g.parameter(f"{name}.bias", shape[:2], packed=bias))
        return g.one("expert_linear", x, *weights, name=name)
