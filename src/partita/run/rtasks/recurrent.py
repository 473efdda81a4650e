"""A stack of LSTM layers as one persistent kernel, for batch 1 and any length at call time.

`compile_stack` takes an `nn.LSTM` (one direction, no projection, no dropout) and gives a callable
with its arguments and outputs. Before the first launch it is checked that all programs fit on the
device at once, from the registers and shared memory of the compiled kernel: otherwise a program
could wait for one that has not started.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.errors import ProblemError

T = torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """How the rows of a layer are dealt: blocks of `rows + extra`; what stays in registers."""

    rows: int
    extra: int
    num_warps: int
    input_resident: bool

    def num_blocks(self, size: int) -> int:
        """Programs per layer."""
        return -(size // -(self.rows + self.extra))

    def __str__(self) -> str:
        kept = "all weights" if self.input_resident else "recurrent weights"
        return f"{self.rows}+{self.extra} rows, {self.num_warps} warps, {kept} in registers"


def shapes(
    inputs: int, size: int, num_layers: int, dtype: torch.dtype, device: torch.device
) -> list[Shape]:
    """Shapes worth trying, the most promising first: resident, weights within the registers."""
    units = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for rows in (4, 8, 16, 32):
        for extra in (0, rows // 4, rows // 2):
            for warps in (4, 8, 16):
                for resident in (False, True):
                    shape = Shape(
                        rows, extra if extra in (0, 1, 2, 4, 8, 16) else 0, warps, resident
                    )
                    if _plausible(shape, inputs, size, num_layers, dtype, units):
                        found.append(shape)
    return sorted(
        dict.fromkeys(found),
        key=lambda shape: (
            num_layers * shape.num_blocks(size) > units,  # two on a unit share its caches
            not shape.input_resident,
            abs(shape.num_warps - 8),
            shape.rows + shape.extra,
        ),
    )


def _plausible(
    shape: Shape, inputs: int, size: int, num_layers: int, dtype: torch.dtype, units: int
) -> bool:
    programs = num_layers * shape.num_blocks(size)
    width = _power(size) + (_power(max(inputs, size)) if shape.input_resident else 0)
    held = 4 * (shape.rows + shape.extra) * width * dtype.itemsize
    per_thread = held / 4 / (32 * shape.num_warps)
    per_unit = -(programs // -units)
    return per_thread <= 176 and per_unit * (per_thread + 60) * 32 * shape.num_warps <= 65536 + 8192


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@dataclass
class _Buffers:
    """What a call of one length needs; hidden states begin with zeros until a state is given."""

    x: T
    hidden: T
    cell: T
    started: bool = False


class Stack:
    """The compiled stack: call it as the module it was made from."""

    def __init__(self, module: nn.LSTM, device: torch.device, shape: Shape) -> None:
        _check(module)
        self.shape, self.device = shape, device
        self.size, self.num_layers = module.hidden_size, module.num_layers
        self.inputs, self.batch_first = module.input_size, module.batch_first
        self.dtype: torch.dtype = next(module.parameters()).dtype
        self.width_h = _power(self.size)
        self.width_x = _power(max(self.inputs, self.size))
        self.w_x = self._packed(module, "weight_ih_l{}", self.width_x)
        self.w_h = self._packed(module, "weight_hh_l{}", self.width_h)
        self.bias = self._biases(module)
        self.num_blocks = shape.num_blocks(self.size)
        self.counters = torch.zeros(self.num_layers + 2, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(self.num_layers, self.size, device=device)
        self._buffers: dict[int, _Buffers] = {}
        self._compiled: Any = None

    def _packed(self, module: nn.LSTM, name: str, width: int) -> T:
        layers = []
        for layer in range(self.num_layers):
            weight = getattr(module, name.format(layer)).detach()
            padded = weight.new_zeros(weight.shape[0], width)
            padded[:, : weight.shape[1]] = weight
            layers.append(padded)
        return torch.stack(layers).contiguous().to(self.device)

    def _biases(self, module: nn.LSTM) -> T:
        if not module.bias:
            return torch.zeros(self.num_layers, 4 * self.size, device=self.device)
        rows = [
            getattr(module, f"bias_ih_l{layer}").detach().float()
            + getattr(module, f"bias_hh_l{layer}").detach().float()
            for layer in range(self.num_layers)
        ]
        return torch.stack(rows).contiguous().to(self.device)

    def __call__(self, x: T, state: tuple[T, T] | None = None) -> tuple[T, tuple[T, T]]:
        """As `nn.LSTM`: output and (h, c); the length may differ from call to call."""
        steps = x.shape[1] if self.batch_first else x.shape[0]
        buffers = self._buffer(steps)
        buffers.x[:, : self.inputs].copy_(x.reshape(steps, self.inputs))
        cell = self._zeros if state is None else state[1].float().reshape(self._zeros.shape)
        if state is not None or buffers.started:
            first = 0 if state is None else state[0].reshape(self._zeros.shape)
            buffers.hidden[:, 0, : self.size] = first
            buffers.started = state is not None
        self._launch(buffers, cell, steps)
        output = buffers.hidden[-1, 1:, : self.size].reshape(x.shape[0], x.shape[1], self.size)
        last = buffers.hidden[:, -1, : self.size].unsqueeze(1)
        return output.clone(), (last.clone(), buffers.cell.unsqueeze(1).to(self.dtype, copy=True))

    def _buffer(self, steps: int) -> "_Buffers":
        if steps not in self._buffers:
            options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
            self._buffers[steps] = _Buffers(
                torch.zeros(steps, self.width_x, **options),
                torch.zeros(self.num_layers, steps + 1, self.width_h, **options),
                torch.zeros_like(self._zeros),
            )
        return self._buffers[steps]

    def _launch(self, buffers: "_Buffers", cell: T, steps: int) -> None:
        from partita.run.rtasks.recurrent_kernel import lstm_stack

        grid = (self.num_layers * self.num_blocks,)
        arguments = (
            buffers.x, self.w_x, self.w_h, self.bias, buffers.hidden, cell, buffers.cell,
            self.counters, steps, self.size,
            self.num_layers, self.num_blocks, self.shape.rows, self.shape.extra,
            self.width_x, self.width_h, self.shape.input_resident,
        )  # fmt: skip
        if self._compiled is None:
            self._compiled = lstm_stack.warmup(
                *arguments, grid=grid, num_warps=self.shape.num_warps
            )
            self._compiled._init_handles()
            self._check_resident()
        lstm_stack[grid](*arguments, num_warps=self.shape.num_warps)

    def _check_resident(self) -> None:
        """Refuse a kernel of which some program could wait for one that has not started."""
        resident = self.num_resident()
        programs = self.num_layers * self.num_blocks
        if programs > resident:
            raise ProblemError(
                f"{programs} programs, but only {resident} are resident at once ({self.about()})",
                fix="use larger blocks or fewer warps",
            )

    def num_resident(self) -> int:
        """How many programs of the compiled kernel the device holds at once."""
        properties = torch.cuda.get_device_properties(self.device)
        threads = 32 * self.shape.num_warps
        registers = -(max(self._compiled.n_regs, 16) // -8) * 8 * threads
        fit = min(65536 // registers, properties.max_threads_per_multi_processor // threads, 32)
        shared = self._compiled.metadata.shared + 1024
        fit = min(fit, properties.shared_memory_per_multiprocessor // shared)
        return int(fit * properties.multi_processor_count)

    def about(self) -> str:
        """The resources of the compiled kernel."""
        if self._compiled is None:
            return "not compiled"
        return (
            f"{self.num_layers * self.num_blocks} programs, {self._compiled.n_regs} registers, "
            f"{self._compiled.n_spills} spills, {self._compiled.metadata.shared} bytes shared"
        )


def compile_stack(module: nn.LSTM, device: torch.device, shape: Shape) -> Stack:
    """The stack for one shape; it is compiled and checked at its first call."""
    return Stack(module, device, shape)


def _check(module: nn.LSTM) -> None:
    refused = {
        "two directions": module.bidirectional,
        "a projection": module.proj_size > 0,
        "dropout between layers in training": module.dropout > 0 and module.training,
    }
    for what, found in refused.items():
        if found:
            raise ProblemError(f"an LSTM with {what} has no persistent form", fix="run it as it is")
