"""AlexNet in one column: Krizhevsky, "One weird trick for parallelizing convolutional neural
networks", 2014 (arXiv:1404.5997), with the layer numbers of torchvision's `alexnet`.
"""

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph
from partita.zoo.parts import finish

# Channels, kernel, stride, padding of a convolution (a ReLU follows), or a 3x3 maximum.
FEATURES: tuple[tuple[int, int, int, int] | str, ...] = (
    (64, 11, 4, 2),
    "pool",
    (192, 5, 1, 2),
    "pool",
    (384, 3, 1, 1),
    (256, 3, 1, 1),
    (256, 3, 1, 1),
    "pool",
)


def alexnet(
    batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True, classes: int = 1000
) -> Graph:
    """Five convolutions and three linear layers on images of `size`."""
    g = GraphBuilder("alexnet", dtype)
    x = g.input("image", (batch, 3, size, size))
    with g.scope("features"):
        position = 0
        for layer in FEATURES:
            if isinstance(layer, str):
                x = g.pool(x, 3, stride=2, name=str(position))
                position += 1
                continue
            channels, kernel, stride, padding = layer
            x = g.conv(x, channels, kernel, stride=stride, padding=padding, name=str(position))
            x = g.relu(x, str(position + 1))
            position += 2
    x = g.flatten(g.global_pool(x, 6, "avgpool"))
    with g.scope("classifier"):
        for position, width in ((0, 4096), (3, 4096)):
            x = g.dropout(x, str(position)) if loss else x
            x = g.relu(g.linear(x, width, str(position + 1)), str(position + 2))
        x = g.linear(x, classes, "6")
    return finish(g, x, loss)
