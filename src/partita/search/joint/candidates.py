"""The best cuts of a cell of the space, for one schedule: plans on paper.

Dynamic programming over cuts chooses, stage by stage, strategy and checkpointing within the memory
budgets (`cuts`; for virtual stages `Interleaved`). A candidate carries the record's estimate; where
a simulator has the last word, it may take more memory, and a candidate is made again that fills
less of the budgets.

Looped orders: rounds of p stages such that the rounds' longest add up to least (`round_ends`).
Groups of devices with virtual stages in a loop work on the same round at the same time, each for a
micro-batch of its own, and none begins the next round before its neighbour has passed on this one.
With t_r(i, j) the seconds of segments i to j on the r-th group,

    least over cuts of the sum over rounds of max_r t_r, and a little of its square

First the least bottleneck b(i, j) of every layer range as one round of p stages, for all starts and
lengths at once; then the rounds by dynamic programming over their ends; then, inside each round,
the cuts of the least sum of squares that stay below its bottleneck. With n segments, stages of at
most l of them and v rounds O(p^2 n l^2 + v p n l), in numpy.

Interleaved orders: every group of devices has several virtual stages (`Interleaved`). Memory is a
group's: all its stages lie there together. So cuts are made for speed first; stages then go over to
options that hold less where a group does not fit (`within_budgets`); where that is not enough, cuts
are made with a Lagrange multiplier on bytes. How cuts are judged depends on the order:

    looped  stages 0, 1, ... p - 1, 0, 1, ...: all groups work on one round of p stages at a time,
            so that a micro-batch takes the sum over rounds of the round's longest
    wave    stages 0, 1, ... p - 1, p - 1, ... 0: each group has its own stages one after the other,
            so that the busiest group sets the pace; segments move from its stages to those of
            others, all stages between moving along, while that makes the busiest less busy

Going over to thriftier options is greedy: every stage has a menu, from the quickest to the one that
holds least, without those that another beats in both. While a group is over its budget, the stages
of one set that go over together go some items down their menus: those that free most for the time
it costs. So not always the best; O(items x sets x stages) a move.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.problems.joint import (
    Cell,
    FlightKey,
    JointProblem,
    JointSolution,
    StageChoice,
    estimate_s,
    pace_s,
    stage_cost,
)
from partita.search.joint.cuts import (
    SLACKS,
    Cuts,
    LayerRanges,
    Option,
    Table,
    best_cuts,
    cuts_with_slack,
    table_of,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
NOTHING = 1e-9  # differences by rounding
Tables = list[tuple[Floats, Ints]]


def round_ends(
    tables: Sequence[Floats], num_rounds: int, longest: int, evenness: float = 0.05
) -> list[int] | None:
    """Where stages begin and, last, where the chain ends; None where there are no such cuts.

    `tables[r][i, j]` is the time of a stage on the r-th group; `longest` the most segments of one;
    `evenness` how much the square of a round's bottleneck counts.
    """
    p, size = len(tables), len(tables[0]) - 1
    steps = [_by_length(table, longest) for table in tables]
    worst = _bottlenecks(steps, size)
    # Rounds of one length go well together: a forward of one runs beside a backward of another.
    average = max(float(np.min([t[0, -1] for t in tables])) / (p * num_rounds), 1e-30)
    weighted = worst * (1 + evenness * worst / average)
    most = worst.shape[1] - 1
    before = np.full(size + 1, np.inf)
    before[0] = 0.0
    came: list[Ints] = []
    for _ in range(num_rounds):
        after, source = np.full(size + 1, np.inf), np.zeros(size + 1, np.int64)
        for length in range(p, min(most, size) + 1):
            total = before[: size + 1 - length] + weighted[: size + 1 - length, length]
            better = total < after[length:]
            after[length:] = np.where(better, total, after[length:])
            source[length:] = np.where(better, np.arange(size + 1 - length), source[length:])
        came.append(source)
        before = after
    if not np.isfinite(before[size]):
        return None
    bounds = [size]
    for source in reversed(came):
        bounds.append(int(source[bounds[-1]]))
    bounds.reverse()
    ends: list[int] = []
    for a, b in itertools.pairwise(bounds):
        ends += _inside(tables, a, b, float(worst[a, b - a]))
    return [*ends, size]


def _by_length(table: Floats, longest: int) -> Floats:
    """Times by start and length, infinite beyond the chain's end."""
    size = len(table) - 1
    full = np.full((size + 1, longest + 1), np.inf)
    for length in range(1, longest + 1):
        full[: size + 1 - length, length] = np.diagonal(table, length)
    return full


