"""What two plans of one model do differently, and what each difference is worth.

Both are simulated as they are; decisions are compared op by op. Which of the differences makes up
the time is told by where the step goes on the busiest devices of each, by purpose: compute,
exposed communication (what is sent, over which links), updates, bubble.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from partita.errors import PlanError
from partita.jobs.explain_account import Account, Shares, account_of
from partita.jobs.simulate import simulate
from partita.plans import OpSplit, Plan, Stage
from partita.showing import plot_of, repr_html, table_of


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of both plans."""

    name: str
    first: float
    second: float
    unit: str  # s, bytes, share or count

    @property
    def ratio(self) -> float:
        """The second over the first."""
        return self.second / self.first if self.first else float("inf")


@dataclass(frozen=True, slots=True)
class Change:
    """Ops that are decided differently in the same way: before, after, how many, an example."""

    before: str
    after: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Everything in which two plans differ."""

    figures: tuple[Figure, ...]
    parts: tuple[Figure, ...]  # where the step goes, the largest of both first
    decisions: tuple[tuple[str, str, str], ...]  # what, in the first, in the second
    changes: tuple[Change, ...]
    same_ops: int
    num_ops: int

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook


def diff(first: Plan, second: Plan) -> Difference:
    """Compare two plans; they must be for the same model, the machines may differ."""
    if first.model.spec != second.model.spec:
        raise PlanError(
            f"one plan is for {first.model.spec}, the other for {second.model.spec}",
            fix="compare plans of one model",
            field="model",
        )
    one, two = account_of(simulate(first)), account_of(simulate(second))
    changes, same, total = _changes(first, second)
    figures = _figures(first, second, one, two)
    return Difference(figures, _parts(one, two), _decisions(first, second), changes, same, total)


def _figures(first: Plan, second: Plan, one: Account, two: Account) -> tuple[Figure, ...]:
    def pair(name: str, unit: str, of: Callable[[Account], float]) -> Figure:
        return Figure(name, of(one), of(two), unit)

    return (
        pair("step", "s", lambda told: told.simulation.step_s),
        pair("compute", "s", _computing),
        pair("exposed communication", "s", lambda told: told.busiest.seconds("communication")),
        pair("bubble", "share", lambda told: told.simulation.bubble),
        pair("peak memory", "bytes", lambda told: max(told.simulation.peak_bytes)),
        pair("MFU", "share", lambda told: told.simulation.mfu),
        pair("devices", "count", lambda told: told.simulation.num_devices),
        Figure("global batch", first.model.batch, second.model.batch, "count"),
    )


def _computing(told: Account) -> float:
    """Seconds that the busiest devices compute, updates of parameters included."""
    return told.busiest.seconds("compute") + told.busiest.seconds("update")


def _parts(one: Account, two: Account) -> tuple[Figure, ...]:
    """The seconds of the busiest devices by what they do or wait for."""
    totals = [_by_name(told.busiest.shares) for told in (one, two)]
    figures = [
        Figure(name, totals[0].get(name, 0.0), totals[1].get(name, 0.0), "s")
        for name in {**totals[0], **totals[1]}
    ]
    return tuple(sorted(figures, key=lambda f: (-max(f.first, f.second), f.name)))


def _by_name(shares: Shares) -> dict[str, float]:
    totals: dict[str, float] = {}
    for item, seconds in shares.items():
        where = f", {item.where}" if item.kind == "communication" and item.where else ""
        totals[f"{item.what}{where}"] = totals.get(f"{item.what}{where}", 0.0) + seconds
    return totals


def _decisions(first: Plan, second: Plan) -> tuple[tuple[str, str, str], ...]:
    both = (
        ("machine", first.cluster.spec, second.cluster.spec),
        ("stages", str(len(first.stages)), str(len(second.stages))),
        ("meshes", _meshes(first), _meshes(second)),
        ("schedule", str(first.schedule), str(second.schedule)),
        ("stages with full checkpointing", _recomputed(first, "full"), _recomputed(second, "full")),
        ("with selective", _recomputed(first, "selective"), _recomputed(second, "selective")),
        ("element type", first.model.dtype, second.model.dtype),
        ("optimizer", first.model.optimizer, second.model.optimizer),
        ("job", _job(first), _job(second)),
        ("method", first.origin.method, second.origin.method),
    )
    return tuple(row for row in both if row[1] != row[2])


def _meshes(plan: Plan) -> str:
    return ", ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))


def _recomputed(plan: Plan, level: str) -> str:
    return str(sum(stage.checkpointing == level for stage in plan.stages))


def _job(plan: Plan) -> str:
    return "training" if plan.model.training else "inference"


def _changes(first: Plan, second: Plan) -> tuple[tuple[Change, ...], int, int]:
    one, two = _decided(first), _decided(second)
    counts: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], str] = {}
    for op in one:
        pair = one[op], two.get(op, "not in it")
        if pair[0] != pair[1]:
            counts[pair] += 1
            example.setdefault(pair, op)
    changes = tuple(Change(*pair, count, example[pair]) for pair, count in counts.most_common())
    return changes, len(one) - sum(counts.values()), len(one)


def _decided(plan: Plan) -> dict[str, str]:
    return {split.op: _words(stage, split) for stage in plan.stages for split in stage.splits}


def _words(stage: Stage, split: OpSplit) -> str:
    """How an op is run, in a form that two plans can be compared by."""
    cuts = [
        f"{dim}/{axis.size}"
        for dim, axis in zip(split.dims, stage.mesh.axes, strict=True)
        if dim and axis.size > 1
    ]
    copies = [
        str(axis.size)
        for dim, axis in zip(split.dims, stage.mesh.axes, strict=True)
        if not dim and axis.size > 1
    ]
    words = " x ".join(sorted(cuts)) or "whole"
    if copies:
        words += f", replicated {'x'.join(copies)}"
    return f"{words}, ZeRO {split.zero}" if split.zero else words
