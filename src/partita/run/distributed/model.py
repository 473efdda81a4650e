"""The user's module as functions: of single ops, and of segments of ops.

The module is exported at the size of batch that a rank computes with, so every size in the program
is the right one; exports of other sizes have the same nodes. What an op computes is its node, with
all the constants that a graph does not tell. A node that became several ops is run as a whole where
all of them run together; where they are apart, each is run by the rule of its kind.

A node may read more than its op says: buffers, and constants that it makes of nothing. Buffers are
held by whoever runs the node; constants are made there again.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from partita.capture import export_module
from partita.capture.eager import RULES
from partita.capture.exported import Captured
from partita.capture.reference_module import ReferenceModule
from partita.capture.reference_program import capture_ops
from partita.capture.torch_program import Ref, TensorSpec, TorchNode, replaced
from partita.errors import CaptureError, PlanError
from partita.graph.rebatch import batch_of, rebatch
from partita.graph.record import Call, Graph, Op
from partita.run.distributed.places import DrawTable, draw_table
from partita.run.draws import PlacedDraws

T = torch.Tensor


@dataclass(frozen=True)
class OpsFunction:
    """Some ops as one function of tensors: `run(*inputs)` gives a tuple of the outputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[..., tuple[T, ...]]
    is_random: bool = False
    uses: tuple["WeightUse", ...] = ()  # where the gradients of parameters are taken apart


@dataclass(frozen=True)
class WeightUse:
    """A node that reads parameters: which results it is, and which arguments they are.

    Where a function is built with `apart`, no two nodes share an argument for a parameter: what a
    node's result says of its own arguments is then the gradient through this node alone.
    """

    results: tuple[int, ...]  # beyond the outputs of the function
    arguments: tuple[int, ...]


class RunModel:
    """A module with its example arguments, exported at the sizes of batch that are asked for."""

    def __init__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.module, self.args, self.kwargs, self.device = module, args, kwargs, device
        self.captured = self._capture(args, kwargs, None)
        self.graph = self.captured.graph
        self.batch = batch_of(self.graph)
        self.by_batch: dict[int, Captured] = {self.batch: self.captured}
        self.known: dict[Any, OpsFunction] = {}
        self.forward_ops = {op.name: op for op in self.graph.ops}
        self.ops_of_node: dict[str, list[str]] = {}
        for op in self.graph.ops:
            self.ops_of_node.setdefault(self.node_of(op), []).append(op.name)
        self.held = held_by_name(self.captured)
        self.is_random = False
        self.start = 0  # the place of the first draw of the step
        self.sample = 0  # the number in the batch of the first sample that is computed now

    def node_of(self, op: Op | str) -> str:
        """The node of the exported program that an op comes from."""
        return self.captured.node_of(op)

    def num_parts(self, op: Op) -> int:
        """How many ops the node of an op has become."""
        return len(self.ops_of_node[self.node_of(op)])

    def is_further(self, op: Op) -> bool:
        """Does an op stand for further results of a node, beside those of its main op?

        Parts stand before the main op, which has the node's name, and further results behind it.
        """
        node, ops = self.node_of(op), self.ops_of_node[self.node_of(op)]
        return node in ops and ops.index(op.name) > ops.index(node)

    def changes_buffers(self, op: str) -> bool:
        """Does an op leave something behind, such as a count of batches?"""
        node = self.captured.record.node[self.node_of(op)]
        schema = getattr(node.target, "_schema", None)
        return bool(schema is not None and schema.is_mutable)

    @functools.cached_property
    def table(self) -> DrawTable:
        """The draws of the model; those of samples are known where another batch can be had."""
        batch = next((b for b in self.by_batch if b != self.batch), other_batch(self.batch))
        try:
            other: Captured | None = self.at(batch)
        except (CaptureError, PlanError):
            other = None
        return draw_table(self.captured, self.batch, other, batch)

    def is_random_op(self, op: str) -> bool:
        """Does an op draw random numbers?"""
        return self.captured.record.node[self.captured.node_of(op)].is_random

    def draws_by_sample(self, op: str) -> bool:
        """Does all that a random op draws belong to samples?"""
        node = self.captured.node_of(op)
        numbers = [self.table.first[node], *self.table.first.values(), len(self.table.draws)]
        end = min(number for number in numbers[1:] if number > numbers[0])
        return all(draw.dim is not None for draw in self.table.draws[numbers[0] : end])

    def drawing(self, node: TorchNode) -> Callable[..., Any]:
        """A random node: what it draws depends on its place and the samples, not on the plan."""

        def drawn(*args: Any, **kwargs: Any) -> Any:
            table = self.table
            torch.default_generator.manual_seed(self.start + table.first[node.name])
            with PlacedDraws(table.draws, self.start, self.sample):
                return node.target(*args, **kwargs)

        return drawn

    def at(self, batch: int) -> Captured:
        """The export at a size of batch."""
        if batch not in self.by_batch:
            args, kwargs = resized((self.args, self.kwargs), self.batch, batch)
            other = self._capture(args, kwargs, batch)
            if [op.name for op in other.graph.ops] != [op.name for op in self.graph.ops]:
                raise PlanError(
                    f"the model does other things with a batch of {batch} than with {self.batch}",
                    fix="let nothing in the model depend on the size of the batch",
                    field="model",
                )
            self.by_batch[batch] = other
        return self.by_batch[batch]

    def _capture(self, args: Any, kwargs: Any, batch: int | None) -> Captured:
        if isinstance(self.module, ReferenceModule):  # plans of the zoo name its ops
            graph = self.module.graph
            return capture_ops(self.module, graph if batch is None else rebatch(graph, batch))
        return export_module(self.module, args, kwargs, checkpointing="inline")

    def function(
        self, ops: Sequence[str], outputs: Sequence[str], batch: int, *, given: frozenset[str],
        apart: frozenset[str] = frozenset(),
    ) -> OpsFunction:  # fmt: skip
        """Ops that run one after the other; `given` are tensors that come from outside.

        With `apart`, parameters, the function also gives the results of the nodes that read them.
        """
        key = (tuple(ops), tuple(outputs), batch, apart)
        if key not in self.known:
            builder = _FunctionBuilder(self, self.at(batch), ops, given)
            self.known[key] = builder.build(outputs, apart)
        return self.known[key]

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, T]:
        """The tensors of one call, by the names that the graph has for them."""
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        like = pytree.tree_structure((self.args, self.kwargs))
        if spec != like:
            raise PlanError(
                "the arguments of this step have another structure than the model was planned with",
                fix="call step as the module is called",
                field="step",
            )
        given = [each for each in self.captured.record.inputs if each.kind == "input"]
        tensors = {}
        for each, value in zip(given, flat, strict=True):
            if isinstance(value, torch.Tensor):
                tensors[str(self.captured.places[each.name])] = value
        return tensors


