"""The shortest schedule of a piece: one sweep over all sets of ops that may be left.

    best(nothing) = 0,   best(set) = min over last stages E of  best(set without E) + cost(E)

Sets are numbered so that less comes first; one ascending sweep settles each with all that it needs
known. What a group takes away is a difference of numbers that adds up over groups: no hashing where
a table of all numbers fits, one probe per stage where only the sets that exist are kept.

    states       sets that hold the producers of their ops, the empty one apart
    transitions  pairs of a set and a last stage of it; about 10 ns each
    memory       16 bytes per entry of the table, or 40 bytes per state

Last stages as IOS (Ding et al., MLSys 2021) has them: groups that are each one op with all that
follows from it, or a merge of equal convs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from partita.compiled import compiled
from partita.problems.streams import BYTES_PER_VALUE, StreamsConstants, StreamStage
from partita.search.streams.chains import I64, Flags
from partita.search.streams.piece import F64, NO_CLASS, U64, SweepPiece

MAX_TABLE = 2**22  # entries
MAX_STATES = 2**21  # where they are kept one by one
STEP = 2_000_000  # transitions between two looks at the clock: some tens of ms
UNLIMITED = 2**31
EMPTY = np.uint64(0)
MERGE_SALT = np.uint64(0x5851F42D4C957F2D)


class Rules(NamedTuple):
    """What the cost of a stage depends on besides its ops."""

    r: int
    s: int
    alpha: float
    sync_us: float
    launch_us: float
    num_sms: float
    flop_per_us: float
    bytes_per_us: float


class Known(NamedTuple):
    """Costs of single stages that go before the formula: stages by a hash of what they run."""

    op_hash: U64
    keys: U64  # open addressing, a power of two long; empty: nothing is known
    cost_us: F64


NOTHING = (np.zeros(0, np.uint64), np.zeros(0))


@dataclass(frozen=True, slots=True)
class BestStages:
    """The shortest schedule of a piece, with what it took to find it."""

    stages: tuple[StreamStage, ...]  # of positions in the piece
    time_us: float
    states: int
    transitions: int
    singles: int  # transitions that take one op; IOS counts them again, as merges of one


def rules(
    constants: StreamsConstants, r: int | None, s: int | None, *, overhead: float = 1.0
) -> Rules:
    """The rules of a problem; `overhead` scales what company costs."""
    return Rules(
        UNLIMITED if r is None else min(r, UNLIMITED),
        UNLIMITED if s is None else min(s, UNLIMITED),
        float(constants.alpha * overhead),
        float(constants.sync_us * overhead),
        float(constants.launch_us),
        float(constants.num_sms),
        float(constants.peak_flop_per_us * constants.efficiency),
        float(constants.bytes_per_us),
    )


def solve(
    piece: SweepPiece,
    given: Rules,
    stopped: Callable[[], bool],
    known: Known | None = None,
    states: tuple[I64, I64] | None = None,
) -> BestStages | None:
    """The shortest schedule of a piece; None if stopped. `states` as `listed` gives them."""
    keys, slots = (np.zeros(0, np.int64),) * 2 if states is None else states
    entries = piece.entries if states is None else len(keys)
    best, previous = np.full(entries, np.inf), np.zeros(entries, np.int64)
    best[0] = 0.0
    if known is None:
        known = Known(np.zeros(len(piece.ops), np.uint64), *NOTHING)
    at, num_states, transitions, singles = 1, 0, 0, 0
    while at < entries:
        if stopped():
            return None
        at, more, tried, single = _sweep(
            piece.chains,
            piece.strides,
            piece.lengths,
            piece.first,
            piece.needs,
            piece.t_us,
            piece.w_us,
            piece.conv,
            piece.merge_class,
            keys,
            slots,
            known,
            given,
            best,
            previous,
            at,
        )
        num_states += more
        transitions += tried
        singles += single
    stages = _stages(piece, previous, keys, slots)
    return BestStages(stages, float(best[-1]), num_states, transitions, singles)


def listed(
    piece: SweepPiece, stopped: Callable[[], bool], most: int = MAX_STATES
) -> tuple[I64, I64] | None:
    """All sets of a piece, ascending, and where to look them up; None if too many, or stopped."""
    keys = np.empty(most + piece.num_chains + 1, np.int64)
    slots = np.full(1 << (2 * len(keys)).bit_length(), -1)  # at most half full
    keys[0] = piece.entries - 1
    _insert(slots, keys, 0)
    head, tail = 0, 1
    while head < tail:
        if stopped():
            return None
        head, tail = _collect(
            piece.chains, piece.strides, piece.lengths, piece.first, keys, slots, head, tail, most
        )
        if tail > most:
            return None
    ordered = np.sort(keys[:tail])
    slots[:] = -1
    for_all(slots, ordered)
    return ordered, slots


def _stages(piece: SweepPiece, previous: I64, keys: I64, slots: I64) -> tuple[StreamStage, ...]:
    """Follow the choices from everything to nothing."""
    stages = []
    key = piece.entries - 1
    while key:
        at = key if not len(keys) else _lookup(slots, keys, key)
        before, merge = divmod(int(previous[at]), 2)
        ops = [
            int(piece.chains[chain, place])
            for chain in range(piece.num_chains)
            for place in range(_count(piece, before, chain), _count(piece, key, chain))
        ]
        stages.append(StreamStage(merge=tuple(sorted(ops))) if merge else grouped(piece.reach, ops))
        key = before
    return tuple(reversed(stages))


def _count(piece: SweepPiece, key: int, chain: int) -> int:
    return key // int(piece.strides[chain]) % (int(piece.lengths[chain]) + 1)


def grouped(reach: Flags, ops: list[int]) -> StreamStage:
    """The groups of a concurrent stage: each op that nothing here precedes, with its followers."""
    order = sorted(ops)
    groups: list[list[int]] = []
    for op in order:
        for group in groups:
            if reach[group[0], op]:
                group.append(op)
                break
        else:
            groups.append([op])
    return StreamStage(groups=tuple(map(tuple, groups)))


def stage_hash(op_hash: dict[int, int], stage: StreamStage) -> int:
    """Equal for stages that run the same ops in the same company; as the sweep computes it."""
    bits = 2**64 - 1
    if stage.merge:
        total = sum(op_hash[op] for op in stage.merge) & bits
        return int(_mix(np.uint64(total ^ int(MERGE_SALT))))
    sums = (sum(op_hash[op] for op in group) & bits for group in stage.groups)
    return sum(int(_mix(np.uint64(each))) for each in sums) & bits


@compiled()
def _mix(value: np.uint64) -> np.uint64:
    """Spread the bits (the finisher of SplitMix64)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@compiled()
