"""Steps bound to memory: buffers, weights as the kernels want them, and the launch of each step.

Nothing is freed or used twice while a bound flow lives: no step overwrites what another reads, so
only true dependencies have to be kept when steps run side by side.
"""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from partita.gpu.bounds import check_inside
from partita.gpu.buffers import put
from partita.gpu.flow import eager
from partita.gpu.flow.place import BufferPlacement, padded
from partita.gpu.flow.precision import nearest
from partita.gpu.flow.steps import Flow, Step, T
from partita.gpu.graphs import GraphReplay, capture
from partita.gpu.streams.bounds import step_reaches
from partita.gpu.streams.compiled import Compiler
from partita.gpu.streams.ways import EAGER, GROUP, Way, block_width

PRE = {"": 0, "relu": 1, "affine": 2, "affine_relu": 3}


class Bound:
    """A flow with its values in memory."""

    def __init__(
        self,
        flow: Flow,
        placement: BufferPlacement,
        device: torch.device,
        compiler: Compiler | None = None,
    ) -> None:
        self.flow = flow
        self.compiler = compiler or Compiler()
        self.placement = placement
        self.device = device
        self.buffers: dict[str, T] = {}
        shared = Counter(place.buffer for place in placement.places.values())
        # written directly by an operator of PyTorch: by itself in its buffer, not padded
        self.alone = {
            name
            for name, place in placement.places.items()
            if shared[place.buffer] == 1 and flow.shapes[name][1] == place.width
        }
        self.values: dict[str, Any] = {}  # where each value is now
        self.homes: dict[str, T] = {}  # where kernels write it
        self.packed: dict[tuple[str, str], T] = {}
        self.exact: dict[str, bool] = {}  # by structure: may factors not be rounded to TF32?
        self.inside: set[tuple[str, Way]] = set()  # launches that cannot leave their memory
        self.scratch: dict[tuple[str, str], tuple[T, T]] = {}
        self.constants = {
            name: value.to(device) for name, value in flow.constants.items()
        }  # fmt: skip
        for name in (*flow.inputs, *(step.name for step in flow.steps)):
            self.allocate(name)
        for name, value in self.constants.items():
            if value.dim() == 4:
                self.constants[name] = value.contiguous(memory_format=torch.channels_last)

    def captured(self, run: Callable[[], object]) -> GraphReplay:
        """A graph of some of the steps, which holds what they read.

        Operators of PyTorch make new memory at every run, so the next run of a step lets go of
        what the graph of its readers looks at.
        """
        return capture(run, holds=lambda: dict(self.values))

    def with_flow(self, flow: Flow) -> "Bound":
        """The same memory for a flow with pieces of the same steps."""
        other = copy.copy(self)
        other.flow = flow
        return other

    def allocate(self, name: str) -> None:
        """The whole of a value: with the channels it is padded by."""
        if name in self.placement.places:
            place = self.placement.places[name]
            if place.buffer not in self.buffers:
                self.buffers[place.buffer] = torch.zeros(
                    self.placement.buffers[place.buffer], dtype=self.flow.dtypes[name],
                    device=self.device,
                ).contiguous(memory_format=torch.channels_last)  # fmt: skip
            whole = self.buffers[place.buffer]
            self.values[name] = whole[:, place.begin : place.begin + place.width]
            self.homes[name] = self.values[name]
        elif name in self.flow.shapes:
            self.values[name] = torch.zeros(
                self.flow.shapes[name], dtype=self.flow.dtypes[name], device=self.device
            )

    def logical(self, name: str) -> Any:
        """A value as the model knows it."""
        value = self.values[name]
        if name in self.placement.places:
            return value[:, : self.flow.shapes[name][1]]
        return value

    def pitch8(self, name: str) -> int:
        """How far pixels lie apart, in eights of values."""
        place = self.placement.places[name]
        if self.values[name].shape[1] == self.buffers[place.buffer].shape[1]:
            return int(self.values[name].shape[1]) // 8
        return int(self.buffers[place.buffer].shape[1]) // 8

    def set_inputs(self, inputs: tuple[T, ...]) -> None:
        """Copy the model's inputs to where the steps read them."""
        put(self.inputs(), inputs)

    def inputs(self) -> tuple[T, ...]:
        """Where the steps read the model's inputs."""
        return tuple(self.logical(name) for name in self.flow.inputs)

    def outputs(self) -> tuple[T, ...]:
        """The model's outputs, where the steps have put them."""
        return tuple(self.logical(name) for name in self.flow.outputs)

    def run(self, step: Step, way: Way = EAGER) -> None:
        """Launch one step on the current stream."""
        if step.is_view:
            return
        if step.kind == "piece":
            self.run_piece(step, way)
            return
        if way.kernel == "eager":
            self.run_eager(step)
            return
        if (step.name, way) not in self.inside:
            check_inside(f"{step.name} as {way}", step_reaches(self, step, way))
            self.inside.add((step.name, way))
        if way.kernel in ("conv", "exactconv"):
            self.run_conv(step, way)
        elif way.kernel == "window":
            self.run_window(step, way)
        else:
            self.run_combine(step, way)

    def run_eager(self, step: Step) -> None:
        """By PyTorch's operators."""
        values = {name: self.logical(name) for name in step.uses}
        self.keep(step.name, eager.compute(step, values, self.constants))

    def keep(self, name: str, result: Any) -> None:
        """Let a value be what an operator made; copied where it belongs, if it must lie there."""
        free = name not in self.placement.places
        if free or (name in self.alone and result.is_contiguous(memory_format=torch.channels_last)):
            self.values[name] = result
        else:
            self.values[name] = self.homes[name]
            self.logical(name).copy_(result)

    def home(self, step: Step) -> T:
        """Where a step's value belongs; from now on it is there."""
        self.values[step.name] = self.homes[step.name]
        return self.homes[step.name]

    def run_piece(self, piece: Step, way: Way) -> None:
        """Several steps: as one that was compiled, or operator by operator."""
        values: dict[str, Any] = {name: self.logical(name) for name in piece.inputs}
        if way.kernel == "eager":
            for step in piece.members:
                values[step.name] = eager.compute(step, values, self.constants)
            for name in piece.makes:
                self.keep(name, values[name])
            return
        placed = [name for name in piece.makes if name in self.homes]
        for name in placed:
            self.values[name] = self.homes[name]
        homes = {name: self.logical(name) for name in placed}
        self.values |= self.compiler.piece(piece, values, self.constants, homes)

    def run_conv(self, step: Step, way: Way) -> None:
        """By the kernel for convolutions."""
        from partita.gpu.kernels import images as kernels

        assert step.window is not None
        x, out = self.values[step.inputs[0]], self.home(step)
        res = self.values[step.residual] if step.residual else out
        bm, bn, bk = way.block
        batch, cout, oh, ow = out.shape
        cin = block_width(self.flow, step)
        gout = cout if step.groups == 1 else cin
        pixels = batch * oh * ow
        grid = (-(-pixels // bm), -(-cout // bn), way.splits)
        part, count = self.parts(step, way, grid)
        precision = "tf32x3" if way.kernel == "exactconv" else _precision(out.dtype)
        rounds = out.dtype == torch.float32 and precision == "tf32"
        w, b = self.weight(step, rounds), self.vector(step, "bias", cout)
        scale = self.vector(step, "pre_scale", x.shape[1]) if step.pre_scale else b
        shift = self.vector(step, "pre_shift", x.shape[1]) if step.pre_shift else b
        window = step.window
        last = step.relu_to if step.relu_to >= 0 else cout
        kernels.conv[grid](
            x, w, b, res, out, part, count, scale, shift,
            pixels, x.shape[2], x.shape[3], oh, ow, window.kernel[1],
            window.kernel[0] * window.kernel[1], *window.stride, *window.padding, *window.dilation,
            cin // 8, cout // 8, gout // 8, self.pitch8(step.inputs[0]),
            self.pitch8(step.residual) if step.residual else 0, self.pitch8(step.name),
            step.relu_from, last if step.relu else 0, way.splits,
            BM=bm, BN=bn, BK=bk, PRE=PRE[step.pre], PIXEL=window.is_pixel,
            PRECISION=precision, ROUND=rounds,
            num_warps=way.warps, num_stages=way.stages,
        )  # fmt: skip

    def run_window(self, step: Step, way: Way) -> None:
        """By the kernel for windows."""
        from partita.gpu.kernels import images as kernels

        assert step.window is not None
        x, out = self.values[step.inputs[0]], self.home(step)
        res = self.values[step.residual] if step.residual else out
        bp, bc = way.block
        batch, cout, oh, ow = out.shape
        pixels = batch * oh * ow
        b = self.vector(step, "bias", cout)
        window = step.window
        kernels.window[(-(-pixels // bp), -(-cout // bc))](
            x, self.taps(step) if step.weight else b, b, res, out,
            pixels, x.shape[2], x.shape[3], oh, ow,
            *window.stride, *window.padding, *window.dilation,
            cout // 8, self.pitch8(step.inputs[0]),
            self.pitch8(step.residual) if step.residual else 0, self.pitch8(step.name),
            int(step.relu), step.factor,
            MODE=("depthwise", "maxpool", "avgpool").index(step.kind),
            KH=window.kernel[0], KW=window.kernel[1], PRE=PRE[step.pre], ALL=step.include_pad,
            BP=bp, BC=bc, num_warps=way.warps,
        )  # fmt: skip

    def run_combine(self, step: Step, way: Way) -> None:
        """By the kernel for sums."""
        from partita.gpu.kernels import images as kernels

        out = self.home(step)
        bp, bc = way.block
        batch, cout, oh, ow = out.shape
        pixels = batch * oh * ow
        names = [*step.inputs, *[step.inputs[0]] * (6 - len(step.inputs))]
        factors = [*step.factors, *[0.0] * (6 - len(step.inputs))]
        zero = self.vector(step, "bias", cout)
        scale = self.vector(step, "scale", cout) if step.scale else zero
        shift = self.vector(step, "shift", cout) if step.shift else zero
        kernels.combine[(-(-pixels // bp), -(-cout // bc))](
            *(self.values[name] for name in names), scale, shift, out,
            pixels, cout // 8, *(self.pitch8(name) for name in names), self.pitch8(step.name),
            *factors, int(step.relu),
            TERMS=len(step.inputs), AFFINE=bool(step.scale), BP=bp, BC=bc, num_warps=way.warps,
        )  # fmt: skip

    def parts(self, step: Step, way: Way, grid: tuple[int, int, int]) -> tuple[T, T]:
        """Room for the parts of split sums and their counters; a step has its own."""
        key = (step.name, str(way))
        if key not in self.scratch:
            tiles = grid[0] * grid[1] if way.splits > 1 else 1
            size = tiles * way.splits * way.block[0] * way.block[1] if way.splits > 1 else 1
            self.scratch[key] = (
                torch.empty(size, device=self.device),
                torch.zeros(tiles, dtype=torch.int32, device=self.device),
            )
        return self.scratch[key]

    def vector(self, step: Step, what: str, width: int) -> T:
        """A constant per channel, padded with zeros; zeros where the step has none."""
        key = (step.name, what)
        if key not in self.packed:
            packed = torch.zeros(width, device=self.device)
            name = getattr(step, what)
            if name:
                held = self.constants[name]
                packed[: len(held)] = held.float()
            self.packed[key] = packed
        return self.packed[key]

    def weight(self, step: Step, rounds: bool) -> T:
        """The weight of a convolution: output channels x (taps x input channels), padded."""
        key = (step.name, "rounded weight" if rounds else "weight")
        if key not in self.packed:
            weight = self.constants[step.weight]
            cout, _, kh, kw = weight.shape
            cin = block_width(self.flow, step)
            packed = weight.new_zeros(padded(cout), kh, kw, cin)
            if step.groups == 1:
                packed[:cout, :, :, : weight.shape[1]] = weight.permute(0, 2, 3, 1)
            else:
                _fill_diagonal(packed, weight)
            self.packed[key] = nearest(packed) if rounds else packed
        return self.packed[key]

    def taps(self, step: Step) -> T:
        """The weight of a depthwise convolution: taps x channels."""
        key = (step.name, "taps")
        if key not in self.packed:
            weight = self.constants[step.weight]
            packed = weight.new_zeros(weight[0].numel(), padded(len(weight)))
            packed[:, : len(weight)] = weight.reshape(len(weight), -1).t()
            self.packed[key] = packed
        return self.packed[key]


def _fill_diagonal(packed: T, weight: T) -> None:
    """Groups narrower than a block stand side by side in it."""
    cout, width, _, _ = weight.shape
    ordered = weight.permute(0, 2, 3, 1)
    if width >= GROUP:
        packed[:] = ordered
        return
    rows = torch.arange(cout, device=weight.device)
    begin = (rows // width * width) % GROUP
    for offset in range(width):
        packed[rows, :, :, begin + offset] = ordered[:, :, :, offset]


def _precision(dtype: torch.dtype) -> str:
    """Matrix products of float32 as PyTorch's convolutions do them."""
    if dtype == torch.float32 and not torch.backends.cudnn.allow_tf32:
        return "ieee"
    return "tf32"
