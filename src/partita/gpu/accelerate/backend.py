"""`torch.compile(module, backend="partita")`: every graph that PyTorch finds is accelerated.

PyTorch cuts a program at its graph breaks and hands over each graph with the inputs of its first
call, weights and buffers among them; sizes that vary are numbers among them, too. A graph becomes a
module (`GraphCall`) that holds its weights and its numbers, and `partita.accelerate` finds the
fastest way to run it, once for each set of shapes. What that cannot do is left to PyTorch's own
compiler, or to the graph as it is, with a warning that says why:

    gradients are asked for            the other compiler: nothing of ours has a backward
    the graph changes what it is given the other compiler: trying it would change it many times
    it is not on one GPU               the graph as it is
    the weights have changed since     the graph as it is, for these weights are not in it
    more than `shapes` sets of shapes  the other compiler

Options of `torch.compile(..., options={...})` are the fields of `BackendOptions`.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from partita.errors import InputError, PartitaError
from partita.gpu.accelerate.api import Accelerated, accelerate
from partita.gpu.flow.export import exported_program
from partita.suggest import suggest

T = torch.Tensor
GraphFunction = Callable[..., Any]
log = logging.getLogger("partita")


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How a graph is accelerated, and what runs where that cannot be."""

    time_s: float = 60.0  # for each graph and set of shapes
    compile: bool = True  # may torch.compile's own compiler be what is kept?
    isolate: bool = True  # kernels of ours run in a child process first
    seed: int = 0
    shapes: int = 8  # sets of shapes that are accelerated, of each graph
    otherwise: str = "inductor"  # PyTorch's name of the compiler for what is not ours