def _bottlenecks(steps: Sequence[Floats], size: int) -> Floats:
    """The least bottleneck of each start and length as one stage on every group in turn."""
    longest = steps[0].shape[1] - 1
    bottlenecks = steps[0]
    for step in steps[1:]:
        count = bottlenecks.shape[1]
        reached = np.minimum(np.arange(size + 1)[:, None] + np.arange(count), size)
        wider = np.full((size + 1, min(size, count - 1 + longest) + 1), np.inf)
        for own in range(1, longest + 1):  # segments of this group's stage
            value = np.maximum(bottlenecks, step[reached, own])
            width = min(count, wider.shape[1] - own)
            part = wider[:, own : own + width]
            np.minimum(part, value[:, :width], out=part)
        bottlenecks = wider
    return bottlenecks


def _inside(tables: Sequence[Floats], a: int, b: int, limit: float) -> list[int]:
    """Where the stages of one round begin: the least sum of squares below the bottleneck."""
    width = b - a + 1
    before = np.full(width, np.inf)
    before[0] = 0.0
    came: list[Ints] = []
    for table in tables:
        own = table[a : b + 1, a : b + 1]
        allowed = np.where(own <= limit * (1 + 1e-12), own * own, np.inf)
        total = before[:, None] + allowed
        came.append(total.argmin(axis=0))
        before = np.take_along_axis(total, came[-1][None], 0)[0]
    ends, end = [], width - 1
    for source in reversed(came):
        end = int(source[end])
        ends.append(a + end)
    return ends[::-1]


@dataclass(frozen=True, slots=True)
class InterleavedSettings:
    """How hard cuts for virtual stages are looked for."""

    # Lagrange multipliers on bytes that are tried, in seconds per byte of the whole model.
    multipliers: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 2.0, 8.0)
    longest: float = 4.0  # times the average: no stage has more segments
    moved: tuple[int, ...] = (1, 2)  # segments that change their stage at a time
    longest_counts: float = 0.1  # how much the longest stage counts beside the busiest group
    evenness: float = 0.05  # how much the square of a round's bottleneck counts
    others_count: float = 1e-3  # time of stages that do not set the pace: they may be next
    slacks: tuple[float, ...] = SLACKS


USUAL_INTERLEAVED = InterleavedSettings()


class Item(NamedTuple):
    """One option: seconds, bytes that lie there, bytes live only for a moment."""

    seconds: float
    kept_bytes: float
    moment_bytes: float
    option: int

    @property
    def held_bytes(self) -> float:
        """Both together."""
        return self.kept_bytes + self.moment_bytes