def _lookup(slots: I64, keys: I64, key: int) -> int:
    mask = len(slots) - 1
    at = np.int64(_mix(np.uint64(key)) & np.uint64(mask))
    while slots[at] >= 0:
        if keys[slots[at]] == key:
            return int(slots[at])
        at = (at + 1) & mask
    return int(-1 - at)  # where it would go


@compiled()
def _insert(slots: I64, keys: I64, index: int) -> bool:
    at = _lookup(slots, keys, keys[index])
    if at >= 0:
        return False
    slots[-1 - at] = index
    return True


@compiled()
def for_all(slots: I64, keys: I64) -> None:
    """Make every key findable."""
    for index in range(len(keys)):
        _insert(slots, keys, index)


@compiled()
def _collect(
    chains: I64,
    strides: I64,
    lengths: I64,
    first: I64,
    keys: I64,
    slots: I64,
    head: int,
    tail: int,
    most: int,
) -> tuple[int, int]:
    """Take single ops from the sets known so far, until none are new, or for a while."""
    num_chains = len(lengths)
    count = np.empty(num_chains, np.int64)
    until = head + 100_000
    while head < tail and head < until and tail <= most:
        key = keys[head]
        head += 1
        for chain in range(num_chains):
            count[chain] = key // strides[chain] % (lengths[chain] + 1)
        for chain in range(num_chains):
            if count[chain] == 0:
                continue
            op = chains[chain, count[chain] - 1]
            alone = True
            for other in range(num_chains):
                if other != chain and first[op, other] < count[other]:
                    alone = False
                    break
            if alone:
                keys[tail] = key - strides[chain]
                if _insert(slots, keys, tail):
                    tail += 1
    return head, tail


