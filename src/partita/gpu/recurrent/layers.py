"""Recurrent layers as persistent kernels, for batches of up to four and any length at call time.

    run = compile_recurrent(spec, weights, device)
    output, h, c = run(x, h0, c0)              c is None but for an LSTM

Layers of one direction are pipelined in one launch, as many as fit; a layer of two directions is a
launch, since the next needs both ends of it. Before the first launch of a kernel it is checked that
all its programs fit on the device at once. A call can be captured in a CUDA graph, once a call of
the same length was made. One call at a time: two streams must not run the same callable.

Without a GPU, Triton's interpreter runs the same kernels as one program that takes all turns; waits
are then checks (`faults`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.errors import ProblemError
from partita.gpu.recurrent.pack import Packed, pack
from partita.gpu.recurrent.program import recurrent_rprogram
from partita.gpu.recurrent.spec import (
    H200_UNITS,
    KINDS,
    Recurrent,
    Shape,
    fits,
    num_groups,
    power,
    recurrent_refusal,
    shapes,
)
from partita.gpu.residency import check_resident, resident_programs, resources
from partita.problems.rprogram import RProgram
from partita.problems.rtasks import RtasksProblem

T = torch.Tensor
MOST_ELEMENTS = 2**31 - 1  # of the hidden states of a launch: offsets are 32 bits


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What calls of up to `capacity` steps share; columns beyond the hidden size stay zero."""

    hidden: T
    carry: T
    capacity: int


class Persistent:
    """The compiled layers; call it with the input and the states."""

    def __init__(
        self,
        spec: Recurrent,
        weights: Sequence[T],
        device: torch.device,
        shape: Shape,
        delay_ns: int = 0,
    ) -> None:
        self.spec, self.device, self.shape, self.delay_ns = spec, device, shape, delay_ns
        self.launches = pack(spec, weights, shape, device)
        self.num_groups = num_groups(spec, shape)
        self.num_blocks = shape.num_blocks(spec.hidden_size)
        self.width_h = power(spec.hidden_size)
        self.spins = device.type == "cuda"
        # where a program cannot keep its states: its steps are not all of one sequence, one by one
        self.carries = spec.batch > 1 or not (self.spins or self.num_blocks == 1)
        count = self.num_groups * spec.batch + 2
        self._counters = [self._zeros(count, dtype=torch.int32) for _ in self.launches]
        self._faults = self._zeros(1, dtype=torch.int32)
        self._start = self._zeros(
            spec.num_layers * spec.directions, spec.batch, spec.hidden_size, dtype=spec.dtype
        )
        self._scratch: dict[int, _Scratch] = {}
        self._compiled: dict[tuple[int, bool, int], Any] = {}
        self.turns: T | None = None  # for the interpreter: (step, program) in another order

    def _zeros(self, *size: int, dtype: torch.dtype) -> T:
        return torch.zeros(*size, dtype=dtype, device=self.device)

    def __call__(self, x: T, h0: T | None = None, c0: T | None = None) -> tuple[T, T, T | None]:
        """Output, h and c as PyTorch gives them; the length may differ from call to call."""
        num_times = self._check(x)
        spec = self.spec
        if spec.batch_first and spec.batch > 1:
            x = x.transpose(0, 1)
        value = aligned(x.reshape(num_times * spec.batch, spec.input_size))
        h0 = self._start if h0 is None else aligned(h0)
        c0 = self._start if c0 is None else aligned(c0)
        h = torch.empty_like(self._start)
        c = torch.empty_like(self._start) if spec.cell == "lstm" else None
        scratch = self._scratch_for(num_times * spec.batch)
        for index, packed in enumerate(self.launches):
            value = self._launch(index, packed, value, h0, c0, h, c, scratch, num_times)
        output = value.reshape(num_times, spec.batch, -1)
        return output.transpose(0, 1) if spec.batch_first else output, h, c

    def _check(self, x: T) -> int:
        spec = self.spec
        times = 1 if spec.batch_first else 0
        wanted: list[Any] = [spec.batch, spec.batch, spec.input_size]
        wanted[times] = "steps"
        sizes = list(x.shape)
        if len(sizes) == 3 and sizes[times] > 0:
            steps = sizes[times]
            sizes[times] = "steps"  # type: ignore[call-overload]
            if sizes == wanted and x.dtype == spec.dtype:
                return steps
        raise ProblemError(
            f"an input of {tuple(x.shape)} {x.dtype}",
            fix=f"give ({', '.join(map(str, wanted))}) {spec.dtype}",
        )

    def _scratch_for(self, num_steps: int) -> _Scratch:
        capacity = max(power(num_steps), 16)
        if self.num_groups * capacity * self.width_h > MOST_ELEMENTS:
            raise ProblemError(f"{num_steps} steps are too many", fix="cut the sequence")
        if capacity not in self._scratch:
            size, spec = self.num_groups, self.spec
            self._scratch[capacity] = _Scratch(
                self._zeros(size, capacity, self.width_h, dtype=spec.dtype),
                self._zeros(size, spec.batch, spec.hidden_size, dtype=torch.float32),
                capacity,
            )
        return self._scratch[capacity]

    def _launch(
        self,
        index: int,
        packed: Packed,
        value: T,
        h0: T,
        c0: T,
        h: T,
        c: T | None,
        scratch: _Scratch,
        num_times: int,
    ) -> T:
        """The layers of one launch on [steps * batch, columns]; the states are those of all."""
        from partita.gpu.kernels.recurrent import recurrent_layers

        spec, shape = self.spec, self.shape
        out = value.new_empty(value.shape[0], spec.directions * spec.hidden_size)
        fed = value if packed.w_pre is None else torch.mm(value, packed.w_pre.t())
        part = slice(packed.first * spec.directions, packed.last * spec.directions)
        groups = part.stop - part.start
        counters = self._counters[index]
        programs = groups * self.num_blocks
        if self.spins:
            turns, num_turns = counters, 0
        else:
            turns = self._turns(num_times * spec.batch, programs)
            num_turns = turns.shape[0]
        arguments = (
            value, fed, packed.w_x, packed.w_h, packed.bias, h0[part],
            (c0 if spec.cell == "lstm" else h0)[part], scratch.hidden, scratch.carry, out, h[part],
            (h if c is None else c)[part], counters, self._faults, turns,
            num_times, scratch.capacity, num_turns,
            KINDS.index(spec.cell), spec.slots, spec.gates,
            0 if packed.w_pre is not None else packed.inputs, spec.hidden_size, spec.batch,
            groups, self.num_blocks, shape.rows, shape.extra,
            packed.w_x.shape[2], self.width_h, packed.w_pre is not None, spec.bidirectional,
            shape.input_resident, self.carries, self.spins, self.delay_ns,
        )  # fmt: skip
        options = {"grid": (programs if self.spins else 1,), "num_warps": shape.num_warps}
        key = (groups, packed.w_pre is not None, packed.inputs)
        if self.spins and key not in self._compiled:
            compiled = recurrent_layers.warmup(*arguments, **options)
            compiled._init_handles()
            resident = resident_programs(compiled, shape.num_warps, self.device)
            check_resident(programs, resident, resources(compiled))
            self._compiled[key] = compiled
        recurrent_layers.run(*arguments, warmup=False, **options)
        return out

    def _turns(self, num_steps: int, programs: int) -> T:
        if self.turns is not None:
            return self.turns
        turns = num_steps * programs if self.carries else programs
        return torch.arange(turns, dtype=torch.int32, device=self.device)

    @property
    def faults(self) -> int:
        """How many waits came too early in the interpreter."""
        return int(self._faults.item())

    def about(self) -> str:
        """The resources of the compiled kernels."""
        programs = self.num_groups * self.num_blocks
        about = {f"{programs} programs, {resources(each)}" for each in self._compiled.values()}
        return "; ".join(sorted(about)) or "not compiled"

    def rprogram(self, num_steps: int) -> tuple[RtasksProblem, RProgram]:
        """What the programs of a launch wait for and signal in some steps, and what they need."""
        spec = self.spec
        return recurrent_rprogram(
            self.num_groups, self.num_blocks, num_steps, spec.batch, spec.bidirectional
        )


