# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, N806
"""One token of a transformer decoder: products of a vector at memory bandwidth, and attention.

    rows      BN rows of a matrix times a vector: RMS or layer norm of the vector before, a bias,
              an activation, a gate or a residual after; a row is read by one program, so nothing is
              added up elsewhere
    rows_of_batch    the same for several vectors, by matrix instructions
    attend    one group of heads over one chunk of the cache: rotary embedding, the new key and
              value written to the cache, softmax; the last program of a group adds up the chunks

With PDL a kernel starts while the one before it ends: it reads its weights, which nobody writes,
then waits, then reads what the other wrote. Everything is summed in float32, and what is added to
from layer to layer stays float32; what a product reads lies in the type of the weights, so that
both come to the same threads.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def after_others(PDL: tl.constexpr):
    """Let the next kernel start, then go on when the one before has written everything.

    The next may start before this one goes on: it reads what nobody writes, and waits for this one
    to end, which itself has waited.
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def embed(
    token, table, position, places, out, copy, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    VOCAB: tl.constexpr, LENGTH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The vectors of the tokens of a batch, and of their places where there are such.

    A token that is none gives zeros.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(1)
    row = tl.load(token + sample)
    known = (row >= 0) & (row < VOCAB)
    x = tl.load(table + row.to(tl.int64) * WIDTH + k, mask=(k < WIDTH) & known, other=0.0)
    wide = x.to(tl.float32)
    if PLACES:
        pos = tl.minimum(tl.maximum(tl.load(position + sample), 0), LENGTH - 1)
        wide += tl.load(places + pos * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + sample * WIDTH + k, wide, mask=k < WIDTH)
    tl.store(copy + sample * WIDTH + k, wide.to(x.dtype), mask=k < WIDTH)


@triton.jit
def activated(y, ACT: tl.constexpr):
    """`ACTIVATIONS` of `gpu/decode/spec.py`: silu, gelu by tanh or erf, relu; 0: what came in."""
    if ACT == 1:
        y = y / (1.0 + tl.exp(-y))
    if ACT == 2:  # (1 + tanh u) / 2 is the logistic function of 2 u, without loss near 0
        y = y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    if ACT == 3:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACT == 4:
        y = tl.maximum(y, 0.0)
    return y


@triton.jit
def weights(w, n, in_n, k, K: tl.constexpr, BK: tl.constexpr):
    """Some columns of some rows; they are read once and need not stay in the cache."""
    there = w + n[:, None] * K + k[None, :]
    if K % BK == 0:
        return tl.load(there, mask=in_n[:, None], other=0.0, eviction_policy="evict_first")
    mask = in_n[:, None] & (k < K)[None, :]
    return tl.load(there, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def inside_threads(x, ROWS: tl.constexpr, COLS: tl.constexpr, EACH: tl.constexpr):
    """Sums over EACH neighbouring columns, which one thread holds: nothing is exchanged."""
    return tl.sum(tl.reshape(x, (ROWS, COLS // EACH, EACH)), 2)


@triton.jit
def center(x, lane, EPS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Mean of a vector and one over its deviation, in two passes as a layer norm takes them."""
    sums = tl.zeros((BK,), tl.float32)
    for begin in tl.static_range(0, K, BK):
        k = begin + lane
        sums += tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / K
    squares = tl.zeros((BK,), tl.float32)
    for begin in tl.static_range(0, K, BK):
        k = begin + lane
        v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32) - mean
        squares += tl.where(k < K, v * v, 0.0)
    return mean, tl.rsqrt(tl.sum(squares, 0) / K + EPS)


@triton.jit
def rows(
    x, norm, shift, w, bias, out, copy, residual, EPS: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, NORM: tl.constexpr, CENTERED: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, COPY: tl.constexpr,
    PDL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """BN rows of W x + b at a time; GATED: act(W x + b) * (V x + c), V behind W and c behind b.

    CENTERED: the norm before takes off the mean and adds a shift (a layer norm). With COPY the
    result is written in a second type, too. A program goes on with the tile that lies as many tiles
    further as there are programs, and reads its first columns while the last of the tile before are
    added up.
    """
    TILES: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0)
    lane = tl.arange(0, BK)
    n = tile * BN + tl.arange(0, BN)
    following = weights(w, n, n < N, lane, K, BK)
    if GATED:
        next_up = weights(w, N + n, n < N, lane, K, BK)
    after_others(PDL)
    if CENTERED:
        mean, scale = center(x, lane, EPS, K, BK)
    while tile < TILES:
        acc = tl.zeros((BN, BK // EACH), tl.float32)
        if GATED:
            acc_up = tl.zeros((BN, BK // EACH), tl.float32)
        squares = tl.zeros((BK,), tl.float32)
        ahead = (tile + tl.num_programs(0)) * BN + tl.arange(0, BN)
        for begin in tl.static_range(0, K, BK):
            k = begin + lane
            part = following
            if GATED:
                part_up = next_up
            if begin + BK < K:
                following = weights(w, n, n < N, k + BK, K, BK)
                if GATED:
                    next_up = weights(w, N + n, n < N, k + BK, K, BK)
            else:
                following = weights(w, ahead, ahead < N, lane, K, BK)
                if GATED:
                    next_up = weights(w, N + ahead, ahead < N, lane, K, BK)
            v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
            if CENTERED:
                weight = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
                v = (v - mean) * scale * weight
                v += tl.load(shift + k, mask=k < K, other=0.0).to(tl.float32)
            elif NORM:
                squares += v * v
                v = v * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
            acc += inside_threads(part.to(tl.float32) * v[None, :], BN, BK, EACH)
            if GATED:
                acc_up += inside_threads(part_up.to(tl.float32) * v[None, :], BN, BK, EACH)
        y = tl.sum(acc, 1)
        factor = 1.0
        if NORM and not CENTERED:
            factor = tl.rsqrt(tl.sum(squares, 0) / K + EPS)
        y = y * factor
        if BIAS:
            y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        y = activated(y, ACT)
        if GATED:
            up = tl.sum(acc_up, 1) * factor
            if BIAS:
                up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
            y = y * up
        if RESIDUAL:
            y += tl.load(residual + n, mask=n < N, other=0.0)
        tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)
        if COPY:
            tl.store(copy + n, y.to(copy.dtype.element_ty), mask=n < N)
        tile += tl.num_programs(0)
        n = ahead


@triton.jit
def several(
    x, norm, shift, means, scales, k, b, K: tl.constexpr, BATCH: tl.constexpr, NORM: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    """Some columns of the vectors of a batch, as a product reads them."""
    wanted = (b < BATCH)[:, None] & (k < K)[None, :]
    v = tl.load(x + b[:, None] * K + k[None, :], mask=wanted, other=0.0)
    if NORM:
        weight = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        normed = (v.to(tl.float32) - means[:, None]) * scales[:, None] * weight[None, :]
        if CENTERED:
            normed += tl.load(shift + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        v = normed.to(v.dtype)
    return v


@triton.jit
def rows_of_batch(
    x, norm, shift, w, bias, out, copy, residual, part, count, EPS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, CENTERED: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    COPY: tl.constexpr, PDL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BATCH: tl.constexpr, BB: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`rows` for the vectors of a batch at once: every weight is read once, for all of them.

    SPLIT programs share the columns of a tile; the last of them adds up, in their order.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    b, lane = tl.arange(0, BB), tl.arange(0, BK)
    after_others(PDL)
    means, scales = tl.zeros((BB,), tl.float32), tl.zeros((BB,), tl.float32)
    if CENTERED:
        for begin in range(0, K, BK):
            v = several(x, norm, shift, means, scales, begin + lane, b, K, BATCH, False, False)
            means += tl.sum(v.to(tl.float32), 1)
        means = means / K
    if NORM:
        for begin in range(0, K, BK):
            k = begin + lane
            v = several(x, norm, shift, means, scales, k, b, K, BATCH, False, False)
            off = tl.where((k < K)[None, :], v.to(tl.float32) - means[:, None], 0.0)
            scales += tl.sum(off * off, 1)
        scales = tl.rsqrt(scales / K + EPS)
    y = tl.zeros((BN, BB), tl.float32)
    if GATED:
        up = tl.zeros((BN, BB), tl.float32)
    SHARE: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    for begin in tl.range(split * SHARE, min(K, (split + 1) * SHARE), BK, num_stages=STAGES):
        k = begin + lane
        v = tl.trans(several(x, norm, shift, means, scales, k, b, K, BATCH, NORM, CENTERED))
        y = tl.dot(weights(w, n, n < N, k, K, BK), v, y, input_precision="ieee")
        if GATED:
            up = tl.dot(weights(w, N + n, n < N, k, K, BK), v, up, input_precision="ieee")
    there = b[None, :] * N + n[:, None]
    wanted = (n < N)[:, None] & (b < BATCH)[None, :]
    last = True
    if SPLIT > 1:
        tl.store(part + split * BATCH * N + there, y, mask=wanted)
        tl.debug_barrier()  # all of the share is written before it is counted
        last = tl.atomic_add(count + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        if SPLIT > 1:
            y = tl.zeros((BN, BB), tl.float32)
            for each in range(SPLIT):
                at = part + each * BATCH * N + there
                y += tl.load(at, mask=wanted, other=0.0, cache_modifier=".cg")
            tl.store(count + tile, 0)  # as the next launch needs it
        if BIAS:
            y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = activated(y, ACT)
        if GATED:  # whole sums: nothing is shared out
            if BIAS:
                up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
            y = y * up
        if RESIDUAL:
            y += tl.load(residual + there, mask=wanted, other=0.0)
        tl.store(out + there, y.to(out.dtype.element_ty), mask=wanted)
        if COPY:
            tl.store(copy + there, y.to(copy.dtype.element_ty), mask=wanted)


@triton.jit
def turned(
    x, head, in_head, d, cosine, sine, norm, EPS: tl.constexpr, HEAD_NORM: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Heads after the rotary embedding, and before that, with HEAD_NORM, their RMS norm."""
    HALF: tl.constexpr = D // 2
    there = x + head[:, None] * D
    wanted = in_head[:, None] & (d < D)[None, :]
    own = tl.load(there + d[None, :], mask=wanted, other=0.0)
    other = tl.load(there + ((d + HALF) % D)[None, :], mask=wanted, other=0.0)
    if HEAD_NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / D + EPS)[:, None]
        own = own * scale * tl.load(norm + d).to(tl.float32)[None, :]
        other = other * scale * tl.load(norm + (d + HALF) % D).to(tl.float32)[None, :]
    return own * cosine[None, :] + tl.where(d < HALF, -1.0, 1.0)[None, :] * other * sine[None, :]


@triton.jit
def join(
    part, stats, out, first, active, GROUP: tl.constexpr, GJ: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, SB: tl.constexpr,
):  # fmt: skip
    """The chunks of GROUP heads from `first` added up, SB chunks at a time."""
    g, d, s = tl.arange(0, GJ), tl.arange(0, D), tl.arange(0, SPLITS)
    here = (g < GROUP)[:, None] & (s < active)[None, :]
    at = (first + g)[:, None] * SPLITS + s[None, :]
    tops = tl.load(stats + 2 * at, mask=here, other=-1e30, cache_modifier=".cg")
    totals = tl.load(stats + 2 * at + 1, mask=here, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 1)
    total = tl.sum(tl.where(here, totals * tl.exp2(tops - top[:, None]), 0.0), 1)
    acc = tl.zeros((GJ, D), tl.float32)
    for begin in range(0, active, SB):
        some = begin + tl.arange(0, SB)
        wanted = (g < GROUP)[:, None] & (some < active)[None, :]
        there = (first + g)[:, None] * SPLITS + some[None, :]
        part_tops = tl.load(stats + 2 * there, mask=wanted, other=-1e30, cache_modifier=".cg")
        parts = tl.load(
            part + there[:, :, None] * D + d[None, None, :], mask=wanted[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        factor = tl.where(wanted, tl.exp2(part_tops - top[:, None]), 0.0)
        acc += tl.sum(parts * factor[:, :, None], 1)
    y = acc / tl.where(g < GROUP, total, 1.0)[:, None]
    to = out + (first + g)[:, None] * D + d[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < D)[None, :])


@triton.jit
def attend(
    qkv, keys, values, position, cosines, sines, q_norm, k_norm, part, stats, count, out,
    SCALE: tl.constexpr, EPS: tl.constexpr, HEAD_NORM: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, GP: tl.constexpr, GJ: tl.constexpr, D: tl.constexpr,
    LENGTH: tl.constexpr, SPLITS: tl.constexpr, SB: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """GROUP heads of a sample over CHUNK rows of the cache of the key head that they share.

    The heads are the rows of two small products: GJ of them, GP as a product has at the least.
    """
    head, split, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    KV: tl.constexpr = HEADS // GROUP
    pos = tl.minimum(tl.maximum(tl.load(position + sample), 0), LENGTH - 1).to(tl.int32)
    active = pos // CHUNK + 1
    d, g = tl.arange(0, D), tl.arange(0, GP)
    t = split * CHUNK + tl.arange(0, CHUNK)
    seen = t < pos
    cached = ((sample * KV + head) * LENGTH).to(tl.int64) * D
    there = cached + t[:, None] * D + d[None, :]
    key = tl.load(keys + there, mask=seen[:, None], other=0.0)
    value = tl.load(values + there, mask=seen[:, None], other=0.0)
    cosine, sine = tl.load(cosines + pos * D + d), tl.load(sines + pos * D + d)
    after_others(PDL)
    if split < active:
        kind = keys.dtype.element_ty
        mine = split == active - 1  # this chunk has the new row
        x = qkv + sample * (HEADS + 2 * KV) * D
        q = turned(
            x, head * GROUP + g, g < GROUP, d, cosine, sine, q_norm, EPS, HEAD_NORM, D
        ) * (SCALE * LOG2E)  # fmt: skip
        one = tl.arange(0, 1)
        new_key = turned(
            x, HEADS + head + one, one < 1, d, cosine, sine, k_norm, EPS, HEAD_NORM, D
        ).to(kind)  # fmt: skip
        new_value = tl.load(x + (HEADS + KV + head) * D + d).to(kind)
        row = cached + pos * D + d
        tl.store(keys + row[None, :], new_key, mask=mine & (d < D)[None, :])
        tl.store(values + row, new_value, mask=mine & (d < D))
        score = tl.dot(q.to(kind), tl.trans(key), input_precision="ieee")
        score = tl.where(seen[None, :], score, -1e30)
        new = tl.sum(q * new_key.to(tl.float32), 1)
        new = tl.where(mine, new, -1e30)
        top = tl.maximum(tl.max(score, 1), new)
        p = tl.where(seen[None, :], tl.exp2(score - top[:, None]), 0.0)
        p_new = tl.where(mine, tl.exp2(new - top), 0.0)
        acc = tl.dot(p.to(kind), value, input_precision="ieee")
        acc += p_new[:, None] * new_value.to(tl.float32)[None, :]
        total = tl.sum(p, 1) + p_new
        first = sample * HEADS + head * GROUP
        own = (g < GROUP)[:, None] & (d < D)[None, :]
        if SPLITS == 1:
            y = acc / total[:, None]
            tl.store(out + (first + g)[:, None] * D + d[None, :], y.to(out.dtype.element_ty), own)
        else:
            at = (first + g) * SPLITS + split
            tl.store(part + at[:, None] * D + d[None, :], acc, mask=own)
            tl.store(stats + 2 * at, top, mask=g < GROUP)
            tl.store(stats + 2 * at + 1, total, mask=g < GROUP)
            tl.debug_barrier()  # all of the chunk is written before it is counted
            counter = count + sample * KV + head
            done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if done == active - 1:
                join(part, stats, out, first, active, GROUP, GJ, D, SPLITS, SB)
                tl.store(counter, 0)  # as the next launch needs it
