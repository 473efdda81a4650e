"""From ops with tiles to the source of a region's kernel: a loop over tasks, a branch a kind.

Ops that differ only in where their operands are share a branch; the table says where. So a network
of equal cells has the code of one. The source is a Python file of its own, readable, kept by its
hash under the user's cache folder: Triton needs a file, and compiles it once for all processes.
"""

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from partita.files import write_atomically
from partita.gpu.rtasks.tileops import NOWHERE, Tile, TileOp

HEADER = '''# mypy: ignore-errors
# ruff: noqa
"""The kernel of a fused region, generated; partita.gpu.kernels.tiles has what a branch does."""

import triton
import triton.language as tl

from partita.gpu.kernels import tiles as K
'''
LOOP = '''

@triton.jit
def region(data, wide, table, starts, waits, flags, state, NUM: tl.constexpr, SPIN: tl.constexpr,
           DELAY: tl.constexpr):
    """Every program runs its tasks in order; the last one to end counts the launch."""
    program = tl.program_id(0)
    epoch = tl.load(state, volatile=True)
    first = tl.load(starts + program)
    code = tl.load(table + first * K.WIDTH)
    for at in range(first, tl.load(starts + program + 1)):
        row = table + at * K.WIDTH
        following = tl.load(row + K.WIDTH)  # brings the next row near; there is one after the last
{branches}
        K.signal(row, flags, state, epoch + at, DELAY)
        code = following
    ended = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if ended == NUM - 1:
        tl.store(state + 1, 0)
        tl.store(state, epoch + 1)
'''
COMMON = "data, wide, row, waits, flags, state, epoch, SPIN"
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
CALLS = {
    "relu": 'K.act({0}, "relu")', "gelu": 'K.act({0}, "gelu")', "silu": 'K.act({0}, "silu")',
    "gelu_tanh": 'K.act({0}, "gelu_tanh")', "hardtanh": 'K.act({0}, "hardtanh")',
    "sigmoid": "K.sigmoid({0})", "tanh": "K.tanh({0})", "exp": "tl.exp({0})", "log": "tl.log({0})",
    "sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})", "neg": "-{0}", "abs": "tl.abs({0})",
    "square": "{0} * {0}", "reciprocal": "1.0 / {0}", "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
}  # fmt: skip
FUNCTIONS = frozenset({*INFIX, *CALLS})  # what a chain may be made of


class Source:
    """The text of a region's kernel, and the branch of every op."""

    def __init__(self, ops: Sequence[TileOp], tiles: Sequence[Tile]) -> None:
        self.branches: dict[str, int] = {}  # call -> code
        self.functions: list[str] = []
        self.chains: dict[str, str] = {}  # body -> name of its function
        self.codes = tuple(self._code(op, tile) for op, tile in zip(ops, tiles, strict=True))

    def _code(self, op: TileOp, tile: Tile) -> int:
        call = self._chain(op, tile) if op.kind in ("chain", "combine") else called(op, tile)
        return self.branches.setdefault(call, len(self.branches))

    def _chain(self, op: TileOp, tile: Tile) -> str:
        body = chain_body(op, tile)
        if body not in self.chains:
            self.chains[body] = f"chain_{len(self.chains)}"
            self.functions.append(
                f"@triton.jit\ndef {self.chains[body]}({COMMON}: tl.constexpr):\n{body}"
            )
        return f"{self.chains[body]}({COMMON})"

    @property
    def text(self) -> str:
        """The whole file."""
        lines = []
        for call, code in self.branches.items():
            lines += [
                f"        {'if' if code == 0 else 'elif'} code == {code}:",
                f"            {call}",
            ]
        functions = "".join(f"\n\n{function}" for function in self.functions)
        return HEADER + functions + LOOP.format(branches="\n".join(lines))

    def module(self) -> ModuleType:
        """The file, written where it is not yet, and loaded."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:20]
        path = cache_folder() / f"region_{digest}.py"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self.text, overwrite=True)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def cache_folder() -> Path:
    """Where generated kernels are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "partita" / "rtasks"


def called(op: TileOp, tile: Tile) -> str:
    """The call of an op's function, with everything that is the same for equal ops."""
    values = _VALUES[op.kind](op, tile)
    words = [COMMON, *(f"{name}={value!r}" for name, value in values.items())]
    return f"K.{op.kind}({', '.join(words)})"


def _has(op: TileOp, index: int) -> bool:
    return len(op.wide) > index and op.wide[index] != NOWHERE


def _residual(op: TileOp) -> int:
    return op.reads[1].stride if len(op.reads) > 1 else 0


def _gemv(op: TileOp, tile: Tile) -> dict[str, Any]:
    x, w, out = op.reads[0], op.weights[0], op.writes[0]
    return {
        "M": out.rows, "N": out.cols, "K": x.cols, "SX": x.stride, "SW": w.stride,
        "SO": out.stride, "SR": _residual(op), "BIAS": _has(op, 0), "ACT": op.attr("act"),
        "BN": tile.cols, "BK": tile.depth,
    }  # fmt: skip


