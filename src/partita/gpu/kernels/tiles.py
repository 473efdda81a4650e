# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, N806
"""The code of one tile of every kind of op, as Triton functions that a region's kernel calls.

A task is a row of the region's table: what to run, which tile, what to wait for, where its operands
are. A function first reads what does not depend on other tasks (weights), then waits, then reads
what others wrote: from the L2 cache (`.cg`), because the L1 cache of a unit may hold what was there
before. What is written in capitals is fixed when the kernel is generated.

Waiting: an op has one counter, which a tile adds one to when it is written. Counters only grow:
after `epoch` launches an op of n tiles has counted n epoch, so this launch waits for n (epoch + 1),
compared by difference, which a counter that wraps around does not disturb. Every thread polls by
itself with acquire. With SPIN off (one program runs everything in order) a wait becomes a check.
"""

import triton
import triton.language as tl

WIDTH: tl.constexpr = tl.constexpr(32)  # columns of the table: a row is one line of the cache
READS: tl.constexpr = tl.constexpr(5)  # the first of six
WEIGHTS: tl.constexpr = tl.constexpr(11)  # of two
WIDE: tl.constexpr = tl.constexpr(13)  # of three
WRITES: tl.constexpr = tl.constexpr(16)  # of two
WAITS: tl.constexpr = tl.constexpr(20)  # of six pairs (counter, tiles); further ones lie in `waits`
INLINE: tl.constexpr = tl.constexpr(6)


@triton.jit
def seen(counter):
    """The value of a counter; what was written before it is seen by this thread afterwards."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait(row, waits, flags, state, epoch, SPIN: tl.constexpr):
    """Go on when everything that the task needs has been written."""
    further = waits + 2 * tl.load(row + 2)
    for at in range(tl.load(row + 3)):
        pair = tl.where(at < INLINE, row + WAITS + 2 * at, further + 2 * (at - INLINE))
        counter = flags + tl.load(pair)
        target = tl.load(pair + 1) * (epoch + 1)
        if SPIN:
            while seen(counter) - target < 0:
                pass
        elif tl.load(counter) - target < 0:
            tl.store(state + 2, 1)


@triton.jit
def signal(row, flags, state, salt, DELAY: tl.constexpr):
    """Say that the task's tile is written; under test up to DELAY reads later, by chance."""
    flag = tl.load(row + 4)
    if DELAY:
        for _ in range(((salt * 1103515245 + 12345) >> 8) % DELAY):
            tl.load(state, volatile=True)
    tl.debug_barrier()  # every warp has written its part
    if flag >= 0:
        tl.atomic_add(flags + flag, 1, sem="release", scope="gpu")


@triton.jit
def operand(data, row, COLUMN: tl.constexpr):
    """Where an operand begins; the table counts in eights."""
    return data + tl.load(row + COLUMN).to(tl.int64) * 8


