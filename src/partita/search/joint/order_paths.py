"""What a published order takes at the least over all cuts: its longest paths, weighted.

Blocks of an order wait for the block before them on their group, a forward for that of the stage
before, gradients for those of the stage behind. Every path through these is below the step. If
path i has n_i(s) forwards, data gradients and weight gradients of stage s, weights of the paths
that add up to 1 give

    step >= sum over segments of min over stages s of n(s) . seconds    with n = sum of weight_i n_i

wherever the chain is cut: each segment is on some stage. Paths from stage to stage of other groups
wait for what is sent there, which adds, for the borders that they cross most often, the cuts that
send least. Good weights are the multipliers of a
linear program, in which segments may be divided: where its cuts are best, the longest path of the
order is a further inequality, until no path is longer (cutting planes, Kelley 1960). The program
knows the segments by a few shares of their seconds; the weights hold for any others.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.schedules.named import NAMED
from partita.search.joint.line_bound import Floats, SegmentSeconds

Ints = npt.NDArray[np.int64]
Shares = tuple[tuple[float, float, float], ...]  # of all seconds: forward, data, weight gradients
COLUMNS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
PERCENT = 100  # shares are rounded to these, so that cells have weights in common
SHARES_OF_SENDS = 2_000


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
    waiting = True
    while waiting:
        waiting = False
        for group, row in enumerate(rows):
            while at[group] < len(row):
                action = row[at[group]]
                kind, stage, i = action.kind, action.stage, action.microbatch
                needs = waited.get((kind, stage))
                if needs is None:
                    needs = waited[kind, stage] = _needs(kind, stage, last, untrained, num_groups)
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
    kind: str, stage: int, last: int, untrained: int, num_groups: int
) -> tuple[tuple[str, int, int], ...]:
    """The two blocks that a block waits for (kind, stage, border); without a kind: none."""
    needs = [("F", stage - 1)] if kind == "F" and stage else []
    if kind == "W":
        needs = [("I", stage)]
    elif kind != "F":
        needs = [("F", stage)]
        needs += [(kind, stage + 1)] if untrained <= stage < last else []
    known = [(other, s, _border(s, stage, num_groups)) for other, s in needs]
    return (*known, *[("", 0, -1)] * (2 - len(known)))


def _border(source: int, stage: int, num_groups: int) -> int:
    """What is sent from one stage to the next, by its number; a wave turns on one group."""
    first = min(source, stage)
    return -1 if source == stage or first == num_groups - 1 else 2 * first + (source > stage)


@compiled(small=2_000)
def _longest(
    stage: Ints, columns: Ints, before: Ints, border: Ints, seconds: Floats, send_s: float
) -> tuple[float, Floats, Floats]:
    """The longest path where stages take such seconds; how often it has each, and each send."""
    count = len(stage)
    ends = np.zeros(count)
    came = np.full(count, -1)
    by = np.full(count, -1)
    last = 0
    for k in range(count):
        for place in range(3):
            other = before[k, place]
            if other >= 0:
                ready = ends[other] + (send_s if border[k, place] >= 0 else 0.0)
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


@functools.lru_cache(maxsize=256)
def path_weights(
    name: str, num_groups: int, virtual_stages: int, count: int, shares: Shares,
    send_share: float = 0.0, untrained: int = 0, settings: PathSettings = USUAL_PATHS,
) -> tuple[Floats, Floats]:  # fmt: skip
    """How often weighted paths have the forward, data and weight gradients of each stage.

    And how often they wait for what each border sends, there and back together. `send_share` is
    what a send takes, of all seconds of a micro-batch. Nothing where an order is too long.
    """
    num_stages = num_groups * virtual_stages
    if 3 * num_stages * count > settings.most_blocks:
        return np.zeros((num_stages, 3)), np.zeros(num_stages)
    blocks = order_blocks(name, num_groups, virtual_stages, count, untrained)
    program = _LeastCuts(np.array(shares), num_stages)
    parts = np.full((num_stages, len(shares)), 1 / num_stages)  # of each share on each stage
    shortest = np.inf
    for _ in range(settings.most_paths):
        step, times, sends = _longest(
            blocks.stage, blocks.columns, blocks.before, blocks.border, parts @ np.array(shares),
            send_share,
        )  # fmt: skip
        shortest = min(shortest, step)
        least, best = program.with_path(times, sends, send_share * float(sends.sum()))
        if shortest - least <= settings.close * shortest:
            break
        parts = (parts + best) / 2  # half way there: less far from what is known
    return program.weighted()


class _LeastCuts:
    """The linear program: parts of segments on stages such that the longest path is least."""

    def __init__(self, shares: Floats, num_stages: int) -> None:
        from ortools.linear_solver import pywraplp

        self.shares, self.paths, self.sends = shares, list[Floats](), list[Floats]()
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.step = self.solver.NumVar(0.0, self.solver.infinity(), "")
        self.parts = [[self.solver.NumVar(0.0, 1.0, "") for _ in shares] for _ in range(num_stages)]
        for k in range(len(shares)):
            whole = self.solver.Constraint(1.0, 1.0)
            for row in self.parts:
                whole.SetCoefficient(row[k], 1.0)
        self.rows: list[pywraplp.Constraint] = []
        self.solver.Objective().SetCoefficient(self.step, 1.0)
        self.solver.Objective().SetMinimization()

    def with_path(self, times: Floats, sends: Floats, sent_s: float) -> tuple[float, Floats]:
        """The least step, and cuts, where no path so far is longer."""
        self.paths.append(times)
        self.sends.append(sends)
        row = self.solver.Constraint(sent_s, self.solver.infinity())
        row.SetCoefficient(self.step, 1.0)
        costs = times @ self.shares.T
        for stage, own in enumerate(self.parts):
            for k, part in enumerate(own):
                if costs[stage, k]:
                    row.SetCoefficient(part, -float(costs[stage, k]))
        self.rows.append(row)
        self.solver.Solve()
        values = [[part.solution_value() for part in own] for own in self.parts]
        return self.step.solution_value(), np.array(values)

    def weighted(self) -> tuple[Floats, Floats]:
        """All paths by their multipliers: seconds, and sends there and back."""
        weights = np.maximum(0.0, [row.dual_value() for row in self.rows])
        if weights.sum() <= 0:
            weights = np.ones(len(self.rows))
        weights = weights / weights.sum()
        sends = (weights @ np.array(self.sends)).reshape(-1, 2).min(axis=1)
        return np.tensordot(weights, np.array(self.paths), axes=1), sends


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
            name, num_groups, virtual_stages, count, shares, share, untrained, settings
        )
        most = np.sort(sends)[::-1][: len(send_s)]  # those crossed most send least
        often = times.min(axis=1)
        both = times[:, 1:].min(axis=1) - often
        costs = np.outer(often, work / count) + np.outer(both, seconds.gradients)
        costs += np.outer(times[:, 0] - often, seconds.forward)
        costs += np.outer(times[:, 1] - often - both, seconds.backward)
        costs += np.outer(times[:, 2] - often - both, seconds.weights)
        bounds.append(float(costs.min(axis=0).sum() + most @ send_s[: len(most)]))
    return min(bounds, default=0.0)
