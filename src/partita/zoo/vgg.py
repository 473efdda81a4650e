"""VGG-16 (configuration D): Simonyan and Zisserman, "Very deep convolutional networks for
large-scale image recognition", 2014 (arXiv:1409.1556), layer numbers as in torchvision's `vgg16`.
"""

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph
from partita.zoo.parts import finish

BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions


def vgg16(
    batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True, classes: int = 1000
) -> Graph:
    """Thirteen 3x3 convolutions and three linear layers on images of `size`."""
    g = GraphBuilder("vgg16", dtype)
    x = g.input("image", (batch, 3, size, size))
    position = 0
    with g.scope("features"):
        for channels, convolutions in BLOCKS:
            for _ in range(convolutions):
                x = g.conv(x, channels, 3, padding=1, name=str(position))
                x = g.relu(x, str(position + 1))
                position += 2
            x = g.pool(x, 2, name=str(position))
            position += 1
    x = g.flatten(g.global_pool(x, 7, "avgpool"))
    with g.scope("classifier"):
        for position in (0, 3):
            x = g.relu(g.linear(x, 4096, str(position)), str(position + 1))
            x = g.dropout(x, str(position + 2)) if loss else x
        x = g.linear(x, classes, "6")
    return finish(g, x, loss)
