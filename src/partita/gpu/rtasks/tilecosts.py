"""How long a tile takes in one program, and what the ops of a region take as kernels of their own.

    tile = start + count * tiles + work
    work of a conv    = max(blocks * block + steps * (step + area), moving)
    work of a window  = max(taps * (tap + its elements), moving)
    work of products  = moving + (blocks - 1) * block
    work of the rest  = moving, and for a norm or softmax the sums over its row
    moving  = max(bytes of the tile / share of the cache, bytes of the op / tiles / of the memory)
    unfused = launches + sum over ops of max(bytes / memory, flops / rate)

A program has its share of what the units read together from the cache, and of what they read from
memory where the arena is larger than the cache: there an op reads everything once. Of few tiles at
a time each has more, up to `MOST_SHARE`, counting those of ops as deep in the region, which run at
the same time. A conv goes through its sum in blocks of `depth` channels, one after the other, each
in steps of what one instruction of a tensor unit multiplies (32 bytes a row); exact products of f32
are several. Most of this waits for the step before, so that time hardly grows with the tile. A
product with a vector asks for its first weights before it waits for the vector.

The constants are of four warps on an H200, fitted to measured chains of equal ops
(`benchmarks/rtasks_tiles.py`): 14 % off in the root mean square, 16 % for sizes that were left out
of a fit, 15 % for recurrent cells, which were not part of it. Regions with many kinds of tasks take
up to 40 % longer.
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch

from partita.cluster import DeviceKind
from partita.gpu.rtasks.arena import RegionOps
from partita.gpu.rtasks.tileops import Tile, TileOp, num_tiles, tiles
from partita.problems.rtasks import ROperator, RtasksProblem, TileEdge, Tiling, VDevice

START_US = 0.58  # a row of the table, addresses, the first loads, the signal's release
SIGNAL_US = 0.78  # until a release on one unit is seen by another
COUNT_US = 0.0012  # every tile of an op adds to the same counter
BLOCK_US = 0.27  # every further block of a sum: what prefetching does not hide
CONV_BLOCK_US = 0.11  # a block of a convolution: a barrier, addresses
STEP_US = 0.02  # a step of a tensor unit, and what it has to load
AREA_US = 0.01  # more of it for every 1,024 elements of the tile
GROUP_STEP_US = 0.0145  # for every byte of a number, where all warps multiply together
GROUP_ROWS = 64  # of a tile, for that
EXACT_STEPS = 3  # steps for one with f32 as it is
TAP_US = 0.053  # a tap of a window
ELEMENT_US = 0.0026  # more of it for every byte that a thread loads
ROW_US = 0.2  # a softmax or a norm: sums that cross warps
COLUMNS_US = 0.4  # more of it for every 1,024 columns
THREADS = 128
MEMORY_PART = 0.85  # of the memory's bandwidth that many small tiles reach
CACHE_PART = 0.75  # of the cache's size: what is nearly as large as it does not stay there
AHEAD = 2.4  # times faster: weights that are asked for before the wait
MOST_SHARE = 2.8  # times the even share that one program reads at most
PLAIN_PART = 0.35  # of the peak without tensor units
TENSOR_PART = 0.2  # of the peak with them, by tiles of at most 64 x 64
LAUNCH_US = 2.2  # a kernel of a CUDA graph, beside its work
MOST_TILES = 4096  # of one op: more is never faster
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Unit:
    """One program of a device, in bytes and flops per microsecond."""

    cache_per_us: float
    memory_per_us: float  # infinite where everything stays in the cache
    plain_per_us: float
    tensor_per_us: float
    itemsize: int
    num_programs: int

    @classmethod
    def of(cls, kind: DeviceKind, dtype: torch.dtype, *, arena_bytes: int, per_unit: int) -> "Unit":
        """The even share of a program; `arena_bytes` decides where weights come from."""
        fits = arena_bytes <= CACHE_PART * kind.cache_bytes
        memory = math.inf if fits else kind.memory_bytes_per_s * MEMORY_PART
        cache = max(kind.cache_bytes_per_s, kind.memory_bytes_per_s)
        plain = kind.peak("f32") * PLAIN_PART
        name = NAMES[dtype] if dtype != torch.float32 else "tf32"
        tensor = kind.peak(name) * TENSOR_PART
        programs = kind.num_units * per_unit
        share = 1e-6 / programs
        return cls(
            cache * share, memory * share, plain * share, tensor * share, dtype.itemsize, programs
        )


def tile_us(op: TileOp, tile: Tile, unit: Unit, beside: int = 1) -> float:
    """One tile of an op, with everything it reads, while as many ops run at once."""
    rows, cols = min(tile.rows, op.writes[0].rows), min(tile.cols, op.writes[0].cols)
    number = num_tiles(op, tile)
    more = min(MOST_SHARE, max(1.0, unit.num_programs / (number * beside)))
    near = _elements(op, rows, cols) * unit.itemsize / (unit.cache_per_us * more)
    far = _distinct(op) / number * unit.itemsize / (unit.memory_per_us * more)
    if op.kind == "conv":
        work_us = max(_conv_us(op, tile, unit), near, far)
    elif op.kind == "window":
        work_us = max(_window_us(op, tile, unit), near, far)
    elif op.weights:
        work_us = max(near / AHEAD, far) + (rows * _blocks(op, tile) - 1) * BLOCK_US
    else:
        work_us = max(near, far) + (_row_us(cols) if op.kind == "rows" else 0.0)
    return START_US + COUNT_US * number + work_us


def _elements(op: TileOp, rows: int, cols: int) -> float:
    """Numbers that a tile moves; a vector that all tiles read comes from near."""
    if op.kind == "gemv":
        return cols * op.weights[0].cols + rows * cols * len(op.reads)
    if op.kind == "conv":
        return (rows + cols) * op.weights[0].cols + rows * cols * len(op.reads)
    if op.kind in ("lstm_cell", "gru_cell"):
        return 4 * cols * sum(weight.cols for weight in op.weights)
    if op.kind == "window":
        return (_taps(op) + 2) * rows * cols
    return rows * cols * (len(op.reads) + 1)


def _distinct(op: TileOp) -> int:
    """Numbers that an op reads and writes, each once."""
    return sum(place.rows * place.cols for place in (*op.reads, *op.weights, *op.writes))


def _conv_us(op: TileOp, tile: Tile, unit: Unit) -> float:
    blocks = _blocks(op, tile)
    steps = blocks * tile.depth * unit.itemsize / 32
    if unit.itemsize == 4 and not op.attr("tf32"):
        steps *= EXACT_STEPS
    step_us = STEP_US + AREA_US * tile.rows * tile.cols / 1024
    if tile.rows >= GROUP_ROWS:
        step_us = GROUP_STEP_US * unit.itemsize
    return blocks * CONV_BLOCK_US + steps * step_us


def _window_us(op: TileOp, tile: Tile, unit: Unit) -> float:
    loaded = tile.rows * tile.cols / THREADS * unit.itemsize
    return _taps(op) * (TAP_US + ELEMENT_US * loaded)


def _row_us(cols: int) -> float:
    return ROW_US + COLUMNS_US * cols / 1024


def _taps(op: TileOp) -> int:
    height, width = op.attr("kernel")
    return int(height * width)


def _blocks(op: TileOp, tile: Tile) -> int:
    """Steps of a sum: of a convolution, blocks of channels for every tap."""
    depth = max(tile.depth, 1)
    if op.kind == "conv":
        return _taps(op) * -(op.weights[0].cols // _taps(op) // -depth)
    return sum(-(weight.cols // -depth) for weight in op.weights)


def _flops(op: TileOp) -> float:
    rows, cols = op.writes[0].rows, op.writes[0].cols
    if op.kind in ("gemv", "conv"):
        return 2.0 * rows * cols * op.weights[0].cols
    if op.kind in ("lstm_cell", "gru_cell"):
        return 8.0 * cols * sum(weight.cols for weight in op.weights)
    if op.kind == "window":
        return 2.0 * _taps(op) * rows * cols
    return 4.0 * (len(op.attr("steps")) if op.kind == "chain" else 8) * rows * cols


def _rate(op: TileOp, unit: Unit) -> float:
    """Flops per microsecond: products of many rows on tensor units, unless f32 stays f32."""
    tensor = op.kind == "conv" and (unit.itemsize < 4 or op.attr("tf32"))
    return unit.tensor_per_us if tensor else unit.plain_per_us


def shapes_of(op: TileOp, itemsize: int) -> tuple[Tile, ...]:
    """The tile shapes worth planning with: not more tiles than help, and none that was slow.

    In f32 a convolution with tiles of 64 rows was never the fastest, alone or beside others.
    """
    shapes = [tile for tile in tiles(op) if num_tiles(op, tile) <= MOST_TILES]
    if op.kind == "conv" and itemsize == 4:
        shapes = [tile for tile in shapes if tile.rows < GROUP_ROWS] or shapes
    return tuple(shapes) or (min(tiles(op), key=lambda tile: num_tiles(op, tile)),)


def region_problem(region: RegionOps, device: VDevice, unit: Unit, name: str) -> RtasksProblem:
    """The tiles of a region on a device; tiling i of an op is the i-th of its `shapes_of`."""
    depth = _depths(region)
    beside = Counter(depth)
    operators = tuple(
        ROperator(
            op.name,
            tuple(
                Tiling(num_tiles(op, tile), tile_us(op, tile, unit, beside[at]))
                for tile in shapes_of(op, unit.itemsize)
            ),
        )
        for op, at in zip(region.ops, depth, strict=True)
    )
    edges = tuple(TileEdge(before, after) for before, after in region.edges)
    return RtasksProblem(device, operators, edges, name)


def _depths(region: RegionOps) -> list[int]:
    """Ops before each, one after the other; ops are in an order that their edges allow."""
    depths = [0] * len(region.ops)
    for before, after in sorted(region.edges, key=lambda edge: edge[1]):
        depths[after] = max(depths[after], depths[before] + 1)
    return depths


def unfused_us(region: RegionOps, kind: DeviceKind, unit: Unit, launches: int) -> float:
    """A region as `launches` kernels of their own, one after the other."""
    total = launches * LAUNCH_US
    for op in region.ops:
        out = op.writes[0]
        moved = _elements(op, out.rows, out.cols) * unit.itemsize
        flops_us = _flops(op) / (_rate(op, unit) * unit.num_programs)
        total += max(moved / (kind.memory_bytes_per_s * 1e-6), flops_us)
    return total
