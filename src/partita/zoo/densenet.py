"""DenseNet-121: Huang et al., "Densely connected convolutional networks", 2016
(arXiv:1608.06993), modules named as in torchvision's `densenet121`.

Every layer reads all feature maps of its block so far: norm, ReLU, 1x1 to 4 k channels, norm, ReLU,
3x3 to k = 32 channels. Transitions halve channels and image.
"""

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish

GROWTH = 32
BOTTLENECK = 4


def densenet121(
    batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True,
    blocks: tuple[int, ...] = (6, 12, 24, 16),
) -> Graph:  # fmt: skip
    """DenseNet with growth 32 and `blocks` layers per block."""
    g = GraphBuilder("densenet121", dtype)
    x = g.input("image", (batch, 3, size, size))
    with g.scope("features"):
        x = g.conv(x, 64, 7, stride=2, padding=3, bias=False, name="conv0")
        x = g.relu(g.norm(x, "batch_norm", "norm0", training=loss), "relu0")
        x = g.pool(x, 3, stride=2, padding=1, name="pool0")
        for number, layers in enumerate(blocks, 1):
            with g.scope(f"denseblock{number}"):
                x = _block(g, x, layers, loss)
            if number < len(blocks):
                with g.scope(f"transition{number}"):
                    x = _transition(g, x, loss)
        x = g.norm(x, "batch_norm", "norm5", training=loss)
    x = g.flatten(g.global_pool(g.relu(x), name="avgpool"))
    return finish(g, g.linear(x, 1000, "classifier"), loss)


def _block(g: GraphBuilder, x: Tensor, layers: int, training: bool) -> Tensor:
    features = [x]
    for layer in range(1, layers + 1):
        with g.scope(f"denselayer{layer}"):
            y = g.concat(features) if len(features) > 1 else x
            y = g.relu(g.norm(y, "batch_norm", "norm1", training=training), "relu1")
            y = g.conv(y, BOTTLENECK * GROWTH, 1, bias=False, name="conv1")
            y = g.relu(g.norm(y, "batch_norm", "norm2", training=training), "relu2")
            features.append(g.conv(y, GROWTH, 3, padding=1, bias=False, name="conv2"))
    return g.concat(features)


def _transition(g: GraphBuilder, x: Tensor, training: bool) -> Tensor:
    x = g.relu(g.norm(x, "batch_norm", "norm", training=training))
    x = g.conv(x, x.shape[1] // 2, 1, bias=False, name="conv")
    return g.pool(x, 2, mode="avg", name="pool")
