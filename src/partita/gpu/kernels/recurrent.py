# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, N806, SIM102
"""The persistent kernel of recurrent layers: one launch for all steps of several layers.

A *group* of programs owns a layer, or one direction of it; a program owns `BH + BX` hidden rows of
its group for the whole sequence, so its weights stay in registers (`X_RESIDENT`: the input weights
too, else they are read from the L2 cache while the program would wait anyway). For every step it

    1. waits until the group below has signalled this step, and computes W_ih x; or reads what a
       matrix product made before the launch (`PRE`: the first layer, or both directions of one);
    2. waits until its own group has signalled the step before, and computes W_hh h;
    3. updates its rows of the state, and signals.

There is no barrier: layers run as far ahead as data allows. The sequences of a batch take turns:
step s is time s // BATCH of sequence s % BATCH. One counter per group and sequence only grows: what
all programs of the group have signalled for it. That is enough, since none of them gets a step of a
sequence ahead of another that has not signalled the one before. How many times were done before is
kept on the device, so that nothing is reset between launches and the length is an argument. Hidden
states of all steps are kept: nothing is written twice. All programs must be resident at once
(`recurrent.py` checks it).

The gates of a row are neighbouring rows of one matrix, in `SLOTS`: one sum over columns instead of
one per gate, since each may have to cross warps. A GRU has four slots: reset, update, and of the
candidate what comes from the input and what comes from the past. Every thread polls by itself, with
acquire: that needs no barrier, and what it reads afterwards is what was released.

With `SPIN` off one program does the work of all, in an order that it is given; a wait becomes a
check that what it waits for is there, and `faults` counts those that fail.
"""

import triton
import triton.language as tl

from partita.gpu.kernels.tiles import seen, sigmoid, tanh

LSTM, GRU, TANH, RELU = (tl.constexpr(number) for number in range(4))


@triton.jit
def wait(counter, target, faults, SPIN: tl.constexpr):
    """Until the counter is there; by the difference, so that it may run over."""
    if SPIN:
        while seen(counter) - target < 0:
            pass
    else:
        missing = (tl.load(counter) - target < 0).to(tl.int32)
        tl.store(faults, tl.load(faults) + missing)


