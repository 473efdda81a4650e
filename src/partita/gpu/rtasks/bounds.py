"""How far the tiles of a region reach: every operand of every op, from sizes, before a launch.

The kinds of ops are those of `tileops.py`, what each function touches is read off
`kernels/tiles.py`: masks keep a tile inside the sizes that it was generated for, so it is enough
that operands of these sizes lie inside the arena.
"""

from collections.abc import Iterator, Sequence

from partita.gpu.bounds import Reach, matrix_end
from partita.gpu.rtasks.tileops import NOWHERE, Place, TileOp

Touched = tuple[str, Place, int, int]  # operand, where, rows and columns that are touched
GATES = {"lstm_cell": 4, "gru_cell": 3}


def region_reaches(ops: Sequence[TileOp], data: int, wide: int) -> list[Reach]:
    """What the ops may touch of an arena of `data` elements and one of `wide` numbers."""
    reaches = []
    for op in ops:
        for operand, place, rows, cols in touched(op):
            needs = matrix_end(rows, place.stride, cols)
            reaches.append(Reach(f"{op.name}, {operand}", needs, data - place.at, place.at))
        for index, length in enumerate(wide_lengths(op)):
            at = op.wide[index] if index < len(op.wide) else NOWHERE
            if at != NOWHERE:
                reaches.append(Reach(f"{op.name}, vector {index}", length, wide - at, at))
    return reaches


def touched(op: TileOp) -> Iterator[Touched]:
    """Every operand in the arena with the rows and columns that tiles touch."""
    out = op.writes[0]
    for index, place in enumerate(op.writes):
        yield f"result {index}", place, out.rows, out.cols
    if op.kind in GATES:
        yield from _cell(op)
        return
    if op.kind in ("combine", "chain"):
        for index, place in enumerate(op.reads):
            rows = 1 if place.rows == 1 else out.rows
            yield f"term {index}", place, rows, 1 if place.cols == 1 else _columns(place, out)
        return
    x = op.reads[0]
    if len(op.reads) > 1:
        yield "residual", op.reads[1], out.rows, out.cols
    if op.kind == "gemv":
        yield "input", x, out.rows, x.cols
        yield "weight", op.weights[0], out.cols, x.cols
    elif op.kind == "rows":
        yield "input", x, out.rows, out.cols
    else:
        yield from _sliding(op, x, out)


def _columns(place: Place, out: Place) -> int:
    """One row that stands for all is read as far as it goes; a matrix as far as the result."""
    return min(place.cols, out.cols) if place.rows == 1 else out.cols


def _sliding(op: TileOp, x: Place, out: Place) -> Iterator[Touched]:
    (high, wide), (out_high, out_wide) = op.attr("image"), op.attr("out")
    kernel, stride, padding = op.attr("kernel"), op.attr("stride"), op.attr("padding")
    taps = kernel[0] * kernel[1]
    images = -(-out.rows // (out_high * out_wide))
    pixel = taps == 1 and tuple(stride) == (1, 1) and tuple(padding) == (0, 0) and op.kind == "conv"
    pixels = out.rows if pixel else images * high * wide
    channels = -(x.cols // -8) * 8
    if op.kind == "conv":
        yield "input", x, pixels, channels
        yield "weight", op.weights[0], out.cols, taps * channels
    else:
        yield "input", x, pixels, out.cols
        if op.weights:
            yield "weight", op.weights[0], taps, out.cols


def _cell(op: TileOp) -> Iterator[Touched]:
    x, h = op.reads[:2]
    gates = GATES[op.kind]
    yield "input", x, 1, x.cols
    yield "state", h, 1, h.cols
    if len(op.reads) > 2:
        yield "cell", op.reads[2], 1, h.cols
    yield "weight of the input", op.weights[0], gates * h.cols, x.cols
    yield "weight of the state", op.weights[1], gates * h.cols, h.cols


def wide_lengths(op: TileOp) -> tuple[int, ...]:
    """How much is read of each vector: biases, scales and shifts."""
    columns = op.writes[0].cols
    if op.kind in GATES:
        return (GATES[op.kind] * op.reads[1].cols,) * 2
    if op.kind == "conv":
        channels = -(op.reads[0].cols // -8) * 8
        return (columns, channels, channels)
    return (columns,) * 3
