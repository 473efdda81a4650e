# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, N806
"""The persistent kernel of greedy decoding: one launch from the first token to the end of sequence.

A program owns `BH` rows of one layer, and `CHUNKS * HB` rows of the head over the vocabulary; some
may own rows of the head only. For every step

    1. layer 0 reads the row of the token in a table (embedding times input weights, made once);
       a layer above waits for the one below and computes W_ih x; with W_hh h from the step before
       that gives the new state, and it signals;
    2. all wait for the last layer, compute the logits of their rows, write the largest and its
       index, and signal;
    3. meanwhile a layer waits for its own programs and computes W_hh h for the next step;
    4. all wait for all of the head, and choose: the largest logit, of equal ones the first. All
       read the same numbers, so all choose the same token, and all stop together at the end of
       sequence.

Counters, epochs and `SPIN` as in `recurrent_kernel.py`; nothing is written twice in a launch. With
`SPIN` off the turns of one step are those of all cells and of all heads, in the order given.
"""

import triton
import triton.language as tl

from partita.gpu.kernels.recurrent import (
    GRU,
    LSTM,
    cell,
    gate_rows,
    gate_values,
    pause,
    signal,
    times,
    wait,
)

LAST = tl.constexpr(2147483647)


@triton.jit
def _fed(
    table, token, w_x, x_main, places, hidden_below, step, below, target, layer, faults,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, GATES: tl.constexpr,
    EMPTY_X: tl.constexpr, RESIDENT: tl.constexpr, SPIN: tl.constexpr,
):  # fmt: skip
    """W_ih x of some rows: out of the table, or from what the layer below has made."""
    columns = tl.arange(0, WIDTH)
    if layer > 0:
        wait(below, target, faults, SPIN)
        source = hidden_below + step * WIDTH + columns
        x = tl.load(source, cache_modifier=".cg").to(tl.float32)
        if RESIDENT:
            sums = times(x_main, x)
        else:
            sums = times(gate_rows(w_x, places, columns, SIZE, WIDTH, SLOTS, EMPTY_X), x)
    else:
        sums = gate_values(table + token * (GATES * SIZE), places, SIZE, SLOTS, EMPTY_X)
    return sums


@triton.jit
def _best(
    w_out, b_out, kept, top, program, element: tl.constexpr, VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr, HB: tl.constexpr, CHUNKS: tl.constexpr, HEAD_RESIDENT: tl.constexpr,
):  # fmt: skip
    """The largest logit of a program's rows and its row, the first of equal ones."""
    columns = tl.arange(0, WIDTH)
    most = tl.full((), -float("inf"), tl.float32)
    first = tl.full((), LAST, tl.int32)
    for chunk in range(CHUNKS):
        rows = (program * CHUNKS + chunk) * HB + tl.arange(0, HB)
        there = rows < VOCABULARY
        if HEAD_RESIDENT:
            sums = times(kept, top)
        else:
            where = rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
            sums = times(tl.load(w_out + where, mask=there[:, None], other=0.0), top)
        logits = sums + tl.load(b_out + rows, mask=there, other=0.0)
        logits = logits.to(element).to(tl.float32)  # as they would be stored
        logits = tl.where(there, logits, -float("inf"))
        here = tl.max(logits, 0)
        row = tl.min(tl.where((logits == here) & there, rows, LAST), 0)
        first = tl.where(here > most, row, tl.where(here == most, tl.minimum(row, first), first))
        most = tl.maximum(here, most)
    return most, first


@triton.jit
def _chosen(
    best, index, step, PROGRAMS: tl.constexpr, WIDE: tl.constexpr, VOCABULARY: tl.constexpr
):
    """The token of a step, from what all programs found."""
    each = tl.arange(0, WIDE)
    where = step * WIDE + each
    value = tl.load(best + where, each < PROGRAMS, other=-float("inf"), cache_modifier=".cg")
    row = tl.load(index + where, each < PROGRAMS, other=LAST, cache_modifier=".cg")
    token = tl.min(tl.where(value == tl.max(value, 0), row, LAST), 0)
    return tl.minimum(token, VOCABULARY - 1)  # in range even where logits are not numbers


