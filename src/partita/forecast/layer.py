"""One layer, the embedding and the output layer on one rank: what they compute, move and launch.

Products are those of tensor parallelism as Megatron does it: columns of the first matrix, rows of
the second, heads of attention. Elementwise work is counted in passes over its tensors as a fused
graph would make them; eager execution moves a multiple (see `costs/physics.py`). Backward is two
products for each forward one.
"""

from dataclasses import dataclass, field, replace

from partita.forecast.inputs import Machine, Strategy, Transformer

BYTES = {"f32": 4, "tf32": 4, "bf16": 2, "f16": 2, "f8": 1, "f4": 0.5}

GRAPH_GAP = 0.3  # of the gap between two kernels that a CUDA graph leaves


@dataclass(slots=True)
class Tally:
    """Work as it adds up: seconds of products and attention, bytes, kernels."""

    machine: Machine
    dtype: str
    product_dtype: str
    products_s: float = 0.0
    attention_s: float = 0.0
    traffic_bytes: float = 0.0  # as a fused graph has it
    plain_bytes: float = 0.0  # as it is in any graph
    kernels: float = 0.0
    flops: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)

    def product(
        self, m: float, n: float, k: float, batch: float = 1.0, dtype: str = "",
        kernels: float = 1, out_bytes: float = 2,
    ) -> None:  # fmt: skip
        """A matrix product, `batch` times; `out_bytes` are moved per element of its result."""
        if min(m, n, k, batch) <= 0:
            return
        dtype = dtype or self.product_dtype
        physics, kind = self.machine.physics, self.machine.kind
        half = physics.half
        flops = 2.0 * batch * m * n * k
        shape = (1 + half / m) * (1 + half / n) * (1 + half / k)
        computing = flops * shape / self._rate(dtype)
        size = BYTES[dtype]
        moved = batch * ((m * k + k * n) * size + m * n * out_bytes)
        moving = moved / (kind.memory_bytes_per_s * physics.memory)
        self.products_s += max(computing, moving)
        self.kernels += kernels
        self.flops += flops
        if dtype in ("f8", "f4"):  # casting the operands
            self.traffic_bytes += batch * (m * k + k * n) * 3
            self.kernels += 1

    def attention(self, flops: float, share: float) -> None:
        """Fused attention."""
        peak = self.machine.kind.peak(self.dtype)
        self.attention_s += flops / (peak * share)
        self.kernels += 1
        self.flops += flops

    def passes(self, elements: float, passes: float, kernels: float = 1, size: float = 2) -> None:
        """Elementwise work: so many reads and writes of so many elements."""
        self.traffic_bytes += elements * passes * size
        self.kernels += kernels

    def _rate(self, dtype: str) -> float:
        if dtype not in self.rates:
            physics, kind = self.machine.physics, self.machine.kind
            share = {"f8": physics.products_f8, "f4": physics.products_f4}.get(
                dtype, physics.products
            )
            peak = kind.peak("f8") * 2 if dtype == "f4" else kind.peak(dtype)
            self.rates[dtype] = peak * share
        return self.rates[dtype]

    def seconds(self, execution: str) -> float:
        """Of the device and the host together, without communication."""
        return max(self.device_s(execution), self.kernels * self.machine.physics.host(execution))

    def device_s(self, execution: str) -> float:
        """Of the device alone."""
        physics = self.machine.physics
        more = physics.eager_traffic if execution == "eager" else 1.0
        bandwidth = self.machine.kind.memory_bytes_per_s * physics.memory
        moving = (self.traffic_bytes * more + self.plain_bytes) / bandwidth
        gap = physics.gap_s * (GRAPH_GAP if execution == "graph" else 1.0)
        return self.products_s + self.attention_s + moving + self.kernels * gap


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One kind of layer on one rank: forward, backward for data and for weights, recomputed."""

    forward: Tally
    data: Tally  # backward without the gradients of weights
    weights: Tally
    again: Tally  # what recomputing adds
    reduce_bytes: float  # of one collective of tensor parallelism
    num_forward: int  # collectives of tensor parallelism, forward
    num_backward: int
    num_again: int
    exchange_bytes: float  # of one all-to-all of experts
    ring_bytes: float  # of keys and values around the ranks of context parallelism
    weight_bytes: float  # parameters of the layer on one rank, 2 bytes each
    expert_bytes: float  # those of experts, 2 bytes each


def layer_work(model: Transformer, s: Strategy, machine: Machine, *, sparse: bool) -> LayerWork:
    """What one layer does for one micro-batch."""
    tokens = s.micro_batch * model.seq / s.cp
    forward, data, weights, again = (Tally(machine, s.dtype, s.product_dtype) for _ in range(4))
    own = tokens / s.tp if s.sp else tokens  # of norms, residuals
    _attention(model, s, tokens, own, forward, data, weights)
    core_again = Tally(machine, s.dtype, s.product_dtype)
    _core(model, s, tokens, core_again, None)
    if sparse:
        _experts(model, s, tokens, own, forward, data, weights)
    else:
        _feed_forward(model, s, model.inner, tokens, own, forward, data, weights)
    if s.recompute == "full":
        again = replace(forward)
    elif s.recompute == "selective":
        again = core_again
    weight, expert = _layer_parameters(model, s, sparse=sparse)
    collectives = 0 if s.tp == 1 else 2
    full = s.recompute == "full"
    return LayerWork(
        forward, data, weights, again,
        reduce_bytes=tokens * model.hidden * 2,
        num_forward=collectives,
        num_backward=collectives,
        num_again=collectives if full else 0,
        exchange_bytes=_exchange_bytes(model, s, tokens) if sparse else 0.0,
        ring_bytes=2 * tokens * model.groups * model.size_of_head * 2 / s.tp if s.cp > 1 else 0.0,
        weight_bytes=weight,
        expert_bytes=expert,
    )  # fmt: skip


def _layer_parameters(model: Transformer, s: Strategy, *, sparse: bool) -> tuple[float, float]:
    """Bytes of a layer's parameters on one rank at 2 each: those of all, those of experts."""
    if not sparse:
        return 2 * (model.attention_parameters + model.dense_parameters) / s.tp, 0.0
    shared = model.attention_parameters + model.shared_parameters
    return 2 * shared / s.tp, 2 * model.expert_parameters / s.ep


