# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, N806
"""One token of a transformer decoder: products of a vector at memory bandwidth, and attention.

    rows      BN rows of a matrix times a vector: RMS norm of the vector before, a gate or a
              residual after; a row is read by one program, so nothing is added up elsewhere
    attend    one group of heads over one chunk of the cache: rotary embedding, the new key and
              value written to the cache, softmax; the last program of a group adds up the chunks

With PDL a kernel starts while the one before it ends: it reads its weights, which nobody writes,
then waits, then reads what the other wrote. Everything is summed in float32, and what is added to
from layer to layer stays float32; what a product reads lies in the type of the weights, so that both
come in the same order to the same threads.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def after_others(PDL: tl.constexpr):
    """Go on when the kernel before has written everything; let the next one start."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def embed(
    token, table, out, copy, WIDTH: tl.constexpr, BLOCK: tl.constexpr, VOCAB: tl.constexpr
):
    """The vector of a token; one that is none gives zeros."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token)
    known = (row >= 0) & (row < VOCAB)
    x = tl.load(table + row.to(tl.int64) * WIDTH + k, mask=(k < WIDTH) & known, other=0.0)
    tl.store(out + k, x.to(tl.float32), mask=k < WIDTH)
    tl.store(copy + k, x, mask=k < WIDTH)


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
def rows(
    x, norm, w, out, copy, residual, EPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, COPY: tl.constexpr,
    PDL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """BN rows of W x at a time; GATED: silu(W x) * (V x), the rows of V behind those of W.

    With COPY the result is written in a second type, too. A program goes on with the tile that lies as many tiles further as there are programs, and
    reads its first columns while the last of the tile before are added up.
    """
    TILES: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0)
    lane = tl.arange(0, BK)
    n = tile * BN + tl.arange(0, BN)
    following = weights(w, n, n < N, lane, K, BK)
    if GATED:
        next_up = weights(w, N + n, n < N, lane, K, BK)
    after_others(PDL)
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
            if NORM:
                squares += v * v
                v = v * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
            acc += inside_threads(part.to(tl.float32) * v[None, :], BN, BK, EACH)
            if GATED:
                acc_up += inside_threads(part_up.to(tl.float32) * v[None, :], BN, BK, EACH)
        y = tl.sum(acc, 1)
        if NORM:
            scale = tl.rsqrt(tl.sum(squares, 0) / K + EPS)
            y = y * scale
        if GATED:
            up = tl.sum(acc_up, 1)
            if NORM:
                up = up * scale
            y = y / (1.0 + tl.exp(-y)) * up
        if RESIDUAL:
            y += tl.load(residual + n, mask=n < N, other=0.0)
        tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)
        if COPY:
            tl.store(copy + n, y.to(copy.dtype.element_ty), mask=n < N)
        tile += tl.num_programs(0)
        n = ahead


@triton.jit
def turned(x, begin, d, cosine, sine, D: tl.constexpr):
    """A head after the rotary embedding."""
    HALF: tl.constexpr = D // 2
    other = tl.where(d < HALF, -1.0, 1.0) * tl.load(x + begin + (d + HALF) % D)
    return tl.load(x + begin + d) * cosine + other * sine


@triton.jit
def join(part, stats, out, head, active, d, D: tl.constexpr, SPLITS: tl.constexpr):
    """The chunks of one head added up."""
    s = tl.arange(0, SPLITS)
    here = s < active
    at = head * SPLITS + s
    top = tl.load(stats + 2 * at, mask=here, other=-1e30, cache_modifier=".cg")
    total = tl.load(stats + 2 * at + 1, mask=here, other=0.0, cache_modifier=".cg")
    factor = tl.where(here, tl.exp2(top - tl.max(top, 0)), 0.0)
    parts = tl.load(
        part + at[:, None] * D + d[None, :], mask=here[:, None], other=0.0, cache_modifier=".cg"
    )
    y = tl.sum(parts * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(out + head * D + d, y)


@triton.jit
def attend(
    qkv, keys, values, position, cosines, sines, part, stats, count, out, SCALE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, LENGTH: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUP heads over CHUNK rows of the cache of the key head that they share."""
    head, split = tl.program_id(0), tl.program_id(1)
    KV: tl.constexpr = HEADS // GROUP
    pos = tl.minimum(tl.load(position), LENGTH - 1)
    active = pos // CHUNK + 1
    d = tl.arange(0, D)
    t = split * CHUNK + tl.arange(0, CHUNK)
    seen = t < pos
    there = (head * LENGTH + t)[:, None] * D + d[None, :]
    key = tl.load(keys + there, mask=seen[:, None], other=0.0).to(tl.float32)
    value = tl.load(values + there, mask=seen[:, None], other=0.0).to(tl.float32)
    cosine, sine = tl.load(cosines + pos * D + d), tl.load(sines + pos * D + d)
    after_others(PDL)
    if split < active:
        kind = keys.dtype.element_ty
        new_key = turned(qkv, (HEADS + head) * D, d, cosine, sine, D).to(kind)
        new_value = tl.load(qkv + (HEADS + KV + head) * D + d).to(kind)
        mine = split == active - 1  # this chunk has the new row
        row = (head * LENGTH + pos) * D + d
        tl.store(keys + row, new_key, mask=mine & (d < D))
        tl.store(values + row, new_value, mask=mine & (d < D))
        for g in tl.static_range(GROUP):
            q = turned(qkv, (head * GROUP + g) * D, d, cosine, sine, D) * (SCALE * LOG2E)
            score = tl.where(seen, tl.sum(key * q[None, :], 1), -1e30)
            new = tl.where(mine, tl.sum(new_key.to(tl.float32) * q, 0), -1e30)
            top = tl.maximum(tl.max(score, 0), new)
            p = tl.where(seen, tl.exp2(score - top), 0.0)
            p_new = tl.where(mine, tl.exp2(new - top), 0.0)
            acc = tl.sum(p[:, None] * value, 0) + p_new * new_value.to(tl.float32)
            at = (head * GROUP + g) * SPLITS + split
            tl.store(part + at * D + d, acc)
            tl.store(stats + 2 * at, top)
            tl.store(stats + 2 * at + 1, tl.sum(p, 0) + p_new)
        tl.debug_barrier()  # all of the chunk is written before it is counted
        done = tl.atomic_add(count + head, 1, sem="acq_rel", scope="gpu")
        if done == active - 1:
            for g in tl.static_range(GROUP):
                join(part, stats, out, head * GROUP + g, active, d, D, SPLITS)
            tl.store(count + head, 0)  # as the next launch needs it
