"""Transformer: the numbers that say what a stack of equal layers computes and holds.

Dense or with experts, grouped-query or latent attention (DeepSeek's MLA), gated or plain
feed-forward. Parameters of a layer are those of its matrices, biases and norms; FLOPs count a
multiplication and an addition as two and causal attention as the half that is needed.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The experts of a sparse layer: each token goes to `top_k` of `count`."""

    count: int
    top_k: int
    inner: int
    shared_inner: int = 0  # of an expert that every token visits
    dense_layers: int = 0  # how many layers, the first ones, have none


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention: keys and values are made from a short vector per token."""

    query_rank: int  # 0: queries are made directly
    key_rank: int
    rope: int = 64
    nope: int = 128
    value: int = 128


@dataclass(frozen=True)
class Transformer:
    """What distinguishes one stack of layers from another."""

    name: str
    layers: int
    hidden: int
    heads: int
    inner: int
    vocab: int
    seq: int
    kv_heads: int = 0  # 0: as many as heads
    head_size: int = 0  # 0: hidden / heads
    gated: bool = False
    biases: bool = True
    tied: bool = True
    causal: bool = True
    positions: bool = True  # learned positions are parameters
    experts: ExpertLayers | None = None
    latent: Latent | None = None
    window: int = 0  # tokens that a windowed layer looks back; 0: all
    windowed_share: float = 0.0  # the part of the layers with a window
    num_positions: int = 0  # that are learned; 0: as many as a sequence has
    transform: bool = False  # a product and a norm before the logits: BERT's head
    patch_features: int = 0  # numbers of one patch of an image, embedded by a product; 0: words
    classifies: bool = False  # one position of a sequence alone reaches the output layer

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def size_of_head(self) -> int:
        """Width of one head."""
        return self.head_size or self.hidden // self.heads

    @cached_property
    def attention_products(self) -> tuple[tuple[int, int, str], ...]:
        """The matrices of attention: inputs, outputs, and what tensor parallelism cuts."""
        h, a, e = self.hidden, self.heads, self.size_of_head
        if self.latent is None:
            return ((h, (a + 2 * self.groups) * e, "columns"), (a * e, h, "rows"))
        latent = self.latent
        query = a * (latent.nope + latent.rope)
        queries: tuple[tuple[int, int, str], ...] = ((h, query, "columns"),)
        if latent.query_rank:
            queries = ((h, latent.query_rank, ""), (latent.query_rank, query, "columns"))
        return (
            *queries,
            (h, latent.key_rank + latent.rope, ""),
            (latent.key_rank, a * (latent.nope + latent.value), "columns"),
            (a * latent.value, h, "rows"),
        )

    @property
    def score_width(self) -> float:
        """Multiplications per pair of positions and head, of scores and of values."""
        if self.latent is None:
            return 2.0 * self.size_of_head
        return float(self.latent.nope + self.latent.rope + self.latent.value)

    @property
    def mean_context(self) -> float:
        """Positions that one position looks at, on average over layers."""
        whole = self.seq / 2 if self.causal else float(self.seq)
        if not self.windowed_share or self.window >= self.seq:
            return whole
        windowed = self.window - self.window**2 / (2.0 * self.seq)
        return whole * (1 - self.windowed_share) + min(windowed, whole) * self.windowed_share

    @property
    def attention_parameters(self) -> float:
        """Of one layer, its two norms with it."""
        count = float(sum(k * n + (n if self.biases else 0) for k, n, _ in self.attention_products))
        return count + (4 if self.biases else 2) * self.hidden

    @property
    def dense_parameters(self) -> float:
        """Of one dense feed-forward part."""
        wide = 2 if self.gated else 1
        count = (wide + 1.0) * self.hidden * self.inner
        return count + ((wide * self.inner + self.hidden) if self.biases else 0)

    @property
    def expert_parameters(self) -> float:
        """Of all experts of one sparse layer."""
        if self.experts is None:
            return 0.0
        return self.experts.count * self._ffn(self.experts.inner)

    @property
    def shared_parameters(self) -> float:
        """Of the router and the shared expert of one sparse layer."""
        if self.experts is None:
            return 0.0
        return self._ffn(self.experts.shared_inner) + self.hidden * self.experts.count

    def _ffn(self, inner: int) -> float:
        return (3.0 if self.gated else 2.0) * self.hidden * inner

    @property
    def sparse_layers(self) -> int:
        """How many layers have experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def embedding_parameters(self) -> float:
        """Of tokens (or patches and the class token) and learned positions."""
        rows = (self.num_positions or self.seq) if self.positions else 0
        rows += self.patch_features + 2 if self.patch_features else self.vocab
        return float(rows * self.hidden)

    @property
    def output_parameters(self) -> float:
        """Of the last norm and what stands before the logits; the table of words apart."""
        return 2.0 * self.hidden + (self.hidden * (self.hidden + 3.0) if self.transform else 0.0)

    @property
    def output_share(self) -> float:
        """The part of all positions that reaches the output layer."""
        return 1.0 / self.seq if self.classifies else 1.0

    @property
    def parameters(self) -> float:
        """Of the whole model."""
        dense = self.layers - self.sparse_layers
        total = self.layers * self.attention_parameters + dense * self.dense_parameters
        total += self.sparse_layers * (self.expert_parameters + self.shared_parameters)
        head = 0.0 if self.tied else self.vocab * self.hidden
        return total + self.embedding_parameters + head + self.output_parameters

    @property
    def layer_flops(self) -> tuple[float, float]:
        """Forward FLOPs per token of a dense layer and of a sparse one."""
        attention = 2.0 * sum(k * n for k, n, _ in self.attention_products)
        attention += 2.0 * self.mean_context * self.heads * self.score_width
        wide = 3 if self.gated else 2
        dense = attention + 2.0 * wide * self.hidden * self.inner
        if self.experts is None:
            return dense, 0.0
        active = self.experts.top_k * self.experts.inner + self.experts.shared_inner
        sparse = attention + 2.0 * wide * self.hidden * active
        return dense, sparse + 2.0 * self.hidden * self.experts.count

    def step_flops(self, sequences: float) -> float:
        """Forward and backward of so many sequences, each operation counted once."""
        return 3.0 * self.forward_flops * sequences * self.seq

    @property
    def forward_flops(self) -> float:
        """Forward FLOPs per token: layers, embedding and output layer."""
        dense, sparse = self.layer_flops
        per_token = dense * (self.layers - self.sparse_layers) + sparse * self.sparse_layers
        wide = self.vocab + (self.hidden if self.transform else 0)
        per_token += 2.0 * self.hidden * wide * self.output_share
        return per_token + 2.0 * self.hidden * self.patch_features
