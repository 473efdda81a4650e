"""What a forecast is of: a transformer, a strategy to run it by, a machine.

A `Transformer` is the numbers that say what a stack of equal layers computes and holds: dense or
with experts, grouped-query or latent attention (DeepSeek's MLA), gated or plain
feed-forward. Parameters of a layer are those of its matrices, biases and norms; FLOPs count a
multiplication and an addition as two and causal attention as the half that is needed.

A `Strategy` says how it is spread over devices, in the field's words; `check_strategy` what is
wrong.

    world = tp x cp x dp x pp        experts are spread over ep ranks of the dp x cp x tp ones
    batch = micro_batch x num_microbatches x dp

A `Machine` is what a forecast needs of a cluster of equal devices: kind, nodes, two bandwidths.
Times of collectives follow the ring: of n bytes over p ranks, q of them in a node,

    inside      fixed + volume / bandwidth of the wires inside
    across      fixed + hops + the larger of that and volume / (q network cards)

with volume 2 n (p-1)/p for an all-reduce and n (p-1)/p for a gather, a scatter or an all-to-all;
between nodes it is that of p/q ranks, since the ranks of a node add up or share out inside first.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property

from partita.cluster import Cluster
from partita.cluster.record import DeviceKind
from partita.costs.physics import Physics, PhysicsSet, physics_of
from partita.errors import ClusterError, PlanError
from partita.plans import EXECUTIONS

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
RECOMPUTE = ("none", "selective", "full")
# One kernel as tuned for its devices; the one of 2023 on whatever devices; products with softmax as
# one kernel between them; every op a kernel of its own, softmax in f32.
ATTENTION = ("flash", "flash-2", "fused-softmax", "eager")
DTYPES = ("f32", "bf16", "f16")
MATMUL_DTYPES = ("f32", "tf32", "bf16", "f16", "f8", "f4")


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


@dataclass(frozen=True, slots=True)
class Strategy:
    """Degrees of parallelism and what else changes the step."""

    batch: int
    micro_batch: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    zero: int = 0
    hsdp: int = 0  # ranks that one copy of parameters is sharded over; 0: all of dp
    recompute: str = "none"
    schedule: str = "1f1b"
    dtype: str = "bf16"
    matmul_dtype: str = ""  # "": dtype
    grad_dtype: str = "f32"
    execution: str = "eager"
    attention: str = "flash"
    dropout: bool = False
    overlap_dp: bool = True  # gradient reduction and parameter gathering beside computing
    overlap_tp: bool = False  # collectives of tensor parallelism in pieces beside products
    overlap_ep: bool = False  # exchanges of tokens between experts beside computing
    overlap_pp: bool = True  # sends and receives beside computing
    ends: int = 0  # layers fewer in the first and in the last stage than in the others
    master: bool = True  # f32 copies of parameters in the optimizer
    gathers: int = 1  # collectives in which a layer's sharded parameters are gathered
    fused_loss: bool = False  # the loss never writes logits in f32
    layers: tuple[int, ...] = ()  # of each stage; (): as even as they can be, see `ends`

    @property
    def fused_attention(self) -> bool:
        """Is attention one kernel that keeps no scores?"""
        return self.attention in ("flash", "flash-2")

    @property
    def world(self) -> int:
        """Devices."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one replica in a step."""
        return max(1, self.batch // (self.micro_batch * self.dp))

    @property
    def product_dtype(self) -> str:
        """What products are computed in."""
        return self.matmul_dtype or self.dtype

    def __str__(self) -> str:
        parts = [
            f"{name}={getattr(self, name)}"
            for name in ("tp", "pp", "vpp", "dp", "cp", "ep")
            if getattr(self, name) > 1
        ]
        parts += ["sp"] * self.sp + [f"zero={self.zero}"] * (self.zero > 0)
        parts += [f"hsdp={self.hsdp}"] * (self.hsdp > 0)
        schedule = f", {self.schedule}" if self.pp > 1 else ""
        recompute = f", {self.recompute} recompute" if self.recompute != "none" else ""
        named = " ".join(parts) or "one device"
        plural = "es" if self.num_microbatches != 1 else ""
        many = f"{self.num_microbatches} micro-batch{plural} of {self.micro_batch}"
        return f"{named}{schedule}, {many}{recompute}"


def check_strategy(model: Transformer, strategy: Strategy, num_devices: int) -> None:
    """Refuse what cannot be: each sentence says what was found and what to change."""
    for field in fields(Strategy):
        value = getattr(strategy, field.name)
        if field.type is int and value < (0 if field.name in ("zero", "hsdp", "ends") else 1):
            raise PlanError(f"is {value}", fix="use at least 1", field=field.name)
    s = strategy
    if s.world != num_devices:
        raise PlanError(
            f"tp={s.tp} x cp={s.cp} x dp={s.dp} x pp={s.pp} are {s.world} devices, "
            f"the cluster has {num_devices}",
            fix=_degrees_that_fit(s, num_devices),
            field="dp",
        )
    if s.micro_batch * s.dp > s.batch:
        raise PlanError(
            f"{s.micro_batch} x dp={s.dp} is more than the batch of {s.batch}",
            fix=f"use a micro-batch of at most {max(1, s.batch // s.dp)} or a larger batch",
            field="micro-batch",
        )
    if s.batch % (s.micro_batch * s.dp):
        raise PlanError(
            f"a batch of {s.batch} is not a whole number of micro-batches of {s.micro_batch} "
            f"for each of dp={s.dp} replicas",
            fix=f"use a multiple of {s.micro_batch * s.dp}",
            field="batch",
        )
    _check_names(s)
    _check_layers(model, s)
    _check_widths(model, s)


def check_divisions(model: Transformer, strategy: Strategy) -> None:
    """Refuse what frameworks refuse though a forecast could be made of it.

    Published runs have layouts of stages that no rule here knows, so `check_strategy` lets them be.
    """
    s = strategy
    if s.vpp > 1 and s.schedule != "interleaved":
        raise PlanError(
            f"vpp={s.vpp}, and {s.schedule} does not interleave chunks",
            fix="use schedule interleaved, or leave vpp out",
            field="vpp",
        )
    if s.schedule == "interleaved" and s.vpp == 1:
        raise PlanError(
            "interleaving needs several chunks on each rank",
            fix="use vpp of at least 2, or schedule 1f1b",
            field="schedule",
        )
    chunks = s.pp * s.vpp
    ends = {0, 1, 2}  # of the embedding and the output layer, those that count as a layer
    if s.vpp > 1 and all((model.layers + more) % chunks for more in ends):
        each = model.layers // s.pp if model.layers % s.pp == 0 else 1
        legal = [vpp for vpp in range(2, each + 1) if each % vpp == 0]
        raise PlanError(
            f"{model.layers} layers are not divided by pp={s.pp} x vpp={s.vpp} = {chunks} chunks",
            fix=f"use vpp of {_either(legal)}"
            if legal
            else f"use pp x vpp that divides {model.layers}, or leave vpp out",
            field="vpp",
        )
    if s.hsdp and s.zero == 0:
        raise PlanError(
            f"hsdp={s.hsdp} says over how many ranks a copy is sharded, and zero=0 shards nothing",
            fix="use zero=3 (or 1, 2), or leave hsdp out",
            field="hsdp",
        )


def _either(numbers: list[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _degrees_that_fit(s: Strategy, num_devices: int) -> str:
    others = s.tp * s.cp * s.pp
    if num_devices % others == 0:
        return f"use dp={num_devices // others}"
    return f"choose tp, cp and pp whose product divides {num_devices}"


def _check_names(s: Strategy) -> None:
    for name, value, known in (
        ("schedule", s.schedule, SCHEDULES),
        ("recompute", s.recompute, RECOMPUTE),
        ("execution", s.execution, EXECUTIONS),
        ("attention", s.attention, ATTENTION),
        ("dtype", s.dtype, DTYPES),
        ("matmul-dtype", s.product_dtype, MATMUL_DTYPES),
        ("grad-dtype", s.grad_dtype, DTYPES),
    ):
        if value not in known:
            raise PlanError(f"is {value!r}", fix=f"use one of {', '.join(known)}", field=name)
    if s.zero > 3:
        raise PlanError(f"is {s.zero}", fix="use 0, 1, 2 or 3", field="zero")
    if s.hsdp and s.dp % s.hsdp:
        raise PlanError(f"{s.hsdp} does not divide dp={s.dp}", fix="choose a divisor", field="hsdp")


def _check_layers(model: Transformer, s: Strategy) -> None:
    chunks = s.pp * s.vpp
    if s.layers and (len(s.layers) != s.pp or sum(s.layers) != model.layers or min(s.layers) < 0):
        raise PlanError(
            f"{','.join(map(str, s.layers))} are {sum(s.layers)} layers in {len(s.layers)} stages, "
            f"the model has {model.layers} and pp is {s.pp}",
            fix=f"give {s.pp} numbers that add up to {model.layers}",
            field="layers",
        )
    if s.vpp > 1 and s.pp == 1:
        raise PlanError(f"vpp={s.vpp} without a pipeline", fix="use pp of at least 2", field="vpp")
    if chunks > model.layers + 2:  # the embedding and the output layer may be chunks, too
        raise PlanError(
            f"pp={s.pp} x vpp={s.vpp} are {chunks} chunks, the model has {model.layers} layers",
            fix=f"use pp x vpp of at most {model.layers}",
            field="pp",
        )
    if s.schedule in ("interleaved",) and s.vpp > 1 and s.num_microbatches % s.pp:
        raise PlanError(
            f"{s.num_microbatches} micro-batches are not a multiple of pp={s.pp}, "
            "as interleaving needs",
            fix=f"use a batch that gives a multiple of {s.pp}",
            field="batch",
        )


def _check_widths(model: Transformer, s: Strategy) -> None:
    heads = model.heads
    if heads % s.tp and s.tp > 1:
        raise PlanError(
            f"tp={s.tp} does not divide {heads} heads",
            fix=f"use a divisor of {math.gcd(heads, model.inner)}",
            field="tp",
        )
    if model.latent is None and model.groups % s.tp and s.tp % model.groups:
        raise PlanError(
            f"tp={s.tp} neither divides {model.groups} heads of keys and values nor is a multiple",
            fix=f"use a divisor of {model.groups}",
            field="tp",
        )
    if s.sp and s.tp == 1:
        raise PlanError(
            "sequence parallelism splits what tensor parallelism repeats, and tp is 1",
            fix="use tp of at least 2 or leave sp out",
            field="sp",
        )
    if model.seq % (s.cp * (s.tp if s.sp else 1)):
        raise PlanError(
            f"{s.cp * (s.tp if s.sp else 1)} ranks do not divide a sequence of {model.seq}",
            fix="choose cp and tp that divide it",
            field="cp",
        )
    if s.ep > 1 and model.experts is None:
        raise PlanError(f"ep={s.ep} and the model has no experts", fix="leave it out", field="ep")
    if model.experts is not None and model.experts.count % s.ep:
        raise PlanError(
            f"ep={s.ep} does not divide {model.experts.count} experts",
            fix="choose a divisor",
            field="ep",
        )
    if s.dp * s.cp * s.tp % s.ep:
        raise PlanError(
            f"ep={s.ep} does not divide the {s.dp * s.cp * s.tp} ranks of one stage",
            fix=f"choose a divisor of {math.gcd(s.dp * s.cp * s.tp, model.experts.count)}"
            if model.experts
            else "leave it out",
            field="ep",
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Equal devices in equal nodes."""

    kind: DeviceKind
    num_devices: int
    node_size: int
    inside_bytes_per_s: float  # of one device, one direction
    across_bytes_per_s: float  # of one device's share of the network cards
    physics_set: PhysicsSet

    @property
    def physics(self) -> Physics:
        """The parameters of the kind."""
        return self.physics_set.physics

    def collective(self, kind: str, size_bytes: float, ranks: int, near: int) -> float:
        """Seconds of a collective over `ranks`, `near` of them in each node."""
        if ranks <= 1 or size_bytes <= 0:
            return 0.0
        physics = self.physics
        volume = size_bytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        wires = self.inside_bytes_per_s * physics.inside
        if near >= ranks:
            return physics.inside_s + volume / wires
        near = max(1, near)
        if kind == "all_to_all":
            volume *= (ranks - near) / max(1, ranks - 1)
            cards = self.across_bytes_per_s * physics.across
            return physics.across_s + (ranks - 1) * physics.hop_s + volume / cards
        # Ranks of one node add up first: each node sends and receives once.
        nodes = ranks / near
        cards = self.across_bytes_per_s * physics.across * near
        between = volume * (nodes - 1) / nodes * ranks / (ranks - 1)
        moving = max(between / cards, volume / wires if near > 1 else 0.0)
        return physics.across_s + (ranks - 1) * physics.hop_s + moving

    def send(self, size_bytes: float, *, far: bool) -> float:
        """Seconds of a message to the next stage."""
        physics = self.physics
        if far:
            return physics.across_s + size_bytes / (self.across_bytes_per_s * physics.across)
        return physics.inside_s + size_bytes / (self.inside_bytes_per_s * physics.inside)

    def side_by_side(self, first_s: float, second_s: float) -> float:
        """Seconds of two things that run at the same time and slow each other down."""
        return max(first_s, second_s) + self.physics.interference * min(first_s, second_s)


def machine_of(cluster: Cluster) -> Machine:
    """The machine that a cluster of equal devices is; heterogeneous ones are refused."""
    kinds = {cluster.kind_of(device).name for device in range(cluster.num_devices)}
    if len(kinds) > 1:
        raise ClusterError(
            f"has devices of {len(kinds)} kinds ({', '.join(sorted(kinds))})",
            fix="strategies by name are for equal devices; `partita plan` takes mixed ones",
            field="cluster",
        )
    kind = cluster.kind_of(0)
    nodes = cluster.levels()
    node_size = len(nodes[0].groups[0]) if nodes else 1
    inside, across = _rate(cluster, 0, 1), 0.0
    if cluster.num_devices > node_size:
        across = _rate(cluster, 0, node_size)
    return Machine(
        kind, cluster.num_devices, node_size, inside, across or inside, physics_of(kind.name)
    )


def _rate(cluster: Cluster, source: int, target: int) -> float:
    """Bytes per second of the narrowest link between two devices."""
    if max(source, target) >= cluster.num_devices:
        return 1.0
    return min(cluster.links[i].bytes_per_s for i in cluster.route(source, target))
