"""Does PyTorch round the factors of a convolution's products to TF32? Ours then do so too.

`torch.backends.cudnn.allow_tf32` only allows it: cuDNN has no such kernel for channels that are not
multiples of four, for many groups, and leaves it where another is faster. Our kernels pad channels
and could always round; where PyTorch does not, the result would be further off than the
model itself. So every different convolution is asked: it rounds if on random numbers it is about as
far from float64 as exact products of rounded factors are, or further.
"""

import torch
from torch.nn import functional as nnf

from partita.gpu.flow.steps import Flow, Step, T
from partita.gpu.reference_output import any_kernel, relative

LEAST = 0.5  # of the error of rounded factors, some 3e-4; a float32 sum has 1e-7


def nearest(values: T) -> T:
    """To the nearest TF32: ten bits of mantissa."""
    return ((values.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def needs_exact(flow: Flow, step: Step, device: torch.device) -> bool:
    """Must the products of this convolution be those of float32, though TF32 is allowed?"""
    if step.kind != "conv" or device.type != "cuda" or not torch.backends.cudnn.allow_tf32:
        return False
    return flow.dtypes[step.name] == torch.float32 and not rounds(flow, step, device)


def rounds(flow: Flow, step: Step, device: torch.device) -> bool:
    """Is PyTorch's convolution no more exact than one with rounded factors?"""
    assert step.window is not None
    window, weight = step.window, flow.constants[step.weight]
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(flow.shapes[step.inputs[0]], generator=draw, device=device)
    w = torch.randn(weight.shape, generator=draw, device=device)

    def conv(x: T, w: T) -> T:
        x, w = (each.contiguous(memory_format=torch.channels_last) for each in (x, w))
        return nnf.conv2d(x, w, None, window.stride, window.padding, window.dilation, step.groups)

    plain = conv(x, w)
    with any_kernel():
        exact = conv(x.double(), w.double())
        rounded = conv(nearest(x).double(), nearest(w).double())
    return relative(plain, exact) > LEAST * relative(rounded, exact)
