"""What two plans of one model do differently, and what each difference is worth.

Both are simulated as they are; decisions are compared op by op. Which of the differences makes up
the time is told by their totals: compute, exposed communication, bubble, memory.
"""

from collections import Counter
from dataclasses import dataclass

from partita.errors import PlanError
from partita.jobs.simulate import Simulation, simulate
from partita.plans import OpSplit, Plan, Stage


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
    decisions: tuple[tuple[str, str, str], ...]  # what, in the first, in the second
    changes: tuple[Change, ...]
    same_ops: int
    num_ops: int


def diff(first: Plan, second: Plan) -> Difference:
    """Compare two plans; they must be for the same model, the machines may differ."""
    if first.model.spec != second.model.spec:
        raise PlanError(
            f"one plan is for {first.model.spec}, the other for {second.model.spec}",
            fix="compare plans of one model",
            field="model",
        )
    runs = simulate(first), simulate(second)
    changes, same, total = _changes(first, second)
    return Difference(
        _figures(first, second, *runs), _decisions(first, second), changes, same, total
    )


def _figures(first: Plan, second: Plan, one: Simulation, two: Simulation) -> tuple[Figure, ...]:
    def pair(name: str, unit: str, a: float, b: float) -> Figure:
        return Figure(name, a, b, unit)

    return (
        pair("step", "s", one.step_s, two.step_s),
        pair("compute", "s", one.compute_s, two.compute_s),
        pair("communication waited for", "s", max(0.0, one.exposed_s), max(0.0, two.exposed_s)),
        pair("idle share of devices", "share", one.bubble, two.bubble),
        pair("peak memory", "bytes", max(one.peak_bytes), max(two.peak_bytes)),
        pair("peak arithmetic used", "share", one.utilisation, two.utilisation),
        pair("devices", "count", one.num_devices, two.num_devices),
        pair("batch", "count", first.model.batch, second.model.batch),
    )


def _decisions(first: Plan, second: Plan) -> tuple[tuple[str, str, str], ...]:
    both = (
        ("machine", first.cluster.spec, second.cluster.spec),
        ("stages", str(len(first.stages)), str(len(second.stages))),
        ("meshes", _meshes(first), _meshes(second)),
        ("schedule", str(first.schedule), str(second.schedule)),
        ("recomputed stages", _recomputed(first, "yes"), _recomputed(second, "yes")),
        ("recomputed lightly", _recomputed(first, "light"), _recomputed(second, "light")),
        ("element type", first.model.dtype, second.model.dtype),
        ("optimizer", first.model.optimizer, second.model.optimizer),
        ("job", _job(first), _job(second)),
        ("method", first.origin.method, second.origin.method),
    )
    return tuple(row for row in both if row[1] != row[2])


def _meshes(plan: Plan) -> str:
    return ", ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))


def _recomputed(plan: Plan, level: str) -> str:
    return str(sum(stage.recomputed == level for stage in plan.stages))


def _job(plan: Plan) -> str:
    return "training" if plan.model.training else "inference"


def _changes(first: Plan, second: Plan) -> tuple[tuple[Change, ...], int, int]:
    one, two = _decided(first), _decided(second)
    found: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], str] = {}
    for op in one:
        pair = one[op], two.get(op, "not in it")
        if pair[0] != pair[1]:
            found[pair] += 1
            example.setdefault(pair, op)
    changes = tuple(Change(*pair, count, example[pair]) for pair, count in found.most_common())
    return changes, len(one) - sum(found.values()), len(one)


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
        words += f" in {'x'.join(copies)} copies"
    return words if split.sharded == "none" else f"{words}, {split.sharded} in shares"
