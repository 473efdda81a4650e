"""A torch program as steps: one rule per operator that is understood.

Operators without a rule become calls. What depends on parameters alone is worked out once, here.
"""

from collections.abc import Callable
from typing import Any

import torch

from partita.capture.torch_program import (
    Ref,
    TensorSpec,
    TorchInput,
    TorchNode,
    TorchProgram,
    refs_in,
    replaced,
)
from partita.errors import GraphError
from partita.gpu.flow.steps import Flow, Pair, Step, T, Window

IDENTITIES = {
    "aten.clone.default", "aten.contiguous.default", "aten.detach.default", "aten.detach_.default",
    "aten.alias.default", "aten.lift_fresh_copy.default",
}  # fmt: skip
ASSERTIONS = {  # about what is known already: shapes are static; they give nothing
    "aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten._assert_scalar.default",
    "aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default",
}  # fmt: skip
RANDOM = ("rand", "bernoulli", "dropout", "normal", "multinomial", "uniform", "exponential")


def read_flow(program: TorchProgram) -> Flow:
    """The steps of an inference program with static shapes."""
    changed = program.changed()
    if changed:  # a replayed graph must not change what the model keeps or is given
        raise GraphError(
            f"the model changes {', '.join(changed)} when it is called",
            fix="give a model that keeps no state between calls",
        )
    reader = _FlowReader(program)
    for given in program.inputs:
        reader.give(given)
    for node in program.nodes:
        reader.call(node)
    reader.finish()
    return reader.flow()


def _control_flow(name: str) -> GraphError:
    return GraphError(
        f"the model has control flow or an unknown operator: {name}",
        fix="give a model without data-dependent control flow",
    )


