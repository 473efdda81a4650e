"""Named strategies and our searches for several numbers of devices: a comparison for each."""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.jobs.compare import compare
from partita.jobs.sweep import Answer, Sweeper
from partita.search.base import Stop
from partita.showing import plot_of, repr_html, table_of


@dataclass(frozen=True, slots=True)
class ComparedTask:
    """One comparison, with all that decides it."""

    model: str
    cluster: str
    num_devices: int
    batch: int | None = None
    dtype: str | None = None
    training: bool = True
    optimizer: str = "adamw"
    objective: str = "throughput"
    time_s: float | None = 60.0
    seed: int = 0


@dataclass(frozen=True)
class ComparedCurve:
    """For each number of devices the seconds of strategies that fit, and (number, why) of others.

    `names` are the strategies, the fastest on the most devices first.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    objective_s: dict[tuple[str, int], float]
    plans: dict[tuple[str, int], str]
    missing: tuple[tuple[int, str], ...]

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def best(self, number: int) -> str:
        """The fastest strategy on so many devices."""
        told = {name: s for (name, own), s in self.objective_s.items() if own == number}
        return min(told, key=lambda name: (told[name], name)) if told else ""


def compare_curve(tasks: Sequence[ComparedTask], sweeper: Sweeper) -> ComparedCurve:
    """Compare every task, each by itself, on as many processes as the sweeper has."""
    seconds: dict[tuple[str, int], float] = {}
    plans: dict[tuple[str, int], str] = {}
    missing = []
    for task, outcome in zip(tasks, sweeper(compared_point, tasks), strict=True):
        if outcome.answer is None:
            missing.append((task.num_devices, outcome.why))
            continue
        for name, (objective_s, arrangement) in outcome.answer["rows"].items():
            seconds[name, task.num_devices] = objective_s
            plans[name, task.num_devices] = arrangement
    numbers = tuple(task.num_devices for task in tasks)

    def rank(name: str) -> tuple[float, ...]:
        return tuple(seconds.get((name, number), float("inf")) for number in reversed(numbers))

    names = sorted({name for name, _ in seconds}, key=lambda name: (rank(name), name))
    return ComparedCurve(numbers, tuple(names), seconds, plans, tuple(missing))


def compared_point(task: ComparedTask) -> Answer:
    """The strategies of one comparison that fit."""
    comparison = compare(
        task.model, task.cluster, batch=task.batch, dtype=task.dtype, training=task.training,
        optimizer=task.optimizer, objective=task.objective, stop=Stop(task.time_s, 0.01),
        seed=task.seed,
    )  # fmt: skip
    rows = {
        row.name: [row.objective_s, row.simulation.arrangement]
        for row in comparison.rows
        if row.fits and row.simulation is not None
    }
    return {"rows": rows, "lower_bound_s": comparison.lower_bound_s}
