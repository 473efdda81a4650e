"""What every strategy costs on every layer range: the tables that cuts are chosen from.

The formulas of `problems.joint` for all ranges [i, j) of the chain at once, by prefix sums: for
each option an array of starts x ends. An option is a strategy with one kind of checkpointing.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.problems.joint import EXPOSED, JointProblem, JointStrategy, TiedBytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SMALL = 500_000  # numbers in the tables of one option: chains of 250 segments


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
