"""The five graphs that come with PaSE, and DenseNet, in PaSE's own ops.

V. Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021. They are not
the zoo's models of the same names: sizes differ (the ResNet reads images of 227 and ends in 8 x 8,
AlexNet has 1024 classes), activations are no ops of their own but work of the op before, and there
are no auxiliary heads, dropouts or biases.
"""

import re
from collections.abc import Callable

from partita.errors import ModelError
from partita.suggest import suggest
from partita.zoo.pase_ops import PaseBuilder, PaseGraph

CNN_CUTOFF = 4  # in PaSE's CNNs a device keeps at least 4 of every dim: batch 128 splits 32 ways
SEQUENCE_CUTOFF = 1
DENSENET = "densenet-6-12-24-16-dense"


def pase_graph(name: str, batch: int = 128) -> PaseGraph:
    """The graph of that name: one of `GRAPHS`, or like `densenet-6-12-24-16-dense` or `-chain`."""
    if batch < 1:
        raise ModelError(f"is {batch}", fix="give at least 1", field="batch")
    if name in GRAPHS:
        return GRAPHS[name](batch)
    blocks = re.fullmatch(r"densenet((?:-[1-9][0-9]?){4})-(dense|chain)", name)
    if blocks:
        sizes = tuple(int(size) for size in blocks[1][1:].split("-"))
        return densenet(batch, sizes, dense=blocks[2] == "dense")
    raise ModelError(f"PaSE has no graph {name!r}", fix=suggest(name, [*GRAPHS, DENSENET]))


def alexnet(batch: int) -> PaseGraph:
    """AlexNet in one column, on images of 227, with 1024 classes."""
    g = PaseBuilder()
    x = g.conv("conv1", (batch, 3, 227, 227), 96, 11, stride=4, pointwise=1)
    x = g.pool("pool1", x, 3, 2)
    x = g.conv("conv2", x, 256, 5, padding=2, pointwise=1)
    x = g.pool("pool2", x, 3, 2)
    x = g.conv("conv3", x, 384, 3, padding=1, pointwise=1)
    x = g.conv("conv4", x, 384, 3, padding=1, pointwise=1)
    x = g.conv("conv5", x, 256, 3, padding=1, pointwise=1)
    x = g.pool("pool5", x, 3, 2)
    x = g.reshape("flatten", x, "bchw", (batch, 256 * 6 * 6))
    x = g.fc("fc6", x, 4096, "bk", pointwise=1)
    x = g.fc("fc7", x, 4096, "bk", pointwise=1)
    x = g.fc("fc8", x, 1024, "bk")
    g.loss("loss", x, "bn")
    return g.finish("alexnet", CNN_CUTOFF)


def resnet101(batch: int) -> PaseGraph:
    """ResNet-101 on images of 227."""
    g = PaseBuilder()
    x = _conv_norm(g, "conv1", (batch, 3, 227, 227), 64, 7, stride=2, padding=3)
    x = g.pool("pool1", x, 3, 2, 1)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 23), (512, 3)), start=2):
        for block in range(blocks):
            x = _bottleneck(g, f"res{stage}.{block}", x, width, 2 if stage > 2 and not block else 1)
    _classify(g, x)
    return g.finish("resnet101", CNN_CUTOFF)


def _bottleneck(g: PaseBuilder, name: str, x: int, width: int, stride: int) -> int:
    y = _conv_norm(g, f"{name}.conv1", x, width, 1)
    y = _conv_norm(g, f"{name}.conv2", y, width, 3, stride, padding=1)
    y = _conv_norm(g, f"{name}.conv3", y, 4 * width, 1)
    if g.shape(x) != g.shape(y):
        x = _conv_norm(g, f"{name}.shortcut", x, 4 * width, 1, stride)
    return g.elementwise(f"{name}.add", (y, x), "bchw", pointwise=1)


def inception3(batch: int) -> PaseGraph:
    """Inception v3 on images of 299, without the auxiliary classifier."""
    g = PaseBuilder()
    x = _conv_norm(g, "stem1", (batch, 3, 299, 299), 32, 3, stride=2)
    x = _conv_norm(g, "stem2", x, 32, 3)
    x = _conv_norm(g, "stem3", x, 64, 3, padding=1)
    x = g.pool("pool1", x, 3, 2)
    x = _conv_norm(g, "stem4", x, 80, 1)
    x = _conv_norm(g, "stem5", x, 192, 3)
    x = g.pool("pool2", x, 3, 2)
    for index, pooled in enumerate((32, 64, 64)):
        x = _inception_a(g, f"a{index}", x, pooled)
    x = _inception_b(g, "b0", x)
    for index, width in enumerate((128, 160, 160, 192)):
        x = _inception_c(g, f"c{index}", x, width)
    x = _inception_d(g, "d0", x)
    for index in range(2):
        x = _inception_e(g, f"e{index}", x)
    _classify(g, x)
    return g.finish("inception3", CNN_CUTOFF)


