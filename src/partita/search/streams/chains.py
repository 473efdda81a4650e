"""Chains of a partial order: what follows from what, and the fewest chains.

The ops of a part are numbered in topological order. By Dilworth's theorem the fewest chains that
hold all ops are as many as the most ops of which none follows from another; they come from a
maximum matching of ops with ops that follow from them (Fulkerson). A set of ops that holds the
producers of all its ops is then fixed by how many ops of each chain it holds.

    reach     (n, n)  does the column's op follow from the row's op, or is it the same?
    matching  O(n^3) at worst, with n^2 bytes of memory
"""

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled

I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@compiled(small=5_000)
def reachable(start: I64, pred: I64) -> Flags:
    """What follows from each op, itself included; `pred[start[i]:start[i + 1]]` feed op i."""
    count = len(start) - 1
    reach = np.zeros((count, count), np.bool_)
    for op in range(count):
        reach[op, op] = True
        for at in range(start[op], start[op + 1]):
            for earlier in range(op):
                if reach[earlier, pred[at]]:
                    reach[earlier, op] = True
    return reach


@compiled(small=5_000)
def fewest_chains(reach: Flags) -> I64:
    """The number of the chain of each op; chains are numbered by their first op."""
    count = len(reach)
    after = np.full(count, -1)  # the next op of the chain
    before = np.full(count, -1)
    came = np.empty(count, np.int64)
    queue = np.empty(count, np.int64)
    for first in range(count):
        came[:] = -1
        queue[0] = first
        head, tail, last = 0, 1, -1
        while head < tail and last < 0:
            op = queue[head]
            head += 1
            for later in range(op + 1, count):
                if reach[op, later] and came[later] < 0:
                    came[later] = op
                    if before[later] < 0:
                        last = later
                        break
                    queue[tail] = before[later]
                    tail += 1
        while last >= 0:
            op = came[last]
            following = after[op]
            after[op] = last
            before[last] = op
            last = following
    chain = np.empty(count, np.int64)
    number = 0
    for op in range(count):
        if before[op] < 0:
            chain[op] = number
            number += 1
        else:
            chain[op] = chain[before[op]]
    return chain
