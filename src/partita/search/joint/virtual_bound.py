"""What orders with several stages on each group take at the least: bubbles that no cut removes.

Where every segment reads from the one before it, the first micro-batch reaches stage s after the
forwards of all stages before it, F(< s); from then on the group r of that stage still runs the
forwards of this and its later stages, and all its backwards, m times. In the same way, where a
backward is one block, all forwards and the backwards of this and later stages come before the last
micro-batch goes back through the stages before, B(< s). With T_r of all stages of a group:

    looped, v rounds     step >= F(< c p + r) + m (forwards of rounds >= c of r)
                               + B(< d p + r) + m (backwards of rounds >= d of r)   for all c, d
    wave of 2 (ZB-V)     step >= F(< r) + m T_r
                         step >= F(all but the last) + m (F of the last + gradients of group 0)

Weights of these that add up to 1 give a sum over segments that holds for all cuts. Looped, with as
many micro-batches as groups: all groups, c and d alike, and m T_r in proportion to r, so that it
does not matter on which stage a segment is:

    step >= (1 + h / (1 + h)) (all work / p)    with h = (p - 1) / (2 p v)

Half of the usual bubble (p - 1) / (m v): later groups may get less to do. With more micro-batches
first rounds may be short; then a group waits for as many segments as groups come before it, there
and back. Wave: a for its second line, b for every other group, b + a f / m in all for group 0, with
f the forward's part of the work; a <= (p - 1) b / (m - 1) makes the first stage no way out.
"""

from dataclasses import dataclass

import numpy as np

from partita.search.joint.line_bound import Floats, SegmentSeconds


@dataclass(frozen=True, slots=True)
class VirtualOrders:
    """Which orders with virtual stages there are, for p groups and m micro-batches."""

    num_groups: int
    num_microbatches: int
    most_rounds: int = 0  # of looped orders; 0: there are none
    wave: bool = False  # is there ZB-V?

    def least_s(self, work: Floats, seconds: SegmentSeconds, *, is_chain: bool) -> float:
        """No cut of the chain takes less; `work` is what all micro-batches of a segment take."""
        if not is_chain:
            return float(work.sum()) / self.num_groups
        bounds = []
        if self.most_rounds:
            bounds.append(self._looped_s(work, seconds))
        if self.wave:
            bounds.append(self._wave_s(work, seconds))
        return min(bounds, default=float(work.sum()) / self.num_groups)

    def _looped_s(self, work: Floats, seconds: SegmentSeconds) -> float:
        p, m = self.num_groups, self.num_microbatches
        even = float(work.sum()) / p
        there_and_back = float(first_waits(seconds.forward + seconds.gradients, p).sum()) / p
        part = (p - 1) / (2 * p * self.most_rounds) if m == p else 0.0
        return max(even + there_and_back, even * (1 + part / (1 + part)))

    def _wave_s(self, work: Floats, seconds: SegmentSeconds) -> float:
        p, m = self.num_groups, self.num_microbatches
        total, forward = float(work.sum()), float(seconds.forward.sum())
        waits = float(first_waits(seconds.forward, p).sum())
        plain = (total + waits) / p
        if total <= 0 or m < 2:
            return plain
        part = m * forward / total  # the forward's, of the work
        others = 1 / (p + part * (p - 1) / (m * (m - 1)))  # with the largest weight that may be
        last = (p - 1) * others / (m - 1)
        first = others + last * part / m
        least = np.minimum(first * work, last * seconds.forward + others * work)
        return max(plain, float(least.sum()))


def first_waits(seconds: Floats, num_groups: int) -> Floats:
    """What each group waits for at least: a segment of each group before it."""
    waits: Floats = np.concatenate(([0.0], np.cumsum(seconds)))[:num_groups]
    return waits
