"""Orders of blocks: what published ones hold, and what they take at the least for any cuts.

A line of stages. With one stage on each group of devices, stage r runs the layer range [i, j) and
no other group has it. Whatever the order, and with weight gradients at any time after their data
gradients,

    start + m total                          it waits for its first forward
    turn + m gradients                       no backward begins before a micro-batch went through
    start + m (forward + backward) + drain   the gradient of the last goes back to the first stage

are below every step. `start`, `turn` and `drain` are longest paths of one micro-batch through the
segments, which depend on the range alone, not on the other cuts. So the least over all cuts of the
most over the groups is found exactly, by dynamic programming over ranges in O(p n^2):

    f_r(j) = min over i < j of max(f_(r-1)(i), cost_r(i, j))

It knows that the chain can be cut between segments only. Inference has no backward: a range waits
for its first forward, and the last output goes on through what reads from it.

A published order: its longest paths, weighted. Blocks of an order wait for the block before them on
their group, a forward for that of the stage before, gradients for those of the stage behind. Every
path through these is below the step. If path i has n_i(s) forwards, data gradients and weight
gradients of stage s, weights of the paths that add up to 1 give

    step >= sum over segments of min over stages s of n(s) . seconds    with n = sum of weight_i n_i

wherever the chain is cut: each segment is on some stage. Paths from stage to stage of other groups
wait for what is sent there, which adds, for the borders that they cross most often, the cuts that
send least. Good weights are the multipliers of a linear program, in which segments may be divided:
where its cuts are best, the longest path of the order is a further inequality, until no path is
longer (cutting planes, Kelley 1960). The program knows the segments by a few shares of their
seconds; the weights hold for any others.

Segments are shared out whole (`Loads`). A segment is on one group as a whole, so what a group has
to do is a sum of some segments. Of a cap on what each group may do, `Loads.under` is the largest
such sum that keeps to it. Segments that take equally long are told by their number; where there are
many kinds, the shortest ones may be divided, which is below what can be.

Orders with several stages on each group have bubbles that no cut removes (`VirtualOrders`). Where
every segment reads from the one before it, the first micro-batch reaches stage s after the
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
takes, and segments as a whole: the least over all such loads is found by bisection (`Rounds`).
If segments could be divided it would be (1 + 2 h) / (1 + h) times an even share of the work, with
h = (p - 1) / (2 m v): half of the usual bubble (p - 1) / (m v) and a little.

Waves: a for its second line, b for every other group, b + a f / m in all for group 0, with f the
forward's part of the work; a <= (p - 1) b / (m - 1) makes the first stage no way out. With few
micro-batches its third line counts: a part t of it, 1 - t of the first, both on average over the
groups, and u r more of m T_r. A segment of group r adds at least

    (1 - t) m T / p + t (F + m gradients / p) + (p - 1 - r) / p min((1 - t) F, t B) + u r m T

which is a line in r, so that the less of its ends holds wherever the segment is. Where gradients go
back through all segments, all paths of a wave's order count, too (`order_bound_s`).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.problems.joint import JointSchedule
from partita.schedules.named import NAMED

SINGLE = "1f1b"  # the name of the order of a single stage, which has nothing to order
Floats = npt.NDArray[np.float64]
Sources = tuple[tuple[int, ...], ...]  # of every segment, those that made what it reads
Ints = npt.NDArray[np.int64]
Shares = tuple[tuple[float, float, float], ...]  # of all seconds: forward, data, weight gradients
GroupShares = tuple[Shares, ...]  # of every group; one where all are alike
COLUMNS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
PERCENT = 100  # shares are rounded to these, so that cells have weights in common
SHARES_OF_SENDS = 2_000
SMALL_PROGRAM = "use_preprocessing: false use_scaling: false use_dual_simplex: true"
ALIKE = 1e-9  # of all work: segments that differ by less are of one kind


def joint_schedule(name: str, virtual_stages: int = 1) -> JointSchedule:
    """A published order as a record of the space."""
    known = NAMED[name]
    return JointSchedule(name, virtual_stages, known.layout, known.split)


def refused(name: str, num_groups: int, virtual_stages: int, num_microbatches: int) -> bool:
    """Is an order not there for these numbers?

    Virtual stages fill the bubbles between many micro-batches: with fewer of them than groups they
    are no part of the space.
    """
    known = NAMED[name]
    if num_groups == 1:
        return name != SINGLE or virtual_stages > 1
    if virtual_stages > 1 and (known.layout == "line" or num_microbatches < num_groups):
        return True
    return bool(known.refuses(num_groups, virtual_stages, num_microbatches))


@functools.lru_cache(maxsize=256)
def in_flight(
    name: str, num_groups: int, virtual_stages: int, num_microbatches: int, waiting: float = 0.25
) -> tuple[float, ...]:
    """Per group, the most activations of a micro-batch that it holds, as parts of all its stages'.

    Read off the order itself; where weight gradients wait, gradients of activations wait with them
    (`waiting`, a part of the activations). Interleaved 1F1B has a closed form: a group runs as many
    forwards as come before its first backward, and one more.
    """
    if name == "interleaved":
        most = virtual_stages * num_microbatches
        first = (virtual_stages - 1) * num_groups + 1
        ahead = [2 * (num_groups - 1 - group) for group in range(num_groups)]
        return tuple(min(most, first + more) / virtual_stages for more in ahead)
    changes = {"F": 1.0, "B": -1.0, "I": waiting, "W": -1.0 - waiting}
    peaks = []
    for row in NAMED[name].order(num_groups, virtual_stages, num_microbatches):
        level = peak = 0.0
        for action in row:
            level += changes[action.kind]
            peak = max(peak, level)
        peaks.append(peak / virtual_stages)
    return tuple(peaks)


@dataclass(frozen=True, eq=False)
class SegmentSeconds:
    """Seconds of one micro-batch, per segment of the chain; each the least by itself."""

    total: Floats
    forward: Floats
    backward: Floats  # of data gradients alone
    gradients: Floats  # of data and weight gradients
    weights: Floats  # of weight gradients alone


@dataclass(frozen=True, eq=False)
class Paths:
    """Longest paths of one micro-batch, at [i, j] for the layer range from i to before j."""

    start: Floats  # until the range can begin
    turn: Floats  # until its backward can
    drain: Floats  # after its last data gradient (inference: after its last forward)


def paths_of(
    seconds: SegmentSeconds, sources: Sources, back_sources: Sources, *, training: bool
) -> Paths:
    """The longest paths of all layer ranges.

    `back_sources` are the sources to which gradients go back. A stage begins when all it reads is
    there, and its backward when all gradients are.
    """
    n = len(sources)
    ends = np.zeros(n)
    for k, own in enumerate(sources):
        ends[k] = seconds.forward[k] + max((ends[q] for q in own), default=0.0)
    start, turn, drain = (np.zeros((n + 1, n + 1)) for _ in range(3))
    for k, own in enumerate(sources):
        for q in own:  # ranges that have k and not q
            _raise(start[q + 1 : k + 1, k + 1 :], ends[q])
    if not training:
        after = seconds.forward.copy()
        for k in reversed(range(n)):
            for q in sources[k]:
                after[q] = max(after[q], seconds.forward[q] + after[k])
                _raise(drain[: q + 1, q + 1 : k + 1], after[k])
        return Paths(start, turn, drain)
    tail, after = np.zeros(n), ends.copy()
    for k, own in enumerate(back_sources):
        tail[k] = seconds.backward[k] + max((tail[q] for q in own), default=0.0)
        for q in own:
            _raise(drain[q + 1 : k + 1, k + 1 :], tail[q])
    for k in reversed(range(n)):
        _raise(turn[: k + 1, k + 1 :], ends[k])
        after[k] += seconds.backward[k]
        for q in back_sources[k]:  # ranges that have q and not k
            after[q] = max(after[q], after[k])
            _raise(turn[: q + 1, q + 1 : k + 1], after[k])
    return Paths(start, turn, drain)


def _raise(ranges: Floats, value: float) -> None:
    np.maximum(ranges, value, out=ranges)


def range_sums(values: Floats) -> Floats:
    """At [i, j] the sum of the values from i to before j."""
    before = np.concatenate(([0.0], np.cumsum(values)))
    sums: Floats = before[None, :] - before[:, None]
    return sums


def range_costs(paths: Paths, seconds: SegmentSeconds, count: int, *, training: bool) -> Floats:
    """What a step takes at the least if one group has a layer range, by computing alone."""
    own = count * range_sums(seconds.total)
    if not training:
        inference: Floats = paths.start + own + paths.drain
        return inference
    back = paths.turn + count * range_sums(seconds.gradients)
    through = count * range_sums(seconds.forward + seconds.backward) + paths.drain
    costs: Floats = np.maximum(paths.start + np.maximum(own, through), back)
    return costs


def least_cuts_s(costs: Sequence[Floats]) -> float:
    """The least over all cuts into ranges, one for each rank, of the most over the ranks."""
    num_segments = len(costs[0]) - 1
    empty = np.tri(num_segments + 1, dtype=bool)
    masked: dict[int, Floats] = {}
    for cost in costs:
        if id(cost) not in masked:
            masked[id(cost)] = np.where(empty, math.inf, cost)
    least = masked[id(costs[0])][0]
    for cost in costs[1:]:
        least = np.maximum(least[:, None], masked[id(cost)]).min(axis=0)
    return float(least[num_segments])


@dataclass(frozen=True, slots=True)
class PathSettings:
    """How far weights are looked for; any of them give a valid bound."""

    most_paths: int = 40
    close: float = 0.002  # so near to the best cuts, weights are good enough
    most_blocks: int = 40_000  # of an order: beyond, nothing is looked for
    most_shares: int = 3  # segments that are told apart: those that take most, and the rest


USUAL_PATHS = PathSettings()


@dataclass(frozen=True, eq=False)
class OrderBlocks:
    """The blocks of an order, each after all that it waits for."""

    stage: Ints
    columns: Ints  # of each block: which figures of its stage count, as bits
    before: Ints  # blocks it waits for; -1: none
    border: (
        Ints  # 2 s + 1 where something is sent there by stage s + 1, 2 s by stage s; -1: nothing
    )
    num_stages: int


@functools.lru_cache(maxsize=64)
def order_blocks(
    name: str, num_groups: int, virtual_stages: int, count: int, untrained: int = 0
) -> OrderBlocks:
    """The blocks of a published order and what each waits for.

    So many first stages may have no gradients at all: they wait for none.
    """
    rows = NAMED[name].order(num_groups, virtual_stages, count)
    last = num_groups * virtual_stages - 1
    waited: dict[tuple[str, int], tuple[tuple[str, int, int], ...]] = {}  # kind, stage, border
    number: dict[str, list[int]] = {kind: [-1] * ((last + 1) * count) for kind in COLUMNS}
    bits = {kind: sum(1 << column for column in columns) for kind, columns in COLUMNS.items()}
    stages: list[int] = []
    columns: list[int] = []
    before: list[tuple[int, int, int]] = []
    border: list[tuple[int, int, int]] = []
    at, lane = [0] * len(rows), [-1] * len(rows)
    turn = num_groups if NAMED[name].layout == "wave" else 0
    waiting = True
    while waiting:
        waiting = False
        for group, row in enumerate(rows):
            while at[group] < len(row):
                action = row[at[group]]
                kind, stage, i = action.kind, action.stage, action.microbatch
                needs = waited.get((kind, stage))
                if needs is None:
                    needs = waited[kind, stage] = _needs(kind, stage, last, untrained, turn)
                first, second = (number[k][s * count + i] if k else -1 for k, s, _ in needs)
                if (first < 0 and needs[0][0]) or (second < 0 and needs[1][0]):
                    break
                number[kind][stage * count + i] = len(stages)
                before.append((lane[group], first, second))
                border.append((-1, needs[0][2], needs[1][2]))
                lane[group], at[group], waiting = len(stages), at[group] + 1, True
                stages.append(stage)
                columns.append(bits[kind])
    assert len(stages) == sum(map(len, rows)), f"the order {name} waits for itself"
    return OrderBlocks(
        np.array(stages), np.array(columns), np.array(before), np.array(border), last + 1
    )


def _needs(
    kind: str, stage: int, last: int, untrained: int, turn: int
) -> tuple[tuple[str, int, int], ...]:
    """The two blocks that a block waits for (kind, stage, border); without a kind: none."""
    needs = [("F", stage - 1)] if kind == "F" and stage else []
    if kind == "W":
        needs = [("I", stage)]
    elif kind != "F":
        needs = [("F", stage)]
        needs += [(kind, stage + 1)] if untrained <= stage < last else []
    known = [(other, s, _border(s, stage, turn)) for other, s in needs]
    return (*known, *[("", 0, -1)] * (2 - len(known)))


def _border(source: int, stage: int, turn: int) -> int:
    """What is sent from one stage to the next, by its number; a wave turns on one group."""
    first = min(source, stage)
    turns = turn and first % turn == turn - 1
    return -1 if source == stage or turns else 2 * first + (source > stage)


@compiled(small=2_000)
def _longest(
    stage: Ints, columns: Ints, before: Ints, border: Ints, seconds: Floats, send_s: Floats
) -> tuple[float, Floats, Floats]:
    """The longest path where stages, and sends over borders, take such seconds.

    And how often it has each stage, and each send.
    """
    count = len(stage)
    ends = np.zeros(count)
    came = np.full(count, -1)
    by = np.full(count, -1)
    last = 0
    for k in range(count):
        for place in range(3):
            other = before[k, place]
            if other >= 0:
                sent = send_s[border[k, place]] if border[k, place] >= 0 else 0.0
                ready = ends[other] + sent
                if ready > ends[k] or came[k] < 0:
                    ends[k], came[k], by[k] = ready, other, border[k, place]
        for column in range(3):
            if columns[k] >> column & 1:
                ends[k] += seconds[stage[k], column]
        if ends[k] > ends[last]:
            last = k
    times, sends = np.zeros(seconds.shape), np.zeros(2 * len(seconds))
    k = last
    while k >= 0:
        for column in range(3):
            if columns[k] >> column & 1:
                times[stage[k], column] += 1.0
        if by[k] >= 0:
            sends[by[k]] += 1.0
        k = came[k]
    return ends[last], times, sends


@functools.lru_cache(maxsize=1024)
def path_weights(
    name: str, num_groups: int, virtual_stages: int, count: int, shares: GroupShares,
    send_shares: tuple[float, ...] = (0.0,), untrained: int = 0,
    settings: PathSettings = USUAL_PATHS, enough: float = math.inf,
) -> tuple[Floats, Floats]:  # fmt: skip
    """How often weighted paths have the forward, data and weight gradients of each stage.

    And how often they wait for what each border sends, there and back. `send_shares` is what sends
    take, of all seconds of a micro-batch, by the numbers of borders or all alike. Nothing where an
    order is too long. Weights that show a step of `enough`, in these units, are good enough.
    """
    num_stages = num_groups * virtual_stages
    if 3 * num_stages * count > settings.most_blocks:
        return np.zeros((num_stages, 3)), np.zeros(2 * num_stages)
    blocks = order_blocks(name, num_groups, virtual_stages, count, untrained)
    known = joint_schedule(name, virtual_stages)
    of_stage = np.array([
        shares[known.group_of(stage, num_groups) % len(shares)] for stage in range(num_stages)
    ])  # fmt: skip
    send_s = np.array(send_shares if len(send_shares) > 1 else send_shares * (2 * num_stages))
    program = _LeastCuts(of_stage)
    speeds = 1 / np.maximum(of_stage.sum(axis=(1, 2)), 1e-30)
    # Of each share on each stage: as fast as the stages are.
    parts = np.repeat((speeds / speeds.sum())[:, None], of_stage.shape[1], axis=1)
    shortest = np.inf
    for _ in range(settings.most_paths):
        step, times, sends = _longest(
            blocks.stage, blocks.columns, blocks.before, blocks.border,
            (parts[:, :, None] * of_stage).sum(axis=1), send_s,
        )  # fmt: skip
        shortest = min(shortest, step)
        solved = program.with_path(times, sends, float(sends @ send_s))
        if solved is None:  # by rounding: the weights before are good, too
            break
        least, best = solved
        if shortest - least <= settings.close * shortest or least >= enough:
            break
        parts = (parts + best) / 2  # half way there: less far from what is known
    return program.weighted()


class _LeastCuts:
    """The linear program: parts of segments on stages such that the longest path is least."""

    def __init__(self, of_stage: Floats) -> None:
        from ortools.linear_solver import pywraplp

        self.of_stage, self.paths, self.sends = of_stage, list[Floats](), list[Floats]()
        num_stages, num_shares = of_stage.shape[:2]
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        # So small a program is solved sooner than it is simplified.
        self.solver.SetSolverSpecificParametersAsString(SMALL_PROGRAM)
        self.step = self.solver.NumVar(0.0, self.solver.infinity(), "")
        self.parts = [
            [self.solver.NumVar(0.0, 1.0, "") for _ in range(num_shares)] for _ in range(num_stages)
        ]
        for k in range(num_shares):
            whole = self.solver.Constraint(1.0, 1.0)
            for row in self.parts:
                whole.SetCoefficient(row[k], 1.0)
        self.rows: list[pywraplp.Constraint] = []
        self.weights = np.zeros(0)  # of the paths, when last solved
        self.solver.Objective().SetCoefficient(self.step, 1.0)
        self.solver.Objective().SetMinimization()

    def with_path(self, times: Floats, sends: Floats, sent_s: float) -> tuple[float, Floats] | None:
        """The least step, and cuts, where no path so far is longer; None where none were found."""
        self.paths.append(times)
        self.sends.append(sends)
        row = self.solver.Constraint(sent_s, self.solver.infinity())
        row.SetCoefficient(self.step, 1.0)
        costs = (times[:, None, :] * self.of_stage).sum(axis=2)
        for own, of_own in zip(self.parts, costs.tolist(), strict=True):
            for part, cost in zip(own, of_own, strict=True):
                if cost:
                    row.SetCoefficient(part, -cost)
        if self.solver.Solve() != self.solver.OPTIMAL:
            return None
        self.rows.append(row)
        self.weights = np.maximum(0.0, [each.dual_value() for each in self.rows])
        values = [[part.solution_value() for part in own] for own in self.parts]
        return self.step.solution_value(), np.array(values)

    def weighted(self) -> tuple[Floats, Floats]:
        """All paths by their multipliers: seconds, and sends there and back."""
        weights = self.weights if self.weights.sum() > 0 else np.ones(len(self.paths))
        weights = weights / weights.sum()
        paths, sends = self.paths[: len(weights)], self.sends[: len(weights)]
        return np.tensordot(weights, np.array(paths), axes=1), weights @ np.array(sends)


def shares_of(seconds: SegmentSeconds, most: int) -> Shares:
    """The segments that take most, as shares of all seconds, and the rest as one."""
    rows = np.array([seconds.forward, seconds.backward, seconds.weights]).T
    total = float(rows.sum())
    if total <= 0:
        return ()
    kinds: dict[tuple[float, ...], Floats] = {}
    for row in rows:
        key = tuple(np.round(row * 1e6 / total).tolist())
        kinds[key] = kinds.get(key, np.zeros(3)) + row
    ranked = sorted(kinds.values(), key=lambda row: -float(row.sum()))
    rest = np.sum(ranked[most:], axis=0) if ranked[most:] else np.zeros(3)
    shares = [np.round(row / total * PERCENT) / PERCENT for row in (*ranked[:most], rest)]
    return tuple(tuple(row.tolist()) for row in shares if row.any())


def order_bound_s(
    names: Sequence[str], num_groups: int, virtual_stages: int, count: int, work: Floats,
    seconds: SegmentSeconds, send_s: Floats, untrained: int = 0,
    settings: PathSettings = USUAL_PATHS,
) -> float:  # fmt: skip
    """No cut is below in any of some orders; `work` is what all micro-batches of a segment take.

    `send_s` is at least what each cut sends there and back, the least first.

    So many first segments have no gradients, so that no gradient need come to a stage of theirs.
    What a segment takes in all, waits included, counts as often as each of its parts does; of the
    rest data and weight gradients together as often as both, and what is left by itself. Each of
    these is the least over all splits by itself.
    """
    shares = shares_of(seconds, settings.most_shares)
    if not shares:
        return 0.0
    share = float(np.median(send_s)) / 2 / float(work.sum() / count) if len(send_s) else 0.0
    share = round(share * SHARES_OF_SENDS) / SHARES_OF_SENDS
    bounds = []
    for name in names:
        times, sends = path_weights(
            name, num_groups, virtual_stages, count, (shares,), (share,), untrained, settings
        )
        both_ways = sends.reshape(-1, 2).min(axis=1)
        most = np.sort(both_ways)[::-1][: len(send_s)]  # those crossed most send least
        costs = stage_costs(times, work / count, seconds)
        bounds.append(float(costs.min(axis=0).sum() + most @ send_s[: len(most)]))
    return min(bounds, default=0.0)


def stage_costs(times: Floats, total: Floats, seconds: SegmentSeconds) -> Floats:
    """What paths that have the parts of stages so often take of segments, stage by segment.

    `total` is a segment's micro-batch in all, waits included. It counts as often as each part does,
    of the rest data and weight gradients together as often as both, and what is left by itself.
    """
    often = times.min(axis=1)
    both = times[:, 1:].min(axis=1) - often
    costs = np.outer(often, total) + np.outer(both, seconds.gradients)
    costs += np.outer(times[:, 0] - often, seconds.forward)
    costs += np.outer(times[:, 1] - often - both, seconds.backward)
    costs += np.outer(times[:, 2] - often - both, seconds.weights)
    return costs


@dataclass(frozen=True, eq=False)
class Loads:
    """Sums that groups may have."""

    sums: Floats  # of whole segments, ascending
    divided: float  # work that may be divided at will
    total: float  # all work, a little less by rounding

    def under(self, caps: Floats) -> Floats:
        """The most that groups may have to do under caps; negative where a cap is."""
        places = np.searchsorted(self.sums, caps, side="right") - 1
        most: Floats = np.minimum(caps, self.sums[np.maximum(places, 0)] + self.divided)
        return most


def loads_of(work: Floats, most: int = 40_000) -> Loads:
    """All sums of some of the segments, those that take longest whole; `most` bounds how many."""
    unit = float(work.sum()) * ALIKE
    if unit <= 0:
        return Loads(np.zeros(1), 0.0, 0.0)
    values, counts = np.unique(np.floor(work / unit), return_counts=True)
    sums, divided = np.zeros(1), 0.0
    for value, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        if len(sums) * (count + 1) > most:
            divided += value * count
        else:
            sums = (sums[:, None] + value * np.arange(count + 1)).ravel()
    return Loads(np.sort(sums) * unit, divided * unit, float(values @ counts) * unit)


def least_cap(loads: Loads, waits: Floats, start: float, rounds: "Rounds | None" = None) -> float:
    """A step below which the groups cannot do all work, from one that is known to be too short.

    Group r begins and ends with waits; `rounds` has what else must fit into a step.
    """

    def fits(step: float) -> bool:
        most = loads.under(step - waits)
        if (most < 0).any() or float(most.sum()) < loads.total * (1 - ALIKE):
            return False
        return rounds is None or rounds.least_s(loads.total, most) <= step

    if fits(start):
        return start
    low, high = start, start * (1 + 1 / 64)
    while not fits(high):
        low, high = high, high * 1.25
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


@dataclass(frozen=True, slots=True)
class Rounds:
    """Interleaved 1F1B with so many rounds: what its groups wait for on average.

    With L_r the work of group r in a step, in which m micro-batches go through p v stages,

        step >= sum over r of L_r (1 / p + (p - 1 - r) / (m p v)) + sends
    """

    num_groups: int
    num_microbatches: int
    rounds: int
    sent_s: float

    def least_s(self, total: float, most: Floats) -> float:
        """The least with these most loads: the last groups have as much as they can."""
        p = self.num_groups
        each = p * self.num_microbatches * self.rounds
        left, waited = total, 0.0
        for r in reversed(range(p)):
            own = min(left, float(most[r]))
            waited, left = waited + own * (p - 1 - r) / each, left - own
        return total / p + waited + self.sent_s

    def even_s(self, total: float) -> float:
        """The least where work can be divided at will, and groups wait for nothing else."""
        part = (self.num_groups - 1) / (2 * self.num_microbatches * self.rounds)
        return (total / self.num_groups * (1 + 2 * part) + self.sent_s) / (1 + part)


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
