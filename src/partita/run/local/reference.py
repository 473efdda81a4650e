"""The whole model in one piece: what the ranks of a plan must arrive at together.

It walks over the forward graph with autograd, micro-batch by micro-batch, in float64, and takes one
optimizer step (PyTorch's own optimizers where it has the rule). The gradients are those of the mean
over the micro-batches of the loss. Nothing here is shared with the gradients of `ops`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from partita.errors import GraphError
from partita.graph.backward import OPTIMIZER_STATES
from partita.graph.rebatch import batch_of, rebatch
from partita.graph.record import FLOATS, Graph, Tensor
from partita.run.local.compute import Groups, Site, compute, constant, id_limits
from partita.run.local.updates import (
    BETAS,
    DECAY,
    EPSILON,
    MOMENTUM,
    RATE,
    SMOOTHING,
    update,
)

T = torch.Tensor
Values = dict[str, T]


@dataclass(frozen=True, slots=True)
class Example:
    """Inputs of the whole batch (with the gradient of the loss, if the graph trains), parameters.

    The gradient of a loss that is a number is 1; it is divided by the number of micro-batches where
    the batch is cut.
    """

    inputs: Values
    parameters: Values


@dataclass(frozen=True, slots=True)
class Reference:
    """What the whole model gives: outputs per micro-batch, and after the step by tensor name.

    `gradients` and `updated` are by parameter, `states` by the names of the training graph. They
    are empty if the graph does not train.
    """

    outputs: tuple[Values, ...]
    gradients: Values
    updated: Values
    states: Values


def example(graph: Graph, seed: int = 0) -> Example:
    """Random inputs and parameters; ids stay within the table or classes they choose from.

    Weights are scaled by the square root of their inputs, so that activations stay of one size.
    Biases are not zero: one that is added twice must show.
    """
    generator = torch.Generator().manual_seed(seed)
    limits = id_limits(graph)
    inputs = {
        tensor.name: _input(graph, tensor, limits.get(tensor.name, 2), generator)
        for tensor in graph.inputs
    }
    parameters = {tensor.name: _parameter(tensor, generator) for tensor in graph.parameters}
    return Example(inputs, parameters)


def _input(graph: Graph, tensor: Tensor, limit: int, generator: torch.Generator) -> T:
    if tensor.dtype not in FLOATS:
        numbers = torch.randint(limit, tensor.shape, generator=generator)
        return numbers.bool() if tensor.dtype == "bool" else numbers
    if not tensor.shape and tensor.name == _loss_gradient(graph):
        return torch.ones((), dtype=torch.float64)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)


def _parameter(tensor: Tensor, generator: torch.Generator) -> T:
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    if len(tensor.shape) < 2:
        return 0.1 * values + (1.0 if tensor.name.endswith("weight") else 0.0)
    # Experts' weights are [experts, out, in], those of convolutions [out, in, *kernel].
    inputs = tensor.shape[-1] if len(tensor.shape) == 3 else math.prod(tensor.shape[1:])
    scaled: T = values / math.sqrt(inputs)
    return scaled


def _loss_gradient(graph: Graph) -> str:
    return f"{graph.outputs[0]}.grad" if graph.is_training and graph.outputs else ""


def initial_states(graph: Graph, parameters: Mapping[str, T]) -> Values:
    """The states before the first step: zeros, and master copies of the parameters."""
    states = {}
    for op in graph.ops:
        if op.phase != "update":
            continue
        start = parameters[op.inputs[0]]
        count = OPTIMIZER_STATES[str(op.attr("rule"))]
        for i, name in enumerate(op.inputs[2:]):
            states[name] = torch.zeros_like(start) if i < count else start.clone()
    return states


def microbatch_graph(graph: Graph, num_microbatches: int) -> Graph:
    """The graph that runs one micro-batch."""
    batch = batch_of(graph)
    if batch % num_microbatches:
        raise GraphError(
            f"a batch of {batch} in {num_microbatches} micro-batches",
            fix="give a number that divides the batch",
        )
    return rebatch(graph, batch // num_microbatches)


def microbatch_inputs(
    graph: Graph, inputs: Mapping[str, T], num_microbatches: int
) -> tuple[Values, ...]:
    """The inputs of each micro-batch: cut along the batch, the gradient of the loss divided."""
    small = microbatch_graph(graph, num_microbatches)
    seed = _loss_gradient(graph)
    batches: list[Values] = [{} for _ in range(num_microbatches)]
    for tensor in small.inputs:
        value = inputs[tensor.name]
        parts = [value] * num_microbatches
        if tuple(value.shape) != tensor.shape:
            parts = list(value.split(tensor.shape[0]))
        for batch, part in zip(batches, parts, strict=True):
            batch[tensor.name] = part / num_microbatches if tensor.name == seed else part
    return tuple(batches)


def reference(
    graph: Graph,
    inputs: Mapping[str, T],
    parameters: Mapping[str, T],
    num_microbatches: int = 1,
    *,
    groups: Mapping[str, Groups] | None = None,
    seed: int = 0,
) -> Reference:
    """Run the whole model: `graph` is a forward graph or a training graph of the whole batch.

    `groups` says in which groups of tokens the dispatch and combine ops of a micro-batch route
    (see `routing_groups`), by op; `seed` is that of dropout.
    """
    small = microbatch_graph(graph, num_microbatches)
    leaves = {name: value.detach().clone() for name, value in parameters.items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(graph.is_training and graph.tensor(name).dtype in FLOATS)
    outputs = []
    for number, given in enumerate(microbatch_inputs(graph, inputs, num_microbatches)):
        sites = _sites(small, number, seed, groups or {})
        with torch.set_grad_enabled(graph.is_training):
            values = _run(small, {**given, **leaves}, sites)
        if graph.is_training:
            torch.autograd.backward(values[graph.outputs[0]], given[_loss_gradient(graph)])
        outputs.append({name: values[name].detach() for name in graph.outputs})
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for op in graph.ops:  # what only chooses, such as gates of experts, has a gradient of zero
        if op.phase == "update":
            gradients.setdefault(op.inputs[0], torch.zeros_like(leaves[op.inputs[0]]).detach())
    start = {name: leaf.detach() for name, leaf in leaves.items()}
    updated, states = _step(graph, start, gradients)
    return Reference(tuple(outputs), gradients, updated, states)


def _sites(
    graph: Graph, microbatch: int, seed: int, groups: Mapping[str, Groups]
) -> dict[str, Site]:
    return {
        op.name: Site(op.name, graph.is_training, microbatch, seed, groups.get(op.name, ()))
        for op in graph.ops
        if op.phase == "forward"
    }


def _run(graph: Graph, values: Values, sites: Mapping[str, Site]) -> Values:
    """All tensors of one forward pass."""
    for op in graph.ops:
        if op.phase != "forward":
            continue
        if op.kind == "constant":
            results: tuple[T, ...] = (constant(graph, op),)
        else:
            given = [values[name] for name in op.inputs]
            results = compute(graph.call(op), given, sites[op.name])
        if op.attr("detach"):
            results = tuple(result.detach() for result in results)
        values.update(zip(op.outputs, results, strict=True))
    return values


# PyTorch's optimizers and the names of their states in the order of the graph's.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], list[str]]] = {
    "sgd": (torch.optim.SGD, {}, []),
    "momentum": (torch.optim.SGD, {"momentum": MOMENTUM}, ["momentum_buffer"]),
    "adagrad": (torch.optim.Adagrad, {"eps": EPSILON}, ["sum"]),
    "rmsprop": (torch.optim.RMSprop, {"alpha": SMOOTHING, "eps": EPSILON}, ["square_avg"]),
    "adam": (torch.optim.Adam, {"betas": BETAS, "eps": EPSILON}, ["exp_avg", "exp_avg_sq"]),
    "adamw": (
        torch.optim.AdamW,
        {"betas": BETAS, "eps": EPSILON, "weight_decay": DECAY},
        ["exp_avg", "exp_avg_sq"],
    ),
}


def _step(graph: Graph, parameters: Values, gradients: Values) -> tuple[Values, Values]:
    """Parameters and states after the first step, by parameter and by state."""
    updated: Values = {}
    states: Values = {}
    for op in graph.ops:
        if op.phase != "update":
            continue
        name, rule = op.inputs[0], str(op.attr("rule"))
        new, held = first_step(rule, parameters[name], gradients[name])
        updated[name] = new
        master = [new.clone()] * (len(op.inputs) - 2 - len(held))
        states.update(zip(op.inputs[2:], (*held, *master), strict=True))
    return updated, states


def first_step(rule: str, parameter: T, gradient: T) -> tuple[T, tuple[T, ...]]:
    """A parameter and its states after one step from states of zero."""
    if rule not in OPTIMIZERS:
        zeros = [torch.zeros_like(parameter)] * OPTIMIZER_STATES[rule]
        return update(rule, parameter, gradient, zeros)
    make, settings, names = OPTIMIZERS[rule]
    leaf = torch.nn.Parameter(parameter.clone())
    leaf.grad = gradient.clone()
    optimizer = make([leaf], lr=RATE, **settings)
    optimizer.step()
    return leaf.detach(), tuple(optimizer.state[leaf][name].detach() for name in names)
