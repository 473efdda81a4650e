"""The ways a step can be run: PyTorch's operators, or a Triton kernel in one of several sizes.

A piece of several steps is run operator by operator, or as torch.compile makes it.

Which is fastest is measured; here are the candidates, the promising first. Of a convolution's tiles
the estimate is rough: waves of programs, each walking its share of the sum in steps of `bk`.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from partita.gpu.flow.place import padded
from partita.gpu.flow.steps import Flow, Step

NUM_SMS = 132
MOST_VALUES = 2**31  # of a tensor: offsets are 32-bit numbers
GROUP = 32  # channels of a block on the diagonal, for narrower groups
MOST_TAPS = 64  # of an unrolled window


@dataclass(frozen=True, slots=True)
class Way:
    """How a step is run: `eager`, `compiled` (a piece), or a kernel with its block sizes."""

    kernel: str = "eager"
    block: tuple[int, ...] = ()
    warps: int = 4
    stages: int = 1
    splits: int = 1

    def __str__(self) -> str:
        if not self.block:
            return self.kernel
        block = "x".join(map(str, self.block))
        return f"{self.kernel} {block} w{self.warps} s{self.stages} k{self.splits}"

    @classmethod
    def parse(cls, text: str) -> "Way":
        """Read what `str` wrote."""
        words = text.split()
        if len(words) == 1:
            return cls(text)
        kernel, block, *rest = words
        warps, stages, splits = (int(word[1:]) for word in rest)
        return cls(kernel, tuple(map(int, block.split("x"))), warps, stages, splits)


EAGER = Way()
COMPILED = Way("compiled")
TILES = (
    (16, 32, 4), (16, 64, 4), (32, 32, 4), (32, 64, 4), (64, 32, 4), (64, 64, 4), (128, 32, 4),
    (64, 128, 4), (128, 64, 4), (128, 128, 8),
)  # fmt: skip  # pixels, channels, warps


def ways(flow: Flow, step: Step, most: int = 10, *, exact: bool = False) -> tuple[Way, ...]:
    """The candidates for a step on a GPU; `exact`: without rounding factors to TF32."""
    if step.kind == "call" or not fits(flow, step):
        return (EAGER,)
    if step.kind == "conv":
        ways = conv_ways(*conv_size(flow, step), flow.dtypes[step.name].itemsize, most)
        if exact:
            ways = tuple(replace(way, kernel="exactconv") for way in ways)
        return (*ways, EAGER)
    if step.kind == "combine":
        blocks = ((8, 64), (16, 64), (32, 64), (8, 128))
        return (*(Way("combine", block) for block in blocks), EAGER)
    sizes = (((4, 64), 2), ((8, 64), 4), ((16, 64), 4), ((32, 64), 4), ((8, 32), 2))
    return (*(Way("window", block, warps) for block, warps in sizes), EAGER)


def fits(flow: Flow, step: Step) -> bool:
    """Do the kernels take this step?"""
    if str(flow.dtypes[step.name]) not in ("torch.float32", "torch.float16", "torch.bfloat16"):
        return False
    if any(math.prod(flow.shapes[name]) >= MOST_VALUES for name in (*step.uses, step.name)):
        return False
    if step.window is not None and step.kind != "conv":
        taps = step.window.kernel[0] * step.window.kernel[1]
        return taps <= MOST_TAPS and step.pre in ("", "relu")
    if step.kind == "conv" and step.groups > 1:
        cin, cout = flow.shapes[step.inputs[0]][1], flow.shapes[step.name][1]
        width = cin // step.groups
        same = cin == cout and cin % GROUP == 0
        return same and not step.pre and (GROUP % width == 0 or width % GROUP == 0)
    return True


def block_width(flow: Flow, step: Step) -> int:
    """Input channels that a tile of output channels reads: a group's, or a block's of some."""
    cin = padded(flow.shapes[step.inputs[0]][1])
    return cin if step.groups == 1 else max(GROUP, cin // step.groups)


def conv_size(flow: Flow, step: Step) -> tuple[int, int, int, int, int]:
    """Pixels, output channels, taps, input channels, output channels of a block."""
    assert step.window is not None
    batch, cout, height, width = flow.shapes[step.name]
    taps = step.window.kernel[0] * step.window.kernel[1]
    cin = block_width(flow, step)
    return (
        batch * height * width,
        padded(cout),
        taps,
        cin,
        padded(cout) if step.groups == 1 else cin,
    )


@lru_cache(maxsize=4096)
def conv_ways(
    pixels: int, cout: int, taps: int, cin: int, block: int, item: int, most: int
) -> tuple[Way, ...]:
    """Tiles and splits, the best by estimate first; at most two splits per tile."""
    estimates: list[tuple[float, Way]] = []
    for bm, bn, warps in TILES:
        if (block != cout and bn > block) or (bm >= 32 and bm >= 2 * pixels):
            continue
        if bn >= 2 * padded(cout) and bn > 32:
            continue
        bk = _depth(cin, item, bm * bn)
        steps = taps * math.ceil(cin / bk)
        tiles = math.ceil(pixels / bm) * math.ceil(cout / bn)
        mine = []
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            if splits > 1 and (steps < 2 * splits or tiles * splits > 3 * NUM_SMS):
                continue
            time = _estimate_us(tiles, steps, splits, bm, bn, bk, item)
            stages = 4 if (bm + bn) * bk * item * 4 <= 96 * 1024 else 3
            mine.append((time, Way("conv", (bm, bn, bk), warps, stages, splits)))
        estimates += sorted(mine, key=lambda each: each[0])[:2]
    estimates.sort(key=lambda each: each[0])
    return tuple(way for _, way in estimates[:most])


def _depth(cin: int, item: int, tile: int) -> int:
    most = 64 if item == 2 and tile < 128 * 128 else 32
    return next((depth for depth in (16, 32) if cin <= depth), most)


def _estimate_us(
    tiles: int, steps: int, splits: int, bm: int, bn: int, bk: int, item: int
) -> float:
    waves = math.ceil(tiles * splits / NUM_SMS)
    # a step waits for its loads or for the matrix unit, whichever is longer
    loads = 0.06 + (bm + bn) * bk * item / 80e3
    dots = bm * bn * bk * 2 / (2.5e6 if item == 4 else 5e6)
    per_wave = math.ceil(steps / splits) * max(loads, dots)
    reduce = (1.5 + 0.15 * splits) if splits > 1 else 0.0
    return 2.0 + waves * per_wave + reduce
