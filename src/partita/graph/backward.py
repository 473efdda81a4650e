"""The training graph of a forward graph: data gradients, weight gradients, optimizer steps.

Each forward op gets at most one `dgrad` op (gradients of its activations) and one `wgrad` op
(gradients of its parameters), so that a schedule may put them apart. `SAVED[kind]` says which
inputs and outputs of the forward each of the two reads; that is what must stay in memory between
forward and backward. Where several consumers give a gradient for one tensor they are added.
"""

from dataclasses import dataclass, replace

from partita.errors import GraphError
from partita.graph.dtypes import FLOATS
from partita.graph.record import Graph, Op, Tensor

OPTIMIZER_STATES = {
    "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adam": 2, "adamw": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Saved:
    """What the backward reads of the forward: input and output positions; "all" means each."""

    dgrad_inputs: tuple[int, ...] | str = ()
    dgrad_outputs: bool = False
    wgrad_inputs: tuple[int, ...] = (0,)


_PRODUCT = Saved(dgrad_inputs="all")
_FROM_INPUT = Saved(dgrad_inputs=(0,))
_FROM_OUTPUT = Saved(dgrad_outputs=True)
_NOTHING = Saved()

SAVED: dict[str, Saved] = {
    "linear": Saved(dgrad_inputs=(1,)),
    "conv": Saved(dgrad_inputs=(1,)),
    "expert_linear": Saved(dgrad_inputs=(1,)),
    "matmul": _PRODUCT,
    "einsum": _PRODUCT,
    "attention": Saved(dgrad_inputs="all", dgrad_outputs=True),
    "softmax": _FROM_OUTPUT,
    "batch_norm": Saved(dgrad_inputs=(0, 1)),
    "group_norm": Saved(dgrad_inputs=(0, 1)),
    "layer_norm": Saved(dgrad_inputs=(0, 1)),
    "rms_norm": Saved(dgrad_inputs=(0, 1)),
    "pool": _FROM_INPUT,
    "lstm": Saved(dgrad_inputs="all", dgrad_outputs=True, wgrad_inputs=(0,)),
    "gru": Saved(dgrad_inputs="all", dgrad_outputs=True, wgrad_inputs=(0,)),
    "lstm_cell": Saved(dgrad_inputs="all", dgrad_outputs=True, wgrad_inputs=(0, 1)),
    "gru_cell": Saved(dgrad_inputs="all", dgrad_outputs=True, wgrad_inputs=(0, 1)),
    "moe_router": Saved(dgrad_inputs=(0, 1), dgrad_outputs=True),
    "moe_dispatch": Saved(dgrad_inputs=(1,)),
    "moe_combine": Saved(dgrad_inputs="all"),
    "cross_entropy": Saved(dgrad_inputs="all"),
    "mse_loss": Saved(dgrad_inputs="all"),
    "embedding": Saved(wgrad_inputs=(0,)),
    "reduce": _NOTHING,
    "concat": _NOTHING,
    "split": _NOTHING,
    "slice": _NOTHING,
    "reshape": _NOTHING,
    "transpose": _NOTHING,
    "pad": _NOTHING,
    "resize": _NOTHING,
    "expand": _NOTHING,
}
# Elementwise functions whose gradient needs the input, the output, or only a mask or nothing.
FROM_INPUT = frozenset({
    "gelu", "silu", "swiglu", "pow", "log", "sin", "cos", "erf", "abs", "hardswish", "softplus",
    "max", "min", "where", "mul", "div", "square", "lrn", "clip",
})  # fmt: skip
FROM_OUTPUT = frozenset({
    "relu", "relu6", "leaky_relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "elu", "dropout",
})  # fmt: skip


def saved_by(op: Op) -> Saved:
    """What an op's backward reads of its forward; an unknown kind is taken to need everything."""
    if op.kind == "elementwise":
        fn = op.attr("fn")
        if fn in FROM_INPUT:
            return Saved(dgrad_inputs="all")
        return _FROM_OUTPUT if fn in FROM_OUTPUT else _NOTHING
    if op.kind == "reduce" and op.attr("fn") in ("max", "min"):
        return _FROM_INPUT
    return SAVED.get(op.kind, Saved(dgrad_inputs="all", dgrad_outputs=True))


def training_graph(
    graph: Graph, optimizer: str | None = "adamw", state_dtype: str = "f32"
) -> Graph:
    """Forward, backward and optimizer steps in one graph.

    Gradients start from the first output (the loss; if it is no scalar, from a gradient that is
    given as the input `<output>.grad`). `optimizer=None` leaves the update out.
    """
    if graph.is_training:
        raise GraphError("the graph has a backward pass already", fix="give the forward graph")
    if not graph.outputs:
        raise GraphError("the graph has no output to differentiate", field="outputs")
    if optimizer is not None and optimizer not in OPTIMIZER_STATES:
        raise GraphError(
            f"unknown optimizer {optimizer!r}", fix=f"use one of {', '.join(OPTIMIZER_STATES)}"
        )
    return _Differentiation(graph).run(optimizer, state_dtype)


class _Differentiation:
    """State of one walk back through a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors: list[Tensor] = list(graph.tensors)
        self.ops: list[Op] = list(graph.ops)
        self.parts: dict[str, list[str]] = {}  # tensor -> names of gradients to be added
        self.wanted = _tensors_with_gradient(graph)

    def run(self, optimizer: str | None, state_dtype: str) -> Graph:
        loss = self.graph.tensor(self.graph.outputs[0])
        if loss.name not in self.wanted:
            raise GraphError(
                f"no parameter influences the output {loss.name!r}", fix="there is nothing to train"
            )
        seed = Tensor(f"{loss.name}.grad", loss.shape, loss.dtype, "input")
        self.tensors.append(seed)
        self.parts[loss.name] = [seed.name]
        for op in reversed(self.graph.ops):
            self._differentiate(op)
        for parameter in self.graph.parameters:
            gradient = self._gradient(parameter.name)
            if gradient is not None and optimizer is not None:
                self._update(parameter, gradient, optimizer, state_dtype)
        return Graph(self.graph.name, tuple(self.tensors), tuple(self.ops), self.graph.outputs)

    def _differentiate(self, op: Op) -> None:
        gradients = {
            i: gradient
            for i, name in enumerate(op.outputs)
            if (gradient := self._gradient(name)) is not None
        }
        if not gradients:
            return
        saved = saved_by(op)
        roles = {name: self.graph.tensor(name).role for name in op.inputs}
        wrt = [
            i
            for i, name in enumerate(op.inputs)
            if name in self.wanted and op.inputs.index(name) == i
        ]
        data = [i for i in wrt if roles[op.inputs[i]] != "parameter"]
        weights = [i for i in wrt if roles[op.inputs[i]] == "parameter"]
        if data:
            reads = [op.inputs[i] for i in _positions(saved.dgrad_inputs, op)]
            reads += op.outputs if saved.dgrad_outputs else ()
            self._add(op, "dgrad", data, gradients, reads)
        if weights:
            reads = [op.inputs[i] for i in _positions(saved.wgrad_inputs, op)]
            self._add(op, "wgrad", weights, gradients, reads)

    def _add(
        self, op: Op, phase: str, wrt: list[int], gradients: dict[int, str], reads: list[str]
    ) -> None:
        outputs = []
        for i in wrt:
            source = self.graph.tensor(op.inputs[i])
            parts = self.parts.setdefault(source.name, [])
            single = len(self.graph.consumers(source.name)) == 1
            name = f"{source.name}.grad" if single else f"{source.name}.grad.{op.name}"
            self.tensors.append(Tensor(name, source.shape, source.dtype, "gradient"))
            parts.append(name)
            outputs.append(name)
        self.ops.append(
            Op(
                name=f"{op.name}.{phase}",
                kind=op.kind,
                inputs=(*gradients.values(), *dict.fromkeys(reads)),
                outputs=tuple(outputs),
                attrs=(("grads", tuple(gradients)), ("wrt", tuple(wrt))),
                scope=op.scope,
                phase=phase,
                forward=op.name,
            )
        )

    def _gradient(self, tensor: str) -> str | None:
        """The name of a tensor's complete gradient, adding its parts if there are several."""
        parts = self.parts.get(tensor, [])
        if len(parts) <= 1:
            return parts[0] if parts else None
        source = self.graph.tensor(tensor)
        total = Tensor(f"{tensor}.grad", source.shape, source.dtype, "gradient")
        producer = self.graph.producer(tensor)
        self.tensors.append(total)
        self.ops.append(
            Op(
                name=f"{tensor}.grad.sum",
                kind="elementwise",
                inputs=tuple(parts),
                outputs=(total.name,),
                attrs=(("fn", "add"),),
                scope=producer.scope if producer else "",
                phase="wgrad" if source.role == "parameter" else "dgrad",
            )
        )
        self.parts[tensor] = [total.name]
        return total.name

    def _update(self, parameter: Tensor, gradient: str, rule: str, state_dtype: str) -> None:
        states = []
        for i in range(OPTIMIZER_STATES[rule]):
            state = Tensor(f"{parameter.name}.{rule}.{i}", parameter.shape, state_dtype, "state")
            self.tensors.append(state)
            states.append(state.name)
        if parameter.dtype != state_dtype:  # mixed precision keeps a full copy of the weights
            master = Tensor(f"{parameter.name}.master", parameter.shape, state_dtype, "state")
            self.tensors.append(master)
            states.append(master.name)
        self.tensors.append(replace(parameter, name=f"{parameter.name}.next", role="activation"))
        self.ops.append(
            Op(
                name=f"{parameter.name}.update",
                kind="optimizer",
                inputs=(parameter.name, gradient, *states),
                outputs=(f"{parameter.name}.next",),
                attrs=(("rule", rule),),
                phase="update",
            )
        )


def _positions(which: tuple[int, ...] | str, op: Op) -> tuple[int, ...]:
    if isinstance(which, str):
        return tuple(range(len(op.inputs)))
    return tuple(i for i in which if i < len(op.inputs))


def _tensors_with_gradient(graph: Graph) -> set[str]:
    """Parameters, and floating activations that depend on one."""
    wanted = {tensor.name for tensor in graph.parameters if tensor.dtype in FLOATS}
    for op in graph.ops:
        if any(name in wanted for name in op.inputs):
            wanted.update(name for name in op.outputs if graph.tensor(name).dtype in FLOATS)
    return wanted
