"""A graph of the zoo as the PyTorch module that a user would have written: straight-line code.

The reference module runs a graph by looking at its ops, which costs the host more than the ops do.
Here the same layers and parameters are called by generated source, one line per op, every size a
literal: in eager mode the host pays what it pays for hand-written code, and torch.compile sees
nothing but tensors and layers. What a model computes once (masks, positions, rotary angles) is a
buffer. A value is deleted after its last use, as reassigned names are in a user's code.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from partita.capture.eager import CLIP, DROPOUT, EPSILON, RULES
from partita.capture.reference_module import DTYPES, reference_module
from partita.graph.record import Call, Graph, Op
from partita.graph.shapes import per_space

UNARY = {
    "relu": "F.relu({0})",
    "gelu": "F.gelu({0})",
    "silu": "F.silu({0})",
    "tanh": "torch.tanh({0})",
    "sigmoid": "torch.sigmoid({0})",
    "clip": f"torch.clamp({{0}}, 0.0, {CLIP})",
    "dropout": f"F.dropout({{0}}, {DROPOUT}, self.training)",
}
BINARY = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "max": "torch.maximum({0}, {1})",
    "swiglu": "F.silu({0}) * {1}",
    "geglu": "F.gelu({0}) * {1}",
}


def straight_module(graph: Graph, device: str = "cpu", seed: int = 0) -> nn.Module:
    """The module of a forward graph; its arguments are `graph.inputs`, in order."""
    return _Writer(graph, reference_module(graph, seed, device), device).finished()


class Straight(nn.Module):
    """Layers, parameters and buffers by short names; `forward` is made for each model."""

    source: str


class _Writer:
    """Writes the lines of one model."""

    def __init__(self, graph: Graph, reference: nn.Module, device: str) -> None:
        self.graph = graph
        self.device = device
        self.module = Straight()
        self.reference: Any = reference
        self.layers = {
            name: layer for name, layer in reference.named_modules() if type(layer) is not nn.Module
        }
        self.parameters = dict(reference.named_parameters())
        self.names: dict[str, str] = {}  # tensor -> expression
        self.held: dict[
            tuple[str, ...], str
        ] = {}  # what a buffer or a line was made of -> its name
        self.lines: list[str] = []
        self.rules: dict[str, Any] = {"torch": torch, "F": F}

    def finished(self) -> nn.Module:
        """All lines, made into a `forward`."""
        arguments = [f"a{i}" for i in range(len(self.graph.inputs))]
        self.names |= {t.name: a for t, a in zip(self.graph.inputs, arguments, strict=True)}
        last = {name: i for i, op in enumerate(self.graph.ops) for name in op.inputs}
        for index, op in enumerate(self.graph.ops):
            self._write(index, op)
            done = [
                self.names[name]
                for name in dict.fromkeys((*op.inputs, *op.outputs))
                if self.names.get(name, "").startswith("v")
                and last.get(name, -1) <= index
                and name not in self.graph.outputs
            ]
            if done:
                self.lines.append(f"del {', '.join(done)}")
        outputs = ", ".join(self.names[name] for name in self.graph.outputs)
        body = "\n    ".join([*self.lines, f"return {outputs}"])
        source = f"def forward(self, {', '.join(arguments)}):\n    {body}\n"
        exec(compile(source, f"<{self.graph.name}>", "exec"), self.rules)
        kind = type("Straight", (Straight,), {"forward": self.rules["forward"], "source": source})
        self.module.__class__ = kind
        return self.module

    def _write(self, index: int, op: Op) -> None:
        call = self.graph.call(op)
        outputs = [f"v{index}" if len(op.outputs) == 1 else f"v{index}_{i}" for i in
                   range(len(op.outputs))]  # fmt: skip
        if op.kind == "constant":
            value = self.reference.constant(op.outputs[0]).to(self.device)
            self.names[op.outputs[0]] = self._buffer(("constant", op.outputs[0]), value)
            return
        layer = self.layers.get(op.name)
        if layer is not None:
            expression = f"self.{self._layer(index, layer)}({self._value(op.inputs[0])})"
        elif op.kind in ("lstm", "gru") and self._alone(op):
            expression = f"self.{self._recurrent(index, op)}({self._value(op.inputs[0])})[0]"
        else:
            inputs = [self._value(name) for name in op.inputs]
            writer = WRITERS.get(op.kind)
            text = writer(self, call, inputs) if writer else None
            expression = text if text is not None else self._rule(index, call, inputs)
        self.names |= dict(zip(op.outputs, outputs, strict=True))
        self.lines.append(f"{', '.join(outputs)} = {expression}")

    def _value(self, name: str) -> str:
        """How a tensor is called; a parameter is taken over when it is first used."""
        if name not in self.names:
            short = f"p{len(self.names)}"
            parameter = self.parameters.get(name)
            if parameter is None:  # a part of a packed one
                parameter = self.reference.parameter_of(self.graph.tensor(name))
            self.module.register_parameter(short, parameter)
            self.names[name] = f"self.{short}"
        return self.names[name]

    def _layer(self, index: int, layer: nn.Module) -> str:
        self.module.add_module(f"layer{index}", layer)
        return f"layer{index}"

    def _alone(self, op: Op) -> bool:
        """Does nobody else read the weights of a recurrent layer?"""
        readers = [o.name for o in self.graph.ops for name in op.inputs[1:] if name in o.inputs]
        return set(readers) == {op.name}

    def _recurrent(self, index: int, op: Op) -> str:
        """PyTorch's own layer, whose weights cuDNN wants in one piece."""
        call = self.graph.call(op)
        kind = nn.LSTM if op.kind == "lstm" else nn.GRU
        layer = kind(
            call.inputs[0][2], call.inputs[2][1], bias=len(op.inputs) > 3, batch_first=True,
            bidirectional=call.flag("bidirectional"), device=self.device,
            dtype=DTYPES[self.graph.tensor(op.inputs[1]).dtype],
        )  # fmt: skip
        return self._layer(index, layer)

    def _rule(self, index: int, call: Call, inputs: list[str]) -> str:
        """What has no line of its own is computed as in the reference module."""
        self.rules[f"rule{index}"] = RULES[call.kind]
        self.rules[f"call{index}"] = call
        return f"rule{index}(self, call{index}, {', '.join(inputs)})"

    def _buffer(self, key: tuple[str, ...], value: torch.Tensor) -> str:
        """A value that is computed once; equal ones are one."""
        if key not in self.held:
            short = f"b{len(self.held)}"
            self.module.register_buffer(short, value)
            self.held[key] = f"self.{short}"
        return self.held[key]

    # One writer per kind: the expression of an op.

    def linear(self, call: Call, inputs: list[str]) -> str:
        """A linear layer whose weight is shared."""
        return f"F.linear({', '.join(inputs)})"

    def matmul(self, call: Call, inputs: list[str]) -> str:
        """A product of two activations."""
        a, b = inputs
        a = f"{a}.mT" if call.flag("transpose_a") else a
        return f"torch.matmul({a}, {b}{'.mT' if call.flag('transpose_b') else ''})"

    def conv(self, call: Call, inputs: list[str]) -> str:
        """A convolution that no layer was made for: a transposed one."""
        rank = len(call.inputs[0]) - 2
        settings = {
            "stride": per_space(call, "stride", rank, 1),
            "padding": per_space(call, "padding", rank, 0, least=0),
            "dilation": per_space(call, "dilation", rank, 1),
            "groups": call.whole("groups", 1),
        }
        name = "conv"
        if call.flag("transposed"):
            name = "conv_transpose"
            settings["output_padding"] = per_space(call, "output_padding", rank, 0, least=0)
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        return f"F.{name}{rank}d({', '.join(inputs)}, {given})"

    def pool(self, call: Call, inputs: list[str]) -> str:
        """Largest or mean of windows."""
        rank, mode = len(call.inputs[0]) - 2, call.text("mode")
        if call.attr("output") is not None:
            size = per_space(call, "output", rank, 1)
            return f"F.adaptive_{mode}_pool{rank}d({inputs[0]}, {size!r})"
        return (
            f"F.{mode}_pool{rank}d({inputs[0]}, {per_space(call, 'kernel', rank, 1)!r}, "
            f"stride={call.ints('stride') or None!r}, "
            f"padding={per_space(call, 'padding', rank, 0, least=0)!r}, "
            f"ceil_mode={call.flag('ceil')!r})"
        )

    def rms_norm(self, call: Call, inputs: list[str]) -> str | None:
        """Root mean square of the last dims."""
        if call.number("shift", 0):
            return None
        shape = call.inputs[0][len(call.inputs[0]) - call.whole("dims", 1) :]
        weight = inputs[1] if len(inputs) > 1 else None
        return f"F.rms_norm({inputs[0]}, {tuple(shape)!r}, {weight}, {call.number('eps', EPSILON)})"

    def attention(self, call: Call, inputs: list[str]) -> str | None:
        """Fused attention; causal masks that carry a bias are added up once for all layers."""
        if call.flag("sinks") or call.number("softcap", 0) or call.whole("chunk", 0):
            return None
        q, k, v = inputs[:3]
        flat = len(call.inputs[0]) == 3
        queries, keys = call.inputs[0][-2], call.inputs[1][-2]
        heads = call.whole("heads", 1) if flat else call.inputs[0][1]
        groups = call.whole("kv_heads", heads) if flat else call.inputs[1][1]
        if flat:
            q = self._heads(q, call.inputs[0], heads)
            k, v = (self._heads(x, call.inputs[1], groups) for x in (k, v))
        causal, window = call.flag("causal"), call.whole("window", 0)
        mask = inputs[3] if len(inputs) > 3 else None
        plain = mask is None and not window and queries == keys
        if causal and not plain:
            mask = self._masked(mask, queries, keys, window)
        extra = f"attn_mask={mask}, " * (mask is not None)
        extra += f"is_causal={causal and plain}"
        extra += ", enable_gqa=True" * (heads != groups)
        if call.attr("scale") is not None:
            extra += f", scale={call.number('scale')!r}"
        text = f"F.scaled_dot_product_attention({q}, {k}, {v}, {extra})"
        return f"{text}.transpose(1, 2).flatten(2)" if flat else text

    def _heads(self, x: str, shape: tuple[int, ...], heads: int) -> str:
        return f"{x}.view({shape[0]}, {shape[1]}, {heads}, {shape[2] // heads}).transpose(1, 2)"

    def _masked(self, bias: str | None, queries: int, keys: int, window: int) -> str:
        dtype = DTYPES[self.graph.parameters[0].dtype]
        query = torch.arange(keys - queries, keys, device=self.device)[:, None]
        key = torch.arange(keys, device=self.device)[None, :]
        allowed = (key <= query) & (key > query - window if window else key >= 0)
        zero = torch.zeros((), dtype=dtype, device=self.device)
        seen = self._buffer(
            ("seen", str(queries), str(keys), str(window)), zero.where(allowed, -math.inf)
        )
        if bias is None:
            return seen
        made = ("sum", bias, seen)
        if made not in self.held:
            self.held[made] = f"m{len(self.held)}"
            self.lines.append(f"{self.held[made]} = {bias} + {seen}")
        return self.held[made]

    def elementwise(self, call: Call, inputs: list[str]) -> str | None:
        """Functions of single elements."""
        fn = call.text("fn")
        if fn == "rope":
            return self._rope(call, inputs[0])
        if fn == "scale":
            return f"{inputs[0]} * {call.number('factor', call.inputs[0][-1] ** -0.5)!r}"
        if len(inputs) == 1 and fn in UNARY:
            return UNARY[fn].format(*inputs)
        if len(inputs) > 1 and fn in BINARY:
            text = inputs[0]
            for number, other in enumerate(inputs[1:]):
                text = BINARY[fn].format(f"({text})" if number else text, other)
            return text
        return None

    def _rope(self, call: Call, x: str) -> str | None:
        """Rotary positions; the angles are worked out once."""
        usual = ("frequencies", "factor", "size", "interleaved")
        if any(call.attr(name) is not None for name in usual):
            return None
        theta = call.number("theta", 10000.0)
        heads, length = call.whole("heads", 1), call.inputs[0][-2]
        size = call.inputs[0][-1] // heads
        half = torch.arange(size // 2, dtype=torch.float32, device=self.device)
        place = torch.arange(length, dtype=torch.float32, device=self.device)
        angle = (place[:, None] * theta ** (-2 * half / size))[:, None]
        dtype = DTYPES[self.graph.parameters[0].dtype]
        key = (str(size), str(length), str(theta))
        cos = self._buffer(("cos", *key), angle.cos().to(dtype))
        sin = self._buffer(("sin", *key), angle.sin().to(dtype))
        self.rules["rotated"] = rotated
        return f"rotated({x}, {heads}, {size}, {cos}, {sin})"


def rotated(
    x: torch.Tensor, heads: int, size: int, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Pairs of values turned by the angles of their positions."""
    a, b = x.view(*x.shape[:-1], heads, size).chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def _slice(writer: _Writer, call: Call, inputs: list[str]) -> str:
    axis = call.whole("axis") % len(call.inputs[0])
    start, stop = call.whole("start", 0), call.whole("stop", call.inputs[0][axis])
    step = call.whole("step", 1)
    return f"{inputs[0]}[{':, ' * axis}{start}:{stop}:{step}]"


def _pad(writer: _Writer, call: Call, inputs: list[str]) -> str:
    pairs = zip(reversed(call.ints("before")), reversed(call.ints("after")), strict=True)
    return f"F.pad({inputs[0]}, {[side for pair in pairs for side in pair]!r})"


WRITERS: dict[str, Callable[[_Writer, Call, list[str]], str | None]] = {
    "linear": _Writer.linear,
    "matmul": _Writer.matmul,
    "conv": _Writer.conv,
    "pool": _Writer.pool,
    "rms_norm": _Writer.rms_norm,
    "attention": _Writer.attention,
    "elementwise": _Writer.elementwise,
    "embedding": lambda w, call, i: f"F.embedding({i[0]}, {i[1]})",
    "softmax": lambda w, call, i: f"torch.softmax({i[0]}, {call.whole('axis', -1)})",
    "concat": lambda w, call, i: f"torch.cat(({', '.join(i)},), {call.whole('axis')})",
    "split": lambda w, call, i: (
        f"torch.split({i[0]}, {list(call.ints('sizes'))!r}, {call.whole('axis')})"
    ),
    "slice": _slice,
    "pad": _pad,
    "reshape": lambda w, call, i: f"{i[0]}.reshape({call.ints('shape')!r})",
    "transpose": lambda w, call, i: f"{i[0]}.permute({call.ints('perm')!r})",
    "expand": lambda w, call, i: f"{i[0]}.expand({call.ints('shape')!r})",
    "lstm_cell": lambda w, call, i: (
        f"torch.lstm_cell({i[0]}, ({i[1]}, {i[2]}), {', '.join(i[3:])})"
    ),
    "gru_cell": lambda w, call, i: f"torch.gru_cell({', '.join(i)})",
    "cross_entropy": lambda w, call, i: (
        f"F.cross_entropy({i[0]}.flatten(0, -2), {i[1]}.flatten())"
        if len(call.inputs[0]) > 2
        else f"F.cross_entropy({i[0]}, {i[1]})"
    ),
    "mse_loss": lambda w, call, i: f"F.mse_loss({i[0]}, {i[1]})",
}