def compile_graph(
    graph: torch.fx.GraphModule,
    example: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> GraphFunction:
    """What PyTorch calls for every graph: gives a function to run instead of it."""
    settings = backend_options(options or {})
    if mode is not None:
        names = ", ".join(each.name for each in fields(BackendOptions))
        raise InputError(
            f"mode={mode!r} is of another backend", fix=f"give options={{...}} instead: {names}"
        )
    tensors = [each for each in example if isinstance(each, T)]
    if not on_one_gpu(tensors):
        places = sorted({str(each.device) for each in tensors}) or ["no device"]
        _left_to_pytorch(graph, f"it is on {', '.join(places)}: the graph runs as it is")
        return graph.forward
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        _left_to_pytorch(graph, f"gradients are asked for: {settings.otherwise} compiles it")
        return GraphFunctions(graph, example, settings).otherwise()
    return GraphFunctions(graph, example, settings)


def on_one_gpu(tensors: Sequence[T]) -> bool:
    """Do all of them lie on one CUDA device?"""
    return {each.device.type for each in tensors} == {"cuda"} and (
        len({each.device for each in tensors}) == 1
    )


def backend_options(given: Mapping[str, Any]) -> BackendOptions:
    """The fields of `options={...}`, each of its type."""
    known = [each.name for each in fields(BackendOptions)]
    for name, value in given.items():
        if name not in known:
            raise InputError(
                f"there is no option {name!r}", fix=suggest(name, known), field="options"
            )
        wanted = type(getattr(BackendOptions(), name))
        if type(value) is not wanted and (wanted, type(value)) != (float, int):
            raise InputError(
                f"found {value!r}", fix=f"give a {wanted.__name__}", field=f"options: {name}"
            )
    return BackendOptions(**given)


class GraphCall(nn.Module):
    """A graph as a module of its tensors: its weights and numbers are inside."""

    def __init__(self, graph: torch.fx.GraphModule, args: Sequence[Any]) -> None:
        super().__init__()
        self.graph = graph
        self.given: list[int] = []  # which arguments are a call's own tensors
        self.numbers: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        for at, value in enumerate(args):
            if not isinstance(value, T):
                self.numbers[at] = value
            elif is_weight(value):
                self.names[at] = f"weight_{at}"
                if isinstance(value, nn.Parameter):
                    self.register_parameter(self.names[at], value)
                else:
                    self.register_buffer(self.names[at], value)
            else:
                self.given.append(at)
        self.eval()

    def forward(self, *tensors: T) -> list[T]:
        """The graph's tensors, with weights and numbers put back between its inputs."""
        own = dict(zip(self.given, tensors, strict=True)) | self.numbers
        own |= {at: getattr(self, name) for at, name in self.names.items()}
        outputs = self.graph(*(own[at] for at in range(len(own))))
        return [each for each in outputs if isinstance(each, T)]


def is_weight(value: T) -> bool:
    """A parameter or buffer of a module, which PyTorch marks: the same tensor at every call."""
    return isinstance(value, nn.Parameter) or hasattr(value, "_dynamo_static_input_type")


@dataclass(frozen=True, slots=True, eq=False)
class ShapedGraph:
    """A graph for one set of shapes; outputs that are no tensors are the same at every call."""

    module: GraphCall
    fast: Accelerated
    outputs: tuple[Any, ...]  # the class of tensors stands where one is

    def has(self, args: Sequence[Any]) -> bool:
        """Are these the weights that it was made with, unchanged?"""
        names = self.module.names.items()
        return all(getattr(self.module, name) is args[at] for at, name in names) and (
            not self.fast.stale()
        )

    def __call__(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The graph's outputs in their order."""
        tensors = iter(self.fast(*(args[at] for at in self.module.given)))
        return tuple(next(tensors) if each is T else each for each in self.outputs)


class GraphFunctions:
    """One graph, accelerated for each set of shapes that it is called with."""

    def __init__(
        self, graph: torch.fx.GraphModule, example: Sequence[Any], options: BackendOptions
    ) -> None:
        self.graph, self.example, self.options = graph, example, options
        self.made: dict[tuple[Any, ...], ShapedGraph | None] = {}
        self.other: GraphFunction | None = None

    def otherwise(self) -> GraphFunction:
        """The graph through the other compiler."""
        if self.other is None:
            from torch._dynamo.backends.registry import lookup_backend

            self.other = lookup_backend(self.options.otherwise)(self.graph, list(self.example))
        return self.other

    def __call__(self, *args: Any) -> Any:
        """What the graph gives for these inputs."""
        key = tuple(map(_key, args))
        if key not in self.made:
            self.made[key] = self.make(args) if len(self.made) < self.options.shapes else None
        shaped = self.made[key]
        if shaped is None:
            return self.otherwise()(*args)
        if not shaped.has(args):
            self.made[key] = None
            _left_to_pytorch(
                self.graph, "the weights have changed since: torch.compiler.reset() begins anew"
            )
            return self.graph(*args)
        return shaped(args)

    def make(self, args: Sequence[Any]) -> ShapedGraph | None:
        """The fastest way to run the graph with inputs of these shapes, or nothing."""
        module = GraphCall(self.graph, args)
        tensors = [args[at].detach() for at in module.given]
        options = self.options
        try:
            with torch.no_grad():
                changed = exported_program(module, tuple(tensors)).graph_signature
            if changed.buffers_to_mutate or changed.user_inputs_to_mutate:
                _left_to_pytorch(
                    self.graph, f"it changes what it is given: {options.otherwise} compiles it"
                )
                return None
            with torch.no_grad():
                outputs = tuple(T if isinstance(each, T) else each for each in self.graph(*args))
            fast = accelerate(
                module, tensors, time_s=options.time_s, compile=options.compile,
                isolate=options.isolate, seed=options.seed, note=log.debug,
            )  # fmt: skip
        except PartitaError as error:
            _left_to_pytorch(self.graph, f"{options.otherwise} compiles it: {error}")
            return None
        log.info("%s runs as %s", _named(self.graph), fast.report().kept)
        return ShapedGraph(module, fast, outputs)


def _key(value: Any) -> Any:
    """What a function was made for: types and shapes of tensors, numbers as they are."""
    if isinstance(value, T):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def _left_to_pytorch(graph: torch.fx.GraphModule, reason: str) -> None:
    """Say why a graph is not ours."""
    warnings.warn(f"{_named(graph)} is not accelerated: {reason}", stacklevel=2)


def _named(graph: torch.fx.GraphModule) -> str:
    count = sum(node.op.startswith("call") for node in graph.graph.nodes)
    return f"a graph of {count} operators"
