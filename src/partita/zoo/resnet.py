"""ResNet and ResNeXt with bottleneck blocks, as in torchvision (the stride is on the 3x3).

He et al., "Deep residual learning for image recognition", 2015 (arXiv:1512.03385); Xie et al.,
"Aggregated residual transformations for deep neural networks", 2016 (arXiv:1611.05431). A block
of width w in g groups: 1x1 to w' channels, 3x3 in g groups, 1x1 to 4 w, with
w' = w * (width of a group / 64) * g.
"""

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish

EXPANSION = 4


def resnet50(batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True) -> Graph:
    """ResNet-50: 3, 4, 6 and 3 blocks."""
    return resnet("resnet50", (3, 4, 6, 3), batch, size, dtype, loss)


def resnet101(batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True) -> Graph:
    """ResNet-101: 3, 4, 23 and 3 blocks."""
    return resnet("resnet101", (3, 4, 23, 3), batch, size, dtype, loss)


def resnext50(batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True) -> Graph:
    """ResNeXt-50 with 32 groups of width 4."""
    return resnet("resnext50", (3, 4, 6, 3), batch, size, dtype, loss, groups=32, group_width=4)


def resnext101(batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True) -> Graph:
    """ResNeXt-101 with 32 groups of width 8."""
    return resnet("resnext101", (3, 4, 23, 3), batch, size, dtype, loss, groups=32, group_width=8)


def resnet(
    name: str, blocks: tuple[int, ...], batch: int, size: int, dtype: str, loss: bool,
    groups: int = 1, group_width: int = 64, classes: int = 1000,
) -> Graph:  # fmt: skip
    """A residual network with `blocks` bottlenecks per stage."""
    g = GraphBuilder(name, dtype)
    x = g.input("image", (batch, 3, size, size))
    x = g.conv(x, 64, 7, stride=2, padding=3, bias=False, name="conv1")
    x = g.relu(g.norm(x, "batch_norm", "bn1", training=loss))
    x = g.pool(x, 3, stride=2, padding=1, name="maxpool")
    for stage, repeats in enumerate(blocks):
        width = 64 * 2**stage
        inner = width * group_width // 64 * groups
        for block in range(repeats):
            with g.scope(f"layer{stage + 1}.{block}"):
                stride = 2 if stage > 0 and block == 0 else 1
                x = _bottleneck(g, x, inner, width * EXPANSION, stride, groups, loss)
    x = g.flatten(g.global_pool(x, name="avgpool"))
    return finish(g, g.linear(x, classes, "fc"), loss)


def _bottleneck(
    g: GraphBuilder, x: Tensor, inner: int, channels: int, stride: int, groups: int, training: bool
) -> Tensor:
    y = g.conv(x, inner, 1, bias=False, name="conv1")
    y = g.relu(g.norm(y, "batch_norm", "bn1", training=training))
    y = g.conv(y, inner, 3, stride=stride, padding=1, groups=groups, bias=False, name="conv2")
    y = g.relu(g.norm(y, "batch_norm", "bn2", training=training))
    y = g.conv(y, channels, 1, bias=False, name="conv3")
    y = g.norm(y, "batch_norm", "bn3", training=training)
    if x.shape != y.shape:
        with g.scope("downsample"):
            x = g.conv(x, channels, 1, stride=stride, bias=False, name="0")
            x = g.norm(x, "batch_norm", "1", training=training)
    return g.relu(g.add(y, x))
