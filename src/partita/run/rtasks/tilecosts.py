"""How long a tile takes in one program, and what the ops of a region take as kernels of their own.

    tile    = start + count * tiles + max(bytes / share, flops / rate) + blocks * latency
    unfused = launches + sum over ops of max(bytes / memory, flops / rate)

A program has its share of what the units read together: of the cache's bandwidth or, where the
arena is larger than the cache, of the memory's; of few tiles each has more, up to `MOST_SHARE`.
Products of a few rows run on the plain units, the others on the tensor units at the part of the
peak that small tiles reach. The constants are of four warps on an H200.
"""

from dataclasses import dataclass

import torch

from partita.cluster import DeviceKind
from partita.problems.rtasks import Edge, ROperator, RtasksProblem, Tiling, VDevice
from partita.run.rtasks.arena import RegionOps
from partita.run.rtasks.tileops import Tile, TileOp, num_tiles, tiles

START_US = 0.8  # a row of the table, addresses, the first loads, the signal's release
SIGNAL_US = 0.8  # until a release on one unit is seen by another
COUNT_US = 0.003  # every tile of an op adds to the same counter
BLOCK_US = 0.12  # every further block of a sum: what prefetching does not hide
MEMORY_PART = 0.85  # of the memory's bandwidth that many small tiles reach
SHARED_PART = 0.25  # of a vector that all tiles of an op read: most of it comes from near
MOST_SHARE = 1.5  # times the even share that one program reads at most
PLAIN_PART = 0.35  # of the peak without tensor units
TENSOR_PART = 0.2  # of the peak with them, by tiles of at most 64 x 64
LAUNCH_US = 2.2  # a kernel of a CUDA graph, beside its work
MOST_TILES = 4096  # of one op: more is never faster
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Unit:
    """One program of a device, in bytes and flops per microsecond."""

    bytes_per_us: float
    plain_per_us: float
    tensor_per_us: float
    itemsize: int
    num_programs: int

    @classmethod
    def of(cls, kind: DeviceKind, dtype: torch.dtype, *, arena_bytes: int, per_unit: int) -> "Unit":
        """The even share of a program; `arena_bytes` decides where weights come from."""
        rate = kind.memory_bytes_per_s * MEMORY_PART
        if arena_bytes <= kind.cache_bytes:
            rate = max(rate, kind.cache_bytes_per_s)
        plain = kind.peak("f32") * PLAIN_PART
        name = NAMES[dtype] if dtype != torch.float32 else "tf32"
        tensor = kind.peak(name) * TENSOR_PART
        programs = kind.num_units * per_unit
        share = 1e-6 / programs
        return cls(rate * share, plain * share, tensor * share, dtype.itemsize, programs)


def tile_us(op: TileOp, tile: Tile, unit: Unit) -> float:
    """One tile of an op, with everything it reads."""
    rows, cols = min(tile.rows, op.writes[0].rows), min(tile.cols, op.writes[0].cols)
    work = _work(op, tile, rows, cols)
    number = num_tiles(op, tile)
    more = min(MOST_SHARE, max(1.0, unit.num_programs / number))
    rate = _rate(op, unit)
    moved_us = work.elements * unit.itemsize / (unit.bytes_per_us * more)
    time_us = max(moved_us, work.flops / (rate * min(more, 2.0)))
    return START_US + COUNT_US * number + time_us + max(work.blocks - 1, 0) * BLOCK_US


def _rate(op: TileOp, unit: Unit) -> float:
    """Flops per microsecond: products of many rows on tensor units, unless f32 stays f32."""
    tensor = op.kind == "conv" and (unit.itemsize < 4 or op.attr("tf32"))
    return unit.tensor_per_us if tensor else unit.plain_per_us


@dataclass(frozen=True, slots=True)
class Work:
    """Elements moved, flops, and blocks of a sum one after the other."""

    elements: float
    flops: float
    blocks: int


def _work(op: TileOp, tile: Tile, rows: int, cols: int) -> Work:
    if op.kind in ("gemv", "conv"):
        depth = op.weights[0].cols
        part = SHARED_PART if op.kind == "gemv" else 1.0
        elements = (part * rows + cols) * depth + rows * cols * len(op.reads)
        return Work(elements, 2.0 * rows * cols * depth, -(depth // -max(tile.depth, 1)))
    if op.kind in ("lstm_cell", "gru_cell"):
        depth, gates = sum(weight.cols for weight in op.weights), 4
        elements = (1 + gates * cols) * depth
        return Work(elements, 2.0 * gates * cols * depth, -(depth // -max(tile.depth, 1)))
    if op.kind == "window":
        taps = op.attr("kernel")[0] * op.attr("kernel")[1]
        return Work((taps + 2) * rows * cols, 2.0 * taps * rows * cols, -(taps // -8))
    lines = len(op.attr("steps")) if op.kind == "chain" else 8
    return Work(rows * cols * (len(op.reads) + 1), 4.0 * lines * rows * cols, 1)


def shapes_of(op: TileOp) -> tuple[Tile, ...]:
    """The tile shapes worth planning with: not more tiles than help."""
    found = [tile for tile in tiles(op) if num_tiles(op, tile) <= MOST_TILES]
    return tuple(found) or (min(tiles(op), key=lambda tile: num_tiles(op, tile)),)


def region_problem(region: RegionOps, device: VDevice, unit: Unit, name: str) -> RtasksProblem:
    """The tiles of a region on the units of a device; tiling i is `shapes_of(op)[i]`."""
    operators = tuple(
        ROperator(
            op.name,
            tuple(Tiling(num_tiles(op, t), tile_us(op, t, unit)) for t in shapes_of(op)),
        )
        for op in region.ops
    )
    edges = tuple(Edge(before, after) for before, after in region.edges)
    return RtasksProblem(device, operators, edges, name)


def unfused_us(region: RegionOps, kind: DeviceKind, unit: Unit, launches: int) -> float:
    """A region as `launches` kernels of their own, one after the other."""
    total = launches * LAUNCH_US
    for op in region.ops:
        out = op.writes[0]
        work = _work(op, Tile(out.rows, out.cols, 64), out.rows, out.cols)
        rate = _rate(op, unit)
        moved = work.elements * unit.itemsize / (kind.memory_bytes_per_s * 1e-6)
        total += max(moved, work.flops / (rate * unit.num_programs))
    return total
