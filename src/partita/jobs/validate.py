"""Predictions against measured runs: errors, ranking, regret, memory, coverage of the intervals.

    error       predicted / measured - 1; MAPE is the mean of its size, bias its mean, in per cent
    Spearman    correlation of the ranks of predicted and measured times
    regret      of runs that share model, machine and batch: measured time of the one with the least
                predicted time over the least measured time, minus 1; a strategy that was
                measured several times has the mean of its times
    coverage    the part of the runs whose measured time lies in the 80 % interval of its prediction

A third of the rows (by a hash of their ids) is kept from the fit of the parameter sets; errors and
coverage are given for fitted and left-out rows apart.

Memory (`check_memory`): bytes where they are published, and verdicts. A run that ran must be
predicted to fit, one that ended out of memory must not. Some sources do not print what decides it
(how much is recomputed, the micro-batch): then the verdict stays open where one reading fits and
the other does not, and such rows are counted with the reason.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from partita.forecast import Forecast, MemoryParts, forecast
from partita.forecast.predict import layer_seconds
from partita.jobs.published import PublishedRun, Skipped, left_out
from partita.showing import plot_of, repr_html, table_of

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

NEAR = 1.25  # machines and batches that differ by less are compared per device and sequence
UNSAID = {"recompute": "what is recomputed", "micro-batch": "the micro-batch"}


@dataclass(frozen=True, slots=True)
class Checked:
    """A measured run beside its forecast."""

    row: PublishedRun
    predicted_s: float
    interval_s: tuple[float, float] | None  # None: one layer, which has none
    memory: MemoryParts | None

    @property
    def left_out(self) -> bool:
        """Was the row kept from the fit?"""
        return left_out(self.row)

    @property
    def error(self) -> float | None:
        """Predicted over measured time, minus 1."""
        measured = self.row.measured_s
        return None if measured is None else self.predicted_s / measured - 1

    @property
    def covered(self) -> bool | None:
        """Does the measured time lie in the interval?"""
        if self.row.measured_s is None or self.interval_s is None:
            return None
        least, most = self.interval_s
        return least <= self.row.measured_s <= most

    @property
    def device_seconds(self) -> tuple[float, float]:
        """Predicted and measured seconds of one device for one sequence."""
        assert self.row.measured_s is not None
        per = self.row.machine.num_devices / self.row.strategy.batch
        return self.predicted_s * per, self.row.measured_s * per


@dataclass(frozen=True, slots=True)
class Errors:
    """Of some runs, in per cent; None where there are too few to say."""

    n: int
    mape: float | None
    bias: float | None
    spearman: float | None


@dataclass(frozen=True, slots=True)
class GroupErrors:
    """Errors of one group of rows, and of its fitted and left-out part."""

    name: str
    both: Errors
    fitted: Errors
    left_out: Errors
    skipped: int


@dataclass(frozen=True, slots=True)
class Regret:
    """How much slower than the best measured runs those are that would be picked, in per cent."""

    name: str
    groups: int  # of runs that share model, machine and batch
    mean: float
    worst: float
    random: float  # of picking blindly


@dataclass(frozen=True, slots=True)
class Coverage:
    """Runs inside their intervals, and all of them."""

    name: str
    fitted_inside: int
    fitted: int
    left_out_inside: int
    left_out: int


@dataclass(frozen=True, slots=True)
class Duel:
    """Parameters sharded over all ranks against tensor and pipeline parallelism, one model."""

    sharded: Checked
    split: Checked

    @property
    def picked(self) -> Checked:
        """The one with the lesser predicted time of a device for a sequence."""
        return min((self.sharded, self.split), key=lambda one: one.device_seconds[0])

    @property
    def better(self) -> Checked:
        """The one with the lesser measured time of a device for a sequence."""
        return min((self.sharded, self.split), key=lambda one: one.device_seconds[1])

    @property
    def regret(self) -> float:
        """In per cent."""
        return 100 * (self.picked.device_seconds[1] / self.better.device_seconds[1] - 1)


@dataclass(frozen=True, slots=True)
class MemoryErrors:
    """Predicted over measured bytes, minus 1, of one group: mean size and mean, in per cent."""

    name: str
    n: int
    mape: float
    bias: float


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Errors in bytes by group, and whether what ran fits."""

    total: MemoryErrors | None
    groups: tuple[MemoryErrors, ...]
    points: tuple[tuple[PublishedRun, float], ...]  # rows with published bytes, predicted bytes
    ran: int  # verdicts on runs that ran
    ran_right: int
    out_of_memory: int  # and on those that ended out of memory
    out_of_memory_right: int
    wrong: tuple[str, ...]  # ids
    open: tuple[tuple[str, int], ...]  # why a row is not judged, how many

    @property
    def share_right(self) -> float | None:
        """Of the verdicts, in per cent."""
        judged = self.ran + self.out_of_memory
        return 100 * (self.ran_right + self.out_of_memory_right) / judged if judged else None