@dataclass(frozen=True, eq=False)
class Interleaved:
    """The question: options of each stage, what it holds at a time, its group, the budgets."""

    stages: Sequence[LayerRanges]
    in_flight: Sequence[float]
    group_of: Sequence[int]
    budgets: Sequence[float]  # by group
    sends: Floats
    num_microbatches: int
    looped: bool
    settings: InterleavedSettings = USUAL_INTERLEAVED

    def best(self) -> Cuts | None:
        """The best cuts; None where nothing fits."""
        new_cuts = self._fitting(0.0)
        if new_cuts is not None:
            return new_cuts
        multipliers = self.settings.multipliers
        low, high = 1, len(multipliers) - 1
        while low <= high:  # the dearer bytes are, the fewer are held
            middle = (low + high) // 2
            cuts = self._fitting(multipliers[middle])
            new_cuts = cuts or new_cuts
            low, high = (low, middle - 1) if cuts else (middle + 1, high)
        return new_cuts

    def _fitting(self, multiplier: float) -> Cuts | None:
        cuts = self._at(multiplier)
        return None if cuts is None else self._within_budgets(cuts)

    def _at(self, multiplier: float) -> Cuts | None:
        tables = self._tables(multiplier)
        if self.looped:
            return self._rounds(tables)
        tried = cuts_with_slack(tables, self.sends, self.num_microbatches, self.settings.slacks)
        evened = [self._evened(tables, cuts) for cuts in tried]
        return min(evened, key=lambda pair: pair[0])[1] if evened else None

    def _tables(self, multiplier: float) -> Tables:
        """Seconds and option of every range with a multiplier on bytes."""
        known: dict[tuple[int, float], tuple[Floats, Ints]] = {}
        tables = []
        for ranges, count in zip(self.stages, self.in_flight, strict=True):
            key = (id(ranges), count if multiplier else 0.0)  # without one, bytes do not count
            if key not in known:
                known[key] = self._table(ranges, count, multiplier)
            tables.append(known[key])
        return tables

    def _table(self, ranges: LayerRanges, count: float, multiplier: float) -> tuple[Floats, Ints]:
        chunks = len(self.stages) // len(self.budgets)
        share = 1 / (self.num_microbatches * chunks)
        unit = 0.0
        if multiplier:
            seconds, static, saved, moment, tail = ranges.of_range(0, -1)
            held = static + count * saved + moment / chunks
            unit = float((seconds + share * tail).min() / max(held.min(), 1e-30))
        return ranges.within(
            count, math.inf, share, s_per_byte=multiplier * unit, moment_share=1 / chunks
        )

    def _within_budgets(self, cuts: Cuts) -> Cuts | None:
        """The same cuts with some stages in options that hold less, so that all groups fit."""
        p, count = len(self.budgets), len(self.stages)
        menus = [self._menu(s, a, b) for s, (a, b, _) in enumerate(cuts.stages)]
        size = p if self.looped else 1  # a round goes over together: nobody waits for one stage
        together = [range(s, s + size) for s in range(0, count, size)]
        chosen = within_budgets(
            menus, self.group_of, self.budgets, together, self._pace, self.settings.others_count
        )
        if chosen is None:
            return None
        stages = tuple(
            (a, b, item.option) for (a, b, _), item in zip(cuts.stages, chosen, strict=True)
        )
        return self._judged(stages, np.array([item.seconds for item in chosen]))

    def _menu(self, stage: int, a: int, b: int) -> list[Item]:
        ranges, chunks = self.stages[stage], len(self.stages) // len(self.budgets)
        share = 1 / (self.num_microbatches * chunks)
        seconds, static, saved, moment, tail = ranges.of_range(a, b)
        return menu_of(seconds + share * tail, static + self.in_flight[stage] * saved, moment)

    def _rounds(self, tables: Tables) -> Cuts | None:
        p, count = len(self.budgets), len(self.stages)
        size = len(self.sends)
        longest = min(size, math.ceil(self.settings.longest * size / count) + 1)
        ends = round_ends(
            [table for table, _ in tables[:p]], count // p, longest, self.settings.evenness
        )
        if ends is None:
            return None
        stages = tuple(
            (a, b, int(tables[s][1][a, b])) for s, (a, b) in enumerate(itertools.pairwise(ends))
        )
        own = np.array([tables[s][0][a, b] for s, (a, b, _) in enumerate(stages)])
        return self._judged(stages, own)

    def _judged(self, stages: tuple[tuple[int, int, int], ...], own: Floats) -> Cuts:
        """The cuts with the pace of their order, and the fill of the pipeline."""
        pace = self._pace(own) * len(self.budgets) / len(own)
        fill = float(own.sum()) + 2 * float(sum(self.sends[a] for a, _, _ in stages))
        return Cuts(stages, (self.num_microbatches - 1) * pace + fill, pace)

    def _pace(self, own: Floats) -> float:
        """Seconds from one micro-batch to the next, if nobody waits for anything else."""
        p = len(self.budgets)
        if self.looped:
            return float(own.reshape(-1, p).max(axis=1).sum())
        return float(np.bincount(np.array(self.group_of), weights=own, minlength=p).max())

    def _evened(self, tables: Tables, cuts: Cuts) -> tuple[float, Cuts]:
        """Segments moved, one or two at a time, from the busiest group to others while that helps.

        With how good the cuts are: less is better.
        """
        ends = [0, *(end for _, end, _ in cuts.stages)]
        count, group_of = len(tables), self.group_of
        members = np.zeros((max(group_of) + 1, count))
        members[list(group_of), range(count)] = 1.0
        seconds = np.stack([table for table, _ in tables])
        stage = np.arange(count)

        def times(ends: Sequence[int]) -> Floats:
            at = np.array(ends)
            times: Floats = seconds[stage, at[:-1], at[1:]]
            return times

        own = times(ends)
        while True:
            busiest = int((members @ own).argmax())
            best, moved = self._score(members, own), ends
            for i, j, size in itertools.product(range(count), range(count), self.settings.moved):
                if group_of[i] != busiest or group_of[j] == busiest:
                    continue
                step = size if j < i else -size  # the cuts between the two stages go this way
                low, high = min(i, j) + 1, max(i, j) + 1
                other = [end + step * (low <= k < high) for k, end in enumerate(ends)]
                short = other[i] >= other[i + 1]
                score = best if short else self._score(members, times(other))
                less = score[0] < best[0] * (1 - NOTHING)
                if less or (score[0] <= best[0] and score[1] < best[1] * (1 - NOTHING)):
                    best, moved = score, other
            if moved is ends:
                break
            ends, own = moved, times(moved)
        stages = tuple(
            (a, b, int(tables[s][1][a, b])) for s, (a, b) in enumerate(itertools.pairwise(ends))
        )
        return self._score(members, own)[0], self._judged(stages, own)

    def _score(self, members: Floats, own: Floats) -> tuple[float, float]:
        """The busiest group; in part also the longest stage, at whose pace orders go."""
        if not math.isfinite(sum(own.tolist())):  # a stage that does not fit
            return math.inf, math.inf
        busy, part = members @ own, self.settings.longest_counts
        longest = len(own) / len(members) * max(own.tolist())
        value = (1 - part) * max(busy.tolist()) + part * longest
        return value, float(busy @ busy) + float(own @ own)


