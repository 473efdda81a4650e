"""NASNet-A (6 @ 4032), "NASNet large": Zoph et al., "Learning transferable architectures for
scalable image recognition", 2017 (arXiv:1707.07012).

Cells combine the two cells before them. With f filters a normal cell gives 6 f channels, a
reduction cell 4 f at half the image size; f is 168, 336, 672 in the three stages. Module names
follow the widely used PyTorch port. Where an even image is halved, padding is even on both sides
here and one-sided in TensorFlow: sizes and counts are the same.
"""

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish

STEM = 96
FILTERS = 168
REPEATS = 6


class _Cells:
    """A builder with the pieces that cells are made of."""

    def __init__(self, g: GraphBuilder, training: bool) -> None:
        self.g = g
        self.training = training

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.g.norm(x, "batch_norm", name, training=self.training)

    def squeeze(self, x: Tensor, channels: int, name: str) -> Tensor:
        """ReLU, 1x1 convolution, norm."""
        with self.g.scope(name):
            x = self.g.conv(self.g.relu(x), channels, 1, bias=False)
            return self.norm(x, "bn")

    def halve(self, x: Tensor, channels: int) -> Tensor:
        """Half the image size: two strided paths, one shifted by a pixel, side by side."""
        g = self.g
        x = g.relu(x)
        with g.scope("path_1"):
            first = g.pool(x, 1, stride=2, mode="avg", name="avgpool")
            first = g.conv(first, channels // 2, 1, bias=False)
        with g.scope("path_2"):
            moved = g.one("pad", x, name="pad", before=(0, 0, 0, 0), after=(0, 0, 1, 1))
            for axis in (2, 3):
                moved = g.one("slice", moved, name="shift", axis=axis, start=1)
            second = g.pool(moved, 1, stride=2, mode="avg", name="avgpool")
            second = g.conv(second, channels // 2, 1, bias=False)
        return self.norm(g.concat([first, second]), "final_path_bn")

    def separable(self, x: Tensor, channels: int, kernel: int, stride: int, name: str) -> Tensor:
        """Twice: ReLU, depthwise, pointwise, norm; a change of channels is made at once."""
        for number in (1, 2):
            with self.g.scope(name):
                x = self.g.relu(x, f"relu_{number}")
                with self.g.scope(f"separable_{number}"):
                    width = x.shape[1]
                    x = self.g.conv(
                        x, width, kernel, stride=stride if number == 1 else 1,
                        padding=kernel // 2, groups=width, bias=False, name="depthwise_conv2d",
                    )  # fmt: skip
                    # Inside a cell widths agree; in the stem the first half changes them.
                    x = self.g.conv(x, channels, 1, bias=False, name="pointwise_conv2d")
                x = self.norm(x, f"bn_sep_{number}")
        return x

    def pool(self, x: Tensor, mode: str, stride: int, name: str) -> Tensor:
        return self.g.pool(x, 3, stride=stride, padding=1, mode=mode, name=name)

    def normal(self, left: Tensor, right: Tensor, filters: int) -> Tensor:
        """`right` comes from the cell before, `left` from the one before that."""
        g = self.g
        pairs = [
            left,
            g.add(
                self.separable(right, filters, 5, 1, "comb_iter_0_left"),
                self.separable(left, filters, 3, 1, "comb_iter_0_right"),
                name="comb_iter_0",
            ),
            g.add(
                self.separable(left, filters, 5, 1, "comb_iter_1_left"),
                self.separable(left, filters, 3, 1, "comb_iter_1_right"),
                name="comb_iter_1",
            ),
            g.add(self.pool(right, "avg", 1, "comb_iter_2_left"), left, name="comb_iter_2"),
            g.add(
                self.pool(left, "avg", 1, "comb_iter_3_left"),
                self.pool(left, "avg", 1, "comb_iter_3_right"),
                name="comb_iter_3",
            ),
            g.add(
                self.separable(right, filters, 3, 1, "comb_iter_4_left"), right, name="comb_iter_4"
            ),
        ]
        return g.concat(pairs)

    def reduction(self, left: Tensor, right: Tensor, filters: int) -> Tensor:
        """Half the image size, four outputs side by side."""
        g = self.g
        zero = g.add(
            self.separable(right, filters, 5, 2, "comb_iter_0_left"),
            self.separable(left, filters, 7, 2, "comb_iter_0_right"),
            name="comb_iter_0",
        )
        one = g.add(
            self.pool(right, "max", 2, "comb_iter_1_left"),
            self.separable(left, filters, 7, 2, "comb_iter_1_right"),
            name="comb_iter_1",
        )
        two = g.add(
            self.pool(right, "avg", 2, "comb_iter_2_left"),
            self.separable(left, filters, 5, 2, "comb_iter_2_right"),
            name="comb_iter_2",
        )
        three = g.add(self.pool(zero, "avg", 1, "comb_iter_3_right"), one, name="comb_iter_3")
        four = g.add(
            self.separable(zero, filters, 3, 1, "comb_iter_4_left"),
            self.pool(right, "max", 2, "comb_iter_4_right"),
            name="comb_iter_4",
        )
        return g.concat([one, two, three, four])


def nasnet_large(batch: int = 32, size: int = 331, dtype: str = "f32", loss: bool = True) -> Graph:
    """NASNet-A with 6 normal cells per stage and 4032 channels at the end."""
    g = GraphBuilder("nasnet_large", dtype)
    cells = _Cells(g, loss)
    x = g.input("image", (batch, 3, size, size))
    with g.scope("conv0"):
        x = g.conv(x, STEM, 3, stride=2, bias=False)
        start = cells.norm(x, "bn")
    previous, current = _stem(cells, start)
    filters = FILTERS
    for stage in range(3):
        for cell in range(REPEATS):
            with g.scope(f"cell_{stage * REPEATS + cell}"):
                previous, current = current, _normal_cell(cells, previous, current, filters)
        if stage < 2:
            filters *= 2
            with g.scope(f"reduction_cell_{stage}"):
                left = cells.squeeze(previous, filters, "conv_prev_1x1")
                right = cells.squeeze(current, filters, "conv_1x1")
                # The next cell looks past the reduction at the same `previous` as it does.
                current = cells.reduction(left, right, filters)
    x = g.flatten(g.global_pool(g.relu(current), name="avg_pool"))
    x = g.dropout(x) if loss else x
    return finish(g, g.linear(x, 1000, "last_linear"), loss)


def _stem(cells: _Cells, start: Tensor) -> tuple[Tensor, Tensor]:
    """Two reduction cells on a quarter and a half of the filters; the first one's input is wide."""
    with cells.g.scope("cell_stem_0"):
        right = cells.squeeze(start, FILTERS // 4, "conv_1x1")
        first = cells.reduction(start, right, FILTERS // 4)
    with cells.g.scope("cell_stem_1"):
        right = cells.squeeze(first, FILTERS // 2, "conv_1x1")
        left = cells.halve(start, FILTERS // 2)
        second = cells.reduction(left, right, FILTERS // 2)
    return first, second


def _normal_cell(cells: _Cells, previous: Tensor, current: Tensor, filters: int) -> Tensor:
    if previous.shape[2] != current.shape[2]:
        left = cells.halve(previous, filters)
    else:
        left = cells.squeeze(previous, filters, "conv_prev_1x1")
    return cells.normal(left, cells.squeeze(current, filters, "conv_1x1"), filters)
