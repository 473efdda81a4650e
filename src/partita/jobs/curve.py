"""Plans for several numbers of devices: a curve of time, memory and price, and its Pareto front.

    partita plan llama-3-70b --cluster 8xH100 --devices 8..1024 --price 3.5

A point is the plan for one number of devices; plans that were next best there are points, too,
since one that is slower may hold less. A point is on the front if no other is as good in step time,
memory, devices and price in an hour, and better in one. A deadline and a budget are of a training
of so many steps: the cheapest point that keeps the one, the fastest that keeps the other.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from partita.cluster import resolve
from partita.cluster.presets import catalogue
from partita.errors import InputError
from partita.jobs.plan import Planned, plan
from partita.jobs.plan_simulator import SimulatedPlan
from partita.jobs.prices import Prices, read_prices
from partita.jobs.sweep import Answer, Sweeper
from partita.search.base import Stop
from partita.showing import plot_of, repr_html, table_of

RANGE = re.compile(r"([0-9]{1,7})\.\.([0-9]{1,7})")
NODES = re.compile(r"(?:([0-9]{1,6})x)?([0-9]{1,6})x(.+)", re.IGNORECASE)
SHORTHAND = "a shorthand of one kind, such as 8xH100 or 4x8xH100"


@dataclass(frozen=True, slots=True)
class CurveTask:
    """One point to plan: everything that decides it, so that it can be sent and remembered."""

    model: str
    cluster: str
    num_devices: int
    batch: int | None = None
    dtype: str | None = None
    training: bool = True
    optimizer: str = "adamw"
    objective: str = "throughput"
    pin: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    max_memory: float | None = None
    time_s: float | None = 60.0
    gap: float = 0.01
    seed: int = 0
    price: str = ""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A plan in numbers."""

    num_devices: int
    cluster: str
    arrangement: str
    found_by: str
    step_s: float
    step_interval_s: tuple[float, float]
    objective_s: float
    peak_memory_bytes: float
    price_per_hour: float | None
    is_best: bool  # of its number of devices

    @property
    def price_per_step(self) -> float | None:
        """What one step costs."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * self.objective_s / 3600


@dataclass(frozen=True)
class Curve:
    """The points of all numbers of devices, and (number, why) of those without one."""

    points: tuple[CurvePoint, ...]
    missing: tuple[tuple[int, str], ...]
    plans: dict[str, dict[str, Any]]  # the plan of each cluster, as its file has it
    bounds: dict[int, float]

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def best(self) -> tuple[CurvePoint, ...]:
        """The fastest of each number of devices."""
        return tuple(point for point in self.points if point.is_best)

    @property
    def front(self) -> tuple[CurvePoint, ...]:
        """Points that no other beats in everything."""
        return pareto_front(self.points)

    def choice(
        self, steps: int, deadline_s: float | None, budget: float | None
    ) -> CurvePoint | None:
        """The cheapest that keeps a deadline; the fastest that keeps a budget; of both, cheapest.

        Without prices devices times seconds stand for money.
        """
        kept = [
            point
            for point in self.best
            if (deadline_s is None or steps * point.objective_s <= deadline_s)
            and (budget is None or steps * _spent(point) <= budget)
        ]
        if deadline_s is None:
            return min(kept, key=lambda p: (p.objective_s, _spent(p)), default=None)
        return min(kept, key=lambda p: (_spent(p), p.objective_s), default=None)


def _spent(point: CurvePoint) -> float:
    price = point.price_per_step
    return point.num_devices * point.objective_s if price is None else price


def pareto_front(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Those that no other point is at least as good as in everything, and better in something."""

    def figures(point: CurvePoint) -> tuple[float, ...]:
        price = point.price_per_hour
        own = (point.objective_s, point.peak_memory_bytes, float(point.num_devices))
        return (*own, 0.0 if price is None else price)

    def beats(one: CurvePoint, other: CurvePoint) -> bool:
        pairs = list(zip(figures(one), figures(other), strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    different = {figures(point): point for point in reversed(points)}.values()
    front = [p for p in different if not any(beats(other, p) for other in different)]
    return tuple(sorted(front, key=lambda p: (p.num_devices, p.objective_s)))


def device_numbers(text: str) -> tuple[int, ...]:
    """`8..1024` are 8, 16, ... 1024; `8,12,64` are just these."""
    match = RANGE.fullmatch(text.strip())
    if match:
        first, last = int(match[1]), int(match[2])
        if not 1 <= first <= last:
            raise InputError(f"found {text!r}", fix="begin with the smaller", field="--devices")
        numbers = [first]
        while numbers[-1] * 2 <= last:
            numbers.append(numbers[-1] * 2)
        return tuple([*numbers, last] if numbers[-1] < last else numbers)
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) < 10**7 for part in parts):
        raise InputError(f"found {text!r}", fix="write 8..1024 or 8,16,64", field="--devices")
    return tuple(sorted({int(part) for part in parts}))