def _matrix(
    s: Strategy, m: float, n: float, k: float, cut: str, dtype: str, tallies: tuple[Tally, ...]
) -> None:
    forward, data, weights = tallies
    n, k = (n / s.tp, k) if cut == "columns" else (n, k / s.tp) if cut == "rows" else (n, k)
    forward.product(m, n, k, dtype=dtype)
    data.product(m, k, n, dtype=dtype)
    weights.product(n, k, m, dtype=dtype, out_bytes=_sum_bytes(s))


def _sum_bytes(s: Strategy) -> float:
    """Bytes per element of a weight's gradient: added to a sum, which is read and written."""
    return 2.0 * BYTES[s.grad_dtype]


def _attention(
    model: Transformer, s: Strategy, tokens: float, own: float,
    forward: Tally, data: Tally, weights: Tally,
) -> None:  # fmt: skip
    h = model.hidden
    forward.passes(own * h, 2)  # norm
    data.passes(own * h, 4)
    for k, n, cut in model.attention_products:
        _matrix(s, tokens, n, k, cut, "", (forward, data, weights))
        if model.biases:
            weights.passes(tokens * n / (s.tp if cut == "columns" else 1), 1)
    heads = (model.heads + 2 * model.groups) * model.size_of_head / s.tp
    turned = 0 if model.positions else 2  # rotary positions, keys and queries
    forward.passes(tokens * heads, 1 + turned, kernels=1 + turned)
    data.passes(tokens * heads, 1 + turned, kernels=1 + turned)
    _core(model, s, tokens, forward, data)
    drop = 0.5 if s.dropout else 0.0
    forward.passes(own * h, 3 + drop)  # bias, dropout, residual
    data.passes(own * h, 2 + drop)


def _core(
    model: Transformer, s: Strategy, tokens: float, forward: Tally, data: Tally | None
) -> None:
    """Scores, softmax, values; with `data` its backward."""
    physics = forward.machine.physics
    heads = model.heads / s.tp
    if s.fused_attention:
        flops = 2.0 * tokens * model.mean_context * heads * model.score_width
        tuned = physics.flash_2 if s.attention == "flash-2" else 1.0
        forward.attention(flops, physics.attention_forward * tuned)
        if data is not None:
            data.attention(2.5 * flops, physics.attention_backward * tuned)
        return
    size, seq = model.size_of_head, float(model.seq)
    batch = s.micro_batch * heads
    rows = seq / s.cp
    scores = batch * rows * seq
    forward.product(rows, seq, size, batch, dtype=s.dtype)
    if s.attention == "eager":  # scaled, masked, cast to f32, softmax, cast back
        forward.passes(scores, 2 + 3 + 3 + 4 + 3, kernels=6)
    else:
        forward.passes(scores, 2)
    if s.dropout:
        forward.passes(scores, 2.5)
    forward.product(rows, size, seq, batch, dtype=s.dtype)
    forward.passes(tokens * heads * size, 4, kernels=3)
    if data is None:
        return
    for _ in range(2):
        data.product(rows, seq, size, batch, dtype=s.dtype)
        data.product(rows, size, seq, batch, dtype=s.dtype)
    more = 11 if s.attention == "eager" else 3
    data.passes(scores, more + (2.5 if s.dropout else 0), kernels=7 if more > 3 else 2)
    data.passes(tokens * heads * size, 6, kernels=4)


