"""Writing a graph down op by op: names, scopes and shapes are worked out on the way.

g = GraphBuilder("mlp")
x = g.input("x", (32, 784))
with g.scope("layers.0"):
    x = g.relu(g.linear(x, 512))
graph = g.finish(g.linear(x, 10, name="head"))
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from partita.errors import GraphError
from partita.graph.packed import PackedPart
from partita.graph.record import FLOATS, Attr, Call, Graph, Op, Tensor
from partita.graph.shapes import SHAPES, output_shapes

EPSILON = 1e-5  # of norms, unless they say otherwise
AttrIn = Attr | Sequence[int] | Sequence[float] | Sequence[str]


class GraphBuilder:
    """Collects tensors and ops; methods return the tensors they make."""

    def __init__(self, name: str, dtype: str = "f32") -> None:
        self.name = name
        self.dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        self._ops: list[Op] = []
        self._names: set[str] = set()
        self._scope: list[str] = []

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Everything made inside belongs to this module of the model."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    @property
    def path(self) -> str:
        """The current module scope, dotted."""
        return ".".join(self._scope)

    def input(self, name: str, shape: Sequence[int], dtype: str | None = None) -> Tensor:
        """A tensor the model is fed."""
        return self._declare(Tensor(name, tuple(shape), dtype or self.dtype, "input"))

    def parameter(
        self, name: str, shape: Sequence[int], dtype: str | None = None,
        packed: PackedPart | None = None,
    ) -> Tensor:  # fmt: skip
        """A learned tensor, named within the current scope; `packed` if it is a part of one."""
        source = ""
        if packed is not None:
            source = str(replace(packed, name=self._qualified(packed.name)))
        full = self._qualified(name)
        return self._declare(Tensor(full, tuple(shape), dtype or self.dtype, "parameter", source))

    def op(
        self,
        kind: str,
        *inputs: Tensor,
        name: str = "",
        dtype: str | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        **attrs: AttrIn,
    ) -> tuple[Tensor, ...]:
        """Any op; `shapes` of the outputs are needed for a kind we do not know."""
        full = self._unique(self._qualified(name or kind))
        fixed = tuple(sorted((key, _attr(value)) for key, value in attrs.items()))
        call = Call(kind, fixed, tuple(tensor.shape for tensor in inputs), ())
        try:
            if shapes is None or kind in SHAPES:
                out_shapes = output_shapes(call)
            else:
                out_shapes = tuple(tuple(shape) for shape in shapes)
        except GraphError as error:
            raise GraphError(error.found, fix=error.fix, field=f"op {full!r}") from None
        floats = [tensor.dtype for tensor in inputs if tensor.dtype in FLOATS]
        self._names.add(full)
        out_dtype = dtype or next(iter(floats), inputs[0].dtype if inputs else self.dtype)
        outputs = tuple(
            self._declare(Tensor(full if len(out_shapes) == 1 else f"{full}:{i}", shape, out_dtype))
            for i, shape in enumerate(out_shapes)
        )
        self._ops.append(
            Op(
                full,
                kind,
                tuple(tensor.name for tensor in inputs),
                tuple(tensor.name for tensor in outputs),
                fixed,
                self.path,
            )
        )
        return outputs

    def one(self, kind: str, *inputs: Tensor, name: str = "", **attrs: AttrIn) -> Tensor:
        """An op with a single output."""
        (output,) = self.op(kind, *inputs, name=name, **attrs)  # type: ignore[arg-type]
        return output

    def finish(self, *outputs: Tensor) -> Graph:
        """The graph, checked."""
        return Graph(
            self.name,
            tuple(self._tensors.values()),
            tuple(self._ops),
            tuple(tensor.name for tensor in outputs),
        )

    # Layers with parameters. Each opens a scope of its name, as a module in PyTorch would.

    def linear(self, x: Tensor, features: int, name: str = "linear", bias: bool = True) -> Tensor:
        """x @ weight.T + bias."""
        weights = [self._weight(name, "weight", (features, x.shape[-1]))]
        if bias:
            weights.append(self._weight(name, "bias", (features,)))
        return self.one("linear", x, *weights, name=name)

    def conv(
        self,
        x: Tensor,
        channels: int,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        transposed: bool = False,
        bias: bool = True,
        name: str = "conv",
    ) -> Tensor:
        """A convolution over one, two or three spatial dims."""
        rank = len(x.shape) - 2
        size = _each(kernel, rank)
        own = x.shape[1] // groups
        shape = (x.shape[1], channels // groups) if transposed else (channels, own)
        weights = [self._weight(name, "weight", (*shape, *size))]
        if bias:
            weights.append(self._weight(name, "bias", (channels,)))
        attrs: dict[str, AttrIn] = {
            "stride": _each(stride, rank),
            "padding": _each(padding, rank),
            "dilation": _each(dilation, rank),
            "groups": groups,
        }
        if transposed:
            attrs["transposed"] = True
        return self.one("conv", x, *weights, name=name, **attrs)

    def pool(
        self,
        x: Tensor,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        mode: str = "max",
        ceil: bool = False,
        name: str = "pool",
    ) -> Tensor:
        """Maximum or average over windows."""
        rank = len(x.shape) - 2
        return self.one(
            "pool",
            x,
            name=name,
            kernel=_each(kernel, rank),
            stride=_each(kernel if stride is None else stride, rank),
            padding=_each(padding, rank),
            mode=mode,
            ceil=ceil,
        )

    def global_pool(
        self, x: Tensor, output: int = 1, name: str = "pool", mode: str = "avg"
    ) -> Tensor:
        """Adaptive pooling to `output` positions per spatial dim."""
        return self.one("pool", x, name=name, output=(output,) * (len(x.shape) - 2), mode=mode)

    def norm(
        self, x: Tensor, kind: str = "layer_norm", name: str = "norm", *, bias: bool = True,
        groups: int = 1, affine: bool = True, training: bool = True, eps: float = EPSILON,
        shift: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """batch_norm, group_norm, layer_norm or rms_norm with its learned scale (and shift).

        `shift` is added to what is stored as the scale of an rms_norm.
        """
        width = x.shape[1] if kind in ("batch_norm", "group_norm") else x.shape[-1]
        weights = [self._weight(name, "weight", (width,))] if affine else []
        if affine and bias and kind != "rms_norm":
            weights.append(self._weight(name, "bias", (width,)))
        attrs: dict[str, AttrIn] = {}
        if kind == "group_norm":
            attrs["groups"] = groups
        if kind == "batch_norm":
            attrs["training"] = training
        if eps != EPSILON:
            attrs["eps"] = eps
        if shift:
            attrs["shift"] = shift
        return self.one(kind, x, *weights, name=name, **attrs)

    def embedding(self, ids: Tensor, vocabulary: int, size: int, name: str = "embedding") -> Tensor:
        """Rows of a learned table."""
        return self.lookup(ids, self._weight(name, "weight", (vocabulary, size)), name)

    def lookup(self, ids: Tensor, table: Tensor, name: str = "embedding") -> Tensor:
        """Rows of an existing table."""
        (tensor,) = self.op("embedding", ids, table, name=name, dtype=table.dtype)
        return tensor

    def recurrent(
        self, x: Tensor, hidden: int, kind: str = "lstm", name: str = "", *,
        bidirectional: bool = False, bias: bool = True,
    ) -> Tensor:  # fmt: skip
        """One LSTM or GRU layer over [batch, positions, features]; torch's two biases."""
        label = name or kind
        rows = (4 if kind == "lstm" else 3) * hidden * (2 if bidirectional else 1)
        weights = [
            self._weight(label, "weight_ih", (rows, x.shape[2])),
            self._weight(label, "weight_hh", (rows, hidden)),
        ]
        if bias:
            weights += [self._weight(label, b, (rows,)) for b in ("bias_ih", "bias_hh")]
        return self.one(kind, x, *weights, name=label, bidirectional=bidirectional)

    # Ops without parameters.

    def elementwise(self, fn: str, *inputs: Tensor, name: str = "", **attrs: AttrIn) -> Tensor:
        """A function applied element by element, broadcasting."""
        return self.one("elementwise", *inputs, name=name or fn, fn=fn, **attrs)

    def relu(self, x: Tensor, name: str = "relu") -> Tensor:
        """max(x, 0)."""
        return self.elementwise("relu", x, name=name)

    def add(self, *inputs: Tensor, name: str = "add") -> Tensor:
        """Sum of tensors."""
        return self.elementwise("add", *inputs, name=name)

    def mul(self, a: Tensor, b: Tensor, name: str = "mul") -> Tensor:
        """Product of two tensors."""
        return self.elementwise("mul", a, b, name=name)

    def dropout(self, x: Tensor, name: str = "dropout") -> Tensor:
        """Random zeros in training."""
        return self.elementwise("dropout", x, name=name)

    def concat(self, parts: Sequence[Tensor], axis: int = 1, name: str = "concat") -> Tensor:
        """Tensors one after the other along an axis."""
        return self.one("concat", *parts, name=name, axis=axis)

    def split(
        self, x: Tensor, sizes: Sequence[int], axis: int = -1, name: str = "split"
    ) -> tuple[Tensor, ...]:
        """Consecutive pieces along an axis."""
        return self.op("split", x, name=name, sizes=tuple(sizes), axis=axis)

    def reshape(self, x: Tensor, shape: Sequence[int], name: str = "reshape") -> Tensor:
        """The same elements in another shape; one size may be -1."""
        return self.one("reshape", x, name=name, shape=tuple(shape))

    def flatten(self, x: Tensor, name: str = "flatten") -> Tensor:
        """[batch, everything else]."""
        return self.reshape(x, (x.shape[0], -1), name)

    def transpose(self, x: Tensor, perm: Sequence[int], name: str = "transpose") -> Tensor:
        """Dims in another order."""
        return self.one("transpose", x, name=name, perm=tuple(perm))

    def softmax(self, x: Tensor, axis: int = -1, name: str = "softmax") -> Tensor:
        """exp(x) / sum(exp(x)) along an axis."""
        return self.one("softmax", x, name=name, axis=axis)

    def matmul(
        self, a: Tensor, b: Tensor, name: str = "matmul", *,
        transpose_a: bool = False, transpose_b: bool = False,
    ) -> Tensor:  # fmt: skip
        """Batched matrix product."""
        return self.one("matmul", a, b, name=name, transpose_a=transpose_a, transpose_b=transpose_b)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int = 0, *, kv_heads: int = 0,
        causal: bool = False, window: int = 0, chunk: int = 0, scale: float | None = None,
        softcap: float = 0.0, bias: Tensor | None = None, sinks: Tensor | None = None,
        fused: bool = True, name: str = "attention", remembered: bool = False,
        values_in_keys: bool = False,
    ) -> Tensor:  # fmt: skip
        """Scaled dot-product attention; `fused=False` spells it out in matmuls and a softmax.

        Takes [b, h, s, d], or [b, s, h * d] with `heads` (and `kv_heads` for grouped queries).
        `scale` is one over the square root of d unless given; `bias` is added to the scores; a sink
        is one more score per head, which takes weight and gives nothing. Keys and values may be
        `remembered` from an earlier call; values may be the first features of the keys.
        """
        groups = kv_heads or heads
        if not fused:
            masks = {"window": window, "chunk": chunk} if causal or window or chunk else None
            with self.scope(name):
                return self._spelled_attention(
                    q, k, v, heads, groups, masks, scale, softcap, bias, sinks
                )
        attrs: dict[str, AttrIn] = {"causal": causal}
        if len(q.shape) == 3:
            attrs |= {"heads": heads, "kv_heads": groups}
        given = {
            "window": window, "chunk": chunk, "softcap": softcap, "sinks": sinks is not None,
            "remembered": remembered, "values_in_keys": values_in_keys,
        }  # fmt: skip
        attrs |= {key: value for key, value in given.items() if value}
        if scale is not None:
            attrs["scale"] = scale
        more = (tensor for tensor in (bias, sinks) if tensor is not None)
        return self.one("attention", q, k, v, *more, name=name, **attrs)

    def _spelled_attention(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int,
        masks: dict[str, int] | None, scale: float | None, softcap: float, bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        flat = len(q.shape) == 3
        if flat:
            q, k, v = (
                self._heads(t, h, n)
                for t, h, n in ((q, heads, "q"), (k, groups, "k"), (v, groups, "v"))
            )
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = (self._repeat(t, repeat, n) for t, n in ((k, "k"), (v, "v")))
        scores = self.matmul(q, k, "scores", transpose_b=True)
        if scale != 1.0:
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            scores = self.elementwise("scale", scores, factor=factor)
        if softcap:
            scores = self.elementwise("softcap", scores, cap=softcap)
        if bias is not None:
            scores = self.add(scores, bias, name="biased")
        if masks is not None:
            given: dict[str, AttrIn] = {key: value for key, value in masks.items() if value}
            scores = self.one("elementwise", scores, name="mask", fn="mask", **given)
        weights = self._with_sinks(scores, sinks) if sinks is not None else self.softmax(scores)
        mixed = self.matmul(weights, v, "mix")
        if not flat:
            return mixed
        back = self.transpose(mixed, (0, 2, 1, 3), "merge")
        return self.reshape(back, (back.shape[0], back.shape[1], -1), "merged")

    def _with_sinks(self, scores: Tensor, sinks: Tensor) -> Tensor:
        b, heads, queries, keys = scores.shape
        column = self.reshape(sinks, (1, heads, 1, 1), "sink_column")
        column = self.one("expand", column, name="sink_scores", shape=(b, heads, queries, 1))
        weights = self.softmax(self.concat([scores, column], -1, "with_sinks"))
        return self.one("slice", weights, name="weights", axis=-1, start=0, stop=keys)

    def _heads(self, x: Tensor, heads: int, name: str) -> Tensor:
        split = self.reshape(x, (x.shape[0], x.shape[1], heads, -1), f"{name}_heads")
        return self.transpose(split, (0, 2, 1, 3), f"{name}_first")

    def _repeat(self, x: Tensor, times: int, name: str) -> Tensor:
        b, h, s, d = x.shape
        wide = self.reshape(x, (b, h, 1, s, d), f"{name}_group")
        full = self.one("expand", wide, name=f"{name}_repeat", shape=(b, h, times, s, d))
        return self.reshape(full, (b, h * times, s, d), f"{name}_all")

    def cross_entropy(self, logits: Tensor, targets: Tensor, name: str = "loss") -> Tensor:
        """Mean negative log-likelihood of the target classes."""
        return self.one("cross_entropy", logits, targets, name=name)

    def _weight(self, layer: str, name: str, shape: Sequence[int]) -> Tensor:
        return self.parameter(f"{layer}.{name}", shape)

    def _qualified(self, name: str) -> str:
        return ".".join((*self._scope, name))

    def _unique(self, name: str) -> str:
        """The name, or with a number after it where it is taken."""
        candidate, number = name, 1
        while candidate in self._names or candidate in self._tensors:
            candidate, number = f"{name}_{number}", number + 1
        return candidate

    def _declare(self, tensor: Tensor) -> Tensor:
        if tensor.name in self._tensors:
            raise GraphError(
                "stands twice",
                fix="give the layer another name or a scope",
                field=f"tensor {tensor.name!r}",
            )
        self._tensors[tensor.name] = tensor
        return tensor


def _each(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def _attr(value: AttrIn) -> Attr:
    return value if isinstance(value, bool | int | float | str) else tuple(value)  # type: ignore[return-value]
