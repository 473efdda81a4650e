"""How far the kernels over images reach for a step: from its sizes, before the first launch."""

from typing import TYPE_CHECKING

from partita.gpu.bounds import Reach, matrix_end
from partita.gpu.flow.steps import Step, T
from partita.gpu.streams.ways import Way, block_width

if TYPE_CHECKING:
    from partita.gpu.streams.bound import Bound


def room(value: T) -> int:
    """Elements from a tensor's first one to the end of its memory."""
    elements = value.untyped_storage().nbytes() // value.element_size()
    return int(elements - value.storage_offset())


def step_reaches(bound: "Bound", step: Step, way: Way) -> list[Reach]:
    """What the kernel of a way may touch, operand by operand."""
    out = bound.homes[step.name]
    batch, cout, high, wide = out.shape
    pixels = batch * high * wide
    reaches = [_image(bound, step.name, out, pixels, cout)]
    if step.residual:
        reaches.append(_image(bound, step.residual, bound.values[step.residual], pixels, cout))
    reaches.append(_vector(bound, step, "bias", cout))
    if way.kernel in ("conv", "exactconv"):
        return reaches + _conv(bound, step, way, out)
    if way.kernel == "window":
        x = bound.values[step.inputs[0]]
        reaches.append(_image(bound, step.inputs[0], x, batch * x.shape[2] * x.shape[3], cout))
        if step.weight:
            assert step.window is not None
            taps = step.window.kernel[0] * step.window.kernel[1]
            reaches.append(Reach("the weight", taps * cout, bound.taps(step).numel()))
        return reaches
    reaches += [_image(bound, name, bound.values[name], pixels, cout) for name in step.inputs]
    return reaches + [_vector(bound, step, each, cout) for each in ("scale", "shift")]


def _conv(bound: "Bound", step: Step, way: Way, out: T) -> list[Reach]:
    assert step.window is not None
    x = bound.values[step.inputs[0]]
    batch, cout, high, wide = out.shape
    bm, bn, _ = way.block
    cin = block_width(bound.flow, step)
    tiles_n = -(-cout // bn)
    # a tile of output channels reads the input channels of the group that its first channel is in
    group = 0 if step.groups == 1 else (tiles_n - 1) * bn // cin
    channels = (group + 1) * cin
    taps = step.window.kernel[0] * step.window.kernel[1]
    seen = (
        batch * high * wide if step.window.is_pixel else batch * int(x.shape[2]) * int(x.shape[3])
    )
    reaches = [
        _image(bound, step.inputs[0], x, seen, channels),
        Reach("the weight", cout * taps * cin, bound.weight(step, rounds=False).numel()),
    ]
    for each in ("pre_scale", "pre_shift"):
        if getattr(step, each):
            length = bound.vector(step, each, int(x.shape[1])).numel()
            reaches.append(Reach(f"the {each}", channels, length))
    if way.splits > 1:
        tiles = -(-(batch * high * wide) // bm) * tiles_n
        part, count = bound.parts(step, way, (tiles // tiles_n, tiles_n, way.splits))
        reaches.append(Reach("the parts of sums", tiles * way.splits * bm * bn, part.numel()))
        reaches.append(Reach("the counters", tiles, count.numel()))
    return reaches


def _image(bound: "Bound", name: str, value: T, pixels: int, channels: int) -> Reach:
    """An image as the kernels see it: pixels in rows that lie its pitch apart."""
    return Reach(name, matrix_end(pixels, 8 * bound.pitch8(name), channels), room(value))


def _vector(bound: "Bound", step: Step, what: str, width: int) -> Reach:
    return Reach(f"the {what}", width, bound.vector(step, what, width).numel())
