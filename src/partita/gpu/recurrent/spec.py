"""Which recurrent layers have a persistent kernel, and how their rows may be dealt to programs.

A *group* of programs owns one layer of a pipelined launch, or one direction of a layer that has
two. A program holds the weights of its rows in registers for the whole sequence, so what fits is a
matter of numbers:

    rows of a program = rows + extra, both powers of two (tiles are)
    programs          = groups * ceil(hidden / rows of a program)      at most one per unit
    held per thread   = slots * rows of a program * columns held / threads   32-bit registers

`shapes` lists what fits, by a rule: fewest steps one after the other first, then what a step takes
(a signal seen across the device, the products, input weights that come from the L2 cache), then
the fewest warps that need not spill: their sums cross fewer of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from partita.errors import ProblemError

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
KINDS = tuple(GATES)  # numbered as in the kernel
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_SEQUENCES = 4  # they take turns: with 8, cuDNN was faster in all that was measured
H200_UNITS = 132
REGISTERS = 65536  # of a unit
SPARE = 48  # registers a thread needs beside the weights it holds
COMFORT = 160  # weights of a thread, all as f32 as compilers may keep them: beyond, they spill
SIGNAL_US = 2.0  # write, signal, see, read: measured, roughly
L2_BYTES_PER_US = 5e6
PRODUCTS_PER_US = 80e3  # of a unit that converts, multiplies and adds
LAUNCH_US = 8.0  # a launch and the product before it
USUAL_STEPS = 100


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Recurrent layers as PyTorch has them: the arguments of `nn.LSTM`, `nn.GRU`, `nn.RNN`."""

    cell: str
    input_size: int
    hidden_size: int
    num_layers: int = 1
    bidirectional: bool = False
    bias: bool = True
    batch_first: bool = False
    batch: int = 1
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.cell not in GATES:
            raise ProblemError(f"no cell {self.cell!r}", fix=f"use one of {', '.join(GATES)}")
        for name in ("input_size", "hidden_size", "num_layers", "batch"):
            if getattr(self, name) < 1:
                raise ProblemError(f"{name} is {getattr(self, name)}", fix="give 1 or more")

    @property
    def gates(self) -> int:
        """Rows of a weight matrix per hidden row."""
        return GATES[self.cell]

    @property
    def slots(self) -> int:
        """Rows of a tile per hidden row: a power of two."""
        return 1 if self.gates == 1 else 4

    @property
    def directions(self) -> int:
        """One or two."""
        return 2 if self.bidirectional else 1


