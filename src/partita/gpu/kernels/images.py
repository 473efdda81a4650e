# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803
"""Triton kernels over images with channels last; channels come in eights, so that loads are wide.

A tensor is a matrix of pixels by channels: pixel p of the image n at (i, j) is row (n H + i) W + j,
rows lie `stride8 * 8` values apart, and a tensor may be some columns of a wider one. So a kernel
writes straight into its place in a concatenation.

    conv      implicit matrix product: output pixels x output channels, over taps x input channels;
              grouped convolutions as blocks on the diagonal; the sum may be split among programs,
              of which the last to finish adds the parts in order (the same result every time)
    window    depthwise convolution, maximum, average
    combine   weighted sum of several images, scale and shift per channel
"""

import triton
import triton.language as tl

INTEGERS = [
    "m_total", "h", "wd", "oh", "ow", "kw", "taps", "stride_h", "stride_w", "pad_h", "pad_w",
    "dil_h", "dil_w", "cin8", "cout8", "gout8", "xs8", "rs8", "os8", "relu_from", "relu_to",
    "splits", "relu", "factor", "f0", "f1", "f2", "f3", "f4", "f5", "s0", "s1", "s2", "s3", "s4",
    "s5",
]  # fmt: skip  # compiled once for all values


@triton.jit(do_not_specialize=INTEGERS)
def conv(
    x, w, bias, res, out, part, count, scale, shift,
    m_total, h, wd, oh, ow, kw, taps, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    cin8, cout8, gout8, xs8, rs8, os8, relu_from, relu_to, splits,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRE: tl.constexpr,
    PIXEL: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One tile of output pixels by output channels, or a share of its sum."""
    pid_m, pid_n, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cin, cout = cin8 * 8, cout8 * 8
    rm = pid_m * BM + tl.arange(0, BM)
    rn = pid_n * BN + tl.arange(0, BN)
    in_m, in_n = rm < m_total, rn < cout
    first = (pid_n * BN) // (gout8 * 8) * cin  # the first input channel of this group
    column = rm % ow
    rest = rm // ow
    row0 = (rest % oh) * stride_h - pad_h
    column0 = column * stride_w - pad_w
    image = rest // oh
    blocks = tl.cdiv(cin, BK)
    share = tl.cdiv(taps * blocks, splits)
    begin = pid_k * share
    end = tl.minimum(begin + share, taps * blocks)
    acc = tl.zeros((BM, BN), tl.float32)
    for it in range(begin, end):
        tap = it // blocks
        c = (it - tap * blocks) * BK + tl.arange(0, BK)
        in_c = c < cin
        if PIXEL:
            pixel, seen = rm, in_m
        else:
            kh = tap // kw
            i = row0 + kh * dil_h
            j = column0 + (tap - kh * kw) * dil_w
            seen = in_m & (i >= 0) & (i < h) & (j >= 0) & (j < wd)
            pixel = (image * h + i) * wd + j
        a = tl.load(
            x + pixel[:, None] * (xs8 * 8) + (first + c)[None, :],
            mask=seen[:, None] & in_c[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            w + rn[:, None] * (taps * cin) + (tap * cin + c)[None, :],
            mask=in_n[:, None] & in_c[None, :], other=0.0,
        )  # fmt: skip
        if PRE == 1:
            a = tl.maximum(a, 0.0).to(a.dtype)
        if PRE >= 2:
            ps = tl.load(scale + first + c, mask=in_c, other=0.0)
            pt = tl.load(shift + first + c, mask=in_c, other=0.0)
            wide = a.to(tl.float32) * ps[None, :] + pt[None, :]
            if PRE == 3:
                wide = tl.maximum(wide, 0.0)
            a = tl.where(seen[:, None], wide, 0.0).to(x.dtype.element_ty)
        if ROUND:  # to the nearest tf32; the matrix unit would cut off the low bits
            a = ((a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    last = splits == 1
    if splits > 1:
        tile = pid_m * tl.num_programs(1) + pid_n
        inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        mine = part + (tile * splits + pid_k) * (BM * BN)
        tl.store(mine + inside, acc)
        tl.debug_barrier()  # all of the tile is written before it is counted
        done = tl.atomic_add(count + tile, 1, sem="acq_rel")
        last = done == splits - 1
        if last:
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(splits):
                there = part + (tile * splits + k) * (BM * BN)
                acc += tl.load(there + inside, cache_modifier=".cg")
            tl.store(count + tile, 0)  # as the next launch needs it
    wanted = in_m[:, None] & in_n[None, :] & last
    acc += tl.load(bias + rn, mask=in_n, other=0.0).to(tl.float32)[None, :]
    there = res + rm[:, None] * (rs8 * 8) + rn[None, :]
    acc += tl.load(there, mask=wanted & (rs8 > 0), other=0.0).to(tl.float32)
    clipped = (rn >= relu_from) & (rn < relu_to)
    acc = tl.where(clipped[None, :], tl.maximum(acc, 0.0), acc)
    tl.store(out + rm[:, None] * (os8 * 8) + rn[None, :], acc.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=INTEGERS)
def window(
    x, w, bias, res, out,
    m_total, h, wd, oh, ow, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    cout8, xs8, rs8, os8, relu, factor,
    MODE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PRE: tl.constexpr,
    ALL: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Some pixels by some channels; MODE 0: depthwise, 1: maximum, 2: average."""
    rm = tl.program_id(0) * BP + tl.arange(0, BP)
    rn = tl.program_id(1) * BC + tl.arange(0, BC)
    in_m, in_n = rm < m_total, rn < cout8 * 8
    rest = rm // ow
    row0 = (rest % oh) * stride_h - pad_h
    column0 = (rm % ow) * stride_w - pad_w
    image = rest // oh
    if MODE == 1:
        acc = tl.full((BP, BC), float("-inf"), tl.float32)
    else:
        acc = tl.zeros((BP, BC), tl.float32)
    number = tl.zeros((BP,), tl.float32)
    for tap in tl.static_range(KH * KW):
        i = row0 + (tap // KW) * dil_h
        j = column0 + (tap % KW) * dil_w
        seen = in_m & (i >= 0) & (i < h) & (j >= 0) & (j < wd)
        there = x + ((image * h + i) * wd + j)[:, None] * (xs8 * 8) + rn[None, :]
        mask = seen[:, None] & in_n[None, :]
        if MODE == 1:
            a = tl.load(there, mask=mask, other=float("-inf")).to(tl.float32)
        else:
            a = tl.load(there, mask=mask, other=0.0).to(tl.float32)
        if PRE == 1:
            a = tl.maximum(a, 0.0)
        if MODE == 0:
            k = tl.load(w + tap * (cout8 * 8) + rn, mask=in_n, other=0.0).to(tl.float32)
            acc += a * k[None, :]
        elif MODE == 1:
            acc = tl.maximum(acc, a)
        else:
            acc += a
            number += seen.to(tl.float32)
    if MODE == 2:
        if ALL:
            acc = acc * (factor / (KH * KW))
        else:
            acc = acc * (factor / tl.maximum(number, 1.0))[:, None]
    wanted = in_m[:, None] & in_n[None, :]
    acc += tl.load(bias + rn, mask=in_n, other=0.0).to(tl.float32)[None, :]
    there = res + rm[:, None] * (rs8 * 8) + rn[None, :]
    acc += tl.load(there, mask=wanted & (rs8 > 0), other=0.0).to(tl.float32)
    acc = tl.where(relu > 0, tl.maximum(acc, 0.0), acc)
    tl.store(out + rm[:, None] * (os8 * 8) + rn[None, :], acc.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=INTEGERS)
def combine(
    x0, x1, x2, x3, x4, x5, scale, shift, out,
    m_total, cout8, s0, s1, s2, s3, s4, s5, os8, f0, f1, f2, f3, f4, f5, relu,
    TERMS: tl.constexpr, AFFINE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The weighted sum of up to six images, then scale and shift, then ReLU."""
    rm = tl.program_id(0) * BP + tl.arange(0, BP)
    rn = tl.program_id(1) * BC + tl.arange(0, BC)
    in_n = rn < cout8 * 8
    wanted = (rm < m_total)[:, None] & in_n[None, :]
    at, on = rm[:, None], rn[None, :]
    acc = tl.load(x0 + at * (s0 * 8) + on, mask=wanted, other=0.0).to(tl.float32) * f0
    if TERMS > 1:
        acc += tl.load(x1 + at * (s1 * 8) + on, mask=wanted, other=0.0).to(tl.float32) * f1
    if TERMS > 2:
        acc += tl.load(x2 + at * (s2 * 8) + on, mask=wanted, other=0.0).to(tl.float32) * f2
    if TERMS > 3:
        acc += tl.load(x3 + at * (s3 * 8) + on, mask=wanted, other=0.0).to(tl.float32) * f3
    if TERMS > 4:
        acc += tl.load(x4 + at * (s4 * 8) + on, mask=wanted, other=0.0).to(tl.float32) * f4
    if TERMS > 5:
        acc += tl.load(x5 + at * (s5 * 8) + on, mask=wanted, other=0.0).to(tl.float32) * f5
    if AFFINE:
        acc = acc * tl.load(scale + rn, mask=in_n, other=0.0)[None, :]
        acc += tl.load(shift + rn, mask=in_n, other=0.0)[None, :]
    acc = tl.where(relu > 0, tl.maximum(acc, 0.0), acc)
    tl.store(out + at * (os8 * 8) + on, acc.to(out.dtype.element_ty), mask=wanted)