def menu_of(seconds: Floats, kept: Floats, moment: Floats) -> list[Item]:
    """The options that are worth it, the quickest first."""
    items: list[Item] = []
    for option in np.lexsort((kept + moment, seconds)):
        item = Item(float(seconds[option]), float(kept[option]), float(moment[option]), int(option))
        if not items or item.held_bytes < items[-1].held_bytes * (1 - NOTHING):
            items.append(item)
    return items


def within_budgets(
    menus: Sequence[Sequence[Item]],
    group_of: Sequence[int],
    budgets: Sequence[float],
    together: Sequence[Sequence[int]],
    pace: Callable[[Floats], float],
    others_count: float = USUAL_INTERLEAVED.others_count,
) -> list[Item] | None:
    """An item for every stage with which every group fits its budget; None if there is none.

    `pace` judges the seconds of all stages.
    """
    at = [0] * len(menus)
    held = [[item.held_bytes for item in menu] for menu in menus]
    while True:
        chosen = [menu[k] for menu, k in zip(menus, at, strict=True)]
        over = _over(chosen, group_of, budgets)
        if max(over) <= 0:
            return chosen
        own = np.array([item.seconds for item in chosen])
        before = pace(own)
        best, move = 0.0, None
        for members in together:
            needy = [s for s in members if over[group_of[s]] > 0]
            for down in range(1, max((len(menus[s]) - at[s] for s in needy), default=1)):
                new = {s: min(at[s] + down, len(menus[s]) - 1) for s in needy}
                freed = sum(
                    min(over[group_of[s]], held[s][at[s]] - held[s][k]) for s, k in new.items()
                )
                trial = own.copy()
                trial[list(new)] = [menus[s][k].seconds for s, k in new.items()]
                paid = pace(trial) - before + others_count * float((trial - own).sum())
                if freed > 0 and freed / max(paid, 1e-12) > best:
                    best, move = freed / max(paid, 1e-12), new
        if move is None:
            return None
        for s, k in move.items():
            at[s] = k


def _over(chosen: Sequence[Item], group_of: Sequence[int], budgets: Sequence[float]) -> list[float]:
    """Bytes that each group has too many; of what is live for a moment the most counts once."""
    kept, moment = [0.0] * len(budgets), [0.0] * len(budgets)
    for item, group in zip(chosen, group_of, strict=True):
        kept[group] += item.kept_bytes
        moment[group] = max(moment[group], item.moment_bytes)
    return [a + b - c for a, b, c in zip(kept, moment, budgets, strict=True)]


@dataclass(frozen=True, slots=True)
class JointCandidate:
    """A plan on paper, and how it was asked for."""

    solution: JointSolution
    estimate_s: float
    ideal_s: float  # the busiest group, if it never had to wait
    filled: float = 1.0  # of the budgets
    selective: bool = True  # might stages have been checkpointed selectively?

    @property
    def cell(self) -> Cell:
        """Where it lies in the space."""
        return self.solution.cell


