"""How a greedy decoder is dealt to programs, and which decoders fit.

    cells     layers * ceil(hidden / rows) programs, each with the weights of its rows
    head      all programs, `head_rows * chunks` rows of the vocabulary each

What does not fit the registers comes from the L2 cache every step: first the head, then the cells.
"""

from dataclasses import dataclass

from partita.gpu.recurrent.spec import (
    COMFORT,
    DTYPES,
    H200_UNITS,
    REGISTERS,
    SPARE,
    Recurrent,
    power,
)

MOST_TABLE_BYTES = 2**30  # of embedding rows times the input weights of the first layer
LEAST_HEAD_ROWS, MOST_HEAD_ROWS = 8, 32  # a program's share of the vocabulary at a time


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Rows of a layer and of the head per program; what stays in registers."""

    rows: int
    num_warps: int
    num_programs: int
    head_rows: int
    chunks: int
    cells_resident: bool = True
    head_resident: bool = True

    def __str__(self) -> str:
        cells, head = (
            "in registers" if kept else "in the L2 cache"
            for kept in (self.cells_resident, self.head_resident)
        )
        return (
            f"{self.num_programs} programs of {self.num_warps} warps, "
            f"{self.rows} rows of a layer {cells}, "
            f"{self.chunks} x {self.head_rows} of the head {head}"
        )


def decoder_shapes(spec: Recurrent, vocabulary: int, units: int = H200_UNITS) -> list[DecoderShape]:
    """Shapes that fit, the most promising first: small blocks, few warps, all in registers."""
    decoder_shapes = []
    for rows in (4, 8, 16, 32) if spec.slots == 4 else (8, 16, 32, 64, 128):
        cells = spec.num_layers * -(spec.hidden_size // -rows)
        programs = max(cells, min(units, -(vocabulary // -LEAST_HEAD_ROWS)))
        if programs > units:
            continue
        share = -(vocabulary // -programs)
        head_rows = min(max(power(share), LEAST_HEAD_ROWS), MOST_HEAD_ROWS)
        chunks = -(share // -head_rows)
        for warps in (4, 8, 16):
            for kept in ((True, True), (True, False), (False, False)):
                shape = DecoderShape(rows, warps, programs, head_rows, chunks, *kept)
                if _fits(spec, shape):
                    decoder_shapes.append(shape)
    return sorted(
        decoder_shapes,
        key=lambda shape: (
            not shape.cells_resident,
            not shape.head_resident,
            _held(spec, shape) > COMFORT,
            shape.rows,
            shape.num_warps,
        ),
    )


def _held(spec: Recurrent, shape: DecoderShape) -> float:
    """Weights that a thread holds: what is kept, and a tile of what is not."""
    cells, head = spec.slots * shape.rows, shape.head_rows
    kept = 2 * cells * shape.cells_resident + head * shape.head_resident
    passing = max(cells * (not shape.cells_resident), head * (not shape.head_resident))
    rows = kept + passing
    return rows * power(spec.hidden_size) / (32 * shape.num_warps)


def _fits(spec: Recurrent, shape: DecoderShape) -> bool:
    if shape.head_resident and shape.chunks > 1:
        return False
    held = _held(spec, shape) * spec.dtype.itemsize / 4
    return held + SPARE <= min(255, REGISTERS // (32 * shape.num_warps))


def decoder_refusal(spec: Recurrent, vocabulary: int, units: int = H200_UNITS) -> str | None:
    """Why a decoder over these layers has no persistent kernel; None if it has one."""
    if spec.dtype not in DTYPES:
        return f"{spec.dtype} has no persistent form, only f32, f16 and bf16 have"
    if spec.batch != 1:
        return f"a batch of {spec.batch}: sequences that stop at different steps have none"
    if spec.bidirectional:
        return "two directions: a decoder does not know what comes later"
    table = vocabulary * spec.gates * spec.hidden_size * 4
    if table > MOST_TABLE_BYTES:
        return (
            f"the input weights times every row of the embedding take {table / 1e6:,.1f} MB, "
            f"more than {MOST_TABLE_BYTES / 1e6:,.1f} MB"
        )
    if not decoder_shapes(spec, vocabulary, units):
        matrix = spec.gates * spec.hidden_size * power(spec.hidden_size)
        size = 2 * spec.num_layers * matrix * spec.dtype.itemsize
        return (
            f"the weights of its layers take {size / 1e6:,.1f} MB: no share of them fits "
            f"a program's registers, with one program for each of {units} units"
        )
    return None
