"""Every kind of tile op in plain PyTorch, tile by tile: what the kernels must agree with.

A tile reads the arena as it is at that moment and writes its own rectangle of the output, computed
in f32 and rounded once. Used as `run_tile` of `interpret.py`, with outputs that begin as NaN, this
checks lowering and programs without a GPU, and is how a region runs there.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as nnf

from partita.gpu.rtasks.arena import Arena, RegionOps
from partita.gpu.rtasks.tileops import NOWHERE, Place, Tile, TileOp, rectangle

T = torch.Tensor


class Tiles:
    """The ops of a region over an arena; call it as `run_tile`."""

    def __init__(self, region: RegionOps, tiles: Sequence[Tile], arena: Arena) -> None:
        self.region, self.tiles, self.arena = region, tuple(tiles), arena

    def spoil(self) -> None:
        """Make NaN of everything that the ops write."""
        for op in self.region.ops:
            for where in op.writes:
                self.arena.matrix(where).fill_(math.nan)

    def __call__(self, operator: int, tile: int) -> None:
        """Run one tile."""
        op = self.region.ops[operator]
        rows, cols = rectangle(op, self.tiles[operator], tile)
        with torch.no_grad():
            values = KINDS[op.kind](_Work(op, self.arena, rows, cols))
            for where, value in zip(op.writes, values, strict=True):
                whole = self.arena.matrix(where)
                whole[rows.start : rows.stop, cols.start : cols.stop] = value.to(whole.dtype)


class _Work:
    """One tile of an op: its rows and columns, and its operands as f32."""

    def __init__(self, op: TileOp, arena: Arena, rows: range, cols: range) -> None:
        self.op, self.arena = op, arena
        self.rows, self.cols = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
        self.shape = len(rows), len(cols)

    def read(self, number: int) -> T:
        return self.arena.matrix(self.op.reads[number]).float()

    def weight(self, number: int = 0) -> T:
        return self.arena.matrix(self.op.weights[number]).float()

    def wide(self, number: int, length: int | None = None) -> T | None:
        """A vector, as long as the output is wide or as said."""
        at = self.op.wide[number] if number < len(self.op.wide) else NOWHERE
        if at == NOWHERE:
            return None
        return self.arena.wide[at : at + (length or self.op.writes[0].cols)]

    def finish(self, y: T, residual: int = 1) -> tuple[T, ...]:
        """Bias and residual, then the activation."""
        bias = self.wide(0)
        if bias is not None:
            y = y + bias[self.cols]
        if len(self.op.reads) > residual:
            y = y + self.read(residual)[self.rows, self.cols]
        return (FUNCTIONS[self.op.attr("act") or "same"](y),)


def _gemv(work: _Work) -> tuple[T, ...]:
    return work.finish(work.read(0)[work.rows] @ work.weight()[work.cols].t())


def _taps(work: _Work, least: float) -> list[tuple[T, T]]:
    """For every tap of a window: the input's rows under the output's, and which there are."""
    op = work.op
    (height, width), (out_h, out_w) = op.attr("image"), op.attr("out")
    m = torch.arange(work.rows.start, work.rows.stop)
    image, i, j = m // (out_h * out_w), m // out_w % out_h, m % out_w
    whole: Place = op.reads[0]
    padded = Place(whole.at, whole.rows, -(whole.cols // -8) * 8, whole.stride)
    x = work.arena.matrix(padded).float()
    taps = []
    (kh, kw), (sh, sw) = op.attr("kernel"), op.attr("stride")
    (ph, pw), (dh, dw) = op.attr("padding"), op.attr("dilation")
    for tap in range(kh * kw):
        y, z = i * sh - ph + tap // kw * dh, j * sw - pw + tap % kw * dw
        inside = (y >= 0) & (y < height) & (z >= 0) & (z < width)
        rows = torch.where(inside, (image * height + y) * width + z, 0)
        value = _pre(work, x[rows])
        taps.append((torch.where(inside[:, None], value, least), inside))
    return taps


def _pre(work: _Work, x: T) -> T:
    pre = work.op.attr("pre")
    if pre.startswith("affine"):
        scale, shift = work.wide(1, x.shape[1]), work.wide(2, x.shape[1])
        assert scale is not None
        assert shift is not None
        x = x * scale + shift
    return nnf.relu(x) if pre.endswith("relu") else x


def _conv(work: _Work) -> tuple[T, ...]:
    taps = _taps(work, 0.0)
    weight = work.weight()[work.cols].reshape(work.shape[1], len(taps), -1)
    y = torch.zeros(work.shape)
    for tap, (x, _) in enumerate(taps):
        y += x @ weight[:, tap].t()
    return work.finish(y)


def _window(work: _Work) -> tuple[T, ...]:
    mode = work.op.attr("mode")
    taps = _taps(work, -math.inf if mode == "maxpool" else 0.0)
    parts = torch.stack([x[:, work.cols] for x, _ in taps])
    if mode == "maxpool":
        return work.finish(parts.amax(0))
    if mode == "depthwise":
        return work.finish((parts * work.weight()[:, None, work.cols]).sum(0))
    number: T | int = len(taps)
    if not work.op.attr("include_pad"):
        number = torch.stack([inside for _, inside in taps]).sum(0)[:, None]
    return work.finish(parts.sum(0) / number * work.op.attr("factor"))


def _combine(work: _Work) -> tuple[T, ...]:
    y = torch.zeros(work.shape)
    for number, factor in enumerate(work.op.attr("factors")):
        y = y + work.read(number)[work.rows, work.cols] * factor
    scale, shift = work.wide(0), work.wide(1)
    if scale is not None and shift is not None:
        y = y * scale[work.cols] + shift[work.cols]
    return (FUNCTIONS[work.op.attr("act") or "same"](y),)


def _chain(work: _Work) -> tuple[T, ...]:
    results: list[T] = []

    def operand(value: str | float) -> T:
        if isinstance(value, float):
            return torch.tensor(value)
        number = int(value[1:])
        if value[0] == "s":
            return results[number]
        if value[0] == "w":
            vector = work.wide(number)
            assert vector is not None
            return vector[work.cols]
        x = work.read(number)
        rows = work.rows if x.shape[0] > 1 else slice(None)
        return x[rows, work.cols if x.shape[1] > 1 else slice(None)]

    for fn, *operands in work.op.attr("steps"):
        results.append(FUNCTIONS[fn](*map(operand, operands)))
    return (results[-1].expand(work.shape),)


def _rows(work: _Work) -> tuple[T, ...]:
    x = work.read(0)[work.rows]
    if len(work.op.reads) > 1:
        x = x + work.read(1)[work.rows]
    fn, eps = work.op.attr("fn"), work.op.attr("eps")
    if fn == "softmax":
        y = x.softmax(1)
    else:
        x = x - x.mean(1, keepdim=True) if fn == "layernorm" else x
        y = x * (x.square().mean(1, keepdim=True) + eps).rsqrt()
    weight, bias = work.wide(0), work.wide(1)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (y[:, work.cols],)


def _gates(work: _Work, read: int, weight: int, bias: int, gates: int) -> list[T]:
    size = work.op.writes[0].cols
    gate_weights = work.weight(weight).reshape(gates, size, -1)[:, work.cols]
    vector = work.wide(bias, gates * size)
    sums = [work.read(read)[work.rows] @ each.t() for each in gate_weights]
    if vector is None:
        return sums
    return [y + b[work.cols] for y, b in zip(sums, vector.reshape(gates, size), strict=True)]


def _lstm_cell(work: _Work) -> tuple[T, ...]:
    ours, theirs = _gates(work, 0, 0, 0, 4), _gates(work, 1, 1, 1, 4)
    i, f, g, o = (a + b for a, b in zip(ours, theirs, strict=True))
    c = f.sigmoid() * work.read(2)[work.rows, work.cols] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(work: _Work) -> tuple[T, ...]:
    r, z, n = _gates(work, 0, 0, 0, 3)
    of_r, of_z, of_n = _gates(work, 1, 1, 1, 3)
    new = (n + (r + of_r).sigmoid() * of_n).tanh()
    kept = (z + of_z).sigmoid()
    return ((1 - kept) * new + kept * work.read(1)[work.rows, work.cols],)


KINDS: dict[str, Callable[[_Work], tuple[T, ...]]] = {
    "gemv": _gemv,
    "conv": _conv,
    "window": _window,
    "combine": _combine,
    "chain": _chain,
    "rows": _rows,
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
}
FUNCTIONS: dict[str, Callable[..., T]] = {
    "same": lambda x: x,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "relu": nnf.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": nnf.gelu,
    "gelu_tanh": lambda x: nnf.gelu(x, approximate="tanh"),
    "silu": nnf.silu,
    "hardtanh": nnf.hardtanh,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
