"""Ops that are scheduled together, as arrays over the counts of their chains.

A set of ops that holds the producers of all its ops is fixed by how many ops of each chain it
holds; with `strides`, by one number from 0 (nothing) to `entries - 1` (everything). Fewer ops have
a smaller number. What follows from an op in such a set is the end of some of the chains: two groups
share no op exactly if they end no chain in common.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.problems.streams import Conv, StreamsProblem
from partita.search.streams.chains import I64, Flags, fewest_chains, reachable

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
MAX_CHAINS = 62  # bits of a signed word
MAX_ENTRIES = 2**62
NO_CLASS = -1


@dataclass(frozen=True, slots=True, eq=False)
class SweepPiece:
    """Ops in topological order with the arrays that the sweep reads."""

    ops: tuple[int, ...]  # their ids in the problem
    reach: Flags
    chains: I64  # (chains, longest): the ops of each chain, -1 after its end
    strides: I64
    lengths: I64
    first: I64  # (ops, chains): where what follows from the op begins in each chain
    needs: I64  # (ops, chains): how many ops of each chain the op needs, itself included
    t_us: F64
    w_us: F64
    conv: F64  # (ops, 9)
    merge_class: I64
    entries: int
    key: bytes  # equal for pieces that differ in the ids of their ops only

    @property
    def num_chains(self) -> int:
        """The most ops of which none follows from another."""
        return len(self.lengths)


def edges(problem: StreamsProblem, ops: tuple[int, ...]) -> tuple[I64, I64]:
    """Producers within `ops` by position: those of op i are `pred[start[i]:start[i + 1]]`."""
    place = {op: at for at, op in enumerate(ops)}
    start, pred = [0], []
    for op in ops:
        pred += [place[each] for each in problem.ops[op].preds if each in place]
        start.append(len(pred))
    return np.array(start, np.int64), np.array(pred, np.int64)


def build(problem: StreamsProblem, ops: tuple[int, ...]) -> SweepPiece | None:
    """The arrays of these ops, ids ascending; None if their sets cannot be numbered."""
    start, pred = edges(problem, ops)
    reach = reachable(start, pred)
    chain = fewest_chains(reach)
    lengths = np.bincount(chain)
    entries = 1
    strides = np.zeros(len(lengths), np.int64)
    for number, length in enumerate(lengths):
        if entries > MAX_ENTRIES // (int(length) + 1) or number >= MAX_CHAINS:
            return None
        strides[number] = entries
        entries *= int(length) + 1
    chains, first, needs = _ends(reach, chain, lengths)
    records = [problem.ops[op] for op in ops]
    t_us = np.array([each.t_us for each in records], np.float64)
    w_us = np.array([each.w_us for each in records], np.float64)
    conv = np.array([_sizes(each.conv) for each in records])
    classes = _classes(problem, ops)
    key = b"|".join(each.tobytes() for each in (start, pred, t_us, w_us, conv, classes))
    return SweepPiece(
        ops,
        reach,
        chains,
        strides,
        lengths,
        first,
        needs,
        t_us,
        w_us,
        conv,
        classes,
        entries,
        key,
    )


def _sizes(conv: Conv | None) -> list[float]:
    return [0.0] * 9 if conv is None else [float(getattr(conv, name)) for name in Conv.__slots__]


def _classes(problem: StreamsProblem, ops: tuple[int, ...]) -> I64:
    """A number for each kind of ops that may be merged, NO_CLASS for ops alone of their kind."""
    kinds = [problem.merge_class(op) for op in ops]
    times = Counter(kinds)
    numbers: dict[object, int] = {}
    alone = [kind is None or times[kind] < 2 for kind in kinds]
    classes = [
        NO_CLASS if single else numbers.setdefault(kind, len(numbers))
        for kind, single in zip(kinds, alone, strict=True)
    ]
    return np.array(classes, np.int64)


@compiled(small=5_000)
def _ends(reach: Flags, chain: I64, lengths: I64) -> tuple[I64, I64, I64]:
    """The chains, and for each op where its followers begin and its producers end in them."""
    count, num_chains = len(chain), len(lengths)
    chains = np.full((num_chains, lengths.max()), -1)
    first = np.empty((count, num_chains), np.int64)
    needs = np.zeros((count, num_chains), np.int64)
    filled = np.zeros(num_chains, np.int64)
    for op in range(count):  # `first[:] = lengths` takes 3 s more to compile
        for other in range(num_chains):
            first[op, other] = lengths[other]
    for op in range(count):
        own = chain[op]
        chains[own, filled[own]] = op
        for other in range(count):
            if reach[other, op]:
                first[other, own] = min(first[other, own], filled[own])
            if reach[op, other]:
                needs[other, own] = filled[own] + 1
        filled[own] += 1
    return chains, first, needs
