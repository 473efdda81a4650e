"""What a tile of a region takes on a GPU, for every tile shape, against what planning expects.

A chain of equal ops, each reading what the one before it wrote, is one region; the time of a long
chain less that of a short one, by the ops between, is an op with its signal: launches cancel out.
Kernels are compiled by several processes first. `-o` keeps the numbers, to fit the constants of
`gpu/rtasks/tilecosts.py`; the table ends with the spread of measured over planned by kind.
"""

import argparse
import json
import math
import multiprocessing
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from partita.cluster import resolve
from partita.gpu.measure import run_us
from partita.gpu.rtasks.arena import RegionOps
from partita.gpu.rtasks.check_table import reads_by_place
from partita.gpu.rtasks.region import Region
from partita.gpu.rtasks.tilecosts import SIGNAL_US, Unit, tile_us
from partita.gpu.rtasks.tileops import Place, Tile, TileOp, num_tiles, tiles
from partita.problems.rprogram import rprogram
from partita.problems.rtasks import ROperator, RtasksProblem, TileEdge, Tiling, VDevice
from partita.search import searches

SHORT, LONG = 2, 6
PER_UNIT = 2
DTYPES = {"f16": torch.float16, "f32": torch.float32, "tf32": torch.float32}


@dataclass(frozen=True)
class Case:
    """An op that can follow itself: as many channels out as in. `side` is that of an image."""

    kind: str
    channels: int
    side: int = 1
    kernel: int = 1
    mode: str = "f16"  # f32: exact products; tf32: rounded ones

    @property
    def rows(self) -> int:
        """Pixels."""
        return self.side * self.side

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.channels} x {self.side} x {self.side}, {self.kernel}, {self.mode}"
        )


CASES = [
    *(Case("gemv", size, mode=m) for size in (256, 512, 1024, 2048, 4096) for m in ("f16", "f32")),
    *(Case("gemv", size, 2, mode=m) for size in (256, 1024) for m in ("f16", "f32")),
    *(
        Case(kind, size, mode=m)
        for kind in ("lstm_cell", "gru_cell")
        for size in (64, 128, 256, 512)
        for m in ("f16", "f32")
    ),
    *(Case("rows", size, side) for size in (256, 1024) for side in (1, 8)),
    *(
        Case("conv", channels, side, kernel, mode)
        for channels, side, kernel in (
            (32, 32, 1), (128, 8, 1), (256, 14, 1), (672, 11, 1), (64, 10, 1), (512, 7, 1),
            (32, 32, 3), (64, 28, 3), (128, 14, 3), (256, 14, 3), (512, 7, 3),
        )
        for mode in ("f16", "tf32", "f32")
    ),
    *(
        Case("window", channels, side, kernel, mode)
        for channels, side, kernel in (
            (32, 32, 3), (32, 32, 5), (128, 8, 5), (672, 11, 3), (672, 11, 7),
        )
        for mode in ("f16", "f32")
    ),
]  # fmt: skip