def _inception_a(g: PaseBuilder, name: str, x: int, pooled: int) -> int:
    one = _conv_norm(g, f"{name}.1x1", x, 64, 1)
    five = _conv_norm(g, f"{name}.5x5.1", x, 48, 1)
    five = _conv_norm(g, f"{name}.5x5.2", five, 64, 5, padding=2)
    three = _conv_norm(g, f"{name}.3x3.1", x, 64, 1)
    three = _conv_norm(g, f"{name}.3x3.2", three, 96, 3, padding=1)
    three = _conv_norm(g, f"{name}.3x3.3", three, 96, 3, padding=1)
    pool = _pool_conv(g, name, x, pooled)
    return g.concat(f"{name}.concat", (one, five, three, pool))


def _inception_b(g: PaseBuilder, name: str, x: int) -> int:
    one = _conv_norm(g, f"{name}.3x3", x, 384, 3, stride=2)
    two = _conv_norm(g, f"{name}.3x3x2.1", x, 64, 1)
    two = _conv_norm(g, f"{name}.3x3x2.2", two, 96, 3, padding=1)
    two = _conv_norm(g, f"{name}.3x3x2.3", two, 96, 3, stride=2)
    return g.concat(f"{name}.concat", (one, two, g.pool(f"{name}.pool", x, 3, 2)))


def _inception_c(g: PaseBuilder, name: str, x: int, width: int) -> int:
    one = _conv_norm(g, f"{name}.1x1", x, 192, 1)
    seven = _conv_norm(g, f"{name}.7x7.1", x, width, 1)
    seven = _row(g, f"{name}.7x7.2", seven, width, 7)
    seven = _column(g, f"{name}.7x7.3", seven, 192, 7)
    twice = _conv_norm(g, f"{name}.7x7x2.1", x, width, 1)
    twice = _column(g, f"{name}.7x7x2.2", twice, width, 7)
    twice = _row(g, f"{name}.7x7x2.3", twice, width, 7)
    twice = _column(g, f"{name}.7x7x2.4", twice, width, 7)
    twice = _row(g, f"{name}.7x7x2.5", twice, 192, 7)
    pool = _pool_conv(g, name, x, 192)
    return g.concat(f"{name}.concat", (one, seven, twice, pool))


def _inception_d(g: PaseBuilder, name: str, x: int) -> int:
    three = _conv_norm(g, f"{name}.3x3.1", x, 192, 1)
    three = _conv_norm(g, f"{name}.3x3.2", three, 320, 3, stride=2)
    seven = _conv_norm(g, f"{name}.7x7.1", x, 192, 1)
    seven = _row(g, f"{name}.7x7.2", seven, 192, 7)
    seven = _column(g, f"{name}.7x7.3", seven, 192, 7)
    seven = _conv_norm(g, f"{name}.7x7.4", seven, 192, 3, stride=2)
    return g.concat(f"{name}.concat", (three, seven, g.pool(f"{name}.pool", x, 3, 2)))


def _inception_e(g: PaseBuilder, name: str, x: int) -> int:
    one = _conv_norm(g, f"{name}.1x1", x, 320, 1)
    three = _conv_norm(g, f"{name}.3x3.1", x, 384, 1)
    three = _fork(g, f"{name}.3x3", three)
    twice = _conv_norm(g, f"{name}.3x3x2.1", x, 448, 1)
    twice = _conv_norm(g, f"{name}.3x3x2.2", twice, 384, 3, padding=1)
    twice = _fork(g, f"{name}.3x3x2", twice)
    pool = _pool_conv(g, name, x, 192)
    return g.concat(f"{name}.concat", (one, three, twice, pool))


def _fork(g: PaseBuilder, name: str, x: int) -> int:
    row = _row(g, f"{name}.row", x, 384, 3)
    column = _column(g, f"{name}.column", x, 384, 3)
    return g.concat(f"{name}.concat", (row, column))