@dataclass
class Candidates:
    """Makes candidates for one problem, and remembers the tables they share."""

    problem: JointProblem
    slacks: tuple[float, ...] = SLACKS
    interleaving: InterleavedSettings = USUAL_INTERLEAVED
    kept_tables: int = 4  # beside those of a cell: one of a large model takes some 50 MB
    _tables: dict[object, Table | None] = field(default_factory=dict)

    def flights(self, cell: Cell, schedule: int) -> tuple[float, ...]:
        """Per group, the micro-batches in flight; nothing where the schedule is not there."""
        p = self.problem.groupings[cell.grouping].num_groups
        if p * self.problem.schedules[schedule].virtual_stages > self.problem.num_segments:
            return ()
        return self.problem.in_flight.get(FlightKey(schedule, p, cell.num_microbatches), ())

    def best(
        self, cell: Cell, schedule: int, *, filled: float = 1.0, selective: bool = True
    ) -> JointCandidate | None:
        """The best cuts of a cell; None where nothing fits."""
        grouping, known = self.problem.groupings[cell.grouping], self.problem.schedules[schedule]
        p, m = grouping.num_groups, cell.num_microbatches
        flights = self.flights(cell, schedule)
        if not flights:
            return None
        tables: list[Table] = []
        for group in range(p):
            table = self.table(cell, group)
            if table is not None and not selective:
                table = table.without_selective
            if table is None:
                return None
            tables.append(table)
        groups = [known.group_of(k, p) for k in range(p * known.virtual_stages)]
        ranges = [tables[group].ranges for group in groups]
        held = [flights[group] for group in groups]
        budgets = [filled * budget for budget in grouping.budget_bytes]
        sends = self.problem.send_s(cell)
        if known.virtual_stages == 1:
            cuts = best_cuts(ranges, held, budgets, sends, m, self.slacks)
        else:
            looped = known.layout == "looped"
            cuts = Interleaved(
                ranges, held, groups, budgets, sends, m, looped, self.interleaving
            ).best()
        if cuts is None:
            return None
        own = np.array([
            float(r.seconds[option][a, b] + r.tail[option][a, b] / (m * known.virtual_stages))
            for r, (a, b, option) in zip(ranges, cuts.stages, strict=True)
        ])  # fmt: skip
        sent = float(sum(sends[a] for a, _, _ in cuts.stages))
        stages = tuple(
            StageChoice(a, b, *tables[group].options[option])
            for group, (a, b, option) in zip(groups, cuts.stages, strict=True)
        )
        estimate = estimate_s(known, p, m, own, sent)
        ideal = m * pace_s(known, p, own)
        return JointCandidate(
            JointSolution(cell, schedule, stages), estimate, ideal, filled, selective
        )

    def on_each_mesh(self, cell: Cell, schedule: int) -> Iterator[JointCandidate]:
        """Of a single stage the best on each mesh; those with replicated parameters apart."""
        problem, m = self.problem, cell.num_microbatches
        flights = self.flights(cell, schedule)
        if not flights:
            return
        budget = problem.groupings[cell.grouping].budget_bytes[0]
        for number, mesh in enumerate(problem.meshes_of(cell, 0)):
            known = problem.strategies[problem.key(cell, 0, mesh)]
            least: dict[bool, tuple[float, Option]] = {}
            for place, strategy in enumerate(known):
                for checkpointing in problem.options(strategy):
                    whole = stage_cost(problem, strategy, checkpointing, 0, problem.num_segments)
                    if whole.static + flights[0] * whole.saved + whole.moment > budget:
                        continue
                    seconds = m * whole.seconds + whole.tail
                    if seconds < least.get(strategy.replicated, (np.inf,))[0]:
                        option = Option(number, place, checkpointing)
                        least[strategy.replicated] = seconds, option
            for replicated in (False, True):
                if replicated in least:
                    seconds, option = least[replicated]
                    yield self._single(cell, schedule, option, seconds)

    def _single(self, cell: Cell, schedule: int, option: Option, estimate: float) -> JointCandidate:
        stage = StageChoice(0, self.problem.num_segments, *option)
        return JointCandidate(JointSolution(cell, schedule, (stage,)), estimate, estimate)

    def table(self, cell: Cell, group: int) -> Table | None:
        """Every option on every layer range of a group; the last few are remembered."""
        problem = self.problem
        meshes = problem.meshes_of(cell, group)
        keys = tuple(problem.key(cell, group, mesh) for mesh in meshes)
        if keys in self._tables:
            table = self._tables.pop(keys)  # and back in as the last that was asked for
        else:
            own = [(number, problem.strategies[key]) for number, key in enumerate(keys)]
            table = table_of(problem, own)
        self._tables[keys] = table
        patterns = set(problem.groupings[cell.grouping].patterns)
        while len(self._tables) > self.kept_tables + len(patterns):
            del self._tables[next(iter(self._tables))]
        return table