@triton.jit
def signal(counter):
    """All that this program has written is seen by who sees the counter."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def pause(seed, DELAY: tl.constexpr):
    """Holds every warp for a time of its own, below `DELAY` nanoseconds; for stress only."""
    if DELAY:
        warp = tl.arange(0, 512) // 32
        drawn = (seed * 16 + warp) * 747796405 + 289133
        drawn = ((drawn >> 13) ^ drawn) * 277803737
        length = ((drawn >> 9) & 0xFFFF) * DELAY // 65536
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [length],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def gate_rows(
    weights, places, columns, SIZE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    EMPTY: tl.constexpr,
):  # fmt: skip
    """Rows (hidden row, slot) of a matrix that holds gate after gate; one slot may be empty."""
    row, slot = places // SLOTS, places % SLOTS
    gate = slot - (slot > EMPTY).to(tl.int32)
    where = (gate * SIZE + row)[:, None] * WIDTH + columns[None, :]
    return tl.load(weights + where, mask=((row < SIZE) & (slot != EMPTY))[:, None], other=0.0)


@triton.jit
def gate_values(
    values, places, SIZE: tl.constexpr, SLOTS: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """The same of a vector."""
    row, slot = places // SLOTS, places % SLOTS
    gate = slot - (slot > EMPTY).to(tl.int32)
    return tl.load(values + gate * SIZE + row, mask=(row < SIZE) & (slot != EMPTY), other=0.0)


@triton.jit
def times(weights, vector):
    """Matrix by vector, in f32."""
    return tl.sum(weights.to(tl.float32) * vector[None, :], 1)


@triton.jit
def cell(gates, state, COUNT: tl.constexpr, KIND: tl.constexpr):
    """The new state and hidden rows; the state of a GRU is its own hidden rows."""
    if KIND == TANH:
        new = tanh(gates)
        state = new
    elif KIND == RELU:
        new = tl.maximum(gates, 0.0)
        state = new
    else:
        even, odd = tl.split(tl.reshape(gates, (COUNT, 2, 2)))  # slots 0 and 2; 1 and 3
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        if KIND == LSTM:  # input, forget, candidate, output
            state = sigmoid(second) * state + sigmoid(first) * tanh(third)
            new = sigmoid(fourth) * tanh(state)
        else:  # reset, update, candidate from the input, candidate from the past
            update = sigmoid(second)
            new = (1.0 - update) * tanh(third + sigmoid(first) * fourth) + update * state
            state = new
    return state, new


@triton.jit
def _start(s_first, carry, group, sequence, rows, time, SIZE: tl.constexpr, BATCH: tl.constexpr):
    """The state of some rows before a step: what was given, or what the last step left."""
    where = (group * BATCH + sequence) * SIZE + rows
    if time == 0:
        state = tl.load(s_first + where, mask=rows < SIZE, other=0.0).to(tl.float32)
    else:
        state = tl.load(carry + where, mask=rows < SIZE, other=0.0)
    return state


@triton.jit
def _walk(
    program, begin, end, epoch, num_times, capacity, x, pre, w_x, w_h, bias, h_first, s_first,
    hidden, carry, out, h_last, c_last, counters, faults,
    KIND: tl.constexpr, SLOTS: tl.constexpr, GATES: tl.constexpr, INPUTS: tl.constexpr,
    SIZE: tl.constexpr, BATCH: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    BH: tl.constexpr, BX: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH_H: tl.constexpr,
    PRE: tl.constexpr, BOTH: tl.constexpr, X_RESIDENT: tl.constexpr, CARRY: tl.constexpr,
    SPIN: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    """Steps begin..end of one program."""
    NO_X: tl.constexpr = PRE and (BOTH or NUM_GROUPS == 1)
    EMPTY_X: tl.constexpr = 3 if KIND == GRU else SLOTS
    EMPTY_H: tl.constexpr = 2 if KIND == GRU else SLOTS
    FEED: tl.constexpr = (2 if BOTH else 1) * GATES * SIZE
    WIDE: tl.constexpr = 2 * SIZE if BOTH else SIZE
    group = program // NUM_BLOCKS
    first = program % NUM_BLOCKS * (BH + BX)
    own = counters + group * BATCH
    below = counters + tl.maximum(group - 1, 0) * BATCH
    in_x = tl.arange(0, WIDTH_X)
    in_h = tl.arange(0, WIDTH_H)
    wx = w_x + group * GATES * SIZE * WIDTH_X
    wh = w_h + group * GATES * SIZE * WIDTH_H
    b = bias + group * SLOTS * SIZE
    pre_here = pre + (group * GATES * SIZE if BOTH else 0)
    hidden_here = hidden + group * capacity * WIDTH_H
    hidden_below = hidden_here - capacity * WIDTH_H
    out_here = out + (group * SIZE if BOTH else 0)
    rows = first + tl.arange(0, BH)
    here = rows < SIZE
    places = first * SLOTS + tl.arange(0, SLOTS * BH)
    w_main = gate_rows(wh, places, in_h, SIZE, WIDTH_H, SLOTS, EMPTY_H)
    b_main = gate_values(b, places, SIZE, SLOTS, SLOTS)
    if X_RESIDENT and not NO_X:
        x_main = gate_rows(wx, places, in_x, SIZE, WIDTH_X, SLOTS, EMPTY_X)
    if not CARRY:
        c = tl.load(s_first + group * SIZE + rows, mask=here, other=0.0).to(tl.float32)
    if BX:
        more = first + BH + tl.arange(0, BX)
        there = more < SIZE
        others = (first + BH) * SLOTS + tl.arange(0, SLOTS * BX)
        w_more = gate_rows(wh, others, in_h, SIZE, WIDTH_H, SLOTS, EMPTY_H)
        b_more = gate_values(b, others, SIZE, SLOTS, SLOTS)
        if X_RESIDENT and not NO_X:
            x_more = gate_rows(wx, others, in_x, SIZE, WIDTH_X, SLOTS, EMPTY_X)
        if not CARRY:
            d = tl.load(s_first + group * SIZE + more, mask=there, other=0.0).to(tl.float32)
    for step in range(begin, end):
        time = step // BATCH
        sequence = step % BATCH
        line = step
        if BOTH:
            if group == 1:
                line = (num_times - 1 - time) * BATCH + sequence
        if NO_X:
            main = gate_values(pre_here + line * FEED, places, SIZE, SLOTS, EMPTY_X)
            if BX:
                extra = gate_values(pre_here + line * FEED, others, SIZE, SLOTS, EMPTY_X)
        else:
            if group > 0:
                pause(program + 4 * step, DELAY)
                wait(below + sequence, (epoch + time + 1) * NUM_BLOCKS, faults, SPIN)
                source = hidden_below + step * WIDTH_H
                width = SIZE
            else:
                source = x + step * INPUTS
                width = INPUTS
            if INPUTS == SIZE:  # known when compiled: no mask where columns are not rounded up
                vector = tl.load(source + in_x, in_x < SIZE, other=0.0, cache_modifier=".cg")
            else:
                vector = tl.load(source + in_x, in_x < width, other=0.0, cache_modifier=".cg")
            vector = vector.to(tl.float32)
            if X_RESIDENT:
                main = times(x_main, vector)
                if BX:
                    extra = times(x_more, vector)
            else:
                read = gate_rows(wx, places, in_x, SIZE, WIDTH_X, SLOTS, EMPTY_X)
                main = times(read, vector)
                if BX:
                    read_more = gate_rows(wx, others, in_x, SIZE, WIDTH_X, SLOTS, EMPTY_X)
                    extra = times(read_more, vector)
            if PRE:
                given = pre_here + line * FEED
                if group == 0:
                    main = gate_values(given, places, SIZE, SLOTS, EMPTY_X).to(tl.float32)
                    if BX:
                        extra = gate_values(given, others, SIZE, SLOTS, EMPTY_X).to(tl.float32)
        if CARRY:
            c = _start(s_first, carry, group, sequence, rows, time, SIZE, BATCH)
            if BX:
                d = _start(s_first, carry, group, sequence, more, time, SIZE, BATCH)
        if time > 0:
            pause(program + 4 * step + 1, DELAY)
            wait(own + sequence, (epoch + time) * NUM_BLOCKS, faults, SPIN)
            past = hidden_here + (step - BATCH) * WIDTH_H
        else:
            past = h_first + (group * BATCH + sequence) * SIZE
        h = tl.load(past + in_h, mask=in_h < SIZE, other=0.0, cache_modifier=".cg")
        h = h.to(tl.float32)
        gates = b_main + main.to(tl.float32) + times(w_main, h)
        c, new = cell(gates, c, BH, KIND)
        kept = new.to(hidden.dtype.element_ty)
        tl.store(hidden_here + step * WIDTH_H + rows, kept, mask=here)
        if BX:
            gates_more = b_more + extra.to(tl.float32) + times(w_more, h)
            d, new_more = cell(gates_more, d, BX, KIND)
            kept_more = new_more.to(hidden.dtype.element_ty)
            tl.store(hidden_here + step * WIDTH_H + more, kept_more, mask=there)
        if CARRY:  # before the barrier in `signal`: other threads of this program read it
            tl.store(carry + (group * BATCH + sequence) * SIZE + rows, c, mask=here)
            if BX:
                tl.store(carry + (group * BATCH + sequence) * SIZE + more, d, mask=there)
        pause(program + 4 * step + 2, DELAY)
        signal(own + sequence)
        if BOTH or group == NUM_GROUPS - 1:
            tl.store(out_here + line * WIDE + rows, kept, mask=here)
            if BX:
                tl.store(out_here + line * WIDE + more, kept_more, mask=there)
        if CARRY:
            if time == num_times - 1:
                last = (group * BATCH + sequence) * SIZE
                tl.store(h_last + last + rows, kept, mask=here)
                if KIND == LSTM:
                    tl.store(c_last + last + rows, c.to(c_last.dtype.element_ty), mask=here)
                if BX:
                    tl.store(h_last + last + more, kept_more, mask=there)
                    if KIND == LSTM:
                        tl.store(c_last + last + more, d.to(c_last.dtype.element_ty), mask=there)
    if not CARRY:  # after the loop: fewer registers in it
        past = hidden_here + (num_times - 1) * WIDTH_H
        kept = tl.load(past + rows, mask=here, cache_modifier=".cg")
        tl.store(h_last + group * SIZE + rows, kept, mask=here)
        if KIND == LSTM:
            tl.store(c_last + group * SIZE + rows, c.to(c_last.dtype.element_ty), mask=here)
        if BX:
            kept_more = tl.load(past + more, mask=there, cache_modifier=".cg")
            tl.store(h_last + group * SIZE + more, kept_more, mask=there)
            if KIND == LSTM:
                tl.store(c_last + group * SIZE + more, d.to(c_last.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_times", "capacity", "num_turns"])
def recurrent_layers(
    x, pre, w_x, w_h, bias, h_first, s_first, hidden, carry, out, h_last, c_last, counters, faults,
    turns, num_times, capacity, num_turns,
    KIND: tl.constexpr, SLOTS: tl.constexpr, GATES: tl.constexpr, INPUTS: tl.constexpr,
    SIZE: tl.constexpr, BATCH: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    BH: tl.constexpr, BX: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH_H: tl.constexpr,
    PRE: tl.constexpr, BOTH: tl.constexpr, X_RESIDENT: tl.constexpr, CARRY: tl.constexpr,
    SPIN: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    """x [T B, INPUTS]; pre [T B, directions GATES SIZE]; w_x [G, GATES SIZE, WIDTH_X];
    w_h [G, GATES SIZE, WIDTH_H]; bias [G, SLOTS, SIZE]; h_first, s_first, carry, h_last, c_last
    [G, B, SIZE]; hidden [G, capacity, WIDTH_H]; out [T B, directions SIZE]; counters [G B + 2]: one
    per group and sequence, the times done before, the programs that are done; turns: (step,
    program) one after the other, for one program that does all."""
    PROGRAMS: tl.constexpr = NUM_GROUPS * NUM_BLOCKS
    COUNTERS: tl.constexpr = NUM_GROUPS * BATCH
    epoch = tl.load(counters + COUNTERS, volatile=True)
    if SPIN:
        _walk(
            tl.program_id(0), 0, num_times * BATCH, epoch, num_times, capacity, x, pre, w_x, w_h,
            bias, h_first, s_first, hidden, carry, out, h_last, c_last, counters, faults,
            KIND, SLOTS, GATES, INPUTS, SIZE, BATCH, NUM_GROUPS, NUM_BLOCKS, BH, BX, WIDTH_X,
            WIDTH_H, PRE, BOTH, X_RESIDENT, CARRY, SPIN, DELAY,
        )  # fmt: skip
        tl.debug_barrier()
        done = tl.atomic_add(counters + COUNTERS + 1, 1, sem="acq_rel", scope="gpu")
        if done == PROGRAMS - 1:
            tl.store(counters + COUNTERS + 1, 0)
            tl.store(counters + COUNTERS, epoch + num_times)
    else:
        for turn in range(num_turns):
            begin, end = 0, num_times  # a group of one program: all its steps, states in registers
            program = tl.load(turns + turn) % PROGRAMS
            if CARRY:
                begin = tl.load(turns + turn) // PROGRAMS
                end = begin + 1
            _walk(
                program, begin, end, epoch, num_times, capacity, x, pre, w_x, w_h, bias,
                h_first, s_first, hidden, carry, out, h_last, c_last, counters, faults,
                KIND, SLOTS, GATES, INPUTS, SIZE, BATCH, NUM_GROUPS, NUM_BLOCKS, BH, BX, WIDTH_X,
                WIDTH_H, PRE, BOTH, X_RESIDENT, CARRY, SPIN, DELAY,
            )  # fmt: skip
        tl.store(counters + COUNTERS, epoch + num_times)
