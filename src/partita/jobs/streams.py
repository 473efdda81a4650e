"""Streams without a GPU: which ops of a model run together, by the analytic costs of a device.

The answer of any search for streams problems becomes a timeline with a lane per stream: stages one
after the other, the ops of a group in their shares of its stage, or starts and ends of the fluid
model where there are no barriers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from partita.cluster import DeviceKind, resolve
from partita.costs.streams import StreamsModel, streams_model
from partita.errors import InputError
from partita.graph.record import Graph
from partita.jobs.workload import load
from partita.problems.streams import (
    StreamsProblem,
    StreamsSolution,
    stage_us,
    stream_times,
)
from partita.program import F64, Kind, ProgramBuilder
from partita.search import searches
from partita.search.base import UNTIL_DONE, Improvement, Result, Stop
from partita.showing import plot_of, repr_html, table_of
from partita.suggest import suggest
from partita.timeline import Timeline

US = 1e-6
METHODS = ("exact", "barrier-free", "greedy", "sequential")  # tried if none is asked for
Slot = tuple[int, int, float, float]  # op, stream, start and end in us


@dataclass(frozen=True)
class AnalyticStreams:
    """What searches decided for a model on a device; the best one with its timeline."""

    model: StreamsModel
    device: DeviceKind
    results: tuple[Result[StreamsSolution], ...]  # the best first
    timeline: Timeline | None

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def best(self) -> Result[StreamsSolution]:
        """The shortest."""
        return self.results[0]


def streams_by_costs(
    model: str | Graph,
    device: str = "H200",
    *,
    batch: int | None = None,
    dtype: str | None = None,
    method: str | None = None,
    stop: Stop = UNTIL_DONE,
    seed: int = 0,
) -> AnalyticStreams:
    """The best stages or streams of an inference model by analytic costs; see METHODS."""
    kind = _device(device)
    work = load(model, batch=batch or 1, dtype=dtype, training=False)
    made = streams_model(work.graph, kind)
    known = searches("streams")
    if method is not None and method not in known:
        raise InputError(f"found {method!r}", fix=suggest(method, tuple(known)), field="--method")
    names = METHODS if method is None else (method, "sequential")
    told = BestOfAll(stop.progress)
    watched = replace(stop, progress=told)
    results = [known[name](made.problem, watched, seed) for name in dict.fromkeys(names)]
    results.sort(key=lambda each: each.objective if each.objective is not None else math.inf)
    solution = results[0].solution
    timeline = None if solution is None else timeline_of(made.problem, solution)
    return AnalyticStreams(made, kind, tuple(results), timeline)


class BestOfAll:
    """Tells of several searches for one problem as of one: the best of all, the lowest bound.

    A bound holds for what its own search may choose: stages, say, where another needs no barrier.
    """

    def __init__(self, progress: Callable[[Improvement], None] | None) -> None:
        self._progress = progress
        self._best: float | None = None
        self._bound: float | None = None

    def __call__(self, step: Improvement) -> None:
        """A step of whichever search is running; heard of where something got better."""
        before = (self._best, self._bound)
        if step.objective is not None:
            self._best = min(step.objective, math.inf if self._best is None else self._best)
        if step.lower_bound is not None:
            self._bound = min(step.lower_bound, math.inf if self._bound is None else self._bound)
        if self._progress is not None and (self._best, self._bound) != before:
            self._progress(replace(step, objective=self._best, lower_bound=self._bound))


def _device(name: str) -> DeviceKind:
    """The kind of the (first) device of what is named."""
    return resolve(name).kind_of(0)


def timeline_of(problem: StreamsProblem, solution: StreamsSolution) -> Timeline:
    """A lane per stream; a task per op, or per merge of some."""
    slots = list(_free(problem, solution) if solution.streams else _staged(problem, solution))
    builder = ProgramBuilder()
    lanes = [builder.lane(f"stream {n}", "stream") for n in range(_width(slots))]
    task: dict[int, int] = {}
    order = sorted(slots, key=lambda slot: (slot[2], slot[0]))
    for op, stream, start, end in order:
        waits = [task[pred] for pred in problem.ops[op].preds if pred in task]
        name = problem.ops[op].name or f"op {op}"
        seconds = (end - start) * US
        task[op] = builder.add(name, lanes[stream], seconds, waits, kind=Kind.FORWARD)
    starts = np.array([slot[2] * US for slot in order])
    return Timeline(builder.build(), starts, starts + _spans(order))


def _spans(order: list[Slot]) -> F64:
    """How long each slot is, in seconds."""
    return np.array([(end - start) * US for _, _, start, end in order])


def _width(slots: list[Slot]) -> int:
    return 1 + max((stream for _, stream, _, _ in slots), default=0)


def _free(problem: StreamsProblem, solution: StreamsSolution) -> list[Slot]:
    times = stream_times(problem, solution.streams)
    return [(op, stream, *times[op]) for stream, ops in enumerate(solution.streams) for op in ops]


def _staged(problem: StreamsProblem, solution: StreamsSolution) -> list[Slot]:
    slots: list[Slot] = []
    now = 0.0
    for stage in (stage for part in solution.parts for stage in part):
        span = stage_us(problem, stage)
        if stage.merge:
            slots.append((stage.merge[0], 0, now, now + span))
        for stream, group in enumerate(stage.groups):
            longest = max(sum(problem.ops[op].t_us for op in each) for each in stage.groups)
            scale = span / longest if longest > 0 else 0.0
            at = now
            for op in group:
                end = at + problem.ops[op].t_us * scale
                slots.append((op, stream, at, min(end, now + span)))
                at = end
        now += span
    return slots