def cluster_of(spec: str, num_devices: int) -> str:
    """The shorthand of so many devices, in nodes like those of a shorthand of one kind."""
    match = NODES.fullmatch(spec.strip())
    preset = None if match is None else catalogue().kind(match[3])
    if match is None or preset is None:
        raise InputError(
            f"{spec!r} cannot be made of other numbers of devices",
            fix=f"name {SHORTHAND}",
            field="--cluster",
        )
    node = int(match[2]) if match[1] else min(int(match[2]), preset.node_size)
    if num_devices <= node:
        return f"{num_devices}x{match[3]}"
    nodes, rest = divmod(num_devices, node)
    if rest:
        raise InputError(
            f"{num_devices} devices are no whole number of nodes of {node}",
            fix=f"use multiples of {node}",
            field="--devices",
        )
    return f"{nodes}x{node}x{match[3]}"


def curve(tasks: Sequence[CurveTask], sweeper: Sweeper) -> Curve:
    """Plan every task, each by itself, on as many processes as the sweeper has."""
    points: list[CurvePoint] = []
    missing: list[tuple[int, str]] = []
    plans: dict[str, dict[str, Any]] = {}
    bounds: dict[int, float] = {}
    for task, outcome in zip(tasks, sweeper(planned_point, tasks), strict=True):
        answer = outcome.answer
        if answer is None or not answer["points"]:
            missing.append((task.num_devices, outcome.why if answer is None else answer["why"]))
            continue
        for told in answer["points"]:
            interval = tuple(told["step_interval_s"])
            points.append(CurvePoint(**{**told, "step_interval_s": interval}))
        plans[task.cluster] = answer["plan"]
        bounds[task.num_devices] = answer["lower_bound_s"]
    return Curve(tuple(points), tuple(missing), plans, bounds)


def planned_point(task: CurveTask) -> Answer:
    """The plan of one task, and the next best, as numbers."""
    machine = resolve(task.cluster)
    prices = read_prices(task.price, machine) if task.price else None
    planned = plan(
        task.model, task.cluster, batch=task.batch, dtype=task.dtype, training=task.training,
        optimizer=task.optimizer, objective=task.objective, pin=task.pin, forbid=task.forbid,
        max_memory=task.max_memory, stop=Stop(task.time_s, task.gap), seed=task.seed,
    )  # fmt: skip
    points = [asdict(point) for point in _points(planned, task.cluster, prices)]
    whole = None if planned.plan is None else json.loads(planned.plan.to_json())
    bound = planned.lower_bound_s if math.isfinite(planned.lower_bound_s) else 0.0
    return {"points": points, "why": planned.why, "plan": whole, "lower_bound_s": bound}


def curve_of(planned: Planned, prices: Prices | None) -> Curve:
    """The points of one planning job."""
    assert planned.best is not None, "there is a plan"
    cluster = planned.best.simulation.cluster
    points = tuple(_points(planned, cluster.name, prices))
    return Curve(points, (), {}, {cluster.num_devices: planned.lower_bound_s})


def _points(planned: Planned, cluster: str, prices: Prices | None) -> Iterator[CurvePoint]:
    candidates = [] if planned.best is None else [planned.best, *planned.others]
    for place, candidate in enumerate(candidates):
        yield _point(cluster, candidate, prices, is_best=place == 0)


def _point(
    cluster: str, candidate: SimulatedPlan, prices: Prices | None, *, is_best: bool
) -> CurvePoint:
    simulation = candidate.simulation
    used = sorted({device for stage in simulation.stages for device in stage.mesh.devices})
    price = None if prices is None else prices.of_devices(simulation.cluster, used)
    return CurvePoint(
        len(used), cluster, simulation.arrangement, candidate.name, candidate.step_s,
        simulation.likely_step_s, candidate.objective_s, simulation.fullest[0], price, is_best,
    )  # fmt: skip