@dataclass(frozen=True, slots=True)
class Validation:
    """All rows of a file beside their forecasts, and what that says about the forecasts."""

    checked: tuple[Checked, ...]
    skipped: tuple[Skipped, ...]
    total: GroupErrors
    groups: tuple[GroupErrors, ...]
    regret: tuple[Regret, ...]
    duels: tuple[Duel, ...]
    memory: MemoryCheck
    coverage: tuple[Coverage, ...]  # of all, then by kind of device

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def worst(self, most: int) -> dict[str, tuple[Checked, ...]]:
        """By group the runs with the largest errors, the largest first."""
        timed = [one for one in self.checked if one.error is not None]
        ordered = sorted(timed, key=lambda one: -abs(one.error or 0.0))
        return {name: tuple(some[:most]) for name, some in grouped(ordered, _group_of).items()}

    @property
    def reasons(self) -> tuple[tuple[str, int], ...]:
        """Why rows were skipped, the commonest first."""
        counts = Counter(one.reason for one in self.skipped)
        return tuple(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def validate(rows: Iterable[PublishedRun], skipped: Iterable[Skipped] = ()) -> Validation:
    """Forecast every row and compare."""
    checked: list[Checked] = []
    left: list[Skipped] = list(skipped)
    for row in rows:
        one = _check(row)
        if one is None:
            left.append(Skipped(row.id, row.group, "the forecast is no finite time"))
        else:
            checked.append(one)
    timed = [one for one in checked if one.error is not None]
    names = dict.fromkeys([*(one.row.group for one in checked), *(one.group for one in left)])
    lost = Counter(one.group for one in left)
    by_name = grouped(timed, _group_of)
    return Validation(
        tuple(checked), tuple(left), _errors("all", timed, len(left)),
        tuple(_errors(name, by_name.get(name, []), lost[name]) for name in names),
        _regrets(timed), _duels(timed),
        check_memory([(one.row, one.memory) for one in checked if one.memory is not None]),
        _coverages(timed),
    )  # fmt: skip


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a key, in the order in which keys appear."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _group_of(one: Checked) -> str:
    return one.row.group


def _check(row: PublishedRun) -> Checked | None:
    if row.layer_only:
        seconds = layer_seconds(row.model, row.machine, row.strategy)
        return Checked(row, seconds, None, None) if _is_time(seconds) else None
    predicted: Forecast = forecast(row.model, row.machine, row.strategy)
    if not _is_time(predicted.step_s) or not math.isfinite(predicted.memory.total):
        return None
    return Checked(row, predicted.step_s, predicted.interval_s, predicted.memory)


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0


def _errors(name: str, timed: Sequence[Checked], skipped: int) -> GroupErrors:
    fitted = [one for one in timed if not one.left_out]
    apart = [one for one in timed if one.left_out]
    return GroupErrors(name, _errors_of(timed), _errors_of(fitted), _errors_of(apart), skipped)


def _errors_of(timed: Sequence[Checked]) -> Errors:
    errors = [one.error for one in timed if one.error is not None]
    if not errors:
        return Errors(0, None, None, None)
    measured = [one.row.measured_s or 0.0 for one in timed]
    return Errors(
        len(errors),
        100 * statistics.fmean(abs(error) for error in errors),
        100 * statistics.fmean(errors),
        spearman([one.predicted_s for one in timed], measured),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Correlation of ranks; None of fewer than two values or of equal ones."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    for same in grouped(range(len(order)), lambda place: values[order[place]]).values():
        for place in same:
            ranks[order[place]] = statistics.fmean(same) + 1
    return ranks


def _case(one: Checked) -> Hashable:
    """What runs share among which one would choose."""
    model, machine = one.row.model, one.row.machine
    sizes = (model.layers, model.hidden, model.heads, model.inner, model.vocab, model.seq)
    return (one.row.group, sizes, machine.kind.name, machine.num_devices, one.row.strategy.batch)


def _regrets(timed: Sequence[Checked]) -> tuple[Regret, ...]:
    cases: dict[str, list[list[tuple[float, float]]]] = {}
    for same in grouped(timed, _case).values():
        choices = _choices(same)
        if len(choices) > 1:
            cases.setdefault(same[0].row.group, []).append(choices)
    regrets = []
    for name, every in cases.items():
        losses = [regret_of(choices) for choices in every]
        blind = [regret_of([(0.0, measured) for _, measured in choices]) for choices in every]
        mean, worst = statistics.fmean(losses), max(losses)
        regrets.append(Regret(name, len(every), mean, worst, statistics.fmean(blind)))
    return tuple(regrets)


def _choices(same: Sequence[Checked]) -> list[tuple[float, float]]:
    """Predicted and measured time by strategy; one that was measured several times has the mean."""
    return [
        (some[0].predicted_s, statistics.fmean(one.row.measured_s or 0.0 for one in some))
        for some in grouped(same, lambda one: one.row.strategy).values()
    ]


def regret_of(choices: Sequence[tuple[float, float]]) -> float:
    """Of choosing by predicted time, in per cent; the mean over equal predicted times."""
    least = min(predicted for predicted, _ in choices)
    picked = statistics.fmean(measured for predicted, measured in choices if predicted == least)
    return 100 * (picked / min(measured for _, measured in choices) - 1)


def _duels(timed: Sequence[Checked]) -> tuple[Duel, ...]:
    """Pairs of one group and model on a machine and batch of nearly one size."""
    duels = []
    steps = [one for one in timed if not one.row.layer_only]
    for same in grouped(steps, _same_model).values():
        sharded = _fastest(one for one in same if _model_ranks(one) == 1 and _zero(one) == 3)
        split = _fastest(one for one in same if _model_ranks(one) > 1 and _zero(one) < 3)
        duels += [Duel(a, b) for a in sharded for b in split if _are_near(a.row, b.row)]
    return tuple(duels)


def _same_model(one: Checked) -> Hashable:
    row = one.row
    return row.group, row.model, row.machine.kind.name, row.strategy.product_dtype


def _fastest(runs: Iterable[Checked]) -> list[Checked]:
    """Of a strategy that was measured several times the fastest run."""
    by_strategy = grouped(runs, lambda one: (one.row.strategy, one.row.machine.num_devices))
    return [min(some, key=lambda one: one.row.measured_s or 0.0) for some in by_strategy.values()]


def _zero(one: Checked) -> int:
    return one.row.strategy.zero


def _model_ranks(one: Checked) -> int:
    return one.row.strategy.tp * one.row.strategy.pp


def _are_near(first: PublishedRun, second: PublishedRun) -> bool:
    sizes = (
        (first.machine.num_devices, second.machine.num_devices),
        (first.strategy.batch, second.strategy.batch),
    )
    return all(max(pair) <= NEAR * min(pair) for pair in sizes)


def _coverages(timed: Sequence[Checked]) -> tuple[Coverage, ...]:
    steps = [one for one in timed if one.covered is not None]
    kinds = sorted(grouped(steps, lambda one: one.row.machine.kind.name).items())
    return tuple(_coverage(name, some) for name, some in [("all", steps), *kinds] if some)


def _coverage(name: str, steps: Sequence[Checked]) -> Coverage:
    fitted = [bool(one.covered) for one in steps if not one.left_out]
    apart = [bool(one.covered) for one in steps if one.left_out]
    return Coverage(name, sum(fitted), len(fitted), sum(apart), len(apart))


def check_memory(rows: Sequence[tuple[PublishedRun, MemoryParts]]) -> MemoryCheck:
    """Compare the memory of rows with what is predicted for them."""
    points = [(row, _comparable(row, memory)) for row, memory in rows if row.memory_bytes]
    names = dict.fromkeys(row.group for row, _ in points)
    groups = tuple(
        _memory_errors(name, [one for one in points if one[0].group == name]) for name in names
    )
    verdicts = [(row, _verdict(row, memory)) for row, memory in rows]
    ran = [(row, right) for row, right in verdicts if not row.out_of_memory and right is not None]
    oom = [(row, right) for row, right in verdicts if row.out_of_memory and right is not None]
    unsaid = Counter(_unsaid(row) for row, right in verdicts if right is None)
    return MemoryCheck(
        _memory_errors("all", points) if points else None, groups, tuple(points),
        len(ran), sum(bool(right) for _, right in ran),
        len(oom), sum(bool(right) for _, right in oom),
        tuple(row.id for row, right in (*ran, *oom) if not right),
        tuple(sorted(unsaid.items(), key=lambda pair: (-pair[1], pair[0]))),
    )  # fmt: skip


def _comparable(row: PublishedRun, memory: MemoryParts) -> float:
    return memory.total if row.with_workspace else memory.allocated


def _memory_errors(name: str, points: Sequence[tuple[PublishedRun, float]]) -> MemoryErrors:
    errors = [100 * (predicted / (row.memory_bytes or 1.0) - 1) for row, predicted in points]
    mape = statistics.fmean(abs(error) for error in errors)
    return MemoryErrors(name, len(errors), mape, statistics.fmean(errors))


def _verdict(row: PublishedRun, memory: MemoryParts) -> bool | None:
    """Is the verdict right? None: what the row does not print decides it."""
    capacity = row.machine.kind.memory_bytes
    fits = memory.total <= capacity
    fits_at_least = fits or (bool(row.assumed) and _least_memory(row).total <= capacity)
    if row.out_of_memory:
        return not fits if fits == fits_at_least else None
    return fits if fits == fits_at_least else None


def _least_memory(row: PublishedRun) -> MemoryParts:
    """With the most recomputing and the smallest micro-batch that the row leaves open."""
    recompute = "full" if "recompute" in row.assumed else row.strategy.recompute
    micro = 1 if "micro-batch" in row.assumed else row.strategy.micro_batch
    strategy = replace(row.strategy, recompute=recompute, micro_batch=micro)
    return forecast(row.model, row.machine, strategy).memory


def _unsaid(row: PublishedRun) -> str:
    return f"the source does not print {' and '.join(UNSAID[name] for name in row.assumed)}"