@compiled()
def _measured(known: Known, stage: np.uint64) -> float:
    """What is known of a stage; negative if nothing is."""
    mask = np.uint64(len(known.keys) - 1)
    at = stage & mask
    while known.keys[at] != EMPTY:
        if known.keys[at] == stage:
            return float(known.cost_us[at])
        at = (at + np.uint64(1)) & mask
    return -1.0


@compiled()
def _merged_us(given: Rules, shape: F64, cout: float, kh: float, kw: float) -> float:
    """The time of one conv by itself, as `partita.problems.streams.solo_us` has it."""
    cin, hin, win = shape[0], shape[1], shape[2]
    pixels, groups = shape[4] * shape[5], shape[8]
    weights = cout * cin / groups * kh * kw
    values = cin * hin * win + weights + cout + cout * pixels
    if groups == 1.0:
        blocks = math.ceil(cout / 64) * math.ceil(pixels / 64)
    else:
        blocks = math.ceil(cout * pixels / 1024)
    used = min(1.0, max(1.0, blocks) / given.num_sms)
    computing = 2 * pixels * weights / (given.flop_per_us * used)
    moving = BYTES_PER_VALUE * values / (given.bytes_per_us * min(1.0, 2 * used))
    return float(given.launch_us + max(computing, moving))