class _FlowReader:
    """Goes over the nodes once, in order."""

    def __init__(self, program: TorchProgram) -> None:
        self.program = program
        self.known: dict[str, Any] = {}  # node -> constant, or Ref to a value, or tuple of them
        self.constants: dict[str, T] = {}
        self.steps: list[Step] = []
        self.inputs: list[str] = []
        self.outputs: tuple[str, ...] = ()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.random: list[str] = []

    def flow(self) -> Flow:
        return Flow(
            tuple(self.steps), tuple(self.inputs), self.outputs, self.shapes, self.dtypes,
            self.constants, tuple(dict.fromkeys(self.random)),
        )  # fmt: skip

    def give(self, given: TorchInput) -> None:
        if given.kind == "input":
            self.note(given, given.value)
            self.inputs.append(given.name)
            self.known[given.name] = Ref(given.name)
        else:
            self.known[given.name] = None if given.data is None else given.data.detach()

    def note(self, owner: TorchInput | TorchNode, value: Any) -> None:
        if not isinstance(value, TensorSpec):
            raise GraphError(f"{owner.name} is no tensor", fix="give a model of tensors alone")
        if any(not isinstance(size, int) for size in value.shape):
            raise GraphError(
                f"{owner.name} ({owner.target}) has the dynamic shape {list(value.shape)}",
                fix="export the model with static shapes",
            )
        self.shapes[owner.name] = value.shape
        self.dtypes[owner.name] = value.dtype

    def finish(self) -> None:
        names = []
        for output in self.program.outputs:
            given = self.lookup(output.value)
            if not isinstance(given, Ref):
                name = output.value.name if isinstance(output.value, Ref) else output.value
                raise GraphError(
                    f"the output {name} does not depend on the input",
                    fix="give a model whose outputs are computed from its inputs",
                )
            names.append(given.name)
        self.outputs = tuple(names)

    def lookup(self, value: Any) -> Any:
        """Arguments with what is known in the place of Refs: constants, or Refs to values."""
        return replaced(value, Ref, lambda ref: self.known[ref.name])

    def call(self, node: TorchNode) -> None:
        if node.is_body:
            users = {str(self.program.node[user].target) for user in node.users}
            raise _control_flow(", ".join(sorted(users)) or "get_attr")
        args, kwargs = self.lookup(node.args), self.lookup(dict(node.kwargs))
        if node.is_item:
            self.item(node, args)
            return
        name = str(node.target)
        if name in ASSERTIONS:
            return
        if not node.is_operator:
            raise _control_flow(name)
        if any(word in name for word in RANDOM) and not _is_off(name, args):
            self.random.append(name)
        if not any(refs_in((args, kwargs))) and name not in self.random:
            self.known[node.name] = node.target(*args, **kwargs)
            return
        if name in IDENTITIES or (name == "aten.dropout.default" and not args[2]):
            self.known[node.name] = args[0]
            return
        rule = None if self.needs_more_than_first(node) else RULES.get(name)
        step = rule(self, node.name, list(args), kwargs) if rule else None
        if isinstance(step, Ref):
            self.known[node.name] = step
            return
        if step is None:
            step = self.any_call(node, name, args, kwargs)
        self.add(node, step)

    def needs_more_than_first(self, node: TorchNode) -> bool:
        """Is a result other than the first read: the indices of a maximum, say?"""
        items = self.program.items(node) if node.gives_several else ()
        return any(number != 0 and item.users for number, item in items)

    def add(self, node: TorchNode, step: Step) -> None:
        self.known[node.name] = Ref(node.name)
        self.steps.append(step)
        if not node.gives_several:
            self.note(node, node.value)
        elif step.kind != "call":  # a rule keeps the first of several results
            self.note(node, node.value[0])

    def item(self, node: TorchNode, args: tuple[Any, ...]) -> None:
        """One of several results."""
        if not isinstance(args[0], Ref):
            self.known[node.name] = args[0][args[1]]
            return
        source = args[0].name
        if source in self.shapes:  # a rule turned the operator into its first result
            self.known[node.name] = args[0]
            return
        self.note(node, node.value)
        self.known[node.name] = Ref(node.name)
        self.steps.append(
            Step(node.name, "call", (source,), target="getitem", arguments=(args[0], args[1]))
        )

    def any_call(
        self, node: TorchNode, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Step:
        inputs = tuple(dict.fromkeys(ref.name for ref in refs_in((args, kwargs))))
        arguments = self.stored(node.name, args)
        keywords = tuple((key, self.stored(node.name, value)) for key, value in kwargs.items())
        return Step(node.name, "call", inputs, target=name, arguments=arguments, keywords=keywords)

    def stored(self, owner: str, value: Any) -> Any:
        """Tensors among arguments become named constants."""
        if isinstance(value, T):
            name = f"{owner}.constant{len(self.constants)}"
            self.constants[name] = value
            return Held(name)
        if isinstance(value, tuple | list):
            return type(value)(self.stored(owner, each) for each in value)
        return value

    def constant(self, owner: str, what: str, value: T) -> str:
        name = f"{owner}.{what}"
        self.constants[name] = value
        return name

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.shapes[ref.name]


class Held(str):
    """The name of a constant among the arguments of a call."""

    def __repr__(self) -> str:
        return f"Held({str(self)!r})"


def _is_off(name: str, args: tuple[Any, ...]) -> bool:
    return "dropout" in name and len(args) > 2 and not args[2]


def _pair(value: Any, default: Pair) -> Pair:
    if value is None or (isinstance(value, tuple | list) and not value):
        return default
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def _padded(args: list[Any], *defaults: Any) -> list[Any]:
    return args + list(defaults)[len(args) - 1 :]


def _conv(reader: _FlowReader, name: str, args: list[Any], kwargs: dict[str, Any]) -> Step | None:
    x, weight, bias, stride, padding, dilation, groups = _padded(
        args, None, None, 1, 0, 1, 1
    )  # fmt: skip
    return _conv_step(reader, name, x, weight, bias, stride, padding, dilation, groups)


def _convolution(reader: _FlowReader, name: str, args: list[Any], kwargs: Any) -> Step | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    if transposed:
        return None
    return _conv_step(reader, name, x, weight, bias, stride, padding, dilation, groups)


def _conv_step(
    reader: _FlowReader, name: str, x: Any, weight: Any, bias: Any, stride: Any, padding: Any,
    dilation: Any, groups: int,
) -> Step | None:  # fmt: skip
    if not isinstance(x, Ref) or not isinstance(weight, T) or weight.dim() != 4:
        return None
    if isinstance(padding, str) or len(reader.shape(x)) != 4 or isinstance(bias, Ref):
        return None
    window = Window(
        (weight.shape[2], weight.shape[3]),
        _pair(stride, (1, 1)), _pair(padding, (0, 0)), _pair(dilation, (1, 1)),
    )  # fmt: skip
    alone = groups > 1 and weight.shape[1] == 1 and weight.shape[0] == groups
    return Step(
        name, "depthwise" if alone else "conv", (x.name,), window=window, groups=groups,
        weight=reader.constant(name, "weight", weight),
        bias="" if bias is None else reader.constant(name, "bias", bias),
    )  # fmt: skip


def _batch_norm(reader: _FlowReader, name: str, args: list[Any], kwargs: Any) -> Step | None:
    x, weight, bias, mean, var = args[:5]
    training = args[5] is True
    eps = args[7] if len(args) > 7 else args[6]
    if training or not isinstance(x, Ref) or len(reader.shape(x)) != 4:
        return None
    if any(isinstance(each, Ref) for each in (weight, bias, mean, var)) or mean is None:
        return None
    scale = (var.double() + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.double()
    shift = -mean.double() * scale
    if bias is not None:
        shift = shift + bias.double()
    return Step(
        name, "combine", (x.name,), factors=(1.0,),
        scale=reader.constant(name, "scale", scale.float()),
        shift=reader.constant(name, "shift", shift.float()),
    )  # fmt: skip


def _relu(reader: _FlowReader, name: str, args: list[Any], kwargs: Any) -> Step | None:
    if not _is_image(reader, args[0]):
        return None
    return Step(name, "combine", (args[0].name,), factors=(1.0,), relu=True)


def _add(reader: _FlowReader, name: str, args: list[Any], kwargs: dict[str, Any]) -> Step | None:
    a, b = args[:2]
    if not (_is_image(reader, a) and _is_image(reader, b)) or reader.shape(a) != reader.shape(b):
        return None
    if reader.dtypes[a.name] != reader.dtypes[b.name]:
        return None
    return Step(name, "combine", (a.name, b.name), factors=(1.0, float(kwargs.get("alpha", 1))))


def _mul(reader: _FlowReader, name: str, args: list[Any], kwargs: Any) -> Step | None:
    a, b = args[:2]
    if isinstance(b, Ref):
        a, b = b, a
    number = _number(b)
    if not _is_image(reader, a) or number is None:
        return None
    return Step(name, "combine", (a.name,), factors=(number,))


def _div(reader: _FlowReader, name: str, args: list[Any], kwargs: Any) -> Step | None:
    number = _number(args[1])
    if not _is_image(reader, args[0]) or not number or kwargs.get("rounding_mode"):
        return None
    return Step(name, "combine", (args[0].name,), factors=(1.0 / number,))


def _number(value: Any) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, T) and value.numel() == 1 and value.is_floating_point():
        return float(value)
    return None


def _is_image(reader: _FlowReader, value: Any) -> bool:
    return (
        isinstance(value, Ref)
        and len(reader.shapes.get(value.name, ())) == 4
        and reader.dtypes[value.name].is_floating_point
    )


def _max_pool(reader: _FlowReader, name: str, args: list[Any], kwargs: Any) -> Step | None:
    x, kernel, stride, padding, dilation, ceil = _padded(args, None, None, 0, 1, False)
    if not _is_image(reader, x):
        return None
    size = _pair(kernel, (1, 1))
    window = Window(size, _pair(stride, size), _pair(padding, (0, 0)), _pair(dilation, (1, 1)))
    return Step(name, "maxpool", (x.name,), window=window, ceil=bool(ceil))


def _avg_pool(reader: _FlowReader, name: str, args: list[Any], kwargs: Any) -> Step | None:
    x, kernel, stride, padding, ceil_mode, include_pad, divisor = _padded(
        args, None, None, 0, False, True, None
    )
    if not _is_image(reader, x) or ceil_mode or divisor is not None:
        return None
    size = _pair(kernel, (1, 1))
    window = Window(size, _pair(stride, size), _pair(padding, (0, 0)))
    return Step(name, "avgpool", (x.name,), window=window, include_pad=bool(include_pad))


def _cat(reader: _FlowReader, name: str, args: list[Any], kwargs: Any) -> Step | None:
    members, dim = args[0], (args[1] if len(args) > 1 else 0)
    if not all(_is_image(reader, each) for each in members) or dim not in (1, -3):
        return None
    if len(members) == 1:
        return members[0]  # type: ignore[no-any-return]
    return Step(name, "cat", tuple(each.name for each in members))


Rule = Callable[[_FlowReader, str, list[Any], Any], Step | None]
RULES: dict[str, Rule] = {
    "aten.conv2d.default": _conv,
    "aten.convolution.default": _convolution,
    "aten.batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten.relu.default": _relu,
    "aten.relu_.default": _relu,
    "aten.add.Tensor": _add,
    "aten.add_.Tensor": _add,
    "aten.mul.Tensor": _mul,
    "aten.mul.Scalar": _mul,
    "aten.div.Tensor": _div,
    "aten.max_pool2d.default": _max_pool,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.avg_pool2d.default": _avg_pool,
    "aten.cat.default": _cat,
}
