"""Orders of stages run block by block, for tests of bounds."""

import numpy as np

from partita.search.joint.orders import SegmentSeconds


def seconds_of(forward, backward, weights):
    forward, backward, weights = map(np.array, (forward, backward, weights))
    gradients = backward + weights
    return SegmentSeconds(forward + gradients, forward, backward, gradients, weights)


def chain(n):
    return tuple((k - 1,) if k else () for k in range(n))


def simulated(order, ends, seconds, reads, *, fused, send_s=0.0):
    """The step of stages in an order, as the engine runs it: blocks in order, sends beside them.

    `seconds` are of all groups or of each by itself; `send_s` takes all sends alike, or gives those
    from one stage to another.
    """
    of_group = seconds if isinstance(seconds, list) else [seconds] * len(order)
    sends = send_s if callable(send_s) else lambda one, two: send_s
    num_stages = len(ends) - 1
    at = {k: s for s in range(num_stages) for k in range(ends[s], ends[s + 1])}
    into = [set() for _ in range(num_stages)]
    for k, own in enumerate(reads):
        into[at[k]] |= {at[q] for q in own} - {at[k]}
    group = {action.stage: rank for rank, row in enumerate(order) for action in row}
    length = {}
    for s in range(num_stages):
        seconds = of_group[group[s]]
        own = slice(ends[s], ends[s + 1])
        back, both = seconds.backward[own].sum(), seconds.gradients[own].sum()
        length |= {("F", s): seconds.forward[own].sum(), ("I", s): back}
        length |= {("B", s): both, ("W", s): both - back}
    done, free = {}, [0.0] * len(order)
    left = [list(row) for row in order]
    while any(left):
        for rank, row in enumerate(left):
            while row:
                kind, s, m = row[0].kind, row[0].stage, row[0].microbatch
                if kind == "F":
                    needs = [("F", q, m) for q in into[s]]
                elif kind == "W":
                    needs = [("I", s, m)]
                else:
                    readers = [t for t in range(num_stages) if s in into[t]]
                    needs = [("F", s, m), *((("B" if fused else "I"), t, m) for t in readers)]
                if any(need not in done for need in needs):
                    break
                there = (
                    done[need] + (sends(need[1], s) if group[need[1]] != group[s] else 0.0)
                    for need in needs
                )
                start = max([free[rank], *there])
                free[rank] = done[kind, s, m] = start + length[kind, s]
                row.pop(0)
    return max(free)
