"""Small regions of every kind of op, with what PyTorch computes for them.

A case fills an arena and returns its ops, who needs whom, and what must stand where afterwards.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from partita.gpu.rtasks.arena import RegionOps
from partita.gpu.rtasks.check_table import reads_by_place
from partita.gpu.rtasks.tileops import NOWHERE, Place, Tile, TileOp, num_tiles
from partita.problems.rprogram import RProgram, check_rprogram, rprogram
from partita.problems.rtasks import ROperator, RtasksProblem, TileEdge, Tiling, VDevice
from partita.search import searches

T = torch.Tensor
Found = tuple[list[TileOp], list[tuple[int, int]], list[tuple[Place, T]]]


class Arena:
    """Places one after the other, and what they hold at first."""

    def __init__(self) -> None:
        self.size = self.wide_size = 8
        self.values: list[tuple[Place, T]] = []
        self.wides: list[tuple[int, T]] = []

    def place(self, rows: int, cols: int) -> Place:
        place = Place(self.size, rows, cols, -(cols // -8) * 8)
        self.size += -(rows * place.stride // -64) * 64
        return place

    def put(self, value: T) -> Place:
        value = value.reshape(-1, value.shape[-1]).detach()
        place = self.place(*value.shape)
        self.values.append((place, value))
        return place

    def wide(self, value: T) -> int:
        at = self.wide_size
        self.wides.append((at, value.detach()))
        self.wide_size += -(len(value) // -8) * 8
        return at

    def build(self, dtype: torch.dtype, device: str) -> tuple[T, T]:
        data = torch.zeros(self.size, dtype=dtype, device=device)
        wide = torch.zeros(self.wide_size, device=device)
        for place, value in self.values:
            view(data, place).copy_(value)
        for at, value in self.wides:
            wide[at : at + len(value)] = value
        return data, wide


def view(data: T, place: Place) -> T:
    return data.as_strided((place.rows, place.cols), (place.stride, 1), place.at)


def pixels(image: T) -> T:
    return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1])


def region_of(ops: list[TileOp]) -> RegionOps:
    return RegionOps(tuple(ops), reads_by_place(ops))


def program_of(
    ops: list[TileOp], tiles: list[Tile], edges: list[tuple[int, int]], units: int = 4
) -> RProgram:
    operators = tuple(
        ROperator(op.name, (Tiling(num_tiles(op, tile), 1.0),))
        for op, tile in zip(ops, tiles, strict=True)
    )
    problem = RtasksProblem(
        VDevice(units, 2, signal_us=1.0), operators, tuple(TileEdge(*edge) for edge in edges)
    )
    solution = searches("rtasks")["list"](problem).solution
    assert solution is not None
    program = rprogram(problem, solution)
    assert not check_rprogram(problem, program, 2 * units)
    return program


def gemv(name: str, x: Place, out: Place, w: Place, bias: int, act: str, *more: Place) -> TileOp:
    return TileOp(name, "gemv", (x, *more), (out,), (w,), (bias,), (("act", act),))


def two_layers(arena: Arena) -> Found:
    x, w1, b1 = torch.randn(1, 40), torch.randn(72, 40), torch.randn(72)
    w2, residual = torch.randn(33, 72) / 8, torch.randn(1, 33)
    hidden, out = arena.place(1, 72), arena.place(1, 33)
    ops = [
        gemv("a", arena.put(x), hidden, arena.put(w1), arena.wide(b1), "relu"),
        gemv("b", hidden, out, arena.put(w2), NOWHERE, "gelu", arena.put(residual)),
    ]
    first = functional.relu(x @ w1.T + b1)
    return ops, [(0, 1)], [(hidden, first), (out, functional.gelu(first @ w2.T + residual))]


def several_rows(arena: Arena) -> Found:
    x, w, bias = torch.randn(5, 600), torch.randn(72, 600) / 24, torch.randn(72)
    out = arena.place(5, 72)
    ops = [gemv("a", arena.put(x), out, arena.put(w), arena.wide(bias), "silu")]
    return ops, [], [(out, functional.silu(x @ w.T + bias))]


def sliding(image: int, out: int, kernel: int, stride: int, padding: int) -> dict[str, object]:
    return {
        "image": (image, image), "out": (out, out), "kernel": (kernel, kernel),
        "stride": (stride, stride), "padding": (padding, padding), "dilation": (1, 1),
    }  # fmt: skip


def convolution(arena: Arena) -> Found:
    x, w, bias = torch.randn(2, 21, 9, 9), torch.randn(40, 21, 3, 3) / 14, torch.randn(40)
    residual, scale, shift = torch.randn(2, 40, 5, 5), torch.randn(21), torch.randn(21)
    out = arena.place(50, 40)
    weight = functional.pad(w.permute(0, 2, 3, 1), (0, 3)).reshape(40, -1)  # channels in eights
    attrs = {"act": "relu", "pre": "affine_relu", **sliding(9, 5, 3, 2, 1), "tf32": False}
    wide = (arena.wide(bias), arena.wide(scale), arena.wide(shift))
    reads = (arena.put(pixels(x)), arena.put(pixels(residual)))
    op = TileOp("c", "conv", reads, (out,), (arena.put(weight),), wide, tuple(attrs.items()))
    changed = functional.relu(x * scale[:, None, None] + shift[:, None, None])
    wanted = functional.relu(functional.conv2d(changed, w, bias, 2, 1) + residual)
    return [op], [], [(out, pixels(wanted))]


def windows(arena: Arena) -> Found:
    x, w = torch.randn(1, 24, 9, 9), torch.randn(24, 1, 3, 3)
    read = arena.put(pixels(x))
    outs = [arena.place(25, 24) for _ in range(4)]
    ops = []
    for out, mode, pre, factor, weights in (
        (outs[0], "depthwise", "relu", 1.0, (arena.put(w.reshape(24, 9).T),)),
        (outs[1], "maxpool", "", 1.0, ()),
        (outs[2], "avgpool", "", 2.0, ()),
    ):
        attrs = {"act": "", "pre": pre, **sliding(9, 5, 3, 2, 1), "mode": mode, "factor": factor}
        attrs["include_pad"] = False
        attrs_of = tuple(attrs.items())
        ops.append(TileOp(mode, "window", (read,), (out,), weights, (NOWHERE,), attrs_of))
    two = torch.full((24,), 2.0)
    wide = (arena.wide(two), arena.wide(torch.ones(24)))
    attrs_of = (("act", "relu"), ("factors", (1.0, 0.5, -1.0)))
    ops.append(TileOp("sum", "combine", tuple(outs[:3]), (outs[3],), (), wide, attrs_of))
    made = [
        functional.conv2d(functional.relu(x), w, None, 2, 1, groups=24),
        functional.max_pool2d(x, 3, 2, 1),
        functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False) * 2,
    ]
    made.append(functional.relu((made[0] + 0.5 * made[1] - made[2]) * 2 + 1))
    checks = [(out, pixels(value)) for out, value in zip(outs, made, strict=True)]
    return ops, [(0, 3), (1, 3), (2, 3)], checks


def chain_and_rows(arena: Arena) -> Found:
    x, row, column, other = (
        torch.randn(7, 50), torch.randn(1, 50), torch.randn(7, 1), torch.randn(7, 50)
    )  # fmt: skip
    weight, bias = torch.randn(50), torch.randn(50)
    reads = tuple(arena.put(value) for value in (x, row, column, other))
    out, soft, norm, root = (arena.place(7, 50) for _ in range(4))
    steps = (
        ("add", "r0", "r1"), ("tanh", "s0"), ("mul", "s1", "r2"), ("sub", "s2", "r3"),
        ("mul", "s3", "w0"), ("maximum", "s4", 0.25), ("div", 1.0, "s5"),
    )  # fmt: skip
    scales = (arena.wide(weight), arena.wide(bias))
    ops = [
        TileOp("e", "chain", reads, (out,), (), scales[:1], (("steps", steps),)),
        TileOp("s", "rows", (out,), (soft,), attrs=(("fn", "softmax"), ("eps", 0.0))),
        TileOp("l", "rows", (out, reads[0]), (norm,), (), scales,
               (("fn", "layernorm"), ("eps", 1e-5))),
        TileOp("r", "rows", (out,), (root,), attrs=(("fn", "rmsnorm"), ("eps", 1e-5))),
    ]  # fmt: skip
    made = 1 / torch.clamp_min((torch.tanh(x + row) * column - other) * weight, 0.25)
    checks = [
        (out, made), (soft, made.softmax(1)),
        (norm, functional.layer_norm(made + x, (50,), weight, bias, 1e-5)),
        (root, functional.rms_norm(made, (50,), eps=1e-5)),
    ]  # fmt: skip
    return ops, [(0, 1), (0, 2), (0, 3)], checks


def cells(arena: Arena) -> Found:
    x, h, c = torch.randn(1, 20), torch.randn(1, 24), torch.randn(1, 24)
    lstm, gru = torch.nn.LSTMCell(20, 24), torch.nn.GRUCell(20, 24)
    read = arena.put(x)
    outs = [arena.place(1, 24) for _ in range(3)]
    ops = [
        TileOp("lstm", "lstm_cell", (read, arena.put(h), arena.put(c)), tuple(outs[:2]),
               (arena.put(lstm.weight_ih), arena.put(lstm.weight_hh)),
               (arena.wide(lstm.bias_ih + lstm.bias_hh),)),
        TileOp("gru", "gru_cell", (read, outs[0]), (outs[2],),
               (arena.put(gru.weight_ih), arena.put(gru.weight_hh)),
               (arena.wide(gru.bias_ih), arena.wide(gru.bias_hh))),
    ]  # fmt: skip
    with torch.no_grad():
        made, cell = lstm(x, (h, c))
        last = gru(x, made)
    return ops, [(0, 1)], [(outs[0], made), (outs[1], cell), (outs[2], last)]


def many_waits(arena: Arena) -> Found:
    """A sum that waits for more ops than a row of the table has room for."""
    x = torch.randn(1, 16)
    read, total = arena.put(x), arena.place(1, 16)
    parts = [arena.place(1, 16) for _ in range(12)]
    softmax = (("fn", "softmax"), ("eps", 0.0))
    ops = [TileOp(f"p{i}", "rows", (read,), (part,), attrs=softmax) for i, part in enumerate(parts)]
    attrs = (("act", ""), ("factors", (1.0,) * 6))
    ops.append(TileOp("sum", "combine", tuple(parts[:6]), (total,), (), (NOWHERE, NOWHERE), attrs))
    edges = [(i, 12) for i in range(12)]  # more than it reads: such waits are allowed
    return ops, edges, [(total, 6 * x.softmax(1))]


CASES: tuple[Callable[[Arena], Found], ...] = (
    two_layers, several_rows, convolution, windows, chain_and_rows, cells, many_waits,
)  # fmt: skip


def run_cases(
    device: str, dtype: torch.dtype, tolerance: float, launches: int = 3, delay: int = 0
) -> None:
    """Every case with its smallest and its largest tiles, launched several times."""
    from partita.gpu.rtasks.region import Region
    from partita.gpu.rtasks.tileops import tiles

    for case in CASES:
        for pick in (0, -1):
            torch.manual_seed(0)
            arena = Arena()
            ops, edges, checks = case(arena)
            chosen = [tiles(op)[pick] for op in ops]
            data, wide = arena.build(dtype, device)
            program = program_of(ops, chosen, edges)
            region = Region(region_of(ops), chosen, program, data, wide, delay=delay)
            for _ in range(launches):
                for place, _ in checks:
                    view(data, place).fill_(float("nan"))
                region()
                for place, wanted in checks:
                    cpu = view(data, place).float().cpu()
                    error = (cpu - wanted).abs().max() / wanted.abs().max()
                    assert error < tolerance, f"{case.__name__}, tile {pick}: {error}"
