"""One op as a graph of its own, run whole and on a mesh, for tests of the local runtime."""

import itertools
from dataclasses import dataclass

import torch

from partita.capture.eager import RULES
from partita.graph.backward import training_graph
from partita.graph.loops import loop_nest
from partita.graph.record import FLOATS, Call, Graph, Op, Tensor
from partita.graph.splits import placements
from partita.plans import Axis
from partita.run.local.ops import backward, forward
from partita.run.local.shards import (
    gate_rows,
    interval,
    places,
    replica_error,
    shard,
    whole,
)

torch.set_num_threads(1)  # the tensors are tiny
IDS = {"embedding": 0, "cross_entropy": 1}  # which input holds ids
FIRST_WEIGHT = {
    "linear": 1, "conv": 1, "expert_linear": 1, "batch_norm": 1, "group_norm": 1, "layer_norm": 1,
    "rms_norm": 1, "lstm": 1, "gru": 1, "lstm_cell": 3, "gru_cell": 2, "moe_router": 1,
    "embedding": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A training graph around the op `op`, and values of everything it reads and gives."""

    graph: Graph
    values: dict[str, torch.Tensor]


def around(call: Call) -> Graph:
    """The call as the op `op` between ops that make its inputs and one that reads its outputs."""
    ids, weight = IDS.get(call.kind), FIRST_WEIGHT.get(call.kind, 99)
    tensors, ops, names = [], [], []
    for i, shape in enumerate(call.inputs):
        names.append(f"x{i}")
        if i == ids:
            tensors.append(Tensor(f"x{i}", shape, "i64", "input"))
        elif i >= weight:
            tensors.append(Tensor(f"x{i}", shape, "f32", "parameter"))
        else:
            tensors.append(Tensor(f"p{i}", shape, "f32", "parameter"))
            tensors.append(Tensor(f"x{i}", shape))
            ops.append(Op(f"make{i}", "given", (f"p{i}",), (f"x{i}",)))
    outputs = tuple(f"y{i}" for i in range(len(call.outputs)))
    tensors += [Tensor(name, shape) for name, shape in zip(outputs, call.outputs, strict=True)]
    ops.append(Op("op", call.kind, tuple(names), outputs, call.attrs))
    ops.append(Op("end", "taken", outputs, ("loss",)))
    return Graph("one", (*tensors, Tensor("loss", ())), tuple(ops), ("loss",))


def in_groups(call: Call, inputs, dims, axes):
    """Dispatch and combine of each share of the batch by itself, put together."""
    leading = {n for names in loop_nest(call).inputs[1].dims[:-1] for n in names}
    cutting = [i for i, dim in enumerate(dims) if dim in leading]
    data, gates = inputs[0], inputs[1].flatten(0, -2)
    is_dispatch = call.kind == "moe_dispatch"
    capacity = call.outputs[0][1] if is_dispatch else data.shape[1]
    parts = []
    for place in itertools.product(*(range(axes[i].size) for i in cutting)):
        cuts = [(axes[i], c) for i, c in zip(cutting, place, strict=True)]
        (t0, t1), (p0, p1) = interval(len(gates), cuts), interval(capacity, cuts)
        shape = (call.outputs[0][0], p1 - p0, call.outputs[0][-1])
        own = Call(call.kind, call.attrs, (), (shape,))
        given = data.flatten(0, -2)[t0:t1] if is_dispatch else data[:, p0:p1]
        parts.append(RULES[call.kind](None, own, given, gates[t0:t1]))
    return torch.cat(parts, 1 if is_dispatch else 0).reshape(call.outputs[0])


class Training:
    """Stands for a module; only asked whether it trains."""

    def __init__(self, training):
        self.training = training


def run_whole(call: Call, inputs, dims=(), axes=()):
    """The outputs of a forward call by the rules of the reference module."""
    if call.kind.startswith("moe_") and call.kind != "moe_router":
        return (in_groups(call, inputs, dims, axes),)
    result = RULES[call.kind](Training(call.flag("training", True)), call, *inputs)
    return result if isinstance(result, tuple) else (result,)


def make_case(call: Call, dims=(), axes=(), seed: int = 0) -> Case:
    """Random inputs and output gradients; outputs and gradients by autograd."""
    graph = training_graph(around(call), optimizer=None)
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for i, shape in enumerate(call.inputs):
        if IDS.get(call.kind) == i:
            most = call.inputs[1][0] if call.kind == "embedding" else call.inputs[0][-1]
            values[f"x{i}"] = torch.randint(most, shape, generator=generator)
        else:
            values[f"x{i}"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    leaves = [values[f"x{i}"].clone() for i in range(len(call.inputs))]
    for leaf in leaves:
        leaf.requires_grad_(leaf.is_floating_point())
    outputs = run_whole(call, leaves, dims, axes)
    given = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    grad = torch.autograd.grad(
        outputs, [x for x in leaves if x.requires_grad], given, materialize_grads=True
    )
    wanted = [i for i, x in enumerate(leaves) if x.requires_grad]
    values |= {f"y{i}": o.detach() for i, o in enumerate(outputs)}
    values |= {f"y{i}.grad": g for i, g in enumerate(given)}
    values |= {f"x{i}.grad": g for i, g in zip(wanted, grad, strict=True)}
    return Case(graph, values)


def run_on_mesh(case: Case, name: str, dims, axes: tuple[Axis, ...], exchanged):
    """The op's outputs put together, and the largest difference between replicas."""
    op, graph, gates = case.graph.op(name), case.graph, gate_rows(case.graph)
    read, written = placements(graph.call(op), dims)
    inputs = [
        tuple(
            shard(case.values[tensor], layout, axes, place, gates.get(tensor, 1))
            for tensor, layout in zip(op.inputs, read, strict=True)
        )
        for place in places(axes)
    ]
    run = backward if op.forward else forward
    results = run(graph, op, dims, axes, inputs, exchanged)
    values, error = {}, 0.0
    for i, (tensor, layout) in enumerate(zip(op.outputs, written, strict=True)):
        shards = [result[i] for result in results]
        error = max(error, replica_error(shards, layout, axes))
        shape = graph.tensor(tensor).shape
        values[tensor] = whole(shards, shape, layout, axes, gates.get(tensor, 1))
    return values, error


def ops_of(case: Case):
    """The op and its gradients, by name."""
    return [op.name for op in case.graph.ops if op.name == "op" or op.forward == "op"]


def is_float(graph: Graph, name: str) -> bool:
    return graph.tensor(name).dtype in FLOATS