def _sliding(op: TileOp) -> dict[str, Any]:
    names = (("H", "W"), ("OH", "OW"), ("KH", "KW"), ("SH", "SV"), ("PH", "PW"), ("DH", "DW"))
    attrs = ("image", "out", "kernel", "stride", "padding", "dilation")
    fields: dict[str, Any] = {}
    for pair, attr in zip(names, attrs, strict=True):
        fields.update(zip(pair, op.attr(attr), strict=True))
    out = op.writes[0]
    return {**fields, "M": out.rows, "N": out.cols, "SX": op.reads[0].stride, "SO": out.stride}


def _conv(op: TileOp, tile: Tile) -> dict[str, Any]:
    return {
        **_sliding(op), "C": -(op.reads[0].cols // -8) * 8, "SW": op.weights[0].stride,
        "SR": _residual(op), "BIAS": _has(op, 0), "PRE": op.attr("pre"), "ACT": op.attr("act"),
        "TF32": op.attr("tf32"), "BM": tile.rows, "BN": tile.cols, "BK": tile.depth,
    }  # fmt: skip


def _window(op: TileOp, tile: Tile) -> dict[str, Any]:
    return {
        **_sliding(op), "SW": op.weights[0].stride if op.weights else 0, "SR": _residual(op),
        "BIAS": _has(op, 0), "PRE": op.attr("pre"), "ACT": op.attr("act"),
        "MODE": op.attr("mode"), "FACTOR": op.attr("factor"), "ALL": op.attr("include_pad"),
        "BM": tile.rows, "BN": tile.cols,
    }  # fmt: skip


def _rows(op: TileOp, tile: Tile) -> dict[str, Any]:
    x, out = op.reads[0], op.writes[0]
    return {
        "M": out.rows, "N": out.cols, "SX": x.stride, "SR": _residual(op), "SO": out.stride,
        "WEIGHT": _has(op, 0), "BIAS": _has(op, 1), "FN": op.attr("fn"), "EPS": op.attr("eps"),
        "BN": _power(tile.cols),
    }  # fmt: skip


def _cell(op: TileOp, tile: Tile) -> dict[str, Any]:
    x, h = op.reads[:2]
    return {
        "H": h.cols, "X": x.cols, "SX": op.weights[0].stride, "SH": op.weights[1].stride,
        "BIAS": _has(op, 0), "BH": tile.cols, "BX": min(_power(x.cols), tile.depth),
        "BK": min(_power(h.cols), tile.depth),
    }  # fmt: skip


_VALUES = {
    "gemv": _gemv, "conv": _conv, "window": _window, "rows": _rows, "lstm_cell": _cell,
    "gru_cell": _cell,
}  # fmt: skip


def chain_body(op: TileOp, tile: Tile) -> str:
    """The lines of a function for elementwise work on a tile."""
    out = op.writes[0]
    lines = [
        f"m, n = K.place(row, {out.rows}, {tile.rows}, {tile.cols})",
        f"wanted = (m < {out.rows})[:, None] & (n < {out.cols})[None, :]",
        "K.wait(row, waits, flags, state, epoch, SPIN)",
    ]
    for index, x in enumerate(op.reads):
        sizes = f"{x.stride}, {x.rows}, {x.cols}"
        lines.append(f"r{index} = K.term(data, row, m, n, wanted, K.READS + {index}, {sizes})")
    if op.kind == "combine":
        sums = [f"{factor!r} * r{index}" for index, factor in enumerate(op.attr("factors"))]
        lines += [
            f"y = {' + '.join(sums)}",
            f"y = K.affine(wide, row, n, y, {out.cols}, {_has(op, 0)}, {_has(op, 1)})",
            f'y = K.act(y, "{op.attr("act")}")',
        ]
    else:
        for index in range(len(op.wide)):
            lines.append(f"w{index} = K.per_column(wide, row, n, K.WIDE + {index}, {out.cols})")
        for index, (function, *arguments) in enumerate(op.attr("steps")):
            lines.append(f"s{index} = {_expression(function, [_word(each) for each in arguments])}")
        lines.append(f"y = s{len(op.attr('steps')) - 1}")
    full = f"tl.zeros(({tile.rows}, {tile.cols}), tl.float32)"
    lines.append(f"K.store(data, row, m, n, wanted, y + {full}, {out.stride})")
    return "\n".join(f"    {line}" for line in lines)


def _word(argument: str | float) -> str:
    """A name as it is; a number so that infinities are numbers too."""
    return argument if isinstance(argument, str) else f'float("{float(argument)!r}")'


def _expression(function: str, arguments: list[str]) -> str:
    if function in INFIX:
        return f" {INFIX[function]} ".join(arguments)
    if function not in CALLS:
        raise ValueError(f"a chain cannot have {function!r}; known: {sorted(FUNCTIONS)}")
    return CALLS[function].format(*arguments)


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