@dataclass(frozen=True, slots=True)
class Shape:
    """How the rows of a group are dealt, how many layers a launch has, what stays in registers."""

    rows: int
    extra: int
    num_warps: int
    input_resident: bool
    layers: int = 1

    def num_blocks(self, size: int) -> int:
        """Programs per group."""
        return -(size // -(self.rows + self.extra))

    def __str__(self) -> str:
        kept = "all weights" if self.input_resident else "recurrent weights"
        return (
            f"{self.rows}+{self.extra} rows, {self.num_warps} warps, "
            f"{self.layers} layers a launch, {kept} in registers"
        )


def power(size: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(size - 1, 0).bit_length()


def num_groups(spec: Recurrent, shape: Shape) -> int:
    """Groups of programs in one launch."""
    return spec.directions if spec.bidirectional else shape.layers


def fed_before(spec: Recurrent, shape: Shape, inputs: int) -> bool:
    """Whether a matrix product before the launch makes W_ih x of its first layer.

    It must where nothing else could (a layer needs both directions of the one below); it pays
    where a launch has one layer, or where the input is wider than the layers above it take.
    """
    return spec.bidirectional or shape.layers == 1 or power(inputs) > power(spec.hidden_size)


def input_width(spec: Recurrent, shape: Shape) -> int:
    """Columns of the input weights in the kernel; 1 where it has none."""
    if num_groups(spec, shape) == 1 or spec.bidirectional:
        return 1
    wide = power(spec.hidden_size)
    first = power(spec.input_size)
    return wide if fed_before(spec, shape, spec.input_size) else max(wide, first)


def held_weights(spec: Recurrent, shape: Shape) -> float:
    """Weights that a thread holds."""
    columns = power(spec.hidden_size)
    if shape.input_resident and input_width(spec, shape) > 1:
        columns += input_width(spec, shape)
    return spec.slots * (shape.rows + shape.extra) * columns / (32 * shape.num_warps)


def held_registers(spec: Recurrent, shape: Shape) -> float:
    """32-bit registers of a thread that they take."""
    return held_weights(spec, shape) * spec.dtype.itemsize / 4


def fits(spec: Recurrent, shape: Shape, units: int = H200_UNITS) -> bool:
    """Whether the weights fit the registers, and every program a unit of its own."""
    threads = 32 * shape.num_warps
    programs = num_groups(spec, shape) * shape.num_blocks(spec.hidden_size)
    room = min(255, REGISTERS // threads)
    return programs <= units and held_registers(spec, shape) + SPARE <= room


def estimate_us(spec: Recurrent, shape: Shape, num_steps: int = USUAL_STEPS) -> float:
    """About how long a call takes: for comparing shapes, not for promises."""
    launches = -(spec.num_layers // -shape.layers)
    width = input_width(spec, shape)
    rows = spec.slots * (shape.rows + shape.extra)
    products = rows * (power(spec.hidden_size) + (width if width > 1 else 0)) * spec.batch
    read = 0.0
    if width > 1 and not shape.input_resident:
        groups = num_groups(spec, shape)
        read = groups * spec.gates * spec.hidden_size * width * spec.dtype.itemsize
    step = SIGNAL_US + products / PRODUCTS_PER_US + read / L2_BYTES_PER_US
    return launches * (LAUNCH_US + (num_steps + shape.layers - 1) * step)


def shapes(spec: Recurrent, units: int = H200_UNITS) -> list[Shape]:
    """Shapes that fit, the most promising first; empty if none does."""
    return sorted(
        (shape for shape in _all_shapes(spec) if fits(spec, shape, units)),
        key=lambda shape: (
            round(estimate_us(spec, shape), 3),
            held_weights(spec, shape) > COMFORT,
            shape.num_warps,
            shape.extra,
            shape.rows,
        ),
    )


def _all_shapes(spec: Recurrent) -> Iterator[Shape]:
    widest = 1 if spec.bidirectional else spec.num_layers
    launches = sorted({-(spec.num_layers // -layers) for layers in range(1, widest + 1)})
    for count in launches:
        layers = 1 if spec.bidirectional else -(spec.num_layers // -count)
        held = (True, False) if layers > 1 else (True,)
        for rows in (4, 8, 16, 32) if spec.slots == 4 else (8, 16, 32, 64, 128):
            for extra in (0, rows // 4, rows // 2):
                for warps in (4, 8, 16):
                    for resident in held:
                        yield Shape(rows, extra, warps, resident, layers)


def recurrent_refusal(spec: Recurrent, units: int = H200_UNITS) -> str | None:
    """Why these layers have no persistent kernel; None if they have one."""
    if spec.dtype not in DTYPES:
        return f"{spec.dtype} has no persistent form, only f32, f16 and bf16 have"
    if spec.batch > MOST_SEQUENCES:
        return (
            f"a batch of {spec.batch}: its sequences would take turns, "
            f"which pays up to {MOST_SEQUENCES}"
        )
    if not shapes(spec, units):
        width = power(spec.hidden_size)
        size = spec.directions * spec.gates * spec.hidden_size * width * spec.dtype.itemsize
        return (
            f"the recurrent weights of a layer take {size / 1e6:,.1f} MB, "
            f"more than the registers of {units} units hold beside what a step needs "
            f"({units * REGISTERS * 4 / 1e6:,.1f} MB in all)"
        )
    return None
