"""Memory of the fullest rank by component: parameters, gradients, optimizer, activations, rest.

Activations per token and layer are those that backward reads, in bytes at two an element; with
sequence parallelism what norms and residuals keep lies sharded, and the gathered input of a
product is given up and gathered again. Recomputing keeps the inputs of layers alone (full) or all
but scores and softmax (selective); fused attention keeps no scores in any case. A rank early in the
pipeline holds as many micro-batches as its schedule has in flight there.

`stage_layers` says which layers each stage of a pipeline has, and the parameters of its ranks.
"""

from dataclasses import dataclass, replace

from partita.forecast.inputs import Machine, Strategy, Transformer
from partita.forecast.layer import BYTES


@dataclass(frozen=True, slots=True)
class StageLayers:
    """One stage: how many layers of which kind, the ends it has, its parameters on one rank."""

    index: int
    dense: int
    sparse: int
    has_embedding: bool
    has_output: bool
    shared_parameters: float
    expert_parameters: float
    largest_layer: float

    @property
    def layers(self) -> int:
        """All of them."""
        return self.dense + self.sparse


def stage_layers(model: Transformer, s: Strategy) -> tuple[StageLayers, ...]:
    """As even as they can be; with `ends`, so many fewer at both ends."""
    counts = list(s.layers) or _counts(model.layers, s.pp, s.ends)
    dense_first = model.layers - model.sparse_layers
    stages, before = [], 0
    for index, count in enumerate(counts):
        dense = max(0, min(count, dense_first - before))
        before += count
        stages.append(_stage(model, s, index, dense, count - dense))
    return tuple(stages)


def _counts(layers: int, pp: int, ends: int) -> list[int]:
    if ends and pp > 2:
        whole = layers + 2 * ends
        even = whole // pp
        counts = [even + (1 if i < whole % pp else 0) for i in range(pp)]
        counts[0] -= ends
        counts[-1] -= ends
        return counts
    more = layers % pp
    return [layers // pp + (1 if (pp - more) // 2 <= i < (pp - more) // 2 + more else 0)
            for i in range(pp)]  # fmt: skip