@triton.jit
def place(row, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The rows and columns of a tile; tiles are counted down the rows first."""
    tile = tl.load(row + 1)
    DOWN: tl.constexpr = (M + BM - 1) // BM
    m = (tile % DOWN) * BM + tl.arange(0, BM)
    n = (tile // DOWN) * BN + tl.arange(0, BN)
    return m, n


@triton.jit
def store(data, row, m, n, wanted, value, SO: tl.constexpr):
    """Write a tile."""
    out = operand(data, row, WRITES) + m[:, None] * SO + n[None, :]
    tl.store(out, value.to(data.dtype.element_ty), mask=wanted)


@triton.jit
def tanh(x):
    """Without a library call; near zero, where 1 - 1 leaves few digits, by a polynomial."""
    s = x * x
    p = -0.33333298 + s * (0.13331924 + s * (-0.05378383 + s * (0.02079596 - 0.00589515 * s)))
    return tl.where(s < 0.36, x + x * s * p, 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def act(x, ACT: tl.constexpr):
    """An activation by name."""
    if ACT == "relu":
        return tl.maximum(x, 0.0)
    if ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACT == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if ACT == "silu":
        return x * sigmoid(x)
    if ACT == "sigmoid":
        return sigmoid(x)
    if ACT == "tanh":
        return tanh(x)
    if ACT == "hardtanh":
        return tl.minimum(tl.maximum(x, -1.0), 1.0)
    return x


@triton.jit
def product(w, rows, in_rows, x, first, SW: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr):  # fmt: skip
    """Rows of a matrix times one vector; `first` has their first BK columns, read before."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    part = first
    for begin in range(0, K, BK):
        vector = tl.load(x + begin + k, mask=begin + k < K, other=0.0, cache_modifier=".cg")
        ahead = begin + BK + k
        following = tl.load(
            w + rows[:, None] * SW + ahead[None, :],
            mask=in_rows[:, None] & (ahead < K)[None, :], other=0.0,
        )  # fmt: skip
        acc += part.to(tl.float32) * vector.to(tl.float32)[None, :]
        part = following
    return tl.sum(acc, 1)


@triton.jit
def first_columns(w, rows, in_rows, SW: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """What `product` begins with."""
    k = tl.arange(0, BK)
    return tl.load(
        w + rows[:, None] * SW + k[None, :], mask=in_rows[:, None] & (k < K)[None, :], other=0.0
    )


@triton.jit
def gemv(
    data, wide, row, waits, flags, state, epoch, SPIN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SX: tl.constexpr, SW: tl.constexpr,
    SO: tl.constexpr, SR: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BN columns of a few rows: act(x W^T + bias + residual)."""
    n = tl.load(row + 1) * BN + tl.arange(0, BN)
    in_n = n < N
    w = operand(data, row, WEIGHTS)
    first = first_columns(w, n, in_n, SW, K, BK)
    bias = tl.zeros((BN,), tl.float32)
    if BIAS:
        bias = tl.load(wide + tl.load(row + WIDE) + n, mask=in_n, other=0.0)
    wait(row, waits, flags, state, epoch, SPIN)
    x = operand(data, row, READS)
    out = operand(data, row, WRITES)
    for m in tl.static_range(M):
        y = bias + product(w, n, in_n, x + m * SX, first, SW, K, BN, BK)
        if SR:
            there = operand(data, row, READS + 1) + m * SR + n
            y += tl.load(there, mask=in_n, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out + m * SO + n, act(y, ACT).to(data.dtype.element_ty), mask=in_n)


@triton.jit
def conv(
    data, wide, row, waits, flags, state, epoch, SPIN: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SH: tl.constexpr, SV: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    SX: tl.constexpr, SW: tl.constexpr, SO: tl.constexpr, SR: tl.constexpr, BIAS: tl.constexpr,
    PRE: tl.constexpr, ACT: tl.constexpr, TF32: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """BM output pixels by BN output channels, as a matrix product over taps and input channels."""
    m, n = place(row, M, BM, BN)
    in_m, in_n = m < M, n < N
    w = operand(data, row, WEIGHTS)
    bias = tl.zeros((BN,), tl.float32)
    if BIAS:
        bias = tl.load(wide + tl.load(row + WIDE) + n, mask=in_n, other=0.0)
    PIXEL: tl.constexpr = KH * KW == 1 and SH == 1 and SV == 1 and PH == 0 and PW == 0
    BLOCKS: tl.constexpr = (C + BK - 1) // BK
    image = m // (OH * OW)
    i0 = m // OW % OH * SH - PH
    j0 = m % OW * SV - PW
    wait(row, waits, flags, state, epoch, SPIN)
    x = operand(data, row, READS)
    acc = tl.zeros((BM, BN), tl.float32)
    for it in range(KH * KW * BLOCKS):
        tap = it // BLOCKS
        c = (it - tap * BLOCKS) * BK + tl.arange(0, BK)
        in_c = c < C
        if PIXEL:
            pixel, inside = m, in_m
        else:
            i = i0 + tap // KW * DH
            j = j0 + tap % KW * DW
            inside = in_m & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            pixel = (image * H + i) * W + j
        a = tl.load(
            x + pixel[:, None] * SX + c[None, :], mask=inside[:, None] & in_c[None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        b = tl.load(
            w + n[:, None] * SW + (tap * C + c)[None, :],
            mask=in_n[:, None] & in_c[None, :], other=0.0,
        )  # fmt: skip
        if PRE == "relu":
            a = tl.maximum(a, 0.0).to(a.dtype)
        if PRE == "affine" or PRE == "affine_relu":
            scale = tl.load(wide + tl.load(row + WIDE + 1) + c, mask=in_c, other=0.0)
            shift = tl.load(wide + tl.load(row + WIDE + 2) + c, mask=in_c, other=0.0)
            changed = a.to(tl.float32) * scale[None, :] + shift[None, :]
            if PRE == "affine_relu":
                changed = tl.maximum(changed, 0.0)
            a = tl.where(inside[:, None], changed, 0.0).to(data.dtype.element_ty)
        if a.dtype != tl.float32:
            acc = tl.dot(a, tl.trans(b), acc)
        elif TF32:  # to the nearest; the unit would cut off the low bits
            a = ((a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="tf32")
        else:  # three products of parts: the plain units take many times as long
            acc = tl.dot(a, tl.trans(b), acc, input_precision="tf32x3")
    wanted = in_m[:, None] & in_n[None, :]
    acc += bias[None, :]
    if SR:
        there = operand(data, row, READS + 1) + m[:, None] * SR + n[None, :]
        acc += tl.load(there, mask=wanted, other=0.0, cache_modifier=".cg").to(tl.float32)
    store(data, row, m, n, wanted, act(acc, ACT), SO)


@triton.jit
def window(
    data, wide, row, waits, flags, state, epoch, SPIN: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SH: tl.constexpr, SV: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SX: tl.constexpr,
    SW: tl.constexpr, SO: tl.constexpr, SR: tl.constexpr, BIAS: tl.constexpr, PRE: tl.constexpr,
    ACT: tl.constexpr, MODE: tl.constexpr, FACTOR: tl.constexpr, ALL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM output pixels by BN channels of a depthwise convolution, a maximum or an average."""
    m, n = place(row, M, BM, BN)
    in_m, in_n = m < M, n < N
    bias = tl.zeros((BN,), tl.float32)
    if BIAS:
        bias = tl.load(wide + tl.load(row + WIDE) + n, mask=in_n, other=0.0)
    image = m // (OH * OW)
    i0 = m // OW % OH * SH - PH
    j0 = m % OW * SV - PW
    wait(row, waits, flags, state, epoch, SPIN)
    x = operand(data, row, READS)
    LEAST: tl.constexpr = float("-inf") if MODE == "maxpool" else 0.0
    acc = tl.full((BM, BN), LEAST, tl.float32)
    number = tl.zeros((BM,), tl.float32)
    for kh in range(KH):
        for kw in tl.static_range(KW):
            i = i0 + kh * DH
            j = j0 + kw * DW
            inside = in_m & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            a = tl.load(
                x + ((image * H + i) * W + j)[:, None] * SX + n[None, :],
                mask=inside[:, None] & in_n[None, :], other=LEAST, cache_modifier=".cg",
            ).to(tl.float32)  # fmt: skip
            if PRE == "relu":
                a = tl.maximum(a, 0.0)
            if MODE == "depthwise":
                k = operand(data, row, WEIGHTS) + (kh * KW + kw) * SW + n
                acc += a * tl.load(k, mask=in_n, other=0.0).to(tl.float32)[None, :]
            elif MODE == "maxpool":
                acc = tl.maximum(acc, a)
            else:
                acc += a
                number += inside.to(tl.float32)
    if MODE == "avgpool":
        if ALL:
            acc = acc * (FACTOR / (KH * KW))
        else:
            acc = acc * (FACTOR / tl.maximum(number, 1.0))[:, None]
    wanted = in_m[:, None] & in_n[None, :]
    acc += bias[None, :]
    if SR:
        there = operand(data, row, READS + 1) + m[:, None] * SR + n[None, :]
        acc += tl.load(there, mask=wanted, other=0.0, cache_modifier=".cg").to(tl.float32)
    store(data, row, m, n, wanted, act(acc, ACT), SO)


@triton.jit
def term(data, row, m, n, wanted, COLUMN: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
         COLS: tl.constexpr):  # fmt: skip
    """A tile of an operand as f32; one row or one column stands for all."""
    at = operand(data, row, COLUMN)
    if ROWS == 1 and COLS == 1:
        term = tl.load(at, cache_modifier=".cg")
    elif ROWS == 1:
        term = tl.load(at + n, mask=n < COLS, other=0.0, cache_modifier=".cg")[None, :]
    elif COLS == 1:
        term = tl.load(at + m * STRIDE, mask=m < ROWS, other=0.0, cache_modifier=".cg")[:, None]
    else:
        there = at + m[:, None] * STRIDE + n[None, :]
        term = tl.load(there, mask=wanted, other=0.0, cache_modifier=".cg")
    return term.to(tl.float32)


@triton.jit
def affine(wide, row, n, value, N: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr):
    """Scale and shift per column, where there are any."""
    if SCALE:
        value = value * per_column(wide, row, n, WIDE, N)
    if SHIFT:
        value = value + per_column(wide, row, n, WIDE + 1, N)
    return value


@triton.jit
def per_column(wide, row, n, COLUMN: tl.constexpr, N: tl.constexpr):
    """A number for every column of a tile."""
    return tl.load(wide + tl.load(row + COLUMN) + n, mask=n < N, other=0.0)[None, :]


@triton.jit
def rows(
    data, wide, row, waits, flags, state, epoch, SPIN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SX: tl.constexpr, SR: tl.constexpr, SO: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, FN: tl.constexpr, EPS: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Softmax, layer norm or RMS norm of one row."""
    m = tl.load(row + 1)
    n = tl.arange(0, BN)
    here = n < N
    wait(row, waits, flags, state, epoch, SPIN)
    there = operand(data, row, READS) + m * SX + n
    x = tl.load(there, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
    if SR:
        there = operand(data, row, READS + 1) + m * SR + n
        x += tl.load(there, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
    if FN == "softmax":
        y = tl.where(here, tl.exp(x - tl.max(tl.where(here, x, float("-inf")), 0)), 0.0)
        y = y / tl.sum(y, 0)
    elif FN == "layernorm":
        centred = tl.where(here, x - tl.sum(x, 0) / N, 0.0)
        y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / N + EPS)
    else:
        y = x * tl.rsqrt(tl.sum(x * x, 0) / N + EPS)
    if WEIGHT:
        y = y * tl.load(wide + tl.load(row + WIDE) + n, mask=here, other=0.0)
    if BIAS:
        y = y + tl.load(wide + tl.load(row + WIDE + 1) + n, mask=here, other=0.0)
    tl.store(operand(data, row, WRITES) + m * SO + n, y.to(data.dtype.element_ty), mask=here)


@triton.jit
def lstm_cell(
    data, wide, row, waits, flags, state, epoch, SPIN: tl.constexpr,
    H: tl.constexpr, X: tl.constexpr, SX: tl.constexpr, SH: tl.constexpr, BIAS: tl.constexpr,
    BH: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BH rows of the new hidden state and cell; gates are in the order of PyTorch (i, f, g, o)."""
    first = tl.load(row + 1) * BH
    lines = first * 4 + tl.arange(0, 4 * BH)
    unit, gate = lines // 4, lines % 4
    in_h = unit < H
    at = gate * H + unit
    w_x, w_h = operand(data, row, WEIGHTS), operand(data, row, WEIGHTS + 1)
    ahead_x = first_columns(w_x, at, in_h, SX, X, BX)
    ahead_h = first_columns(w_h, at, in_h, SH, H, BK)
    sums = tl.zeros((4 * BH,), tl.float32)
    if BIAS:
        sums += tl.load(wide + tl.load(row + WIDE) + at, mask=in_h, other=0.0)
    wait(row, waits, flags, state, epoch, SPIN)
    x, h = operand(data, row, READS), operand(data, row, READS + 1)
    sums += product(w_x, at, in_h, x, ahead_x, SX, X, 4 * BH, BX)
    sums += product(w_h, at, in_h, h, ahead_h, SH, H, 4 * BH, BK)
    even, odd = tl.split(tl.reshape(sums, (BH, 2, 2)))  # i, g; f, o
    i, g = tl.split(even)
    f, o = tl.split(odd)
    n = first + tl.arange(0, BH)
    here = n < H
    there = operand(data, row, READS + 2) + n
    c = tl.load(there, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    y = sigmoid(o) * tanh(c)
    kind = data.dtype.element_ty
    tl.store(operand(data, row, WRITES) + n, y.to(kind), mask=here)
    tl.store(operand(data, row, WRITES + 1) + n, c.to(kind), mask=here)


@triton.jit
def gru_cell(
    data, wide, row, waits, flags, state, epoch, SPIN: tl.constexpr,
    H: tl.constexpr, X: tl.constexpr, SX: tl.constexpr, SH: tl.constexpr, BIAS: tl.constexpr,
    BH: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BH rows of the new hidden state; four sums a row: r, z, n of the input, n of the state."""
    first = tl.load(row + 1) * BH
    lines = first * 4 + tl.arange(0, 4 * BH)
    unit, gate = lines // 4, lines % 4
    in_h = unit < H
    of_x, of_h = in_h & (gate < 3), in_h & (gate != 2)
    at_x, at_h = gate * H + unit, tl.minimum(gate, 2) * H + unit
    w_x, w_h = operand(data, row, WEIGHTS), operand(data, row, WEIGHTS + 1)
    ahead_x = first_columns(w_x, at_x, of_x, SX, X, BX)
    ahead_h = first_columns(w_h, at_h, of_h, SH, H, BK)
    sums = tl.zeros((4 * BH,), tl.float32)
    if BIAS:
        sums += tl.load(wide + tl.load(row + WIDE) + at_x, mask=of_x, other=0.0)
        sums += tl.load(wide + tl.load(row + WIDE + 1) + at_h, mask=of_h, other=0.0)
    wait(row, waits, flags, state, epoch, SPIN)
    x, h = operand(data, row, READS), operand(data, row, READS + 1)
    sums += product(w_x, at_x, of_x, x, ahead_x, SX, X, 4 * BH, BX)
    sums += product(w_h, at_h, of_h, h, ahead_h, SH, H, 4 * BH, BK)
    even, odd = tl.split(tl.reshape(sums, (BH, 2, 2)))  # r, n of x; z, n of h
    r, nx = tl.split(even)
    z, nh = tl.split(odd)
    n = first + tl.arange(0, BH)
    here = n < H
    old = tl.load(h + n, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
    new = tanh(nx + sigmoid(r) * nh)
    z = sigmoid(z)
    y = (1.0 - z) * new + z * old
    tl.store(operand(data, row, WRITES) + n, y.to(data.dtype.element_ty), mask=here)