@compiled()
def _sweep(
    chains: I64,
    strides: I64,
    lengths: I64,
    first: I64,
    needs: I64,
    t_us: F64,
    w_us: F64,
    conv: F64,
    merge_class: I64,
    keys: I64,
    slots: I64,
    known: Known,
    given: Rules,
    best: F64,
    previous: I64,
    at: int,
) -> tuple[int, int, int, int]:
    """Settle sets from `at` on for a while: the next set, then how many states, stages, singles."""
    num_chains, num_ops = len(lengths), len(t_us)
    dense = len(keys) == 0
    asks = len(known.keys) > 0
    states = transitions = singles = looked = 0
    count = np.empty(num_chains, np.int64)
    # groups that may be in the last stage, chain by chain
    ends = np.empty(num_ops, np.int64)  # bits of the chains that the group ends
    following = np.empty(num_ops, np.int64)  # the first group of the next chain
    takes = np.empty(num_ops, np.int64)
    group_t, group_w = np.empty(num_ops), np.empty(num_ops)
    group_hash = np.zeros(num_ops, np.uint64)
    sinks = np.empty(num_chains, np.int64)
    sink_takes = np.empty(num_chains, np.int64)
    # the stage being made, one level per group
    turn = np.empty(num_chains + 1, np.int64)
    used = np.zeros(num_chains + 1, np.int64)
    taken = np.zeros(num_chains + 1, np.int64)
    longest, work = np.zeros(num_chains + 1), np.zeros(num_chains + 1)
    hashed = np.zeros(num_chains + 1, np.uint64)
    cout, kh, kw = np.zeros(num_chains + 1), np.zeros(num_chains + 1), np.zeros(num_chains + 1)
    while at < len(best) and transitions + looked // 8 < STEP:
        looked += 1
        key = at if dense else keys[at]
        for chain in range(num_chains):
            count[chain] = key // strides[chain] % (lengths[chain] + 1)
        if dense and not _complete(chains, needs, count):
            at += 1
            continue
        states += 1
        groups = num_sinks = 0
        for chain in range(num_chains):
            begin = groups
            for place in range(count[chain] - 1, -1, -1):
                op = chains[chain, place]
                size = 0
                bits, difference, time, weight = 0, 0, 0.0, 0.0
                mark = np.uint64(0)
                for other in range(num_chains):
                    start = first[op, other]
                    gone = count[other] - start
                    if gone <= 0:
                        continue
                    size += gone
                    if size > given.r:
                        break
                    bits |= 1 << other
                    difference += gone * strides[other]
                    for each in range(start, count[other]):
                        member = chains[other, each]
                        time += t_us[member]
                        weight += w_us[member]
                        if asks:
                            mark += known.op_hash[member]
                if size > given.r:
                    break  # earlier ops of the chain have only more that follows
                ends[groups], takes[groups] = bits, difference
                group_t[groups], group_w[groups] = time, weight
                if asks:
                    group_hash[groups] = _mix(mark)
                groups += 1
                singles += size == 1
                if size == 1 and merge_class[op] != NO_CLASS:
                    sinks[num_sinks], sink_takes[num_sinks] = op, strides[chain]
                    num_sinks += 1
            for each in range(begin, groups):
                following[each] = groups
        shortest, choice = np.inf, 0
        level = 0
        turn[0] = 0
        while level >= 0:
            group = turn[level]
            while group < groups and ends[group] & used[level]:
                group += 1
            if group == groups:
                level -= 1
                continue
            turn[level] = group + 1
            transitions += 1
            slowest = max(longest[level], group_t[group])
            total = work[level] + group_w[group]
            less = taken[level] + takes[group]
            cost = max(slowest, total)
            if level > 0:
                cost = cost * (1 + given.alpha * level) + given.sync_us
            if asks:
                mark = hashed[level] + group_hash[group]
                exact = _measured(known, mark)
                if exact >= 0:
                    cost = exact
                hashed[level + 1] = mark
            rest = key - less
            cost += best[rest] if dense else best[_lookup(slots, keys, rest)]
            if cost < shortest:
                shortest, choice = cost, 2 * rest
            if level + 1 < given.s and following[group] < groups:
                level += 1
                turn[level] = following[group]
                used[level] = used[level - 1] | ends[group]
                taken[level], longest[level], work[level] = less, slowest, total
        level = 0 if num_sinks > 1 else -1
        turn[0] = 0
        while level >= 0:
            sink = turn[level]
            if sink == num_sinks:
                level -= 1
                continue
            turn[level] = sink + 1
            op = sinks[sink]
            if level > 0 and merge_class[op] != merge_class[sinks[turn[0] - 1]]:
                continue
            turn[level + 1] = sink + 1
            taken[level + 1] = taken[level] + sink_takes[sink]
            cout[level + 1] = cout[level] + conv[op, 3]
            kh[level + 1] = max(kh[level], conv[op, 6])
            kw[level + 1] = max(kw[level], conv[op, 7])
            if asks:
                hashed[level + 1] = hashed[level] + known.op_hash[op]
            if level > 0:
                transitions += 1
                cost = _merged_us(given, conv[op], cout[level + 1], kh[level + 1], kw[level + 1])
                if asks:
                    exact = _measured(known, _mix(hashed[level + 1] ^ MERGE_SALT))
                    if exact >= 0:
                        cost = exact
                rest = key - taken[level + 1]
                cost += best[rest] if dense else best[_lookup(slots, keys, rest)]
                if cost < shortest:
                    shortest, choice = cost, 2 * rest + 1
            level += 1
        best[at], previous[at] = shortest, choice
        at += 1
    return at, states, transitions, singles


@compiled()
def _complete(chains: I64, needs: I64, count: I64) -> bool:
    """Does the set hold the producers of all its ops?"""
    for chain in range(len(count)):
        if count[chain] > 0:
            op = chains[chain, count[chain] - 1]
            for other in range(len(count)):
                if needs[op, other] > count[other]:
                    return False
    return True
