"""Bounds of pipelines whose groups are of different kinds: every group's own seconds, every link.

A cell says which group comes where, so that what a segment takes at the least is known of every
group by itself, and what a cut sends of every border by its own links. Then no plan of a line is
below the least over all cuts of

    most over the groups r with their ranges [i, j) of
        start + m total              segments and sends before it, on the groups before it
        turn + m gradients           the same to the end of the chain and back
        start + m (forward + backward) + drain

(`orders`), where over a group's own borders goes what its cuts send, and over others what the cut
sends that sends least. Of virtual stages the order itself is known: paths through its blocks,
weighted (`path_weights`), give a sum over segments, each at the stage where it costs least, by that
stage's group; and over borders, where those that cost most send least. The weights are those of a
linear program in which every group takes its own seconds for a part of the segments.

Paths of orders ask that every segment reads from the one before it and gives gradients back to it.
Elsewhere `ComputeBounds` has what groups compute.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.problems.joint import JointSchedule
from partita.search.joint.orders import (
    PERCENT,
    SHARES_OF_SENDS,
    USUAL_PATHS,
    GroupShares,
    Paths,
    PathSettings,
    SegmentSeconds,
    Sources,
    least_cuts_s,
    path_weights,
    paths_of,
    range_costs,
    stage_costs,
)

Floats = npt.NDArray[np.float64]
FINER = 4 * PERCENT  # steps of shares, where groups are told apart
ENOUGH = 50  # steps of a micro-batch's seconds in what is enough
DEAR = 0.05  # of a micro-batch's seconds: sends that are worth another look
MARGIN = 1.03  # segments as a whole need not take what shares of them do: so much more is enough


@dataclass(frozen=True, slots=True)
class Border:
    """What it takes to send from one group to another and back: at once, and for each byte."""

    there: tuple[float, float]
    back: tuple[float, float]


@dataclass(frozen=True, eq=False)
class MixedPipeline:
    """The question: a cell's groups in their order, the chain, the borders between groups."""

    seconds: tuple[SegmentSeconds, ...]  # of every group, the least of every segment
    num_microbatches: int
    training: bool
    sources: Sources
    back_sources: Sources
    sent_bytes: Floats  # of a micro-batch at every cut: there, and back
    borders: tuple[Border, ...]  # of every group with the next, of the last one with the first
    waits: bool  # does every segment wait for the one before it, and for gradients behind it?
    busy_only: bool = False  # does only the time count that groups are busy?
    untrained: int = 0  # first segments that have no gradients
    settings: PathSettings = USUAL_PATHS

    # One stage on each group.

    def line_s(self) -> float:
        """No cuts of a line take less."""
        return least_cuts_s([self._range_costs(r) for r in range(len(self.seconds))])

    def _range_costs(self, rank: int) -> Floats:
        """What a step takes at the least if a group has a layer range."""
        before, every = self._paths(self.seconds[: max(rank, 1)]), self._paths(self.seconds)
        paths = Paths(before.start, every.turn, (before if self.training else every).drain)
        if self.waits and not self.busy_only:
            paths = Paths(*map(np.add, (paths.start, paths.turn, paths.drain), self._sent(rank)))
        own = self.seconds[rank]
        return range_costs(paths, own, self.num_microbatches, training=self.training)

    def _paths(self, seconds: Sequence[SegmentSeconds]) -> Paths:
        """Longest paths on any of some groups."""
        if self.busy_only:  # batches follow each other: nobody waits for a first forward
            none = np.zeros((len(self.sources) + 1,) * 2)
            return Paths(none, none, none)
        distinct = tuple({id(own): own for own in seconds}.values())
        key = tuple(map(id, distinct))
        if key not in self._known_paths:
            self._known_paths[key] = paths_of(
                least_of(distinct), self.sources, self.back_sources, training=self.training
            )
        return self._known_paths[key]

    @functools.cached_property
    def _known_paths(self) -> dict[tuple[int, ...], Paths]:
        return {}

    def _sent(self, rank: int) -> tuple[Floats, Floats, Floats]:
        """What start, turn and drain of a group's ranges wait for sends, at [i, j]."""
        n, last = len(self.sources), len(self.seconds) - 1
        there, back = self._sends
        least_there, least_back = there.min(axis=1), back.min(axis=1)
        before_there, before_back = np.zeros(n + 1), np.zeros(n + 1)
        if rank:
            before_there[1:n] = least_there[: rank - 1].sum() + there[rank - 1]
            before_back[1:n] = least_back[: rank - 1].sum() + back[rank - 1]
        behind = np.zeros(n + 1)
        if rank < last:
            behind[1:n] = there[rank] + least_there[rank + 1 : last].sum()
            behind[1:n] += back[rank] + least_back[rank + 1 : last].sum()
        start = before_there[:, None] + np.zeros(n + 1)
        drain = before_back[:, None] + np.zeros(n + 1)
        return start, start + behind, drain if self.training else 0.0 * start + behind

    @functools.cached_property
    def _sends(self) -> tuple[Floats, Floats]:
        """Seconds of every border of the line at every cut, there and back."""

        def seconds(ways: Sequence[tuple[float, float]], sent: Floats) -> Floats:
            start, each = np.array(ways).T
            return np.where(sent > 0, start[:, None] + each[:, None] * sent, 0.0)

        line = self.borders[:-1]
        back = seconds([border.back for border in line], self.sent_bytes[1])
        return (
            seconds([border.there for border in line], self.sent_bytes[0]),
            back if self.training else 0.0 * back,
        )

    # Several stages on each group.

    def order_s(self, schedule: JointSchedule, enough: float = math.inf) -> float:
        """No cuts of an order with virtual stages take less; more than enough is not looked for."""
        p, v, m = len(self.seconds), schedule.virtual_stages, self.num_microbatches
        num_stages = p * v
        scale = float(np.mean([own.total.sum() for own in self.seconds]))
        if not self.waits or self.busy_only or not self.training or scale <= 0:
            return 0.0
        group_of = [schedule.group_of(stage, p) for stage in range(num_stages)]
        typical = np.sort(self.sent_bytes, axis=1)[:, : num_stages - 1].mean(axis=1)
        ways = self._ways(group_of)
        shares = tuple(
            round(float(start + each * size) / scale * SHARES_OF_SENDS) / SHARES_OF_SENDS
            for stage in ways
            for (start, each), size in zip(stage, typical, strict=True)
        )
        # Weights may rest on sends that other cuts make cheaper: also those that know of none.
        known = [(*shares, 0.0, 0.0)] + ([(0.0,)] if sum(shares) > DEAR else [])
        much = math.inf if math.isinf(enough) else _above(enough / scale)
        best = 0.0
        for sent in known:
            weights = path_weights(
                schedule.name, p, v, m, self._shares(scale), sent, self.untrained, self.settings,
                much,
            )  # fmt: skip
            best = max(best, self._weighted_s(weights, group_of, ways))
            if best >= enough:
                break
        return best

    def _weighted_s(
        self, weights: tuple[Floats, Floats], group_of: Sequence[int],
        ways: Sequence[tuple[tuple[float, float], ...]],
    ) -> float:  # fmt: skip
        """What weighted paths take at the least: segments, and what is sent over borders."""
        times, sends = weights
        least = np.full(len(self.sources), math.inf)
        for group, own in enumerate(self.seconds):
            mine = times[[stage for stage, g in enumerate(group_of) if g == group]]
            least = np.minimum(least, stage_costs(mine, own.total, own).min(axis=0))
        sent = sends.reshape(-1, 2)[:-1]
        return float(least.sum()) + sum(
            _least_sent(sent[:, way], np.array([stage[way] for stage in ways]), sizes)
            for way, sizes in enumerate(self.sent_bytes)
        )

    def _ways(self, group_of: Sequence[int]) -> list[tuple[tuple[float, float], ...]]:
        """Of every border between stages, what sending there and back takes."""
        p = len(self.borders)
        ways: list[tuple[tuple[float, float], ...]] = []
        for one, two in itertools.pairwise(group_of):
            if one == two:
                ways.append(((0.0, 0.0), (0.0, 0.0)))
            elif (one + 1) % p == two:
                ways.append((self.borders[one].there, self.borders[one].back))
            else:
                ways.append((self.borders[two].back, self.borders[two].there))
        return ways

    def _shares(self, scale: float) -> GroupShares:
        """The segments that take most, as shares of all seconds on every group, and the rest."""
        rows = np.array([(own.forward, own.backward, own.weights) for own in self.seconds])
        kinds: dict[bytes, Floats] = {}
        for column in rows.transpose(2, 0, 1):
            key = np.round(column * 1e6 / scale).tobytes()
            kinds[key] = kinds.get(key, np.zeros_like(column)) + column
        most = self.settings.most_shares
        ranked = sorted(kinds.values(), key=lambda own: -float(own.sum()))
        left = ranked[most:]
        columns = [*ranked[:most], *([np.sum(left, axis=0)] if left else [])]
        steps = np.round(np.array(columns) / scale * FINER) / FINER
        return tuple(
            tuple(tuple(share) for share in own) for own in steps.transpose(1, 0, 2).tolist()
        )


def least_of(rows: Sequence[SegmentSeconds]) -> SegmentSeconds:
    """Of every segment the least of some, each figure by itself."""
    if len(rows) == 1:
        return rows[0]
    return SegmentSeconds(
        np.min([row.total for row in rows], axis=0),
        np.min([row.forward for row in rows], axis=0),
        np.min([row.backward for row in rows], axis=0),
        np.min([row.gradients for row in rows], axis=0),
        np.min([row.weights for row in rows], axis=0),
    )


def _above(share: float) -> float:
    """A rounded share that is a little more, so that cells have weights in common."""
    return math.ceil(share * MARGIN * ENOUGH) / ENOUGH


def _least_sent(often: Floats, ways: Floats, sizes: Floats) -> float:
    """The least that some sends take, each of the bytes of another cut.

    The dearest borders have the cuts that send least; those that send nothing cost nothing.
    """
    starts = np.sort(often * ways[:, 0])[: len(often) - int((sizes <= 0).sum())]
    each = np.sort(often * ways[:, 1])[::-1]
    least = np.sort(sizes)[: len(each)]
    return float(starts.sum() + each[: len(least)] @ least)
