"""U-Net: Ronneberger, Fischer and Brox, "U-Net: convolutional networks for biomedical image
segmentation", 2015 (arXiv:1505.04597).

Convolutions are unpadded, so 572 x 572 pixels give 388 x 388 labels and the maps that are handed
across are cropped. Four halvings without a remainder need a size of 16 n + 12, at least 188.
"""

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.ending import finish

WIDTHS = (64, 128, 256, 512, 1024)


def unet(
    batch: int = 1, size: int = 572, dtype: str = "f32", loss: bool = True, classes: int = 2
) -> Graph:
    """U-Net on single-channel images of `size`, one label per pixel of the middle."""
    if size < 188 or size % 16 != 12:
        raise ModelError(
            f"size {size}, which four halvings do not divide",
            fix="choose 16 n + 12, at least 188, like 572",
            field="unet",
        )
    g = GraphBuilder("unet", dtype)
    x = g.input("image", (batch, 1, size, size))
    handed: list[Tensor] = []
    for level, width in enumerate(WIDTHS):
        with g.scope(f"down{level}"):
            if level:
                x = g.pool(x, 2)
            x = _double(g, x, width)
            handed.append(x)
    for level in reversed(range(len(WIDTHS) - 1)):
        with g.scope(f"up{level}"):
            x = g.conv(x, WIDTHS[level], 2, stride=2, transposed=True, name="upsample")
            x = _double(g, g.concat([_crop(g, handed[level], x.shape[2]), x]), WIDTHS[level])
    labels = g.conv(x, classes, 1, name="head")
    return finish(g, g.transpose(labels, (0, 2, 3, 1), "channels_last"), loss)


def _double(g: GraphBuilder, x: Tensor, width: int) -> Tensor:
    x = g.relu(g.conv(x, width, 3, name="conv1"), "relu1")
    return g.relu(g.conv(x, width, 3, name="conv2"), "relu2")


def _crop(g: GraphBuilder, x: Tensor, size: int) -> Tensor:
    start = (x.shape[2] - size) // 2
    for axis in (2, 3):
        x = g.one("slice", x, name="crop", axis=axis, start=start, stop=start + size)
    return x
