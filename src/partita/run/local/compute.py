"""What one op computes at its full size: the rules of `capture.eager`, made repeatable.

Three kinds need to know where they run. Dropout draws its mask from the name of the op, the number
of the micro-batch and a seed, so that all ranks, the backward and the whole model have one mask.
Experts take tokens within `groups` of the batch, since a share of the batch fills its own share of
every expert's places. Constants are ids within their limits, as in the reference module.
"""

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from partita.capture.eager import DROPOUT, RULES, constant_ids
from partita.errors import GraphError
from partita.graph.loops import loop_nest
from partita.graph.record import FLOATS, Call, Graph, Op
from partita.plans import Axis
from partita.run.draws import place_seed
from partita.run.local.shards import interval, places

T = torch.Tensor
Span = tuple[int, int]  # start and stop
Groups = tuple[tuple[Span, Span], ...]  # spans of tokens and of the places they fill

ROUTED = frozenset({"moe_dispatch", "moe_combine"})


@dataclass(frozen=True, slots=True)
class Site:
    """Where a forward op runs: what its result depends on besides its inputs."""

    op: str
    training: bool = False
    microbatch: int = 0
    seed: int = 0
    groups: Groups = ()


def compute(call: Call, inputs: list[T], site: Site) -> tuple[T, ...]:
    """The outputs of a forward call."""
    if call.kind in ROUTED and site.groups:
        return (_routed(call, inputs[0], inputs[1], site.groups),)
    if call.kind == "elementwise" and call.text("fn") == "dropout":
        return (inputs[0] * dropout_mask(site, call.inputs[0]) if site.training else inputs[0],)
    if call.kind not in RULES:
        raise GraphError(
            f"no rule computes ops of the kind {call.kind!r}",
            fix="the local runtime executes graphs of the known kinds",
        )
    masked = call.kind == "attention" and len(inputs) - call.flag("sinks") > 3
    if masked:  # PyTorch wants masks of [s, t] at least
        inputs = [*inputs[:3], torch.atleast_2d(inputs[3]), *inputs[4:]]
    # Frozen batch norms are those that say so, whatever the rest of the model does.
    module = SimpleNamespace(training=call.flag("training", True))
    result = RULES[call.kind](module, call, *inputs)
    return result if isinstance(result, tuple) else (result,)


def dropout_mask(site: Site, shape: tuple[int, ...]) -> T:
    """0 where dropped, else what makes up for it."""
    seed = place_seed(site.op, site.seed, 0, site.microbatch)
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator, dtype=torch.float64) >= DROPOUT
    return kept.double() / (1 - DROPOUT)


def constant(graph: Graph, op: Op) -> T:
    """Zeros; where ids are meant (positions, say), those that the reference module has."""
    tensor = graph.tensor(op.outputs[0])
    if tensor.dtype in FLOATS:
        return torch.zeros(tensor.shape, dtype=torch.float64)
    return constant_ids(op, tensor.shape, id_limits(graph).get(tensor.name, 2))


def id_limits(graph: Graph) -> dict[str, int]:
    """For tensors that hold ids: how many things there are to choose from."""
    limits = {}
    for op in graph.ops:
        if op.kind == "embedding" and not op.forward:
            limits[op.inputs[0]] = graph.tensor(op.inputs[1]).shape[0]
        elif op.kind == "cross_entropy" and not op.forward:
            limits[op.inputs[1]] = graph.tensor(op.inputs[0]).shape[-1]
    return limits


@functools.lru_cache(maxsize=1024)
def routing_groups(call: Call, dims: tuple[str, ...], axes: tuple[Axis, ...]) -> Groups:
    """The groups that a split of dispatch or combine routes in; none if its tokens are together."""
    if call.kind not in ROUTED:
        return ()
    nest = loop_nest(Call(call.kind, call.attrs, call.inputs, call.outputs))
    gates_access = nest.inputs[1]
    leading = {name for names in gates_access.dims[:-1] for name in names}
    cutting = [i for i, dim in enumerate(dims) if dim in leading and axes[i].size > 1]
    if not cutting:
        return ()
    # Only the outermost of the leading dims is ever split: its shares are spans of tokens.
    (outer,) = {dims[i] for i in cutting}
    extent, tokens = nest.extent(outer), math.prod(call.inputs[1][:-1])
    capacity = (call.outputs[0] if call.kind == "moe_dispatch" else call.inputs[0])[1]
    groups = []
    for place in places(tuple(axes[i] for i in cutting)):
        cuts = [(axes[i], coordinate) for i, coordinate in zip(cutting, place, strict=True)]
        start, stop = interval(extent, cuts)
        inner = tokens // extent
        groups.append(((start * inner, stop * inner), interval(capacity, cuts)))
    return tuple(groups)


def _routed(call: Call, data: T, gates: T, groups: Groups) -> T:
    """Dispatch or combine, group by group."""
    experts = gates.shape[-1]
    flat = gates.reshape(-1, experts)
    parts = []
    for (token, next_token), (spot, next_spot) in groups:
        own_gates = flat[token:next_token]
        if call.kind == "moe_dispatch":
            tokens = data.reshape(-1, data.shape[-1])[token:next_token]
            shape = (experts, next_spot - spot, data.shape[-1])
            own = Call(call.kind, call.attrs, (), (shape,))
            parts.append(RULES[call.kind](None, own, tokens, own_gates))
        else:
            parts.append(RULES[call.kind](None, call, data[:, spot:next_spot], own_gates))
    return torch.cat(parts, 1 if call.kind == "moe_dispatch" else 0).reshape(call.outputs[0])