def aligned(tensor: T) -> T:
    """Contiguous and on a boundary of 16 bytes, so that no other kernel is compiled for it."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def compile_recurrent(
    spec: Recurrent,
    weights: Sequence[T],
    device: torch.device,
    shape: Shape | None = None,
    delay_ns: int = 0,
) -> Persistent:
    """The layers as a callable, by the most promising shape unless one is given.

    `weights` as PyTorch lists them: w_ih, w_hh, b_ih, b_hh per layer and direction. Kernels are
    compiled and checked at the first call. `delay_ns` holds programs up at random, for stress.
    """
    units = num_units(device)
    refusal = recurrent_refusal(spec, units)
    if refusal is not None:
        raise ProblemError(refusal, fix="run these layers as they are")
    if shape is None:
        shape = shapes(spec, units)[0]
    elif not fits(spec, shape, units) or shape.layers > spec.num_layers:
        raise ProblemError(f"{spec} does not fit as {shape}", fix="take one of shapes(spec)")
    return Persistent(spec, weights, device, shape, delay_ns)


def num_units(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H200 where there is none."""
    if device.type != "cuda":
        return H200_UNITS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def spec_of(module: nn.RNNBase, batch: int = 1) -> Recurrent:
    """The spec of a PyTorch module, in evaluation: dropout between layers does nothing."""
    if module.proj_size > 0:
        raise ProblemError(
            "an LSTM with a projection has no persistent form", fix="run it as it is"
        )
    if module.dropout > 0 and module.training:
        raise ProblemError("dropout in training has no persistent form", fix="call eval() on it")
    return Recurrent(
        cell=module.mode.lower(),
        input_size=module.input_size,
        hidden_size=module.hidden_size,
        num_layers=module.num_layers,
        bidirectional=module.bidirectional,
        bias=module.bias,
        batch_first=module.batch_first,
        batch=batch,
        dtype=next(module.parameters()).dtype,
    )


def compile_module(
    module: nn.RNNBase, device: torch.device, shape: Shape | None = None, batch: int = 1
) -> Persistent:
    """An `nn.LSTM`, `nn.GRU` or `nn.RNN` as a callable."""
    weights = [weight for weight in module._flat_weights if weight is not None]
    return compile_recurrent(spec_of(module, batch), weights, device, shape)
