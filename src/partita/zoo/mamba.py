"""Mamba-2: layers of a state space in place of attention, as `transformers` has them.

Dao and Gu, "Transformers are SSMs", 2024 (arXiv:2405.21060). What the checkpoint packs into one
input layer and one convolution (gate, values, the two readings of the state, time steps) stands
apart in the graph, so that heads can be split; `Tensor.source` says where each lies.

Parameters of a layer with width d, inner width f = e d, h heads, g groups of state n, kernel k:
d (2 f + 2 g n + h) + (f + 2 g n) (k + 1) + 3 h + f + f d + d.
"""

from dataclasses import dataclass

from partita.graph.build import AttrIn, GraphBuilder
from partita.graph.packed import PackedPart
from partita.graph.record import Graph, Tensor
from partita.zoo.decoder import check_cache, remembered
from partita.zoo.parts import finish


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """What distinguishes one Mamba-2 from another."""

    layers: int
    width: int
    heads: int
    head_size: int
    state: int
    groups: int
    kernel: int
    vocab: int
    chunk: int = 256
    eps: float = 1e-5
    bias: bool = False
    conv_bias: bool = True
    activation: str = "silu"
    tied: bool = False
    limits: tuple[float, float | None] = (0.0, None)  # of time steps

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_size

    @property
    def read(self) -> int:
        """Features of one reading of the state, of all groups."""
        return self.groups * self.state


def mamba(
    name: str, sizes: MambaSizes, batch: int, seq: int, dtype: str, loss: bool, cache: int = 0
) -> Graph:
    """The graph of a language model of Mamba-2 layers.

    With a `cache`, however many tokens were read before: each layer begins with its state, and its
    convolutions with the last inputs.
    """
    check_cache(name, seq, cache, 0, loss)
    g = GraphBuilder(name, dtype)
    ids = g.input("input_ids", (batch, seq), "i64")
    with g.scope("backbone"):
        table = g.parameter("embeddings.weight", (sizes.vocab, sizes.width))
        x = g.lookup(ids, table, "embeddings")
        for layer in range(sizes.layers):
            with g.scope(f"layers.{layer}"):
                y = g.norm(x, "rms_norm", "norm", eps=sizes.eps)
                with g.scope("mixer"):
                    y = _mixer(g, y, sizes, behind=cache > 0)
                x = g.add(x, y, name="residual")
        x = g.norm(x, "rms_norm", "norm_f", eps=sizes.eps)
    weight = table if sizes.tied else g.parameter("lm_head.weight", table.shape)
    return finish(g, g.one("linear", x, weight, name="lm_head"), loss)


def _mixer(g: GraphBuilder, x: Tensor, sizes: MambaSizes, behind: bool) -> Tensor:
    inner, read, heads = sizes.inner, sizes.read, sizes.heads
    widths = {"gate": inner, "x": inner, "b": read, "c": read, "dt": heads}
    total, start, parts = sum(widths.values()), 0, {}
    for part, width in widths.items():
        parts[part] = _part_of_linear(g, x, part, total, start, width, sizes.bias)
        start += width
    start, mixed = 0, {}
    for part in ("x", "b", "c"):
        mixed[part] = _part_of_conv(g, parts[part], part, start, sizes, behind)
        start += widths[part]
    decay = g.parameter("A_log", (heads,))
    skip, bias = g.parameter("D", (heads,)), g.parameter("dt_bias", (heads,))
    attrs: dict[str, AttrIn] = {"heads": heads, "groups": sizes.groups, "chunk": sizes.chunk}
    low, high = sizes.limits
    if low > 0:
        attrs["low"] = low
    if high is not None:
        attrs["high"] = high
    state = [
        g.input(f"{g.path}.state", (x.shape[0], heads, sizes.head_size, sizes.state))
        for _ in range(behind)
    ]
    y = g.one(
        "state_space", mixed["x"], parts["dt"], decay, mixed["b"], mixed["c"], skip, bias, *state,
        name="scan", **attrs,
    )  # fmt: skip
    gate = g.elementwise("silu", parts["gate"], name="gate_activation")
    y = g.elementwise("mul", y, gate, name="gated")
    y = g.norm(y, "rms_norm", "norm", eps=sizes.eps)
    return g.linear(y, sizes.width, "out_proj", bias=sizes.bias)


def _part_of_linear(
    g: GraphBuilder, x: Tensor, part: str, total: int, start: int, width: int, bias: bool
) -> Tensor:
    stop = start + width
    packed = PackedPart("in_proj.weight", (total, x.shape[-1]), start=start, stop=stop)
    shape = (width, x.shape[-1])
    weights = [g.parameter(f"in_proj.{part}.weight", shape, packed=packed)]
    if bias:
        packed = PackedPart("in_proj.bias", (total,), start=start, stop=stop)
        weights.append(g.parameter(f"in_proj.{part}.bias", (width,), packed=packed))
    return g.one("linear", x, *weights, name=f"in_proj.{part}")


def _part_of_conv(
    g: GraphBuilder, x: Tensor, part: str, start: int, sizes: MambaSizes, behind: bool
) -> Tensor:
    """Each feature looks at its last positions, then the activation."""
    width = x.shape[-1]
    total, stop = sizes.inner + 2 * sizes.read, start + width
    packed = PackedPart("conv1d.weight", (total, 1, sizes.kernel), start=start, stop=stop)
    weights = [g.parameter(f"conv1d.{part}.weight", (width, 1, sizes.kernel), packed=packed)]
    if sizes.conv_bias:
        packed = PackedPart("conv1d.bias", (total,), start=start, stop=stop)
        weights.append(g.parameter(f"conv1d.{part}.bias", (width,), packed=packed))
    if behind:
        x = remembered(g, x, sizes.kernel - 1, part)
    y = g.transpose(x, (0, 2, 1), f"{part}_turned")
    if not behind:
        y = g.one("pad", y, name=f"{part}_padded", before=(0, 0, sizes.kernel - 1), after=(0, 0, 0))
    y = g.one(
        "conv", y, *weights, name=f"conv1d.{part}", stride=(1,), padding=(0,), dilation=(1,),
        groups=width,
    )  # fmt: skip
    y = g.transpose(y, (0, 2, 1), f"{part}_back")
    return g.elementwise(sizes.activation, y, name=f"{part}_activation") if sizes.activation else y
