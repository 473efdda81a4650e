"""What orders with several stages on each group take at the least: bubbles that no cut removes.

Where every segment reads from the one before it, the first micro-batch reaches stage s after the
forwards of all stages before it, F(< s); from then on the group r of that stage still runs what it
has not run yet, m times all but what comes before in its order. In the same way, where a backward
is one block, the last micro-batch goes back through the stages before, B(< s), when the group has
run all but what comes after. In interleaved 1F1B, where p micro-batches at a time go through all
rounds, these are p forwards of each round before, and p backwards. With T_r of all stages of a
group, f and b of its rounds:

    interleaved, v rounds  step >= m T_r + F(< c p + r) - p (f of rounds < c of r)
                                 + B(< d p + r) - p (b of rounds < d of r)   for all c, d
    other looped orders    the same with m in place of p
    wave of 2 (ZB-V)       step >= F(< r) + m T_r
                           step >= F(all but the last) + m (F of the last + gradients of group 0)
                           step >= F(all) + B(> 2 p - 1 - r) + m (gradients of group r)

Weights of these that add up to 1 give a sum over segments that holds for all cuts. Interleaved: all
groups, c and d alike, where what was run before cancels out but for p - 1 - r stages,

    step >= sum over r of m T_r (1 / p + (p - 1 - r) / (m p v)) + sends

What is sent from stage to stage is waited for on these paths, c p + r times there and back: at the
least at the cuts that send least. So many rounds have their price, and the least is over the
numbers of rounds that there are. Late groups may get more to do, but no group more than a step
takes, and segments as a whole: the least over all such loads is found by bisection (`shared_out`).
If segments could be divided it would be (1 + 2 h) / (1 + h) times an even share of the work, with
h = (p - 1) / (2 m v): half of the usual bubble (p - 1) / (m v) and a little.

Waves: a for its second line, b for every other group, b + a f / m
in all for group 0, with f the forward's part of the work; a <= (p - 1) b / (m - 1) makes the first
stage no way out. With few micro-batches its third line counts: a part t of it, 1 - t of the first,
both on average over the groups, and u r more of m T_r. A segment of group r adds at least

    (1 - t) m T / p + t (F + m gradients / p) + (p - 1 - r) / p min((1 - t) F, t B) + u r m T

which is a line in r, so that the less of its ends holds wherever the segment is. Where gradients go
back through all segments, all paths of a wave's order count, too (`order_paths`).
"""

import math
from dataclasses import dataclass

import numpy as np

from partita.search.joint.line_bound import Floats, SegmentSeconds
from partita.search.joint.order_paths import order_bound_s
from partita.search.joint.shared_out import Rounds, least_cap, loads_of


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
    depth_first: bool = False  # are looped orders all interleaved 1F1B?
    waves: tuple[str, ...] = ()  # names of waves, where gradients go back through all segments but
    untrained: int = 0  # the first few
    is_chain: bool = True  # does every segment read from the one before it, and gradients go back?
    # Of the weights, for rounds: any give a bound.
    round_parts: tuple[float, ...] = (0.0, 0.4, 0.7, 0.85, 0.95)

    def least_s(self, work: Floats, seconds: SegmentSeconds) -> float:
        """No cut of the chain takes less; `work` is what all micro-batches of a segment take.

        At once: as if segments could be divided, and without the paths of waves.
        """
        bounds = [self.looped_s(work, seconds, whole=False)] if self.rounds else []
        bounds += [self.wave_s(work, seconds, whole=False)] if self.wave else []
        return min(bounds, default=float(work.sum()) / self.num_groups)

    def looped_s(self, work: Floats, seconds: SegmentSeconds, *, whole: bool = True) -> float:
        """The same of looped orders, segments as a whole or not."""
        p, m = self.num_groups, self.num_microbatches
        even = float(work.sum()) / p
        if not self.is_chain or even <= 0:
            return self._shared_out_s(work) if whole else even
        total, waits = p * even, first_waits(seconds.forward + seconds.gradients, p)
        waits = waits + first_waits(np.array([*self.send_s, *[0.0] * p]), p)
        even += float(waits.mean())
        known = self._rounds() if m == p or self.depth_first else []
        if not whole:
            return max(even, min((each.even_s(total) for each in known), default=0.0))
        loads, least = loads_of(work), math.inf
        if not known:
            return least_cap(loads, waits, even)
        for rounds in sorted(known, key=lambda each: each.even_s(total)):
            start = max(even, rounds.even_s(loads.total))
            if start < least:
                least = min(least, least_cap(loads, waits, start, rounds))
        return least

    def looped_of_groups_s(self, costs: Floats, path: Floats, waits: Floats) -> float:
        """The same where what a segment costs depends on its group, by rows, without bubbles.

        `path` is what a micro-batch of each segment takes at the least, `waits` are those of the
        groups before their first forward. A part of the weights is that of rounds, alike for all
        groups, and the rest such that all groups cost the same.
        """
        p, after = self.num_groups, np.arange(self.num_groups)[::-1]
        totals, least = np.maximum(costs.sum(axis=1), 1e-30), math.inf
        known = self._rounds() if self.is_chain and self._has_rounds else [Rounds(p, 1, 1, 0.0)]
        for rounds in known:
            best = 0.0
            for part in self.round_parts if self.is_chain and self._has_rounds else (0.0,):
                more = part * after / (p * rounds.rounds)
                each = (1 + float((more * path.sum() / totals).sum())) / float((1 / totals).sum())
                weights = (each - more * path.sum()) / totals
                if (weights < part / p).any():
                    continue
                own = weights[:, None] * costs + more[:, None] * path
                waited = float((weights - part / p) @ waits) + part * rounds.sent_s
                best = max(best, float(own.min(axis=0).sum()) + waited)
            least = min(least, best)
        return least

    @property
    def _has_rounds(self) -> bool:
        """Is it known what comes before each round?"""
        return bool(self.rounds) and (self.depth_first or self.num_microbatches == self.num_groups)

    def _rounds(self) -> list[Rounds]:
        p, m = self.num_groups, self.num_microbatches
        return [Rounds(p, m, v, self._sent_s(p * v)) for v in self.rounds]

    def wave_s(self, work: Floats, seconds: SegmentSeconds, *, whole: bool = True) -> float:
        """The same of waves; where segments are a whole, with all paths of their orders."""
        p, m = self.num_groups, self.num_microbatches
        if not self.is_chain or float(work.sum()) <= 0:
            return self._shared_out_s(work) if whole else float(work.sum()) / p
        least = self._wave_s(work, seconds)
        if not whole:
            return least
        least = least_cap(loads_of(work), first_waits(seconds.forward, p), least)
        if self.waves:
            sends = np.array(self.send_s)
            by_paths = order_bound_s(
                self.waves, p, 2, m, work, seconds, sends, self.untrained
            )  # fmt: skip
            least = max(least, by_paths)
        return least

    def _shared_out_s(self, work: Floats) -> float:
        """What the busiest group does at the least, whoever waits for whom."""
        loads = loads_of(work)
        return least_cap(loads, np.zeros(self.num_groups), loads.total / self.num_groups)

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