def _row(g: PaseBuilder, name: str, x: int, channels: int, kernel: int) -> int:
    return _conv_norm(g, name, x, channels, (1, kernel), padding=(0, kernel // 2))


def _column(g: PaseBuilder, name: str, x: int, channels: int, kernel: int) -> int:
    return _conv_norm(g, name, x, channels, (kernel, 1), padding=(kernel // 2, 0))


def _pool_conv(g: PaseBuilder, name: str, x: int, channels: int) -> int:
    pool = g.pool(f"{name}.pool", x, 3, 1, 1)
    return _conv_norm(g, f"{name}.pool.1x1", pool, channels, 1)


def densenet(batch: int, blocks: tuple[int, ...], dense: bool, growth: int = 32) -> PaseGraph:
    """DenseNet (bottlenecks, halving transitions) on images of 224.

    `dense`: every layer reads one concatenation of all features so far, as the network is usually
    written; otherwise each concatenation adds to the one before, a chain of the same features.
    """
    g = PaseBuilder()
    x = _conv_norm(g, "conv0", (batch, 3, 224, 224), 64, 7, stride=2, padding=3)
    x = g.pool("pool0", x, 3, 2, 1)
    for block, layers in enumerate(blocks, start=1):
        features = [x]
        for layer in range(1, layers + 1):
            name = f"block{block}.{layer}"
            y = _norm_conv(g, f"{name}.1", x, 4 * growth, 1)
            y = _norm_conv(g, f"{name}.2", y, growth, 3, padding=1)
            features = [*features, y] if dense else [x, y]
            x = g.concat(f"{name}.concat", tuple(features))
        if block < len(blocks):
            x = _norm_conv(g, f"transition{block}", x, g.shape(x)[1] // 2, 1)
            x = g.pool(f"transition{block}.pool", x, 2, 2)
    _classify(g, g.batchnorm("norm5", x))
    form = "dense" if dense else "chain"
    return g.finish(f"densenet-{'-'.join(map(str, blocks))}-{form}", CNN_CUTOFF)


def rnnlm(batch: int) -> PaseGraph:
    """A language model of one two-layer LSTM: 256 tokens, 2048 units, 100,000 words."""
    g = PaseBuilder()
    x = g.embedding("embedding", (batch, 256), 100_000, 2048)
    x = g.lstm("lstm", x, 2)
    x = g.fc("projection", x, 100_000, "bsk")
    g.loss("loss", x, "bsn")
    return g.finish("rnnlm", SEQUENCE_CUTOFF)


TRANSFORMER = {"d": 512, "f": 2048, "h": 8, "e": 64, "l": 256, "m": 256, "v": 50_000, "q": 3}


def transformer(batch: int) -> PaseGraph:
    """The base Transformer: 6 + 6 layers of 512, 256 tokens on either side, 50,000 words."""
    g = PaseBuilder()
    sizes = TRANSFORMER | {"b": batch}
    x = _embed(g, "encoder", batch)
    for layer in range(6):
        x = _attention(g, f"encoder.{layer}.self", x, x, sizes)
        x = _feed_forward(g, f"encoder.{layer}.ffn", x, sizes)
    memory = x
    x = _embed(g, "decoder", batch)
    for layer in range(6):
        x = _attention(g, f"decoder.{layer}.self", x, x, sizes)
        x = _attention(g, f"decoder.{layer}.cross", x, memory, sizes)
        x = _feed_forward(g, f"decoder.{layer}.ffn", x, sizes)
    x = g.einsum("logits", "bld,dv->blv", (x,), sizes)
    g.loss("loss", x, "blv")
    return g.finish("transformer", SEQUENCE_CUTOFF)


def _embed(g: PaseBuilder, name: str, batch: int) -> int:
    x = g.embedding(f"{name}.embedding", (batch, TRANSFORMER["l"]), TRANSFORMER["v"], 512)
    return g.elementwise(f"{name}.position", (x,), "bld")


def _attention(g: PaseBuilder, name: str, x: int, memory: int, sizes: dict[str, int]) -> int:
    """Queries from `x`, keys and values from `memory`, one product for all three."""
    if memory == x:
        qkv = g.einsum(f"{name}.qkv", "bld,qdhe->qbhle", (x,), sizes)
    else:  # three inputs, so the three products are a batch
        stacked = g.stack(f"{name}.stack", (x, memory, memory), "bld")
        qkv = g.einsum(f"{name}.qkv", "qbld,qdhe->qbhle", (stacked,), sizes)
    parts = g.unstack(f"{name}.unstack", qkv, "bhle")
    scores = g.einsum(f"{name}.scores", "bhle,bhme->bhlm", (parts, parts), sizes)
    weights = g.softmax(f"{name}.softmax", scores, "bhlm", "m")
    context = g.einsum(f"{name}.context", "bhlm,bhme->bhle", (weights, parts), sizes)
    y = g.einsum(f"{name}.out", "bhle,hed->bld", (context,), sizes)
    return _residual(g, name, x, y)


def _feed_forward(g: PaseBuilder, name: str, x: int, sizes: dict[str, int]) -> int:
    y = g.einsum(f"{name}.up", "bld,df->blf", (x,), sizes, pointwise=2)
    y = g.einsum(f"{name}.down", "blf,fd->bld", (y,), sizes)
    return _residual(g, name, x, y)


def _residual(g: PaseBuilder, name: str, x: int, y: int) -> int:
    total = g.elementwise(f"{name}.add", (x, y), "bld")
    return g.norm(f"{name}.norm", total, "bld", "d")


def _conv_norm(
    g: PaseBuilder,
    name: str,
    x: int | tuple[int, ...],
    channels: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
) -> int:
    return g.batchnorm(f"{name}.norm", g.conv(name, x, channels, kernel, stride, padding))


def _norm_conv(
    g: PaseBuilder, name: str, x: int, channels: int, kernel: int, padding: int = 0
) -> int:
    return g.conv(name, g.batchnorm(f"{name}.norm", x), channels, kernel, padding=padding)


def _classify(g: PaseBuilder, x: int) -> None:
    g.loss("loss", g.fc("fc", g.mean("mean", x), 1000, "bc"), "bn")


GRAPHS: dict[str, Callable[[int], PaseGraph]] = {
    "alexnet": alexnet,
    "resnet101": resnet101,
    "inception3": inception3,
    "rnnlm": rnnlm,
    "transformer": transformer,
}
