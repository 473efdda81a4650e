"""The training graph of a forward graph: data gradients, weight gradients, optimizer steps.

Each forward op gets at most one `dgrad` op (gradients of its activations) and one `wgrad` op
(gradients of its parameters), so that a schedule may put them apart. `SAVED[kind]` says which
inputs and outputs of the forward each of the two reads; that is what must stay in memory between
forward and backward. Where several consumers give a gradient for one tensor they are added.

What cheap ops make need not be kept from forward to backward (`recomputable`). They have no product
loop, so that their time is that of reading and writing. What such an op makes can be made again
where all it reads is kept anyway, or can be made again itself.
"""

from collections.abc import Set
from dataclasses import dataclass, replace

from partita.errors import GraphError
from partita.graph.loops import loop_nest
from partita.graph.record import FLOATS, Attr, Graph, Op, Tensor
from partita.graph.work import VIEWS

OPTIMIZER_STATES = {
    "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adam": 2, "adamw": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BackwardReads:
    """What the backward reads of the forward: positions of inputs, and whether the outputs.

    "all" means every input, "others" those that multiply what is differentiated.
    """

    inputs: tuple[int, ...] | str = ()
    outputs: bool = False


@dataclass(frozen=True, slots=True)
class WeightedKind:
    """A kind with weights of its own: its weight gradient reads something else."""

    dgrad: BackwardReads
    wgrad: BackwardReads


_ALL = BackwardReads("all", outputs=True)
_FROM_INPUT = BackwardReads("all")
_FROM_OUTPUT = BackwardReads(outputs=True)
_PRODUCT = BackwardReads("others")
_NOTHING = BackwardReads()
_WEIGHTED = WeightedKind(dgrad=BackwardReads((1,)), wgrad=BackwardReads((0,)))
_NORM = WeightedKind(dgrad=BackwardReads((0, 1)), wgrad=BackwardReads((0,)))
# The weight gradients of recurrent ops follow from those of the gates, which need everything.
_RECURRENT = WeightedKind(dgrad=_ALL, wgrad=_ALL)

SAVED: dict[str, BackwardReads | WeightedKind] = {
    "linear": _WEIGHTED,
    "conv": _WEIGHTED,
    "expert_linear": _WEIGHTED,
    "grouped_mm": WeightedKind(dgrad=BackwardReads((1, 2)), wgrad=BackwardReads((0, 2))),
    "matmul": _PRODUCT,
    "einsum": _PRODUCT,
    "attention": _ALL,
    "softmax": _FROM_OUTPUT,
    "batch_norm": _NORM,
    "group_norm": _NORM,
    "layer_norm": _NORM,
    "rms_norm": _NORM,
    "pool": _FROM_INPUT,
    "state_space": BackwardReads("all"),
    "lstm": _RECURRENT,
    "gru": _RECURRENT,
    "lstm_cell": _RECURRENT,
    "gru_cell": _RECURRENT,
    "moe_router": WeightedKind(
        dgrad=BackwardReads((1,), outputs=True), wgrad=BackwardReads((0,), outputs=True)
    ),
    "moe_dispatch": BackwardReads((1,)),
    "moe_combine": _FROM_INPUT,
    "cross_entropy": _FROM_INPUT,
    "mse_loss": _FROM_INPUT,
    "embedding": BackwardReads((0,)),
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
# Elementwise functions whose gradient needs the input, the output (or a mask as large), nothing.
FROM_INPUT = frozenset({
    "gelu", "silu", "swiglu", "pow", "log", "sin", "cos", "erf", "abs", "hardswish", "softplus",
    "max", "min", "where", "div", "square", "lrn", "clip", "gelu_tanh", "quick_gelu", "relu2",
    "softcap", "clamped_swiglu", "marked",
})  # fmt: skip
FROM_OUTPUT = frozenset({
    "relu", "relu6", "leaky_relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "elu", "dropout",
    "hardsigmoid", "reciprocal",
})  # fmt: skip
LINEAR = frozenset({"identity", "cast", "add", "sub", "neg", "scale", "mask", "rope", "compare",
                    "temperature"})  # fmt: skip


def saved_for(op: Op, wrt: list[int]) -> tuple[BackwardReads, ...]:
    """What gradients of inputs read of the forward: of a layer's data, of its weights, or of both.

    Weights that are computed have their gradient in the dgrad; data may be a parameter.
    """
    phases = dict.fromkeys("wgrad" if i else "dgrad" for i in wrt)
    return tuple(dict.fromkeys(saved_by(op, phase) for phase in phases))


def saved_by(op: Op, phase: str) -> BackwardReads:
    """What an op's dgrad or wgrad reads of its forward; what is unknown needs everything."""
    if op.kind == "elementwise":
        return _saved_elementwise(op.attr("fn", "add"))
    if op.kind == "reduce" and op.attr("fn", "sum") not in ("sum", "mean"):
        return _ALL
    if op.kind == "moe_router" and op.attr("score") is not None:
        return _FROM_INPUT  # the gates of experts that were not chosen are not in the output
    if op.kind == "moe_dispatch" and op.attr("weighted"):
        return _FROM_INPUT
    if op.kind == "pool" and op.attr("mode") == "avg":
        return _NOTHING
    backward_reads = SAVED.get(op.kind, _ALL)
    if isinstance(backward_reads, WeightedKind):
        return backward_reads.wgrad if phase == "wgrad" else backward_reads.dgrad
    return backward_reads


def _saved_elementwise(fn: object) -> BackwardReads:
    if fn in LINEAR:
        return _NOTHING
    if fn in FROM_OUTPUT:
        return _FROM_OUTPUT
    return _PRODUCT if fn == "mul" else _FROM_INPUT if fn in FROM_INPUT else _ALL


def training_graph(
    graph: Graph, optimizer: str | None = "adamw", state_dtype: str = "f32", grad_dtype: str = ""
) -> Graph:
    """Forward, backward and optimizer steps in one graph.

    Gradients start from the first output (the loss; if it is no scalar, from a gradient that is
    given as the input `<output>.grad`). `optimizer=None` leaves the update out. Gradients of
    parameters are in `grad_dtype` from the op that makes them on; '' is that of the parameter.
    """
    if graph.is_training:
        raise GraphError("the graph has a backward pass already", fix="give the forward graph")
    if not graph.outputs:
        raise GraphError("the graph has no output to differentiate", field="outputs")
    if optimizer is not None and optimizer not in OPTIMIZER_STATES:
        raise GraphError(
            f"unknown optimizer {optimizer!r}", fix=f"use one of {', '.join(OPTIMIZER_STATES)}"
        )
    return _Differentiation(graph, grad_dtype).run(optimizer, state_dtype)


class _Differentiation:
    """State of one walk back through a graph."""

    def __init__(self, graph: Graph, grad_dtype: str) -> None:
        self.graph, self.grad_dtype = graph, grad_dtype
        self.tensors: list[Tensor] = list(graph.tensors)
        self.ops: list[Op] = list(graph.ops)
        self.parts: dict[str, list[str]] = {}  # tensor -> names of gradients to be added
        self.wanted = _tensors_with_gradient(graph)
        self.live = _ops_with_gradient(graph, self.wanted)

    def run(self, optimizer: str | None, state_dtype: str) -> Graph:
        loss = self.graph.tensor(self.graph.outputs[0])
        if loss.name not in self.wanted:
            raise self._untrained(loss)
        seed = Tensor(f"{loss.name}.grad", loss.shape, loss.dtype, "input")
        self.tensors.append(seed)
        self.parts[loss.name] = [seed.name]
        for op in reversed(self.graph.ops):
            self._differentiate(op)
        for parameter in self.graph.parameters:
            gradient = self._gradient(parameter.name)
            if gradient is not None and optimizer is not None:
                self._update(parameter, gradient, optimizer, state_dtype)
        return replace(self.graph, tensors=tuple(self.tensors), ops=tuple(self.ops))

    def _untrained(self, loss: Tensor) -> GraphError:
        """Gradients start from the first output, and this one passes none on."""
        others = [name for name in self.graph.outputs if name in self.wanted]
        if others:
            place = self.graph.outputs.index(others[0])
            return GraphError(
                f"gradients start from the first output, and {loss.name!r} ({loss.dtype}) has none",
                fix=f"return what is trained first, the loss or the logits: {others[0]!r}, which "
                f"is output {place + 1} of {len(self.graph.outputs)}",
            )
        if loss.dtype not in FLOATS:
            return GraphError(
                f"gradients start from the first output, and {loss.name!r} ({loss.dtype}) has none",
                fix="return the loss, or the logits that it is made of, before it",
            )
        return GraphError(
            f"no parameter influences the output {loss.name!r}", fix="there is nothing to train"
        )

    def _differentiate(self, op: Op) -> None:
        gradients = {
            i: gradient
            for i, name in enumerate(op.outputs)
            if (gradient := self._gradient(name)) is not None
        }
        if not gradients:
            return
        roles = {name: self.graph.tensor(name).role for name in op.inputs}
        places = _places(self.graph, op)
        wrt = [i for i, name in enumerate(op.inputs) if name in self.wanted and places[i] == i]
        data = [i for i in wrt if roles[op.inputs[i]] != "parameter"]
        weights = [i for i in wrt if roles[op.inputs[i]] == "parameter"]
        if data:
            self._add(op, "dgrad", data, gradients)
        if weights:
            self._add(op, "wgrad", weights, gradients)

    def _add(self, op: Op, phase: str, wrt: list[int], gradients: dict[int, str]) -> None:
        reads, told = _reads(op, saved_for(op, wrt), wrt, _places(self.graph, op))
        outputs = []
        for i in wrt:
            source = self.graph.tensor(op.inputs[i])
            parts = self.parts.setdefault(source.name, [])
            users = self.graph.consumers(source.name)
            single = sum(1 for user in users if user.name in self.live) == 1
            if any(source.name == op.inputs[j] for j in wrt if j < i):
                name = f"{source.name}.grad.{op.name}.{i}"
            elif single and not any(source.name == op.inputs[j] for j in wrt if j != i):
                name = f"{source.name}.grad"
            else:
                name = f"{source.name}.grad.{op.name}"
            self.tensors.append(Tensor(name, source.shape, self._dtype(source), "gradient"))
            parts.append(name)
            outputs.append(name)
        self.ops.append(
            Op(
                name=f"{op.name}.{phase}",
                kind=op.kind,
                inputs=(*gradients.values(), *reads),
                outputs=tuple(outputs),
                attrs=(("grads", tuple(gradients)), *told, ("wrt", tuple(wrt))),
                scope=op.scope,
                phase=phase,
                forward=op.name,
            )
        )

    def _dtype(self, source: Tensor) -> str:
        """The type of a tensor's gradient."""
        is_summed = self.grad_dtype and source.role == "parameter"
        return self.grad_dtype if is_summed else source.dtype

    def _gradient(self, tensor: str) -> str | None:
        """The name of a tensor's complete gradient, adding its parts if there are several."""
        parts = self.parts.get(tensor, [])
        if len(parts) <= 1:
            return parts[0] if parts else None
        source = self.graph.tensor(tensor)
        total = Tensor(f"{tensor}.grad", source.shape, self._dtype(source), "gradient")
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
        following = f"{parameter.name}.next"
        self.tensors.append(replace(parameter, name=following, role="activation", source=""))
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


def _places(graph: Graph, op: Op) -> tuple[int, ...]:
    """For every input the first one that is the same tensor, and read in the same way.

    A tensor that stands twice and is read in two ways (x @ x) has a gradient for each: split over
    devices, the two lie in two ways.
    """
    if len(set(op.inputs)) == len(op.inputs):
        return tuple(range(len(op.inputs)))
    accesses = loop_nest(graph.call(op)).inputs
    keys = list(zip(op.inputs, accesses, strict=True))
    return tuple(keys.index(key) for key in keys)


def _reads(
    op: Op, needs: tuple[BackwardReads, ...], wrt: list[int], places: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[tuple[str, Attr], ...]]:
    """The tensors of the forward that a gradient reads, each once for every way of reading it.

    Where one is read in two ways the names do not say which is which: that is said in `reads`.
    """
    positions: set[int] = set()
    for saved in needs:
        if isinstance(saved.inputs, str):
            others = saved.inputs == "others"
            read = [i for i in range(len(op.inputs)) if not others or any(j != i for j in wrt)]
        else:
            read = [i for i in saved.inputs if i < len(op.inputs)]
        positions.update(places[i] for i in read)
    codes = {f"i{i}": op.inputs[i] for i in sorted(positions)}
    if any(saved.outputs for saved in needs):
        codes |= {f"o{i}": name for i, name in enumerate(op.outputs)}
    plain = all(op.inputs.index(op.inputs[i]) == i for i in positions)
    return tuple(codes.values()), () if plain else (("reads", tuple(codes)),)


def _ops_with_gradient(graph: Graph, wanted: set[str]) -> set[str]:
    """The ops that lead from a wanted tensor to the loss."""
    reached, live = {graph.outputs[0]}, set()
    for op in reversed(graph.ops):
        if any(name in reached for name in op.outputs):
            live.add(op.name)
            reached.update(name for name in op.inputs if name in wanted)
    return live


def forward_part(graph: Graph) -> Graph:
    """The ops of a training graph that compute its loss; a forward graph is all of it."""
    if not graph.is_training:
        return graph
    ops = tuple(op for op in graph.ops if op.phase == "forward")
    used = {name for op in ops for name in (*op.inputs, *op.outputs)}
    outputs = tuple(name for name in graph.outputs if name in used) or ops[-1].outputs
    tensors = tuple(tensor for tensor in graph.tensors if tensor.name in used)
    return replace(graph, tensors=tensors, ops=ops, outputs=outputs)


def learned_first(graph: Graph) -> Graph:
    """The graph with the first output that a parameter influences before all others.

    A model may give classes first and scores after; who trains it differentiates the scores.
    """
    wanted = _tensors_with_gradient(graph)
    outputs = sorted(graph.outputs, key=lambda name: name not in wanted)
    return replace(graph, outputs=(*outputs[:1], *(o for o in graph.outputs if o != outputs[0])))


def is_learned(graph: Graph) -> bool:
    """Does a parameter influence any output, so that there is something to train?"""
    return not _tensors_with_gradient(graph).isdisjoint(graph.outputs)


def _tensors_with_gradient(graph: Graph) -> set[str]:
    """Parameters, and floating activations that depend on one; `detach` stops it."""
    wanted = {tensor.name for tensor in graph.parameters if tensor.dtype in FLOATS}
    for op in graph.ops:
        if any(name in wanted for name in op.inputs) and not op.attr("detach"):
            wanted.update(name for name in op.outputs if graph.tensor(name).dtype in FLOATS)
    return wanted


CHEAP_KINDS = VIEWS | {
    "elementwise", "layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax", "transpose",
    "pool", "pad", "concat", "resize", "reduce",
}  # fmt: skip


def recomputable(graph: Graph, saved: Set[str]) -> frozenset[str]:
    """The forward ops whose outputs can be made again from `saved`, what gradients read."""
    maker: dict[str, str] = {}
    names: set[str] = set()
    for op in graph.ops:
        if op.phase != "forward":
            continue
        there = all(name in saved or maker[name] in names for name in op.inputs if name in maker)
        if op.kind in CHEAP_KINDS and there and set(graph.outputs).isdisjoint(op.outputs):
            names.add(op.name)
        maker.update(dict.fromkeys(op.outputs, op.name))
    return frozenset(names)
