"""What a fused region is made of: ops that are cut into tiles, over one arena of memory.

All values and weights of a region lie in one arena of the model's element type; biases and scales
in a second one of f32. A value is a matrix of rows by columns, rows `stride` elements apart; begins
and strides are multiples of eight, and the columns that round a row up to that are zero and never
written. An image with channels last is a matrix of pixels by channels. Nothing is written twice in
one launch, so an op waits for what it reads and for nothing else.

    kind       reads          weights     wide          computes
    gemv       x, [residual]  W           bias          act(x W^T + bias + residual), few rows
    conv       x, [residual]  W           bias, s, t    the same over a window; pre(x) first
    window     x, [residual]  [W]         bias          depthwise, maximum or average
    combine    up to six                  scale, shift  act((f0 x0 + f1 x1 + ...) scale + shift)
    chain      up to six                  up to three   an expression, element by element
    rows       x, [residual]              weight, bias  softmax, layernorm, rmsnorm of a row
    lstm_cell  x, h, c        W_ih, W_hh  bias          the new h and c
    gru_cell   x, h           W_ih, W_hh  two biases    the new h

`pre` is "", "relu", "affine" or "affine_relu" (x s + t). W of a conv is [cout, taps, cin in
eights], of a depthwise window [taps, c]. `tf32` says that the factors of a conv are or may be
rounded to TF32 (16 bits always fit). `mode` is "depthwise", "maxpool" or "avgpool" (times
`factor`); `image` and `out` are (height, width), a matrix of m rows is an image of (m, 1). The
`steps` of a chain are tuples of a function (`generate.FUNCTIONS`) and its arguments: "r0" is the
first operand, "s0" the result of the first step, "w0" the first wide operand (a number per column),
numbers are numbers; the last step is the result. One row or one column stands for all of them.
"""

from dataclasses import dataclass
from typing import Any

Attrs = tuple[tuple[str, Any], ...]
ReadsFrom = tuple[tuple[tuple[int, ...], ...], ...]  # of an op, of a read: the ops that made it
NOWHERE = -1  # of a wide operand that is not there
ACTS = ("", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "hardtanh")
ATTRS: dict[str, tuple[str, ...]] = {
    "gemv": ("act",),
    "conv": ("act", "pre", "image", "out", "kernel", "stride", "padding", "dilation", "tf32"),
    "window": ("act", "pre", "image", "out", "kernel", "stride", "padding", "dilation", "mode",
               "factor", "include_pad"),
    "combine": ("act", "factors"),
    "chain": ("steps",),
    "rows": ("fn", "eps"),
    "lstm_cell": (),
    "gru_cell": (),
}  # fmt: skip
MOST_ROWS = 8  # of a gemv
MOST_TERMS = 6  # of a combine
MOST_HELD = 8192  # weights that a tile of a gemv holds in registers: 64 of each of 128 threads


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix in the arena, in elements."""

    at: int
    rows: int
    cols: int
    stride: int

    def __post_init__(self) -> None:
        if self.at % 8 or self.stride % 8 or self.stride < self.cols:
            raise ValueError(f"{self} is not in eights")


@dataclass(frozen=True, slots=True)
class TileOp:
    """One op of a region; `attrs` has a value for every name of its kind."""

    name: str
    kind: str
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]  # one, or h and c of an LSTM cell
    weights: tuple[Place, ...] = ()
    wide: tuple[int, ...] = ()  # where in the f32 arena, or NOWHERE
    attrs: Attrs = ()

    def __post_init__(self) -> None:
        if self.kind not in ATTRS or tuple(name for name, _ in self.attrs) != ATTRS[self.kind]:
            raise ValueError(f"{self.kind} {self.name!r} has the attributes {self.attrs}")

    def attr(self, name: str) -> Any:
        """The value of an attribute."""
        return dict(self.attrs)[name]


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the output that one tile makes; `depth` columns of a sum at a time."""

    rows: int
    cols: int
    depth: int = 0


def num_tiles(op: TileOp, tile: Tile) -> int:
    """Into how many tiles this cuts the op's output."""
    out = op.writes[0]
    return -(out.rows // -tile.rows) * -(out.cols // -tile.cols)


def rectangle(op: TileOp, tile: Tile, index: int) -> tuple[range, range]:
    """The rows and columns of the output that tile `index` makes: column by column of tiles."""
    out = op.writes[0]
    down = -(out.rows // -tile.rows)
    row, col = index % down * tile.rows, index // down * tile.cols
    return range(row, min(row + tile.rows, out.rows)), range(col, min(col + tile.cols, out.cols))


def tiles(op: TileOp) -> tuple[Tile, ...]:
    """The tile shapes that there is code for, small ones first."""
    out = op.writes[0]
    if op.kind in ("gemv", "lstm_cell", "gru_cell"):
        rows, held = out.rows, MOST_HELD if out.rows == 1 else MOST_HELD // 2
        held = held if op.kind == "gemv" else held // 8  # four rows a unit, of two matrices
        longest = _power(max(weight.cols for weight in op.weights))
        shapes = [Tile(rows, cols, min(512, held // cols, longest)) for cols in (4, 8, 16, 32, 64)]
    elif op.kind == "conv":
        shapes = [
            Tile(rows, cols, _depth(op, rows * cols))
            for rows, cols in ((16, 16), (16, 32), (32, 32), (64, 64))  # 32 x 64 was never faster
        ]
    elif op.kind == "rows":
        return (Tile(1, out.cols),)
    else:
        sizes = ((8, 32), (16, 64), (32, 64), (64, 64))
        shapes = [Tile(*size) for size in sizes[: 3 if op.kind == "window" else 4]]  # registers
        shapes += [Tile(1, cols) for cols in (256, 1024)] if out.rows == 1 else []
    fitting = [
        tile for tile in shapes if tile.cols < 2 * out.cols and tile.rows < 2 * out.rows + 15
    ]
    return tuple(fitting) or (shapes[0],)


def _depth(op: TileOp, size: int) -> int:
    """Channels of a convolution's sum at a time: many, as long as registers and buffers hold them.

    Exact products split every factor in two, so they have room for half as many.
    """
    most = (128 if size <= 1024 else 64) // (1 if op.attr("tf32") else 2)
    channels = -(op.reads[0].cols // -8) * 8
    depth = most
    while depth > 16 and -(channels // -depth) * depth > 1.25 * channels:
        depth //= 2  # too many of the last block would be nothing
    return depth


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
