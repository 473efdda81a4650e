"""SqueezeNet 1.0 and 1.1: Iandola et al., 2016 (arXiv:1602.07360), as in torchvision.

A fire module squeezes to s channels with a 1x1 and expands to e + e with a 1x1 and a 3x3. Version
1.1 pools earlier and starts narrower.
"""

from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish

Fire = tuple[int, int]  # squeeze, expand (of each kind)
FIRES: tuple[Fire, ...] = (
    (16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256),
)  # fmt: skip
STEMS = {"1.0": (96, 7), "1.1": (64, 3)}  # channels, kernel
POOLED_BEFORE = {"1.0": (0, 3, 7), "1.1": (0, 2, 4)}  # fire modules that a pooling precedes


def squeezenet1_0(batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True) -> Graph:
    """SqueezeNet 1.0."""
    return squeezenet("1.0", batch, size, dtype, loss)


def squeezenet1_1(batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True) -> Graph:
    """SqueezeNet 1.1: as accurate with 2.4 times fewer operations."""
    return squeezenet("1.1", batch, size, dtype, loss)


def squeezenet(version: str, batch: int, size: int, dtype: str, loss: bool) -> Graph:
    """SqueezeNet of version "1.0" or "1.1"."""
    g = GraphBuilder(f"squeezenet{version.replace('.', '_')}", dtype)
    x = g.input("image", (batch, 3, size, size))
    channels, kernel = STEMS[version]
    with g.scope("features"):
        x = g.relu(g.conv(x, channels, kernel, stride=2, name="0"), "1")
        position = 2
        for index, fire in enumerate(FIRES):
            if index in POOLED_BEFORE[version]:
                x = g.pool(x, 3, stride=2, ceil=True, name=str(position))
                position += 1
            with g.scope(str(position)):
                x = _fire(g, x, *fire)
            position += 1
    with g.scope("classifier"):
        x = g.dropout(x, "0") if loss else x
        x = g.relu(g.conv(x, 1000, 1, name="1"), "2")
        x = g.flatten(g.global_pool(x, name="3"))
    return finish(g, x, loss)


def _fire(g: GraphBuilder, x: Tensor, squeeze: int, expand: int) -> Tensor:
    x = g.relu(g.conv(x, squeeze, 1, name="squeeze"), "squeeze_activation")
    one = g.relu(g.conv(x, expand, 1, name="expand1x1"), "expand1x1_activation")
    three = g.relu(g.conv(x, expand, 3, padding=1, name="expand3x3"), "expand3x3_activation")
    return g.concat([one, three])
