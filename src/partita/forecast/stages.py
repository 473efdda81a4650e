"""Layers of each stage of a pipeline, and the parameters that its ranks hold."""

from dataclasses import dataclass

from partita.forecast.inputs import Strategy, Transformer


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
