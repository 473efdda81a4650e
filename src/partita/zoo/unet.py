"""U-Net: Ronneberger, Fischer and Brox, "U-Net: convolutional networks for biomedical image
segmentation", 2015 (arXiv:1505.04597).

Convolutions are unpadded, so 572 x 572 pixels give 388 x 388 labels and the maps that are handed
across are cropped. Four halvings without a remainder need a size of 16 n + 12, at least 188.
"""

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish

WIDTHS = (64, 128, 256, 512, 1024)


def unet(
    batch: int = 1, size: int = 572, dtype: str = "f32", loss: bool = True, classes: int = 2,
    widths: tuple[int, ...] = WIDTHS,
) -> Graph:  # fmt: skip
    """U-Net on single-channel images of `size`, one label per pixel of the middle."""
    _check_size(size, len(widths) - 1)
    g = GraphBuilder("unet", dtype)
    x = g.input("image", (batch, 1, size, size))
    handed: list[Tensor] = []
    for level, width in enumerate(widths):
        with g.scope(f"down{level}"):
            if level:
                x = g.pool(x, 2)
            x = _double(g, x, width)
            handed.append(x)
    for level in reversed(range(len(widths) - 1)):
        with g.scope(f"up{level}"):
            x = g.conv(x, widths[level], 2, stride=2, transposed=True, name="upsample")
            x = _double(g, g.concat([_crop(g, handed[level], x.shape[2]), x]), widths[level])
    labels = g.conv(x, classes, 1, name="head")
    return finish(g, g.transpose(labels, (0, 2, 3, 1), "channels_last"), loss)


def _check_size(size: int, halvings: int) -> None:
    """Every level takes 4 off and halves what is left; the lowest has 8, of which 4 remain."""
    least = 8
    for _ in range(halvings):
        least = 2 * least + 4
    step = 2**halvings
    if size < least or (size - least) % step:
        count = {4: "four"}.get(halvings, str(halvings))
        raise ModelError(
            f"size {size}, which {count} halvings do not divide",
            fix=f"choose {step} n + {least % step}, at least {least}, like {least + 24 * step}",
            field="unet",
        )


def _double(g: GraphBuilder, x: Tensor, width: int) -> Tensor:
    x = g.relu(g.conv(x, width, 3, name="conv1"), "relu1")
    return g.relu(g.conv(x, width, 3, name="conv2"), "relu2")


def _crop(g: GraphBuilder, x: Tensor, size: int) -> Tensor:
    start = (x.shape[2] - size) // 2
    for axis in (2, 3):
        x = g.one("slice", x, name="crop", axis=axis, start=start, stop=start + size)
    return x