def chain(case: Case, length: int) -> tuple[list[TileOp], int]:
    """The ops, and how many numbers their arena has."""
    ops: list[TileOp] = []
    size = 0

    def place(rows: int, cols: int) -> Place:
        nonlocal size
        place = Place(size, rows, cols, -(cols // -8) * 8)
        size += -(rows * place.stride // -64) * 64
        return place

    taps, pad = case.kernel**2, case.kernel // 2
    image = (case.side, case.side)
    sliding = {
        "act": "relu", "pre": "", "image": image, "out": image, "kernel": (case.kernel,) * 2,
        "stride": (1, 1), "padding": (pad, pad), "dilation": (1, 1),
    }  # fmt: skip
    attrs: dict[str, dict[str, Any]] = {
        "gemv": {"act": "relu"},
        "conv": {**sliding, "tf32": case.mode != "f32"},
        "window": {**sliding, "mode": "depthwise", "factor": 1.0, "include_pad": True},
        "lstm_cell": {},
        "gru_cell": {},
        "rows": {"fn": "layernorm", "eps": 1e-5},
    }
    c = case.channels
    weights: dict[str, list[tuple[int, int]]] = {
        "gemv": [(c, c)],
        "conv": [(c, taps * c)],
        "window": [(taps, c)],
        "lstm_cell": [(4 * c, c)] * 2,
        "gru_cell": [(3 * c, c)] * 2,
        "rows": [],
    }
    x = place(case.rows, c)
    states = [place(1, c) for _ in range({"lstm_cell": 2, "gru_cell": 1}.get(case.kind, 0))]
    for number in range(length):
        outs = [place(case.rows, c) for _ in range(2 if case.kind == "lstm_cell" else 1)]
        held = tuple(place(*each) for each in weights[case.kind])
        wide = (0, 0) if case.kind in ("gru_cell", "rows") else (0,)
        ops.append(
            TileOp(
                f"op{number}", case.kind, (x, *states), tuple(outs), held, wide,
                tuple(attrs[case.kind].items()),
            )
        )  # fmt: skip
        x = outs[0]
    return ops, size


def region(case: Case, tile: Tile, length: int, units: int) -> tuple[Region, float]:
    """The kernel of a chain, and what is planned for it."""
    ops, size = chain(case, length)
    dtype = DTYPES[case.mode]
    kind = resolve("H200").kinds[0]
    unit = Unit.of(kind, dtype, arena_bytes=size * dtype.itemsize, per_unit=PER_UNIT)
    problem = RtasksProblem(
        VDevice(units, PER_UNIT, signal_us=SIGNAL_US),
        tuple(
            ROperator(op.name, (Tiling(num_tiles(op, tile), tile_us(op, tile, unit)),))
            for op in ops
        ),
        tuple(TileEdge(number, number + 1) for number in range(length - 1)),
    )
    result = searches("rtasks")["list"](problem)
    assert result.solution is not None
    assert result.objective is not None
    data = (0.05 * torch.randn(size + 64, device="cuda")).to(dtype)
    wide = torch.zeros(4 * case.channels + 64, device="cuda")
    parts = RegionOps(tuple(ops), reads_by_place(ops))
    made = Region(parts, [tile] * length, rprogram(problem, result.solution), data, wide)
    made.compile()
    return made, result.objective


def compiled(case: Case) -> str:
    """Compile all kernels of a case, in a process of its own; what failed."""
    failed = []
    for tile in tiles(chain(case, 1)[0][0]):
        for length in (SHORT, LONG):
            try:
                region(case, tile, length, units())
            except Exception as error:
                failed.append(f"{case} {tile}: {type(error).__name__} {str(error)[:150]}")
    return "; ".join(failed)


def units() -> int:
    """Of this device."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def measured(case: Case) -> list[dict[str, Any]]:
    """A row per tile shape."""
    rows = []
    for tile in tiles(chain(case, 1)[0][0]):
        regions = [region(case, tile, length, units()) for length in (SHORT, LONG)]
        times = [run_us(made, 20) for made, _ in regions]
        between = LONG - SHORT
        op = chain(case, 1)[0][0]
        rows.append({
            "kind": case.kind, "channels": case.channels, "side": case.side,
            "kernel": case.kernel, "mode": case.mode, "rows": tile.rows, "cols": tile.cols,
            "depth": tile.depth, "tiles": num_tiles(op, tile),
            "measured_us": (times[1] - times[0]) / between,
            "planned_us": (regions[1][1] - regions[0][1]) / between,
            "launch_us": times[0] - SHORT * (times[1] - times[0]) / between,
            "about": regions[0][0].about(),
        })  # fmt: skip
    return rows


def main() -> None:
    """Print a line per case and tile shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("-o", "--output", help="the numbers as JSON")
    chosen = parser.parse_args()
    cases = [case for case in CASES if chosen.only in str(case)]
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool:
        for text in pool.imap_unordered(compiled, cases):
            if text:
                print(text, flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases:
        try:
            tiles_of_case = measured(case)
        except Exception as error:
            print(f"{case}: {type(error).__name__} {str(error)[:200]}", flush=True)
            continue
        rows += tiles_of_case
        words = [
            f"{r['rows']}x{r['cols']}x{r['depth']} ({r['tiles']}) "
            f"{r['measured_us']:.2f}/{r['planned_us']:.2f}"
            for r in tiles_of_case
        ]
        print(f"{case!s:30} {', '.join(words)}", flush=True)
    if chosen.output:
        Path(chosen.output).write_text(json.dumps(rows))
    for kind in sorted({(r["kind"], r["mode"]) for r in rows}):
        logs = [
            math.log(r["measured_us"] / r["planned_us"])
            for r in rows
            if (r["kind"], r["mode"]) == kind and r["measured_us"] > 0
        ]
        print(
            f"{' '.join(kind)}: measured over planned {math.exp(statistics.mean(logs)):.2f}, "
            f"spread {math.exp(statistics.pstdev(logs)):.2f}"
        )


if __name__ == "__main__":
    main()
