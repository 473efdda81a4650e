"""Blocks of a graph: ops in topological order, cut where everything goes through one op.

A cut after op i is at an articulation point if all that later ops read of earlier ones is made by a
single op. A block longer than asked is cut further, each time where the fewest ops are read across
the cut, the middle first. Any such cut is valid: producers come before their readers.
"""

from collections.abc import Sequence


def blocks(preds: Sequence[Sequence[int]], most: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Consecutive ops between articulation points; at most `most` ops each, if that is given."""
    widths = crossing(preds)
    blocks, begin = [], 0
    for op in range(len(preds)):
        if widths[op] <= 1 or op == len(preds) - 1:
            blocks.append((begin, op + 1))
            begin = op + 1
    return tuple(
        tuple(range(first, end))
        for block in _grown(blocks)
        for first, end in _cut(block, widths, most)
    )


def crossing(preds: Sequence[Sequence[int]]) -> list[int]:
    """How many ops up to each one are still read after it."""
    last = [-1] * len(preds)
    for op, each in enumerate(preds):
        for pred in each:
            last[pred] = op
    ends = [0] * (len(preds) + 1)
    widths, open_ops = [], 0
    for op in range(len(preds)):
        open_ops -= ends[op]  # read for the last time by this op
        if last[op] > op:
            open_ops += 1
            ends[last[op]] += 1
        widths.append(open_ops)
    return widths


def _grown(blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Chains of single ops go together: there is nothing to choose inside them."""
    grown: list[tuple[int, int]] = []
    chain = False
    for first, end in blocks:
        single = end - first == 1
        if grown and single and chain:
            grown[-1] = (grown[-1][0], end)
        else:
            grown.append((first, end))
        chain = single
    return grown


def _cut(block: tuple[int, int], widths: Sequence[int], most: int | None) -> list[tuple[int, int]]:
    first, end = block
    if most is None or end - first <= most:
        return [block]
    middle = (first + end) / 2
    quarter = max(1, (end - first) // 4)
    places = range(first + quarter, end - quarter + 1)
    at = min(places, key=lambda each: (widths[each - 1], abs(each - middle)))
    return [*_cut((first, at), widths, most), *_cut((at, end), widths, most)]