def other_batch(batch: int) -> int:
    """A size of batch to hold this one against."""
    return batch // 2 if batch > 1 else 2


def resized(call: Any, before: int, batch: int) -> Any:
    """The arguments of a call with another size of batch."""
    return pytree.tree_map_only(torch.Tensor, lambda t: _resized(t, before, batch), call)


def _resized(tensor: T, before: int, batch: int) -> T:
    if not tensor.ndim or tensor.shape[0] != before:
        return tensor
    return tensor[:batch] if batch <= before else tensor[:1].expand(batch, *tensor.shape[1:])


@dataclass
class _FunctionBuilder:
    """Writes nodes into a graph of torch.fx, which becomes plain Python code."""

    model: RunModel
    captured: Captured
    ops: Sequence[str]
    given: frozenset[str]
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[str, fx.Node] = field(default_factory=dict)  # by tensor
    done: dict[str, fx.Node] = field(default_factory=dict)  # by node of the export
    placeholders: dict[str, fx.Node] = field(default_factory=dict)
    random: bool = False

    def __post_init__(self) -> None:
        self.own = set(self.ops)
        graph = self.captured.graph
        self.ops_of_node: dict[str, list[Op]] = {}
        for op in graph.ops:
            self.ops_of_node.setdefault(self.captured.node_of(op), []).append(op)
        self.given_tensors = {tensor.name for tensor in graph.tensors if tensor.is_given}
        self.start = self.graph.create_node("placeholder", "begin_")  # what comes before is input
        self.constant = _constant_tensors(graph)

    def build(self, outputs: Sequence[str], apart: frozenset[str]) -> OpsFunction:
        graph = self.captured.graph
        for op in graph.ops:
            if op.name in self.own:
                self._op(op)
        made = [self._tensor(name) for name in outputs]
        names, uses = list(self.placeholders), []
        if apart:
            uses = self._apart(apart, names, made)
        self.graph.output(tuple(made))
        self.graph.erase_node(self.start)
        self.graph.lint()
        code = fx.GraphModule({}, self.graph)
        return OpsFunction(tuple(names), tuple(outputs), code.forward, self.random, tuple(uses))

    def _apart(
        self, parameters: frozenset[str], names: list[str], made: list[fx.Node]
    ) -> list[WeightUse]:
        """Give every node that reads parameters arguments of its own, and add its results.

        What is made of parameters alone for one reader (a transposed weight) belongs to it.
        """
        held = {node: name for name, node in self.placeholders.items() if name in parameters}
        chains: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}  # uses: a reader, a parameter
        uses, taken = [], set()
        for node in list(self.graph.nodes):
            inputs = node.all_input_nodes
            own = [(node, each) for each in inputs if each in held]
            own += [use for each in inputs for use in chains.get(each, ())]
            if not own:
                continue
            alone = all(each in held or each in chains for each in inputs)
            if alone and len(node.users) == 1 and node not in made:
                chains[node] = own
                continue
            arguments = []
            for reader, parameter in own:
                place = names.index(held[parameter])
                if parameter in taken:
                    with self.graph.inserting_before(self.start):
                        fresh = self.graph.create_node("placeholder", f"t{len(names)}")
                    reader.replace_input_with(parameter, fresh)
                    place = len(names)
                    names.append(held[parameter])
                taken.add(parameter)
                arguments.append(place)
            parts = [user for user in node.users if user.target is operator.getitem]
            results = range(len(made), len(made) + max(len(parts), 1))
            made += parts or [node]
            uses.append(WeightUse(tuple(results), tuple(arguments)))
        return uses

    def _op(self, op: Op) -> None:
        node = self.captured.record.node[self.captured.node_of(op)]
        if all(each.name in self.own for each in self.ops_of_node[node.name]):
            if node.name not in self.done:
                self._node(node)
            return
        inputs = tuple(self._tensor(name) for name in op.inputs)
        made = self.graph.call_function(_rule(self.captured.graph.call(op), op, node.name), inputs)
        for i, name in enumerate(op.outputs):
            self.made[name] = self.graph.call_function(operator.getitem, (made, i))

    def _node(self, node: TorchNode) -> fx.Node:
        if node.is_body or not callable(node.target):
            raise PlanError(
                f"{node.name} is control flow inside the model",
                fix="a model whose ops are run one by one has none; write it without torch.cond",
                field="model",
            )
        ops = self.ops_of_node.get(node.name, ())
        is_constant = bool(ops) and all(op.kind == "constant" for op in ops)
        read = self._like if is_constant else self._ref
        args, kwargs = replaced((node.args, dict(node.kwargs)), Ref, read)
        args, kwargs = replaced((args, kwargs), torch.device, lambda _: self.model.device)
        target = node.target
        if node.is_random:
            self.random = self.model.is_random = True
            target = self.model.drawing(node)
        made = self.graph.call_function(target, args, kwargs)
        self.done[node.name] = made
        place = self.captured.places.get(node.name)
        if isinstance(place, str):
            self.made.setdefault(place, made)
        elif isinstance(place, tuple):
            for i, name in enumerate(place):
                if name:
                    self.made[name] = self.graph.call_function(operator.getitem, (made, i))
        return made

    def _like(self, ref: Ref) -> fx.Node | None:
        """What a constant is made like (`zeros_like`): only its size counts."""
        place = self.captured.places.get(ref.name)
        spec = self.captured.record.values.get(ref.name)
        if not isinstance(place, str) or place in self.made or not isinstance(spec, TensorSpec):
            return self._ref(ref)
        settings: dict[str, Any] = {"dtype": spec.dtype, "device": self.model.device}
        return self.graph.call_function(torch.zeros, (tuple(spec.shape),), settings)

    def _ref(self, ref: Ref) -> fx.Node | None:
        place = self.captured.places.get(ref.name)
        if isinstance(place, str):
            return self._tensor(place)
        if ref.name in self.done:
            return self.done[ref.name]
        if ref.name in self.captured.record.node:
            return self._node(self.captured.record.node[ref.name])
        return None

    def _tensor(self, name: str) -> fx.Node:
        if name not in self.made:
            producer = self.captured.graph.producer(name)
            if name in self.constant and name not in self.given and producer is not None:
                self._constant(producer)
            else:
                self.made[name] = self._placeholder(name)
        return self.made[name]

    def _constant(self, op: Op) -> None:
        """Something made of nothing, made here again."""
        for each in self.ops_of_node[self.captured.node_of(op)]:
            self.own.add(each.name)
        self._op(op)

    def _placeholder(self, name: str) -> fx.Node:
        with self.graph.inserting_before(self.start):
            node = self.graph.create_node("placeholder", f"t{len(self.placeholders)}")
        self.placeholders[name] = node
        return node


