"""Cut a chain of segments into stages: the least time of m micro-batches, within memory budgets.

A stage is a layer range run with one of several options (strategy, checkpointing); its option is
the quickest that fits its budget, with as many micro-batches' activations as its place in the
pipeline has to hold. With seconds t_s per micro-batch and x_s to send what crosses its first cut,

    step = (m - 1) max t_s + sum (t_s + 2 x_s)

First the least bottleneck, by dynamic programming over (stage, cut); then, for that bottleneck and
a few above it, the least sum of ranges that stay below it. Exact for each bottleneck tried.
O(stages x options x segments^2), in numpy.

What a stage does once, at the end of a step, counts as so much more of every micro-batch. Groups of
devices with several virtual stages are another matter: see `candidates`.

Cuts are chosen from tables (`LayerRanges`) of what every strategy costs on every layer range: the
formulas of `problems.joint` for all ranges [i, j) of the chain at once, by prefix sums: for
each option an array of starts x ends. An option is a strategy with one kind of checkpointing.
"""

import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.problems.joint import (
    EXPOSED,
    JointProblem,
    JointSolution,
    JointStrategy,
    TiedBytes,
    check,
    objective_s,
    strategy_of,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SMALL = 500_000  # numbers in the tables of one option: chains of 250 segments
SLACKS = (1.0, 1.02, 1.06, 1.15, 1.4)  # times the least bottleneck: what is tried


class Option(NamedTuple):
    """A strategy of one of a group's meshes, and what is checkpointed."""

    mesh: int
    strategy: int
    checkpointing: str


@dataclass(frozen=True, eq=False)
class LayerRanges:
    """Figures of every range [i, j): for each option an array of starts x ends.

    Bytes of a stage: static + micro-batches in flight * saved + moment. `tail` is what it takes
    once, beyond the last micro-batch.
    """

    seconds: Sequence[Floats]
    static: Sequence[Floats]
    saved: Sequence[Floats]
    moment: Sequence[Floats]
    tail: Sequence[Floats]

    def within(
        self, in_flight: float, budget: float, tail_share: float, *, s_per_byte: float = 0.0,
        moment_share: float = 1.0,
    ) -> tuple[Floats, Ints]:  # fmt: skip
        """The least seconds of each range that fits the budget, and the option it is run with.

        With a multiplier on bytes the least of both together, and the seconds of that.
        """
        size = len(self.seconds[0])
        seconds, least = np.full((size, size), np.inf), np.full((size, size), np.inf)
        option = np.zeros((size, size), np.int64)
        for number in range(len(self.seconds)):
            _improve(
                number, self.seconds[number], self.static[number], self.saved[number],
                self.moment[number], self.tail[number], tail_share, in_flight, moment_share,
                s_per_byte, budget, seconds, least, option,
            )  # fmt: skip
        return seconds, option

    @property
    def _parts(self) -> tuple[Sequence[Floats], ...]:
        return self.seconds, self.static, self.saved, self.moment, self.tail

    def of_range(self, a: int, b: int) -> Floats:
        """Seconds, bytes and tail of one range; columns are options."""
        return np.array([[own[a, b] for own in part] for part in self._parts])

    def only(self, chosen: Sequence[int]) -> "LayerRanges":
        """The same with some of the options."""
        return LayerRanges(*(tuple(part[i] for i in chosen) for part in self._parts))


def _improve_in_numpy(
    number: int, seconds: Floats, static: Floats, saved: Floats, moment: Floats, tail: Floats,
    tail_share: float, in_flight: float, moment_share: float, s_per_byte: float, budget: float,
    chosen_s: Floats, least: Floats, option: Ints,
) -> None:  # fmt: skip
    held = in_flight * saved + static + moment_share * moment
    own = tail_share * tail + seconds
    both = own + s_per_byte * held
    better = np.triu((held <= budget) & (both < least), 1)
    chosen_s[better], least[better], option[better] = own[better], both[better], number


@compiled(small=SMALL, plain=_improve_in_numpy)
def _improve(
    number: int, seconds: Floats, static: Floats, saved: Floats, moment: Floats, tail: Floats,
    tail_share: float, in_flight: float, moment_share: float, s_per_byte: float, budget: float,
    chosen_s: Floats, least: Floats, option: Ints,
) -> None:  # fmt: skip
    """Take an option wherever it fits and is less than what was taken before."""
    size = len(seconds)
    for i in range(size):
        for j in range(i + 1, size):
            held = in_flight * saved[i, j] + static[i, j] + moment_share * moment[i, j]
            own = tail_share * tail[i, j] + seconds[i, j]
            both = own + s_per_byte * held
            if held <= budget and both < least[i, j]:
                chosen_s[i, j], least[i, j], option[i, j] = own, both, number


@dataclass(frozen=True, eq=False)
class Table:
    """All ranges with every option of a group."""

    ranges: LayerRanges
    options: tuple[Option, ...]

    @functools.cached_property
    def without_selective(self) -> "Table | None":
        """The same without selective checkpointing; None where nothing else is allowed."""
        left = [i for i, option in enumerate(self.options) if option.checkpointing != "selective"]
        if len(left) == len(self.options):
            return self
        return Table(self.ranges.only(left), tuple(self.options[i] for i in left)) if left else None


def joined(parts: Sequence[LayerRanges]) -> LayerRanges:
    """All options of several tables in one, in this order."""

    def all_of(name: str) -> tuple[Floats, ...]:
        return tuple(itertools.chain(*(getattr(part, name) for part in parts)))

    return LayerRanges(*map(all_of, ("seconds", "static", "saved", "moment", "tail")))


def table_of(
    problem: JointProblem, own: Sequence[tuple[int, Sequence[JointStrategy]]]
) -> Table | None:
    """The table of some meshes, by number, with their strategies; None where there is no option."""
    parts: list[LayerRanges] = []
    options: list[Option] = []
    for mesh, strategies in own:
        for number, strategy in enumerate(strategies):
            allowed = problem.options(strategy)
            made = (
                _training(problem, strategy, allowed)
                if problem.training
                else {"none": _inference(problem, strategy)}
            )
            for checkpointing in allowed:
                parts.append(made[checkpointing])
                options.append(Option(mesh, number, checkpointing))
    return Table(joined(parts), tuple(options)) if parts else None


def _training(
    problem: JointProblem, strategy: JointStrategy, allowed: Sequence[str]
) -> dict[str, LayerRanges]:
    """Every range with all activations kept, with cheap ones and with all computed again."""
    kinds = np.array(problem.segment_kind)

    def sums(column: Floats) -> Floats:
        return range_sums(column[kinds])

    def beside(computing: Floats, sent: Floats) -> Floats:
        return sums(computing) + late_ranges(sent[kinds], computing[kinds])

    overlapped, compute = strategy.overlapped, strategy.compute
    waited = sums(strategy.blocking + EXPOSED * overlapped)
    static = sums(strategy.static) + tied_ranges(strategy.tied, len(kinds))
    tail = late_ranges(strategy.sync[kinds], (compute - strategy.forward)[kinds])
    tail += np.where(np.isfinite(static), sums(strategy.ends), 0.0)
    layer_ranges: dict[str, LayerRanges] = {}
    if "none" in allowed:
        saved = sums(strategy.saved)
        seconds = waited + beside(compute, overlapped)
        layer_ranges["none"] = _one(seconds, static, saved, np.zeros_like(saved), tail)
    if "selective" in allowed:
        sent = strategy.again_sent
        layer_ranges["selective"] = _one(
            waited + EXPOSED * sums(sent) + beside(compute + strategy.again, overlapped + sent),
            static,
            sums(strategy.again_saved),
            range_peaks((strategy.saved - strategy.again_saved)[kinds]),
            tail,
        )
    if "full" in allowed:
        # Sharded parameters are gathered once for a second forward and the backward after it.
        twice = beside(compute + strategy.forward, overlapped)
        peaks = range_peaks(strategy.saved[kinds])
        layer_ranges["full"] = _one(waited + twice, static, sums(strategy.entering), peaks, tail)
    return layer_ranges


def _inference(problem: JointProblem, strategy: JointStrategy) -> LayerRanges:
    """Every range when nothing is kept but what passes through it."""
    kinds = np.array(problem.segment_kind)
    overlapped, compute = strategy.overlapped[kinds], strategy.compute[kinds]
    seconds = range_sums(compute + strategy.blocking[kinds] + EXPOSED * overlapped)
    seconds += late_ranges(overlapped, compute)
    nothing = np.zeros_like(seconds)
    static = range_sums(strategy.static[kinds]) + tied_ranges(strategy.tied, len(kinds))
    peaks = range_peaks(strategy.entering[kinds])
    return _one(seconds, static, nothing, peaks, nothing)


def _one(*arrays: Floats) -> LayerRanges:
    return LayerRanges(*((array,) for array in arrays))


def range_sums(values: Floats) -> Floats:
    """Sums over every range [i, j); infinite where there is none (j <= i)."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    sums: Floats = total[None, :] - total[:, None]
    sums += _nowhere(len(total))
    return sums


@functools.lru_cache(maxsize=8)
def _nowhere(size: int) -> Floats:
    """Infinite where there is no range, else 0."""
    nowhere: Floats = np.where(np.tri(size, dtype=bool), np.inf, 0.0)
    return nowhere


def range_peaks(values: Floats) -> Floats:
    """The largest value of every range [i, j), at least 0; 0 where there is none."""
    count = len(values)
    peaks = np.zeros((count + 1, count + 1))
    own = np.where(np.tri(count, k=-1, dtype=bool), 0.0, values[None, :])
    np.maximum.accumulate(own, axis=1, out=peaks[:count, 1:])
    return peaks


def late_ranges(sent: Floats, computing: Floats) -> Floats:
    """Communication of every range that ends after the computing beside it."""
    if not sent.any() and computing.min(initial=0.0) >= 0:
        return np.zeros((len(sent) + 1,) * 2)
    before = np.concatenate(([0.0], np.cumsum(sent - computing)))  # of the segments before each
    least = before.min()
    late = range_peaks(before[1:] + computing - least) - (before - least)[:, None]
    tail: Floats = np.maximum(0.0, late)
    return tail


def tied_ranges(tied: Sequence[TiedBytes], num_segments: int) -> Floats:
    """What tied parameters add to every range [i, j): the user is in it, the owner is not."""
    tied_ranges: Floats = np.zeros((num_segments + 1, num_segments + 1))
    for one in tied:
        tied_ranges[one.owner + 1 : one.user + 1, one.user + 1 :] += one.size_bytes
    return tied_ranges


@dataclass(frozen=True)
class Cuts:
    """Stages as (first segment, end, option), with the estimate of the step."""

    stages: tuple[tuple[int, int, int], ...]
    step_s: float
    bottleneck_s: float


def best_cuts(
    stages: Sequence[LayerRanges],
    in_flight: Sequence[float],
    budgets: Sequence[float],
    sends: Floats,
    num_microbatches: int,
    slacks: Sequence[float] = SLACKS,
) -> Cuts | None:
    """The best cuts for stages in a row, each with its options; None where nothing fits.

    `sends[i]` is the seconds to send what crosses the cut before segment i.
    """
    tables = _tables(stages, in_flight, budgets, 1 / num_microbatches)
    tried = cuts_with_slack(tables, sends, num_microbatches, slacks)
    return min(tried, key=lambda cuts: cuts.step_s, default=None)


def cuts_with_slack(
    tables: Sequence[tuple[Floats, Ints]],
    sends: Floats,
    num_microbatches: int,
    slacks: Sequence[float] = SLACKS,
) -> list[Cuts]:
    """The cuts of the least sum for the least bottleneck, and for a few above it."""
    least = _smallest_bottleneck([seconds for seconds, _ in tables])
    if not np.isfinite(least):
        return []
    distinct = dict.fromkeys(
        _smallest_sum(tables, sends, least * slack, num_microbatches) for slack in slacks
    )
    return [cuts for cuts in distinct if cuts is not None]


def _tables(
    stages: Sequence[LayerRanges],
    in_flight: Sequence[float],
    budgets: Sequence[float],
    share: float,
) -> list[tuple[Floats, Ints]]:
    known: dict[tuple[int, float, float], tuple[Floats, Ints]] = {}
    tables = []
    for ranges, count, cap in zip(stages, in_flight, budgets, strict=True):
        key = (id(ranges), count, cap)
        if key not in known:
            known[key] = ranges.within(count, cap, share)
        tables.append(known[key])
    return tables


def _smallest_bottleneck(tables: Sequence[Floats]) -> float:
    size = len(tables[0])
    reach = np.full(size, np.inf)  # the least bottleneck with the first so many segments done
    reach[0] = 0.0
    for seconds in tables:
        reach = np.maximum(reach[:, None], seconds).min(axis=0)
    return float(reach[-1])


def _smallest_sum(
    tables: Sequence[tuple[Floats, Ints]], sends: Floats, limit: float, num_microbatches: int
) -> Cuts | None:
    size = len(tables[0][0])
    before = np.full(size, np.inf)
    before[0] = 0.0
    moved = 2 * np.concatenate((sends, [0.0]))
    came: list[Ints] = []
    for seconds, _ in tables:
        allowed = np.where(seconds <= limit * (1 + 1e-12), seconds, np.inf)
        total = (before + moved)[:, None] + allowed
        came.append(total.argmin(axis=0))
        before = np.take_along_axis(total, came[-1][None], 0)[0]
    if not np.isfinite(before[-1]):
        return None
    stages: list[tuple[int, int, int]] = []
    end, bottleneck = size - 1, 0.0
    for (seconds, option), sources in zip(reversed(tables), reversed(came), strict=True):
        start = int(sources[end])
        stages.append((start, end, int(option[start, end])))
        bottleneck = max(bottleneck, float(seconds[start, end]))
        end = start
    step = (num_microbatches - 1) * bottleneck + float(before[-1])
    return Cuts(tuple(reversed(stages)), step, bottleneck)


def cuts_at(
    problem: JointProblem, solution: JointSolution, borders: Collection[int]
) -> JointSolution | None:
    """The same stages, meshes and strategies with cuts before some segments only, about as even.

    What fits the budgets comes first, then the least objective; None where there are too few.
    """
    size = problem.num_segments + 1
    off = np.ones(size, dtype=bool)
    off[[0, size - 1, *borders]] = False
    cell, schedule = solution.cell, problem.schedules[solution.schedule]
    share = 1 / (cell.num_microbatches * schedule.virtual_stages)
    num_groups = problem.groupings[cell.grouping].num_groups
    known: dict[object, Floats] = {}
    tables: list[tuple[Floats, Ints]] = []
    for k, stage in enumerate(solution.stages):
        group = schedule.group_of(k, num_groups)
        mesh = problem.meshes_of(cell, group)[stage.mesh]
        key = (problem.key(cell, group, mesh), stage.strategy, stage.checkpointing)
        if key not in known:
            own = _seconds(problem, strategy_of(problem, solution, k), stage.checkpointing, share)
            own[off, :], own[:, off] = np.inf, np.inf
            known[key] = own
        tables.append((known[key], np.zeros((size, size), np.int64)))
    moved = [
        replace(
            solution,
            stages=tuple(
                stage._replace(first=first, end=end)
                for stage, (first, end, _) in zip(solution.stages, cuts.stages, strict=True)
            ),
        )
        for cuts in cuts_with_slack(tables, problem.send_s(cell), cell.num_microbatches)
    ]
    return min(
        moved,
        key=lambda one: (bool(check(problem, one)), objective_s(problem, one)),
        default=None,
    )


def _seconds(
    problem: JointProblem, strategy: JointStrategy, checkpointing: str, tail_share: float
) -> Floats:
    """Of every layer range with one option of a strategy."""
    table = table_of(problem, [(0, [strategy])])
    assert table is not None  # a stage has this option
    place = [option.checkpointing for option in table.options].index(checkpointing)
    ranges = table.ranges
    return ranges.seconds[place] + tail_share * ranges.tail[place]
