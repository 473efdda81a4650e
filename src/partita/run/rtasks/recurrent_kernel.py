# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803
"""The persistent kernel of a stack of LSTM layers: one launch for all layers and all steps.

A program owns `BH + BX` hidden rows of one layer for the whole sequence, so its recurrent weights
stay in registers; `X_RESIDENT` keeps the input weights there too, else they are read from the L2
cache while the program would wait anyway. For step t of layer l it

    1. waits until all programs of layer l-1 have signalled step t, and computes W_ih x;
    2. waits until all programs of its own layer have signalled step t-1, and computes W_hh h;
    3. updates its rows of the cell and of the hidden state, and signals.

There is no barrier: layers run as far ahead as data allows. One counter per layer only grows; what
it starts from is kept on the device, so that nothing is reset between launches and the length of
the sequence is an argument. The hidden states of all steps are kept: nothing is written twice, and
they are the output. All programs must be resident at once (`recurrent.py` checks it).

The four gates of a row are four neighbouring rows of one matrix: one sum over columns instead of
four, since each may have to cross warps. Every thread polls by itself, with acquire: that needs no
barrier, and what it reads afterwards is what was released.
"""

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def _seen(counter):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _wait(counter, target):
    while _seen(counter) < target:
        pass


@triton.jit
def _rows(weights, places, columns, size, WIDTH: tl.constexpr):
    """Rows (hidden row, gate) of a layer's matrix, which holds gate after gate."""
    row, gate = places // 4, places % 4
    where = (gate * size + row)[:, None] * WIDTH + columns[None, :]
    return tl.load(weights + where, mask=(row < size)[:, None], other=0.0)


@triton.jit
def _biases(bias, places, size):
    row, gate = places // 4, places % 4
    return tl.load(bias + gate * size + row, mask=row < size, other=0.0).to(tl.float32)


@triton.jit
def _times(weights, vector):
    return tl.sum(weights.to(tl.float32) * vector[None, :], 1)


@triton.jit
def _cell(gates, c, COUNT: tl.constexpr):
    """The new cell and hidden state from the sums of (input, forget, candidate, output)."""
    even, odd = tl.split(tl.reshape(gates, (COUNT, 2, 2)))  # input, candidate; forget, output
    i, g = tl.split(even)
    f, o = tl.split(odd)
    c = _sigmoid(f) * c + _sigmoid(i) * _tanh(g)
    return c, _sigmoid(o) * _tanh(c)


@triton.jit
def lstm_stack(
    x, w_x, w_h, bias, hidden, cell, last_cell, counters, num_steps, size,
    NUM_LAYERS: tl.constexpr, NUM_BLOCKS: tl.constexpr, BH: tl.constexpr, BX: tl.constexpr,
    WIDTH_X: tl.constexpr, WIDTH_H: tl.constexpr, X_RESIDENT: tl.constexpr,
):  # fmt: skip
    """x [T, WIDTH_X]; w_x [L, 4, size, WIDTH_X]; w_h [L, 4, size, WIDTH_H]; bias [L, 4, size];
    hidden [L, T + 1, WIDTH_H]; cell and last_cell [L, size]; counters [L + 2]: one per layer, the
    number they start from, and the programs that are done."""
    layer = tl.program_id(0) // NUM_BLOCKS
    block = tl.program_id(0) % NUM_BLOCKS
    base = tl.load(counters + NUM_LAYERS, volatile=True)
    own = counters + layer
    below = counters + tl.maximum(layer - 1, 0)
    first = block * (BH + BX)
    in_x = tl.arange(0, WIDTH_X)
    in_h = tl.arange(0, WIDTH_H)
    wx = w_x + layer * 4 * size * WIDTH_X
    wh = w_h + layer * 4 * size * WIDTH_H
    b = bias + layer * 4 * size
    rows = first + tl.arange(0, BH)
    here = rows < size
    places = first * 4 + tl.arange(0, 4 * BH)
    w_main = _rows(wh, places, in_h, size, WIDTH_H)
    b_main = _biases(b, places, size)
    c = tl.load(cell + layer * size + rows, mask=here, other=0.0)
    if X_RESIDENT:
        x_main = _rows(wx, places, in_x, size, WIDTH_X)
    if BX:
        more = first + BH + tl.arange(0, BX)
        there = more < size
        others = (first + BH) * 4 + tl.arange(0, 4 * BX)
        w_more = _rows(wh, others, in_h, size, WIDTH_H)
        b_more = _biases(b, others, size)
        d = tl.load(cell + layer * size + more, mask=there, other=0.0)
        if X_RESIDENT:
            x_more = _rows(wx, others, in_x, size, WIDTH_X)
    stride = (num_steps + 1) * WIDTH_H
    for step in range(num_steps):
        if layer > 0:
            _wait(below, base + (step + 1) * NUM_BLOCKS)
            source = hidden + (layer - 1) * stride + (step + 1) * WIDTH_H + in_x
            vector = tl.load(source, mask=in_x < WIDTH_H, other=0.0, cache_modifier=".cg")
        else:
            vector = tl.load(x + step * WIDTH_X + in_x)
        vector = vector.to(tl.float32)
        if X_RESIDENT:
            main = b_main + _times(x_main, vector)
        else:
            main = b_main + _times(_rows(wx, places, in_x, size, WIDTH_X), vector)
        if BX:
            if X_RESIDENT:
                extra = b_more + _times(x_more, vector)
            else:
                extra = b_more + _times(_rows(wx, others, in_x, size, WIDTH_X), vector)
        if step > 0:
            _wait(own, base + step * NUM_BLOCKS)
        past = hidden + layer * stride + step * WIDTH_H
        h = tl.load(past + in_h, cache_modifier=".cg").to(tl.float32)
        c, new = _cell(main + _times(w_main, h), c, BH)
        tl.store(past + WIDTH_H + rows, new.to(hidden.dtype.element_ty), mask=here)
        if BX:
            d, also = _cell(extra + _times(w_more, h), d, BX)
            tl.store(past + WIDTH_H + more, also.to(hidden.dtype.element_ty), mask=there)
        tl.debug_barrier()
        tl.atomic_add(own, 1, sem="release", scope="gpu")
    tl.store(last_cell + layer * size + rows, c, mask=here)
    if BX:
        tl.store(last_cell + layer * size + more, d, mask=there)
    tl.debug_barrier()
    done = tl.atomic_add(counters + NUM_LAYERS + 1, 1, sem="acq_rel", scope="gpu")
    if done == NUM_LAYERS * NUM_BLOCKS - 1:
        tl.store(counters + NUM_LAYERS + 1, 0)
        tl.store(counters + NUM_LAYERS, base + num_steps * NUM_BLOCKS)