@triton.jit(do_not_specialize=["max_steps", "capacity", "eos", "num_turns"])
def greedy_decode(
    first_token, table, w_x, w_h, bias, w_out, b_out, h_first, s_first, hidden, carry, best, index,
    tokens, num_steps, h_last, c_last, counters, faults, turns, max_steps, capacity, eos, num_turns,
    KIND: tl.constexpr, SLOTS: tl.constexpr, GATES: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, VOCABULARY: tl.constexpr, NUM_LAYERS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, PROGRAMS: tl.constexpr, WIDE: tl.constexpr, BH: tl.constexpr,
    HB: tl.constexpr, CHUNKS: tl.constexpr, RESIDENT: tl.constexpr, HEAD_RESIDENT: tl.constexpr,
    SPIN: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    """first_token [1]; table [vocabulary, GATES SIZE] f32; w_x, w_h [L, GATES SIZE, WIDTH];
    bias [L, SLOTS, SIZE]; w_out [VOCABULARY, WIDTH]; b_out [VOCABULARY]; h_first, s_first, carry,
    h_last, c_last [L, SIZE]; hidden [L, capacity, WIDTH]; best, index [capacity, WIDE];
    tokens [max_steps]; counters [L + 3]: one per layer, the head's, the steps done before, the
    programs that are done."""
    EMPTY_X: tl.constexpr = 3 if KIND == GRU else SLOTS
    EMPTY_H: tl.constexpr = 2 if KIND == GRU else SLOTS
    CELLS: tl.constexpr = NUM_LAYERS * NUM_BLOCKS
    epoch = tl.load(counters + NUM_LAYERS + 1, volatile=True)
    heads = counters + NUM_LAYERS
    top_done = counters + NUM_LAYERS - 1
    top_hidden = hidden + (NUM_LAYERS - 1) * capacity * WIDTH
    columns = tl.arange(0, WIDTH)
    token = tl.load(first_token).to(tl.int32)
    steps = 0
    if SPIN or PROGRAMS == 1:  # one alone has no others to wait for
        program = tl.program_id(0)
        has_cell = program < CELLS
        layer = tl.minimum(program // NUM_BLOCKS, NUM_LAYERS - 1)
        own = counters + layer
        below = counters + tl.maximum(layer - 1, 0)
        own_hidden = hidden + layer * capacity * WIDTH
        first = program % NUM_BLOCKS * BH
        rows = first + tl.arange(0, BH)
        here = rows < SIZE
        places = first * SLOTS + tl.arange(0, SLOTS * BH)
        wx = w_x + layer * GATES * SIZE * WIDTH
        wh = w_h + layer * GATES * SIZE * WIDTH
        x_main = wx
        kept = w_out
        if RESIDENT:
            x_main = gate_rows(wx, places, columns, SIZE, WIDTH, SLOTS, EMPTY_X)
            h_main = gate_rows(wh, places, columns, SIZE, WIDTH, SLOTS, EMPTY_H)
        if HEAD_RESIDENT:
            owned = program * HB + tl.arange(0, HB)
            where = owned[:, None] * WIDTH + columns[None, :]
            kept = tl.load(w_out + where, mask=(owned < VOCABULARY)[:, None], other=0.0)
        b = gate_values(bias + layer * SLOTS * SIZE, places, SIZE, SLOTS, SLOTS)
        c = tl.load(s_first + layer * SIZE + rows, mask=here, other=0.0).to(tl.float32)
        h = tl.load(h_first + layer * SIZE + columns, mask=columns < SIZE, other=0.0)
        h = h.to(tl.float32)
        if RESIDENT:
            past = times(h_main, h)
        else:
            past = times(gate_rows(wh, places, columns, SIZE, WIDTH, SLOTS, EMPTY_H), h)
        going = max_steps > 0
        while going:
            if has_cell:
                pause(program + 4 * steps, DELAY)
                sums = _fed(
                    table, token, wx, x_main, places, own_hidden - capacity * WIDTH, steps, below,
                    (epoch + steps + 1) * NUM_BLOCKS, layer, faults,
                    SIZE, WIDTH, SLOTS, GATES, EMPTY_X, RESIDENT, SPIN,
                )  # fmt: skip
                c, new = cell(b + sums + past, c, BH, KIND)
                new = new.to(hidden.dtype.element_ty)
                tl.store(own_hidden + steps * WIDTH + rows, new, mask=here)
                pause(program + 4 * steps + 1, DELAY)
                signal(own)
            wait(top_done, (epoch + steps + 1) * NUM_BLOCKS, faults, SPIN)
            top = tl.load(top_hidden + steps * WIDTH + columns, cache_modifier=".cg")
            value, row = _best(
                w_out, b_out, kept, top.to(tl.float32), program, hidden.dtype.element_ty,
                VOCABULARY, WIDTH, HB, CHUNKS, HEAD_RESIDENT,
            )  # fmt: skip
            tl.store(best + steps * WIDE + program, value)
            tl.store(index + steps * WIDE + program, row)
            pause(program + 4 * steps + 2, DELAY)
            signal(heads)
            if has_cell:
                wait(own, (epoch + steps + 1) * NUM_BLOCKS, faults, SPIN)
                source = own_hidden + steps * WIDTH + columns
                h = tl.load(source, cache_modifier=".cg").to(tl.float32)
                if RESIDENT:
                    past = times(h_main, h)
                else:
                    past = times(gate_rows(wh, places, columns, SIZE, WIDTH, SLOTS, EMPTY_H), h)
            pause(program + 4 * steps + 3, DELAY)
            wait(heads, (epoch + steps + 1) * PROGRAMS, faults, SPIN)
            token = _chosen(best, index, steps, PROGRAMS, WIDE, VOCABULARY)
            if program == 0:
                tl.store(tokens + steps, token.to(tl.int64))
            steps += 1
            going = (token != eos) & (steps < max_steps)
        if has_cell:
            if steps > 0:
                source = own_hidden + (steps - 1) * WIDTH + rows
                new = tl.load(source, mask=here, cache_modifier=".cg")
            else:
                new = tl.load(h_first + layer * SIZE + rows, mask=here)
            tl.store(h_last + layer * SIZE + rows, new, mask=here)
            if KIND == LSTM:
                tl.store(c_last + layer * SIZE + rows, c.to(c_last.dtype.element_ty), mask=here)
        if program == 0:
            tl.store(num_steps, steps)
            for rest in range(steps, max_steps):
                tl.store(tokens + rest, tl.zeros((), tl.int64) + eos)
        tl.debug_barrier()
        done = tl.atomic_add(counters + NUM_LAYERS + 2, 1, sem="acq_rel", scope="gpu")
        if done == PROGRAMS - 1:
            tl.store(counters + NUM_LAYERS + 2, 0)
            tl.store(counters + NUM_LAYERS + 1, epoch + steps)
    else:
        stop = max_steps
        for turn in range(num_turns):
            number = tl.load(turns + turn)
            step = number // (CELLS + PROGRAMS)
            tile = number % (CELLS + PROGRAMS)
            if tile < CELLS:  # a cell
                if (step > 0) & (step < stop):
                    wait(heads, (epoch + step) * PROGRAMS, faults, SPIN)
                    token = _chosen(best, index, step - 1, PROGRAMS, WIDE, VOCABULARY)
                    tl.store(tokens + step - 1, token.to(tl.int64))
                    if token == eos:
                        stop = step
                if step < stop:
                    layer = tile // NUM_BLOCKS
                    own_hidden = hidden + layer * capacity * WIDTH
                    first = tile % NUM_BLOCKS * BH
                    rows = first + tl.arange(0, BH)
                    here = rows < SIZE
                    places = first * SLOTS + tl.arange(0, SLOTS * BH)
                    wx = w_x + layer * GATES * SIZE * WIDTH
                    wh = w_h + layer * GATES * SIZE * WIDTH
                    if step > 0:
                        wait(counters + layer, (epoch + step) * NUM_BLOCKS, faults, SPIN)
                        h = tl.load(own_hidden + (step - 1) * WIDTH + columns)
                        c = tl.load(carry + layer * SIZE + rows, mask=here, other=0.0)
                    else:
                        where = h_first + layer * SIZE + columns
                        h = tl.load(where, mask=columns < SIZE, other=0.0)
                        c = tl.load(s_first + layer * SIZE + rows, mask=here, other=0.0)
                        c = c.to(tl.float32)
                    read = gate_rows(wh, places, columns, SIZE, WIDTH, SLOTS, EMPTY_H)
                    past = times(read, h.to(tl.float32))
                    sums = _fed(
                        table, token, wx, wx, places, own_hidden - capacity * WIDTH, step,
                        counters + layer - 1, (epoch + step + 1) * NUM_BLOCKS, layer, faults,
                        SIZE, WIDTH, SLOTS, GATES, EMPTY_X, False, SPIN,
                    )  # fmt: skip
                    b = gate_values(bias + layer * SLOTS * SIZE, places, SIZE, SLOTS, SLOTS)
                    c, new = cell(b + sums + past, c, BH, KIND)
                    new = new.to(hidden.dtype.element_ty)
                    tl.store(own_hidden + step * WIDTH + rows, new, mask=here)
                    tl.store(carry + layer * SIZE + rows, c, mask=here)
                    tl.store(h_last + layer * SIZE + rows, new, mask=here)
                    if KIND == LSTM:
                        last = c.to(c_last.dtype.element_ty)
                        tl.store(c_last + layer * SIZE + rows, last, mask=here)
                    signal(counters + layer)
            elif step < stop:
                program = tile - CELLS
                wait(top_done, (epoch + step + 1) * NUM_BLOCKS, faults, SPIN)
                top = tl.load(top_hidden + step * WIDTH + columns).to(tl.float32)
                value, row = _best(
                    w_out, b_out, w_out, top, program, hidden.dtype.element_ty,
                    VOCABULARY, WIDTH, HB, CHUNKS, False,
                )  # fmt: skip
                tl.store(best + step * WIDE + program, value)
                tl.store(index + step * WIDE + program, row)
                signal(heads)
        token = _chosen(best, index, stop - 1, PROGRAMS, WIDE, VOCABULARY)
        tl.store(tokens + stop - 1, token.to(tl.int64))
        tl.store(num_steps, stop)
        for rest in range(stop, max_steps):
            tl.store(tokens + rest, tl.zeros((), tl.int64) + eos)
        tl.store(counters + NUM_LAYERS + 1, epoch + stop)
