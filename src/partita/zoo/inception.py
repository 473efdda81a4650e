"""Inception v3: Szegedy et al., "Rethinking the Inception architecture for computer vision", 2015
(arXiv:1512.00567), modules named as in torchvision's `inception_v3`.

The auxiliary classifier (`aux=True`) hangs on Mixed_6e and adds 0.4 times its loss.
"""

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish

Kernel = int | tuple[int, int]


class _Inception:
    """A builder with the one convolution that every module is made of."""

    def __init__(self, g: GraphBuilder, training: bool) -> None:
        self.g = g
        self.training = training

    def conv(
        self, x: Tensor, name: str, channels: int, kernel: Kernel, stride: int = 1,
        same: bool = True,
    ) -> Tensor:  # fmt: skip
        """Convolution, batch norm, ReLU; `same` keeps the image size."""
        sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = tuple(k // 2 for k in sizes) if same else (0, 0)
        with self.g.scope(name):
            x = self.g.conv(x, channels, sizes, stride=stride, padding=padding, bias=False)
            return self.g.relu(self.g.norm(x, "batch_norm", "bn", training=self.training))

    def module_a(self, x: Tensor, pool_features: int) -> Tensor:
        one = self.conv(x, "branch1x1", 64, 1)
        five = self.conv(x, "branch5x5_1", 48, 1)
        five = self.conv(five, "branch5x5_2", 64, 5)
        double = self.conv(x, "branch3x3dbl_1", 64, 1)
        double = self.conv(double, "branch3x3dbl_2", 96, 3)
        double = self.conv(double, "branch3x3dbl_3", 96, 3)
        return self.g.concat([one, five, double, self._pooled(x, pool_features)])

    def module_b(self, x: Tensor) -> Tensor:
        three = self.conv(x, "branch3x3", 384, 3, 2, same=False)
        double = self.conv(x, "branch3x3dbl_1", 64, 1)
        double = self.conv(double, "branch3x3dbl_2", 96, 3)
        double = self.conv(double, "branch3x3dbl_3", 96, 3, 2, same=False)
        return self.g.concat([three, double, self.g.pool(x, 3, stride=2)])

    def module_c(self, x: Tensor, inner: int) -> Tensor:
        one = self.conv(x, "branch1x1", 192, 1)
        seven = self.conv(x, "branch7x7_1", inner, 1)
        seven = self.conv(seven, "branch7x7_2", inner, (1, 7))
        seven = self.conv(seven, "branch7x7_3", 192, (7, 1))
        double = self.conv(x, "branch7x7dbl_1", inner, 1)
        double = self.conv(double, "branch7x7dbl_2", inner, (7, 1))
        double = self.conv(double, "branch7x7dbl_3", inner, (1, 7))
        double = self.conv(double, "branch7x7dbl_4", inner, (7, 1))
        double = self.conv(double, "branch7x7dbl_5", 192, (1, 7))
        return self.g.concat([one, seven, double, self._pooled(x, 192)])

    def module_d(self, x: Tensor) -> Tensor:
        three = self.conv(x, "branch3x3_1", 192, 1)
        three = self.conv(three, "branch3x3_2", 320, 3, 2, same=False)
        seven = self.conv(x, "branch7x7x3_1", 192, 1)
        seven = self.conv(seven, "branch7x7x3_2", 192, (1, 7))
        seven = self.conv(seven, "branch7x7x3_3", 192, (7, 1))
        seven = self.conv(seven, "branch7x7x3_4", 192, 3, 2, same=False)
        return self.g.concat([three, seven, self.g.pool(x, 3, stride=2)])

    def module_e(self, x: Tensor) -> Tensor:
        one = self.conv(x, "branch1x1", 320, 1)
        three = self.conv(x, "branch3x3_1", 384, 1)
        three_a = self.conv(three, "branch3x3_2a", 384, (1, 3))
        three_b = self.conv(three, "branch3x3_2b", 384, (3, 1))
        double = self.conv(x, "branch3x3dbl_1", 448, 1)
        double = self.conv(double, "branch3x3dbl_2", 384, 3)
        double_a = self.conv(double, "branch3x3dbl_3a", 384, (1, 3))
        double_b = self.conv(double, "branch3x3dbl_3b", 384, (3, 1))
        wide = self.g.concat([three_a, three_b], name="branch3x3")
        deep = self.g.concat([double_a, double_b], name="branch3x3dbl")
        return self.g.concat([one, wide, deep, self._pooled(x, 192)])

    def auxiliary(self, x: Tensor, classes: int) -> Tensor:
        x = self.g.pool(x, 5, stride=3, mode="avg")
        x = self.conv(x, "conv0", 128, 1)
        x = self.conv(x, "conv1", 768, 5, same=False)
        x = self.g.flatten(self.g.global_pool(x, name="avgpool"))
        return self.g.linear(x, classes, "fc")

    def _pooled(self, x: Tensor, channels: int) -> Tensor:
        pooled = self.g.pool(x, 3, stride=1, padding=1, mode="avg", name="avgpool")
        return self.conv(pooled, "branch_pool", channels, 1)


def inception_v3(
    batch: int = 32, size: int = 299, dtype: str = "f32", loss: bool = True, aux: bool = False
) -> Graph:
    """Inception v3 on images of `size`, at training with or without its auxiliary classifier."""
    g = GraphBuilder("inception_v3", dtype)
    net = _Inception(g, loss)
    x = _stem(net, g.input("image", (batch, 3, size, size)))
    for name, features in (("5b", 32), ("5c", 64), ("5d", 64)):
        with g.scope(f"Mixed_{name}"):
            x = net.module_a(x, features)
    with g.scope("Mixed_6a"):
        x = net.module_b(x)
    for name, inner in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        with g.scope(f"Mixed_{name}"):
            x = net.module_c(x, inner)
    middle = x
    with g.scope("Mixed_7a"):
        x = net.module_d(x)
    for name in ("7b", "7c"):
        with g.scope(f"Mixed_{name}"):
            x = net.module_e(x)
    x = g.global_pool(x, name="avgpool")
    x = g.flatten(g.dropout(x) if loss else x)
    logits = g.linear(x, 1000, "fc")
    if not (aux and loss):
        return finish(g, logits, loss)
    with g.scope("AuxLogits"):
        extra = net.auxiliary(middle, 1000)
    targets = g.input("targets", (batch,), "i64")
    main = g.cross_entropy(logits, targets, "main_loss")
    side = g.elementwise("scale", g.cross_entropy(extra, targets, "aux_loss"), name="aux_weight")
    return g.finish(g.add(main, side, name="loss"))


def _stem(net: _Inception, x: Tensor) -> Tensor:
    x = net.conv(x, "Conv2d_1a_3x3", 32, 3, 2, same=False)
    x = net.conv(x, "Conv2d_2a_3x3", 32, 3, same=False)
    x = net.conv(x, "Conv2d_2b_3x3", 64, 3)
    x = net.g.pool(x, 3, stride=2, name="maxpool1")
    x = net.conv(x, "Conv2d_3b_1x1", 80, 1)
    x = net.conv(x, "Conv2d_4a_3x3", 192, 3, same=False)
    return net.g.pool(x, 3, stride=2, name="maxpool2")
