"""A network of Exprimo's as a Graph: channels first, a layer's main op has the layer's name.

An `Input` is an op too (it hands its tensor on), so that data has a place; batch norms and
activations that a layer names are ops of their own behind it: `conv1.norm`, `conv1.relu`.
"""

from collections.abc import Callable

from partita.capture.exprimo_net import ExprimoNetwork, NetLayer, Shape
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor


def network_graph(network: ExprimoNetwork, dtype: str = "f32") -> Graph:
    """The network as a graph, channels first; a layer's main op has the layer's name."""
    g = GraphBuilder(network.name, dtype)
    made: dict[str, Tensor] = {}
    for layer in network.layers:
        inputs = [made[parent] for parent in layer.parents]
        x = _MAKERS.get(layer.type, _identity)(g, layer, inputs)
        for extra in layer.extras:
            name = f"{layer.name}.{extra}"
            if extra == "norm":
                x = g.norm(x, "batch_norm" if len(x.shape) > 2 else "layer_norm", name)
            else:
                x = g.elementwise(extra, x, name=name)
        made[layer.name] = x
    read = {parent for layer in network.layers for parent in layer.parents}
    ends = [made[layer.name] for layer in network.layers if layer.name not in read]
    return g.finish(*ends[::-1])


def layer_ops(network: ExprimoNetwork, graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The forward ops of every layer, in the network's order."""
    layer_ops: dict[str, list[str]] = {layer.name: [] for layer in network.layers}
    owner = ""
    for op in graph.ops:
        if op.phase == "forward":
            main = op.name.removesuffix(".pad").removesuffix(".flatten")
            owner = main if main in layer_ops else owner
            layer_ops[owner].append(op.name)
    return tuple(map(tuple, layer_ops.values()))


def _first(shape: Shape) -> Shape:
    """Channels first."""
    return (shape[0], shape[-1], *shape[1:-1]) if len(shape) > 2 else shape


def _make_input(g: GraphBuilder, layer: NetLayer, inputs: list[Tensor]) -> Tensor:
    if inputs:  # Keras' flatten is written as an input with a parent
        return g.reshape(inputs[0], _first(layer.shape), name=layer.name)
    given = g.input(f"{layer.name}.batch", _first(layer.shape))
    return g.elementwise("identity", given, name=layer.name)


def _make_conv(g: GraphBuilder, layer: NetLayer, inputs: list[Tensor]) -> Tensor:
    x, padding = _padded(g, layer, inputs[0])
    return g.conv(
        x, layer.shape[3], layer.kernel, stride=layer.stride, padding=padding, name=layer.name
    )


def _make_deconv(g: GraphBuilder, layer: NetLayer, inputs: list[Tensor]) -> Tensor:
    x = inputs[0]
    weights = [
        g.parameter(f"{layer.name}.weight", (x.shape[1], layer.shape[3], *layer.kernel)),
        g.parameter(f"{layer.name}.bias", (layer.shape[3],)),
    ]
    pads = tuple(max(0, *pair) for pair in layer.padding)
    more = tuple(
        out - ((size - 1) * step - 2 * pad + window)
        for out, size, step, pad, window in zip(
            layer.shape[1:3], x.shape[2:], layer.stride, pads, layer.kernel, strict=True
        )
    )
    return g.one(
        "conv", x, *weights, name=layer.name, stride=layer.stride, padding=pads, groups=1,
        dilation=(1, 1), transposed=True, output_padding=more,
    )  # fmt: skip


def _make_pool(g: GraphBuilder, layer: NetLayer, inputs: list[Tensor]) -> Tensor:
    x, padding = _padded(g, layer, inputs[0])
    return g.pool(
        x, layer.kernel, stride=layer.stride, padding=padding, name=layer.name,
        mode="avg" if layer.type == "AvgPool" else "max",
    )  # fmt: skip


def _padded(g: GraphBuilder, layer: NetLayer, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The input and the padding to give an op; what is not even on both sides is an op itself."""
    before = tuple(max(0, pair[0]) for pair in layer.padding)
    after = tuple(max(0, pair[1]) for pair in layer.padding)
    counts = tuple(
        (size + 2 * a - window) // step + 1
        for size, a, window, step in zip(
            x.shape[2:], after, layer.kernel, layer.stride, strict=True
        )
    )
    if counts == layer.shape[1:3]:  # a wider margin gives no window more
        return x, (after[0], after[1])
    padded = g.one("pad", x, name=f"{layer.name}.pad", before=(0, 0, *before), after=(0, 0, *after))
    return padded, (0, 0)


def _make_dense(g: GraphBuilder, layer: NetLayer, inputs: list[Tensor]) -> Tensor:
    x = inputs[0]
    flat = g.flatten(x, name=f"{layer.name}.flatten") if len(x.shape) > 2 else x
    return g.linear(flat, layer.shape[1], name=layer.name)


def _make_softmax(g: GraphBuilder, layer: NetLayer, inputs: list[Tensor]) -> Tensor:
    x = inputs[0]
    flat = g.flatten(x, name=f"{layer.name}.flatten") if len(x.shape) > 2 else x
    return g.softmax(flat, name=layer.name)


def _make_concat(g: GraphBuilder, layer: NetLayer, inputs: list[Tensor]) -> Tensor:
    axis = layer.axis
    if len(layer.shape) > 2:
        axis = 1 if axis == len(layer.shape) - 1 else axis + 1
    return g.concat(inputs, axis=axis, name=layer.name)


def _identity(g: GraphBuilder, layer: NetLayer, inputs: list[Tensor]) -> Tensor:
    return g.elementwise("identity", inputs[0], name=layer.name)


_MAKERS: dict[str, Callable[[GraphBuilder, NetLayer, list[Tensor]], Tensor]] = {
    "Input": _make_input,
    "Convolution": _make_conv,
    "Deconvolution": _make_deconv,
    "Pooling": _make_pool,
    "AvgPool": _make_pool,
    "UpSampling2D": lambda g, layer, inputs: g.one(
        "resize", inputs[0], name=layer.name, output=layer.shape[1:3]
    ),
    "Dropout": lambda g, layer, inputs: g.dropout(inputs[0], name=layer.name),
    "Concatenate": _make_concat,
    "Reshape": lambda g, layer, inputs: g.reshape(inputs[0], _first(layer.shape), name=layer.name),
    "Elementwise": lambda g, layer, inputs: g.add(*inputs, name=layer.name),
    "Softmax": _make_softmax,
    "Sigmoid": lambda g, layer, inputs: g.elementwise("sigmoid", inputs[0], name=layer.name),
    "InnerProduct": _make_dense,
}
