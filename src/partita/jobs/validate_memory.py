"""Memory of measured runs against forecasts: bytes where they are published, and verdicts.

A run that ran must be predicted to fit, one that ended out of memory must not. Some sources do not
print what decides it (how much is recomputed, the micro-batch): then the verdict stays open where
one reading fits and the other does not, and such rows are counted with the reason.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.forecast import MemoryParts, forecast
from partita.jobs.published import PublishedRun

UNSAID = {"recompute": "what is recomputed", "micro-batch": "the micro-batch"}


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


def check_memory(rows: Sequence[tuple[PublishedRun, MemoryParts]]) -> MemoryCheck:
    """Compare the memory of rows with what is predicted for them."""
    points = [(row, _comparable(row, memory)) for row, memory in rows if row.memory_bytes]
    names = dict.fromkeys(row.group for row, _ in points)
    groups = tuple(_errors(name, [one for one in points if one[0].group == name]) for name in names)
    verdicts = [(row, _verdict(row, memory)) for row, memory in rows]
    ran = [(row, right) for row, right in verdicts if not row.out_of_memory and right is not None]
    oom = [(row, right) for row, right in verdicts if row.out_of_memory and right is not None]
    unsaid = Counter(_unsaid(row) for row, right in verdicts if right is None)
    return MemoryCheck(
        _errors("all", points) if points else None, groups, tuple(points),
        len(ran), sum(bool(right) for _, right in ran),
        len(oom), sum(bool(right) for _, right in oom),
        tuple(row.id for row, right in (*ran, *oom) if not right),
        tuple(sorted(unsaid.items(), key=lambda pair: (-pair[1], pair[0]))),
    )  # fmt: skip


def _comparable(row: PublishedRun, memory: MemoryParts) -> float:
    return memory.total if row.with_workspace else memory.allocated


def _errors(name: str, points: Sequence[tuple[PublishedRun, float]]) -> MemoryErrors:
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