def _constant_tensors(graph: Graph) -> set[str]:
    """Tensors that depend on nothing that is given."""
    constant: set[str] = set()
    for op in graph.ops:
        if op.phase == "forward" and all(name in constant for name in op.inputs):
            constant.update(op.outputs)
    return constant


def _rule(call: Call, op: Op, node: str) -> Callable[..., tuple[T, ...]]:
    """A part of a node, by the rule of its kind."""
    if op.kind not in RULES:
        raise PlanError(
            f"op {op.name!r} is a part of {node!r} that cannot run by itself",
            fix="plan again with these ops in one stage and unsplit",
            field="stages",
        )
    rule = RULES[op.kind]
    module = SimpleNamespace(training=True)

    def run(*inputs: T) -> tuple[T, ...]:
        shaped = replace(call, inputs=tuple(tuple(each.shape) for each in inputs))
        result = rule(module, shaped, *inputs)
        return result if isinstance(result, tuple) else (result,)

    return run


def held_by_name(captured: Captured) -> Mapping[str, T]:
    """Parameters, buffers and constants of the module, by the names that the graph has."""
    tensors: dict[str, T] = {}
    for each in captured.record.inputs:
        if each.kind != "input" and each.data is not None:
            tensors.setdefault(str(captured.places[each.name]), each.data)
    return tensors