def _feed_forward(
    model: Transformer, s: Strategy, inner: float, tokens: float, own: float,
    forward: Tally, data: Tally, weights: Tally,
) -> None:  # fmt: skip
    h, wide = model.hidden, 2 if model.gated else 1
    forward.passes(own * h, 2)
    data.passes(own * h, 4)
    _matrix(s, tokens, inner * wide, h, "columns", "", (forward, data, weights))
    forward.passes(tokens * inner / s.tp, wide + 1)
    data.passes(tokens * inner / s.tp, 2 * wide + 1)
    if model.biases:
        weights.passes(tokens * inner * wide / s.tp, 1)
    _matrix(s, tokens, h, inner, "rows", "", (forward, data, weights))
    drop = 0.5 if s.dropout else 0.0
    forward.passes(own * h, 3 + drop)
    data.passes(own * h, 2 + drop)


def _experts(
    model: Transformer, s: Strategy, tokens: float, own: float,
    forward: Tally, data: Tally, weights: Tally,
) -> None:  # fmt: skip
    experts, h = model.experts, model.hidden
    assert experts is not None
    wide = 2 if model.gated else 1
    if experts.shared_inner:
        _feed_forward(model, s, experts.shared_inner, tokens, own, forward, data, weights)
    else:
        forward.passes(own * h, 5)
        data.passes(own * h, 6)
    routed = tokens / s.tp * experts.top_k  # rows that this rank sends and receives
    here = experts.count / s.ep
    each = routed / here
    forward.product(own, experts.count, h, dtype=s.dtype, kernels=6)
    data.product(own, h, experts.count, dtype=s.dtype, kernels=6)
    for tally, passes in ((forward, 4), (data, 4)):  # into the order of experts and back
        tally.passes(routed * h, passes, kernels=4)
    forward.product(each, experts.inner * wide, h, here, kernels=2)
    forward.passes(routed * experts.inner, wide + 1)
    forward.product(each, h, experts.inner, here, kernels=2)
    data.product(each, h, experts.inner * wide, here, kernels=2)
    data.passes(routed * experts.inner, 2 * wide + 1)
    data.product(each, experts.inner, h, here, kernels=2)
    sums = _sum_bytes(s)
    weights.product(experts.inner * wide, h, each, here, kernels=2, out_bytes=sums)
    weights.product(h, experts.inner, each, here, kernels=2, out_bytes=sums)


def _exchange_bytes(model: Transformer, s: Strategy, tokens: float) -> float:
    if s.ep == 1 or model.experts is None:
        return 0.0
    return tokens / s.tp * model.experts.top_k * model.hidden * 2


@dataclass(frozen=True, slots=True)
class EndWork:
    """The embedding and the output layer with its loss, on one rank."""

    embedding: Tally
    embedding_backward: Tally
    output: Tally
    output_data: Tally
    output_weights: Tally


def end_work(model: Transformer, s: Strategy, machine: Machine) -> EndWork:
    """What the first and the last stage do besides their layers."""
    tokens = s.micro_batch * model.seq / s.cp
    work = tuple(Tally(machine, s.dtype, s.dtype) for _ in range(5))
    h, vocab = model.hidden, model.vocab / s.tp
    embedding, embedding_backward, output, output_data, output_weights = work
    rows = tokens * model.output_share
    if model.patch_features:
        embedding.product(tokens, h, model.patch_features)
        embedding_backward.product(h, model.patch_features, tokens, out_bytes=_sum_bytes(s))
    embedding.passes(tokens * h, 3, kernels=4)
    embedding_backward.passes(tokens * h, 4, kernels=4)
    output.passes(tokens * h, 2)
    if model.transform:
        output.product(rows, h, h)
        output_data.product(rows, h, h)
        output_weights.product(h, h, rows, out_bytes=_sum_bytes(s))
    output.product(rows, vocab, h)
    output_data.product(rows, h, vocab)
    output_weights.product(vocab, h, rows, out_bytes=_sum_bytes(s))
    output.plain_bytes += rows * vocab * (6 if s.fused_loss else 16)
    output_data.plain_bytes += rows * vocab * (4 if s.fused_loss else 8)
    output.kernels += 2 if s.fused_loss else 8
    output_data.kernels += 2
    output_data.passes(tokens * h, 4)
    return EndWork(*work)
