"""A reference module as a program of its graph's ops, one node for each.

`torch.export` takes the ops of a reference module apart (an attention is seven nodes), and a plan
of a zoo model names the ops of the zoo. Here every node is one of those, computed by the rule of
its kind, so such a plan can be run as it is. Batch norms use the batch's statistics; running ones
are no part of a zoo graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.export import ExportedProgram

from partita.capture.eager import RULES
from partita.capture.exported import Captured
from partita.capture.reference_module import DTYPES, ReferenceModule
from partita.capture.torch_program import (
    NO_STORAGE,
    Ref,
    TensorSpec,
    TorchInput,
    TorchNode,
    TorchOutput,
    TorchProgram,
)
from partita.graph.record import Call, Graph, Op

T = torch.Tensor


@dataclass(frozen=True)
class CapturedReference(Captured):
    """A reference module whose nodes are the ops of its graph."""

    def node_of(self, op: Op | str) -> str:
        """The node of an op: its own."""
        return node_name(op if isinstance(op, str) else op.name)


def node_name(op: str) -> str:
    """The name of an op's node, which no tensor has."""
    return f"{op}()"


def capture_ops(module: ReferenceModule, graph: Graph) -> Captured:
    """The program of a reference module; `graph` is its own, or that for another batch."""
    held = {tensor.name: module.parameter_of(tensor) for tensor in graph.parameters}
    inputs = [
        TorchInput(tensor.name, "input", tensor.name, _spec(graph, tensor.name))
        for tensor in graph.inputs
    ]
    inputs += [
        TorchInput(
            tensor.name, "parameter", tensor.name, _spec(graph, tensor.name), held[tensor.name],
            persistent=True,
        )
        for tensor in graph.parameters
    ]  # fmt: skip
    places: dict[str, Any] = {tensor.name: tensor.name for tensor in graph.tensors}
    for op in graph.ops:
        places[node_name(op.name)] = op.outputs[0] if len(op.outputs) == 1 else op.outputs
    program = TorchProgram(
        tuple(inputs),
        tuple(_node(module, graph, op) for op in graph.ops),
        tuple(TorchOutput("output", Ref(name)) for name in graph.outputs),
        None,
    )
    nothing = cast(ExportedProgram, None)  # nothing was exported
    return CapturedReference(module, nothing, program, graph, places)


def _spec(graph: Graph, name: str) -> TensorSpec:
    tensor = graph.tensor(name)
    return TensorSpec(
        tensor.shape, (), DTYPES[tensor.dtype], torch.device("cpu"), NO_STORAGE
    )  # strides are nobody's business here


def _node(module: ReferenceModule, graph: Graph, op: Op) -> TorchNode:
    specs = tuple(_spec(graph, name) for name in op.outputs)
    value = specs[0] if len(specs) == 1 else specs
    if op.kind == "constant":
        target: Callable[..., Any] = _constant(module, graph, op.outputs[0])
        args: tuple[Any, ...] = (torch.device("cpu"),)  # becomes the one of the run
    else:
        target, args = _rule(graph.call(op)), tuple(Ref(name) for name in op.inputs)
    return TorchNode(node_name(op.name), target, args, {}, value, op.inputs, ())


def _constant(module: ReferenceModule, graph: Graph, name: str) -> Callable[..., T]:
    def constant(device: torch.device) -> T:
        return module.constant(name, graph.tensor(name).shape).to(device)

    return constant


def _rule(call: Call) -> Callable[..., Any]:
    """An op by the rule of its kind, of whatever part of its inputs it is given."""
    rule, module = RULES[call.kind], SimpleNamespace(training=True)
    if call.kind == "elementwise" and call.text("fn", "add") == "scale":
        usual = call.inputs[0][-1] ** -0.5 if call.inputs[0] else 1.0  # of the whole, not a part
        factor = call.number("factor", usual)
        return lambda x: x * factor

    def run(*inputs: T) -> Any:
        shapes = tuple(tuple(each.shape) for each in inputs)
        return rule(module, replace(call, inputs=shapes), *inputs)

    if call.kind == "elementwise" and call.text("fn", "add") == "dropout":
        run.tags = (torch.Tag.nondeterministic_seeded,)  # type: ignore[attr-defined]
    return run