def _stage(model: Transformer, s: Strategy, index: int, dense: int, sparse: int) -> StageLayers:
    first, last = index == 0, index == s.pp - 1
    shared = dense * (model.attention_parameters + model.dense_parameters)
    shared += sparse * (model.attention_parameters + model.shared_parameters)
    if first:
        shared += model.embedding_parameters
    if last:
        shared += model.output_parameters
        if not first or not model.tied:
            shared += model.vocab * model.hidden
    largest = (model.attention_parameters + model.dense_parameters) / s.tp
    if sparse:
        largest = (model.attention_parameters + model.shared_parameters) / s.tp
        largest += model.expert_parameters / s.ep
    return StageLayers(
        index, dense, sparse, first, last, shared / s.tp, sparse * model.expert_parameters / s.ep,
        largest,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    output: float  # logits and what the loss makes of them
    workspace: float
    stage: int

    @property
    def total(self) -> float:
        """All of it."""
        return self.allocated + self.workspace

    @property
    def allocated(self) -> float:
        """Without what drivers and libraries keep."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.output


def every_stage(model: Transformer, s: Strategy, machine: Machine) -> tuple[MemoryParts, ...]:
    """The components of one rank of each stage; all ranks of a stage need the same."""
    stages = stage_layers(model, s)
    return tuple(_of_stage(model, s, machine, stage, len(stages)) for stage in stages)


def fullest_rank(
    model: Transformer, s: Strategy, machine: Machine, stages: tuple[StageLayers, ...]
) -> MemoryParts:
    """The components of the rank that needs most."""
    # Of stages with equal layers an early one holds most micro-batches; the last has the logits.
    candidates = {0, len(stages) - 1, min(1, len(stages) - 1)}
    if len({(stage.dense, stage.sparse) for stage in stages}) > 1:
        candidates = set(range(len(stages)))
    return max(
        (_of_stage(model, s, machine, stages[i], len(stages)) for i in sorted(candidates)),
        key=lambda parts: parts.total,
    )


def _of_stage(
    model: Transformer, s: Strategy, machine: Machine, stage: StageLayers, num_stages: int
) -> MemoryParts:
    shards = s.hsdp or s.dp * s.cp
    shared, expert = stage.shared_parameters, stage.expert_parameters
    few = max(1, s.dp * s.cp * s.tp // s.ep)  # ranks that hold the same experts
    count = shared + expert
    spread = shared / shards + expert / few
    grad = BYTES[s.grad_dtype]
    states = 8 + (4 if s.master and s.dtype != "f32" else 0)
    size = BYTES[s.dtype]
    parameters = (spread if s.zero >= 3 else count) * size
    # What is gathered at once: a layer, or where it is gathered in pieces its largest matrix.
    gathered = stage.largest_layer / min(3, s.gathers) * size
    if s.zero >= 3:  # what is computed and what comes next
        parameters += 2 * gathered
    gradients = (spread if s.zero >= 2 else count) * grad
    if s.zero >= 3:
        gradients += gathered
    optimizer = (spread if s.zero >= 1 else count) * states
    tokens = s.micro_batch * model.seq / s.cp
    output = 0.0
    if stage.has_output:
        per_logit = 4 if s.fused_loss else 2 + 4 + (4 if s.dtype != "f32" else 0)
        output = tokens * model.output_share * model.vocab / s.tp * per_logit
    activations = _activations(model, s, stage, num_stages, tokens)
    return MemoryParts(
        parameters, gradients, optimizer, activations, output,
        machine.physics.workspace_bytes, stage.index,
    )  # fmt: skip


def in_flight(s: Strategy, stage: int, num_stages: int) -> float:
    """Micro-batches, in whole stages' worth, that a rank holds at most."""
    count, p = s.num_microbatches, num_stages
    if s.schedule == "gpipe":
        return count
    if s.vpp > 1 or s.schedule == "interleaved":
        chunks = min(count * s.vpp, (s.vpp - 1) * p + 2 * (p - stage - 1) + 1)
        return chunks / s.vpp
    if s.schedule == "zb-h2":  # every stage fills the memory that the first one needs
        return min(count, 2 * p - 1)
    if s.schedule == "dualpipe-v":
        return min(count, p + 0.5)
    if s.schedule == "zb-v":
        return min(count, p)
    if s.schedule == "zb-h1":
        return min(count, p)
    return min(count, p - stage)


def layer_bytes(model: Transformer, s: Strategy, tokens: float, *, sparse: bool) -> float:
    """What one layer keeps of one micro-batch for its backward."""
    h, a, t = model.hidden, model.heads * model.size_of_head, s.tp
    own = t if s.sp else 1
    if s.recompute == "full":
        return 2 * tokens * h / own
    groups = model.groups * model.size_of_head
    kept = (2 * h + 2 * h) / own  # the norms' inputs
    kept += (2 * h + 2 * h) / own  # inputs of the first products of both parts
    kept += (2 * a + 4 * groups) / t + 2 * a / t  # queries, keys, values; what they give
    if model.latent is not None:
        kept += 2 * (model.latent.query_rank + model.latent.key_rank + model.latent.rope) * 2
        wider = model.heads * (model.latent.nope + model.latent.rope + model.latent.value)
        kept += 2 * (wider - 2 * model.size_of_head * model.heads) / t if wider > 0 else 0
    if s.dropout:
        kept += 2 * h / own
    if not s.fused_attention and s.recompute == "none":
        each = 2 + (3 if s.dropout else 0)
        kept += each * model.heads * model.seq / t
    wide = 2 if model.gated else 1
    if sparse and model.experts is not None:
        e = model.experts
        kept += 2 * (wide + 1) * e.shared_inner / t
        kept += e.top_k * (2 * (wide + 1) * e.inner + 4 * h) / t
    else:
        kept += 2 * (wide + 1) * model.inner / t
    return tokens * kept


def _activations(
    model: Transformer, s: Strategy, stage: StageLayers, num_stages: int, tokens: float
) -> float:
    held = in_flight(s, stage.index, num_stages)
    dense = layer_bytes(model, s, tokens, sparse=False)
    sparse = layer_bytes(model, s, tokens, sparse=True) if stage.sparse else 0.0
    total = held * (stage.dense * dense + stage.sparse * sparse)
    if s.recompute == "full":  # the layer that is computed again
        whole = replace(s, recompute="none")
        total += layer_bytes(model, whole, tokens, sparse=stage.sparse > 0)
    if stage.has_embedding and s.dropout:
        total += held * tokens * model.hidden
    if stage.has_output:
        total += 4 * tokens * model.hidden / (s.tp if s.sp else 1)
    return total
