"""One device further along a line, compiled: see `line`."""

from typing import Any

import numpy as np

from partita.compiled import compiled

NONE = 2**30


@compiled()
def advance(
    states: Any, which: Any, grown: Any, ahead: Any, bounds: Any, best: Any, parent: Any
) -> None:
    """What the states become by the choices of the next device.

    A state is (choice, first number, second number, index of the state before). Number n becomes
    the largest over s of (what `which[n, s]` was, 0 if -1; -2: no source) + `grown[n, s]`, and at
    least `bounds[n, 0]`; the state is none where it and `ahead[n]` exceed 0. Those with
    `bounds[n, 2]` are kept, two at most: `best[choice, first]` is the least second one, `parent`
    the state it comes from.
    """
    for choice in range(len(best)):
        for index in range(len(states)):
            old = states[index, 0]
            first, second = 0, 0
            fits = True
            for n in range(len(bounds)):
                value = bounds[n, 0]
                for s in range(which.shape[1]):
                    source = which[n, s]
                    if source > -2:
                        was = 0 if source < 0 else states[index, 1 + source]
                        value = max(value, was + grown[n, s, old, choice])
                if value + ahead[n, choice] > 0:
                    fits = False
                    break
                if bounds[n, 2]:
                    if n == 0:
                        first = value - bounds[n, 0]
                    else:
                        second = value
            if fits and second < best[choice, first]:
                best[choice, first] = second
                parent[choice, first] = index


@compiled()
def collected(best: Any, parent: Any, low: int) -> Any:
    """The states in `best`, none that is no better than another one of its choice."""
    collected = np.empty((best.size, 4), np.int64)
    rows = 0
    for choice in range(len(best)):
        least = NONE
        for place in range(best.shape[1]):
            if best[choice, place] < least:
                least = best[choice, place]
                collected[rows, 0], collected[rows, 1] = choice, place + low
                collected[rows, 2], collected[rows, 3] = least, parent[choice, place]
                rows += 1
    return collected[:rows].copy()
