"""What planning expects of a tile: near what was measured, and in the right order."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from partita.cluster import resolve  # noqa: E402
from partita.gpu.rtasks.arena import RegionOps  # noqa: E402
from partita.gpu.rtasks.tilecosts import (  # noqa: E402
    SIGNAL_US,
    Unit,
    region_problem,
    shapes_of,
    tile_us,
)
from partita.gpu.rtasks.tileops import Place, Tile, TileOp, num_tiles, tiles  # noqa: E402
from partita.problems.rtasks import VDevice  # noqa: E402

H200 = resolve("H200").kinds[0]
DTYPES = {"f16": torch.float16, "tf32": torch.float32, "f32": torch.float32}


def op_of(kind, channels, side=1, kernel=1, mode="f16"):
    image, pad = (side, side), kernel // 2
    sliding = {
        "act": "relu", "pre": "", "image": image, "out": image, "kernel": (kernel, kernel),
        "stride": (1, 1), "padding": (pad, pad), "dilation": (1, 1),
    }  # fmt: skip
    attrs = {
        "gemv": {"act": "relu"},
        "conv": {**sliding, "tf32": mode != "f32"},
        "window": {**sliding, "mode": "depthwise", "factor": 1.0, "include_pad": True},
    }[kind]
    rows, cols = {
        "gemv": (channels, channels),
        "conv": (channels, kernel**2 * channels),
        "window": (kernel**2, channels),
    }[kind]
    value = Place(0, side * side, channels, channels)
    weight = Place(0, rows, cols, cols)
    return TileOp("op", kind, (value,), (value,), (weight,), (0,), tuple(attrs.items()))


def unit_of(op, mode, ops=6):
    """As in a chain of some such ops with weights of their own."""
    dtype = DTYPES[mode]
    size = ops * op.weights[0].rows * op.weights[0].cols * dtype.itemsize
    return Unit.of(H200, dtype, arena_bytes=size, per_unit=2)


# microseconds of an op in a chain, on an H200 (benchmarks/rtasks_tiles.py)
MEASURED = [
    ("gemv", 256, 1, 1, "f16", Tile(1, 8, 256), 1.32),
    ("gemv", 1024, 1, 1, "f32", Tile(1, 8, 512), 1.82),
    ("gemv", 4096, 1, 1, "f16", Tile(1, 16, 512), 10.25),
    ("gemv", 4096, 1, 1, "f32", Tile(1, 16, 512), 16.67),
    ("conv", 32, 32, 1, "f16", Tile(16, 32, 32), 1.49),
    ("conv", 256, 14, 1, "tf32", Tile(32, 32, 128), 2.81),
    ("conv", 672, 11, 1, "f16", Tile(32, 32, 128), 3.64),
    ("conv", 672, 11, 1, "f32", Tile(32, 32, 64), 10.92),
    ("conv", 256, 14, 3, "f16", Tile(16, 32, 128), 6.76),
    ("conv", 256, 14, 3, "f16", Tile(16, 16, 32), 13.5),
    ("conv", 256, 14, 3, "tf32", Tile(16, 16, 128), 13.88),
    ("conv", 512, 7, 3, "f32", Tile(32, 32, 64), 67.13),
    ("window", 32, 32, 5, "f16", Tile(8, 32), 2.37),
    ("window", 672, 11, 7, "f32", Tile(16, 64), 10.19),
]


@pytest.mark.parametrize(("kind", "channels", "side", "kernel", "mode", "tile", "us"), MEASURED)
def test_a_tile_costs_about_what_was_measured(kind, channels, side, kernel, mode, tile, us):
    op = op_of(kind, channels, side, kernel, mode)
    waves = math.ceil(num_tiles(op, tile) / 264)
    outcome = waves * tile_us(op, tile, unit_of(op, mode)) + SIGNAL_US
    assert us / 1.4 < outcome < us * 1.4


def test_exact_products_take_longer_than_rounded_ones():
    rounded, exact = op_of("conv", 256, 14, 3, "tf32"), op_of("conv", 256, 14, 3, "f32")
    tile, unit = Tile(32, 32, 64), unit_of(rounded, "tf32")
    assert tile_us(exact, tile, unit) > 2 * tile_us(rounded, tile, unit)
    half = replace(unit, itemsize=2)
    assert tile_us(exact, tile, half) == tile_us(rounded, tile, half)


@pytest.mark.parametrize(
    ("channels", "mode", "depths"),
    [
        (256, "f16", {128, 64}),
        (256, "f32", {64, 32}),
        (32, "f16", {32}),
        (40, "f16", {16}),  # 48 of 40; 64 would be more than half for nothing
        (672, "tf32", {128, 64}),
        (8, "f16", {16}),
    ],
)
def test_a_convolution_sums_over_as_many_channels_at_a_time_as_fit(channels, mode, depths):
    op = op_of("conv", channels, 14, 3, mode)
    assert {tile.depth for tile in tiles(op)} == depths


def test_more_channels_at_a_time_are_cheaper():
    op = op_of("conv", 256, 14, 3)
    costs = [tile_us(op, Tile(32, 32, depth), unit_of(op, "f16")) for depth in (32, 64, 128)]
    assert costs == sorted(costs, reverse=True)


def test_a_model_larger_than_the_cache_reads_its_weights_from_memory():
    op, tile = op_of("gemv", 2048), Tile(1, 16, 512)
    assert tile_us(op, tile, unit_of(op, "f16")) > 1.5 * tile_us(op, tile, unit_of(op, "f16", 1))


def test_an_op_is_not_cut_into_more_tiles_than_help():
    op = op_of("conv", 4096, 64)
    assert all(num_tiles(op, tile) <= 4096 for tile in shapes_of(op, 2))
    assert shapes_of(op, 2)


def test_a_convolution_in_f32_has_no_tiles_of_64_rows():
    op = op_of("conv", 256, 14, 3)
    assert {tile.rows for tile in shapes_of(op, 2)} == {16, 32, 64}
    assert {tile.rows for tile in shapes_of(op, 4)} == {16, 32}


def test_ops_that_run_at_the_same_time_share_the_cache():
    op, tile = op_of("conv", 672, 11, 1, "tf32"), Tile(16, 16, 128)
    unit = unit_of(op, "tf32")
    alone, among = (tile_us(op, tile, unit, beside) for beside in (1, 8))
    assert among == alone  # more tiles than programs already
    large = Tile(64, 64, 64)
    assert tile_us(op, large, unit, 12) > 1.5 * tile_us(op, large, unit)
    ops = [replace(op, name=f"op{number}") for number in range(12)]
    wide, chain = (
        region_problem(RegionOps(tuple(ops), reads_from), VDevice(132, 2), unit, "region")
        for reads_from in ((((),),) * 12, (((),), *(((number,),) for number in range(11))))
    )
    assert wide.operators[0].tilings[-1].tile_us > chain.operators[0].tilings[-1].tile_us
