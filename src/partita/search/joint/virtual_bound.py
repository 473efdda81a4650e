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
                         step >= F(all) + B(> 2 p - 1 - r) + m (gradients of group r)

Weights of these that add up to 1 give a sum over segments that holds for all cuts. Looped, with as
many micro-batches as groups: all groups, c and d alike, and m T_r in proportion to r, so that it
does not matter on which stage a segment is:

    step >= (1 + h / (1 + h)) (all work / p)    with h = (p - 1) / (2 p v)

What is sent from stage to stage is waited for on these paths, c p + r times there and back: at the
least at the cuts that send least. So many rounds have their price, and the least is over the
numbers of rounds that there are.

Half of the usual bubble (p - 1) / (m v): later groups may get less to do. With more micro-batches
first rounds may be short; then a group waits for as many segments as groups come before it, there
and back, and for what these send. Wave: a for its second line, b for every other group, b + a f / m
in all for group 0, with f the forward's part of the work; a <= (p - 1) b / (m - 1) makes the first
stage no way out. With few micro-batches its third line counts: a part t of it, 1 - t of the first,
both on average over the groups, and u r more of m T_r. A segment of group r adds at least

    (1 - t) m T / p + t (F + m gradients / p) + (p - 1 - r) / p min((1 - t) F, t B) + u r m T

which is a line in r, so that the less of its ends holds wherever the segment is.
"""

from dataclasses import dataclass

import numpy as np

from partita.search.joint.line_bound import Floats, SegmentSeconds


@dataclass(frozen=True, slots=True)
class VirtualOrders:
    """Which orders with virtual stages there are, for p groups and m micro-batches."""

    num_groups: int
    num_microbatches: int
    rounds: tuple[int, ...] = ()  # of looped orders
    wave: bool = False  # is there ZB-V?
    # At every cut at least what is sent there and back, the least first; nothing: sends are free.
    send_s: tuple[float, ...] = ()
    turn_parts: tuple[float, ...] = ()  # where gradients go back through every segment: t

    def least_s(self, work: Floats, seconds: SegmentSeconds, *, is_chain: bool) -> float:
        """No cut of the chain takes less; `work` is what all micro-batches of a segment take."""
        if not is_chain:
            return float(work.sum()) / self.num_groups
        bounds = []
        if self.rounds:
            bounds.append(self._looped_s(work, seconds))
        if self.wave:
            bounds.append(self._wave_s(work, seconds))
        return min(bounds, default=float(work.sum()) / self.num_groups)

    def _looped_s(self, work: Floats, seconds: SegmentSeconds) -> float:
        p, m = self.num_groups, self.num_microbatches
        even = float(work.sum()) / p
        there_and_back = float(first_waits(seconds.forward + seconds.gradients, p).sum()) / p
        there_and_back += self._sent_s(p)
        if m > p:
            return even + there_and_back
        parts = [(p * v, (p - 1) / (2 * p * v)) for v in self.rounds]
        bubbles = min(
            (even * (1 + 2 * part) + self._sent_s(stages)) / (1 + part) for stages, part in parts
        )
        return max(even + there_and_back, bubbles)

    def _sent_s(self, num_stages: int) -> float:
        """Sends before a stage, on average over so many stages."""
        before = np.concatenate(([0.0], np.cumsum(self.send_s)))[:num_stages]
        return float(before.sum()) / num_stages if self.send_s else 0.0

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
        turned = [self._turned_s(work, seconds, part) for part in self.turn_parts]
        return max(plain, float(least.sum()), *turned)

    def _turned_s(self, work: Floats, seconds: SegmentSeconds, part: float) -> float:
        """The third line of a wave in a part, with the weights u that make both ends alike."""
        p, m = self.num_groups, self.num_microbatches
        forward, gradients = seconds.forward, seconds.gradients
        early = np.minimum((1 - part) * forward, part * seconds.backward) * (p - 1) / p
        u = float(early.sum()) / ((p - 1) * float(work.sum()))
        least = (1 - part) * work / p + part * (forward + m / p * gradients)
        least = least + np.minimum(early, u * (p - 1) * work)
        return float(least.sum()) / (1 + u * p * (p - 1) / 2)


def first_waits(seconds: Floats, num_groups: int) -> Floats:
    """What each group waits for at least: a segment of each group before it."""
    waits: Floats = np.concatenate(([0.0], np.cumsum(seconds)))[:num_groups]
    return waits
