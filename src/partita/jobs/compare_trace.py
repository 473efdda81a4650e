"""A plan's prediction beside a traced run: per task and in total, and which assumption was wrong.

Causes are four, each with a sentence and numbers: products (what ops take on the device), host
(time between tasks and for starting messages), link (latency and bandwidth of what is sent) and
interference (computing is slower while something is sent). Their shares of the difference are
seconds of the mean rank.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita import units
from partita.cluster.calibration import Calibration
from partita.costs.collectives import reached
from partita.costs.roofline import op_class
from partita.engine import run
from partita.graph.record import Graph
from partita.jobs.calibrate import LinkFit, base_cluster, calibration_of, link_fit, with_replay
from partita.jobs.run_trace import RankTrace, TaskTime
from partita.jobs.trace_match import (
    COMPUTE,
    MOST_OF,
    MatchedRun,
    TaskMatch,
    containers,
    match_run,
)
from partita.lower import lower_plan
from partita.meaning import COMMUNICATION, Purpose
from partita.plans import Plan
from partita.showing import plot_of, repr_html, table_of

ALIKE = 1.1  # a factor within this is as predicted
BESIDE = 0.5  # of a task, that something is sent beside it


@dataclass(frozen=True, slots=True)
class Row:
    """Tasks of one purpose, phase and stage: seconds of a rank in a step."""

    purpose: str
    phase: str
    stage: str
    count: int
    predicted_s: float
    measured_s: float
    hidden: int = 0  # of the count: nobody waited for it

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else float("inf")


@dataclass(frozen=True, slots=True)
class Cause:
    """One assumption: was it right, what it is worth in a step, and a sentence."""

    name: str  # products, host, link, interference
    is_wrong: bool
    seconds: float
    sentence: str


@dataclass(frozen=True)
class TraceComparison:
    """What was predicted and what was measured."""

    matched: MatchedRun
    rows: tuple[Row, ...]
    slowest: tuple[TaskMatch, ...]
    causes: tuple[Cause, ...]
    calibration: Calibration
    predicted_bubble: float
    measured_bubble: float

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def predicted_s(self) -> float:
        """The predicted step."""
        return self.matched.timeline.makespan

    @property
    def measured_s(self) -> float:
        """The measured step."""
        return self.matched.step_s

    @property
    def worst(self) -> Cause | None:
        """The wrong assumption that is worth most."""
        wrong = [cause for cause in self.causes if cause.is_wrong]
        return max(wrong, key=lambda cause: abs(cause.seconds), default=None)


def compare_trace(
    plan: Plan, traces: tuple[RankTrace, ...], slowest: int = 10, most_of: float = MOST_OF
) -> TraceComparison:
    """Lay a traced run over the plan that was run."""
    matched = with_replay(match_run(plan, traces, most_of))
    cluster = base_cluster(matched)
    base = lower_plan(matched.lowered.stages, plan.schedule, matched.workload.graph, cluster, run)
    fit = link_fit(matched, base, cluster)
    factor = interference(matched)
    calibration = replace(calibration_of(matched), interference=factor)
    known = [task for task in matched.tasks if task.measured_s is not None]
    worst = sorted(known, key=lambda task: -abs((task.measured_s or 0.0) - task.predicted_s))
    return TraceComparison(
        matched, _rows(matched), tuple(worst[:slowest]),
        (
            _products(matched), _host(matched), _link(matched, fit), _beside(matched, factor),
        ),
        calibration, _predicted_bubble(matched), _measured_bubble(matched),
    )  # fmt: skip


def _rows(matched: MatchedRun) -> tuple[Row, ...]:
    """By purpose, phase and stage, in the order in which they first run."""
    groups: dict[tuple[str, str, str], list[TaskMatch]] = defaultdict(list)
    stages = matched.lowered.stages
    for task in matched.tasks:
        work = task.work
        if work.purpose is Purpose.OTHER:
            continue
        stage = stages[max(work.stage, 0)].name
        groups[work.purpose.words, work.phase.name.lower(), stage].append(task)
    rows = []
    for (purpose, phase, stage), tasks in groups.items():
        rows.append(
            Row(
                purpose, phase, stage, len(tasks),
                sum(task.predicted_s for task in tasks),
                sum(task.measured_s or 0.0 for task in tasks),
                sum(task.measured_s is None for task in tasks),
            )
        )  # fmt: skip
    return tuple(rows)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def computed(matched: MatchedRun) -> tuple[float, float]:
    """Seconds that the mean rank computes in a step: predicted and measured."""
    predicted: dict[int, float] = defaultdict(float)
    for task in matched.tasks:
        if task.work.purpose in COMPUTE:
            for rank in task.by_rank:
                predicted[rank] += task.predicted_s
    return _mean(list(predicted.values())), _mean([rank.compute_s for rank in matched.ranks])


def class_factors(matched: MatchedRun) -> dict[str, float]:
    """Measured over predicted by class of op, where ops were recorded one by one."""
    graph: Graph = matched.lowered.graph
    ops = {op.name: op for op in graph.ops}
    sums: dict[str, list[float]] = {}
    for task in matched.tasks:
        if task.key[2] >= 0 and task.work.op in ops and task.measured_s is not None:
            if task.work.purpose not in (Purpose.COMPUTE, Purpose.RECOMPUTE):
                continue
            own = sums.setdefault(op_class(graph.call(ops[task.work.op])), [0.0, 0.0])
            own[0] += task.predicted_s
            own[1] += task.measured_s
    return {name: b / a for name, (a, b) in sums.items() if a > 0}


def _is_off(ratio: float) -> bool:
    return not 1 / ALIKE <= ratio <= ALIKE


def _products(matched: MatchedRun) -> Cause:
    predicted, measured = computed(matched)
    ratio = measured / predicted if predicted else float("inf")
    classes = class_factors(matched)
    parts = ", ".join(f"{name} {value:.3g}x" for name, value in classes.items())
    told = f" ({parts})" if parts else ""
    verdict = "as predicted" if not _is_off(ratio) else f"{ratio:.3g} times what was predicted"
    return Cause(
        "products", _is_off(ratio), measured - predicted,
        f"computing takes {verdict}{told}: {units.seconds(measured)} of a rank's step, "
        f"{units.seconds(predicted)} predicted",
    )  # fmt: skip


def _host(matched: MatchedRun) -> Cause:
    spent = _mean([rank.host_s + rank.issue_s for rank in matched.ranks])
    count = _mean([rank.num_tasks for rank in matched.ranks])
    step = matched.step_s
    share = spent / step if step else 0.0
    others = ""
    if matched.is_shared:
        others = (
            f"; ranks had {matched.had:.0%} of their cores, so all is told by processor time and "
            f"the step is replayed (by the clock {units.seconds(matched.clock_s)})"
        )
    return Cause(
        "host", share > ALIKE - 1, spent,
        f"the host takes {units.seconds(spent / max(count, 1))} per task between tasks and to "
        f"start messages: {units.seconds(spent)} ({share:.0%}) of a step of "
        f"{units.seconds(step)}, predicted as part of each op's launch{others}",
    )  # fmt: skip


def _link(matched: MatchedRun, fit: LinkFit | None) -> Cause:
    sent = [task for task in matched.tasks if task.is_communication and task.predicted_s > 0]
    if fit is None:
        hidden = f"all {len(sent)} messages and collectives were hidden" if sent else "none is sent"
        return Cause("link", False, 0.0, f"no rank waited for a message or collective: {hidden}")
    seen = [task for task in sent if task.measured_s is not None]
    measured = sum(task.measured_s or 0.0 for task in seen)
    predicted = sum(task.predicted_s for task in seen)
    ratio = measured / predicted if predicted else float("inf")
    waits = _mean([rank.wait_s for rank in matched.ranks])
    return Cause(
        "link", _is_off(ratio), (measured - predicted) / max(len(matched.ranks), 1),
        f"messages and collectives that were waited for take {ratio:.3g} times what was predicted "
        f"({len(seen)} of {len(sent)}; {units.seconds(measured)} for {units.seconds(predicted)}): "
        f"latency {fit.latency:.3g}x, bandwidth {1 / fit.per_byte:.3g}x; a rank waits "
        f"{units.seconds(waits)} in a step, for the others' computing too",
    )  # fmt: skip


def _beside(matched: MatchedRun, factor: float | None) -> Cause:
    if factor is None:
        return Cause(
            "interference", False, 0.0,
            "interference is not known: no task ran both beside communication and without",
        )  # fmt: skip
    _, measured = computed(matched)
    assumed = 1 + reached(matched.cluster).interference
    is_off = factor > ALIKE * assumed
    verdict = f"{factor:.3g} times as long as" if is_off else f"as long as ({factor:.3g}x)"
    return Cause(
        "interference", is_off, max(0.0, (1 - 1 / max(factor, 1e-9)) * measured) if is_off else 0.0,
        f"computing beside communication takes {verdict} without it; at most "
        f"{assumed:.3g} times as long was assumed",
    )  # fmt: skip


def interference(matched: MatchedRun) -> float | None:
    """How much longer a task takes while this rank sends or receives; None if it cannot be told.

    Equal tasks (one stage, phase and op, recorded alike) are compared with each other on one rank.
    """
    words = {Purpose.COMPUTE.words, Purpose.RECOMPUTE.words}
    sent = {purpose.words for purpose in COMMUNICATION}
    beside: dict[tuple[object, ...], list[float]] = defaultdict(list)
    alone: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for trace in matched.traces:
        for step in trace.steps:
            opened = containers(step.tasks)
            spans = _spans([each for each in step.tasks if each.purpose in sent])
            for each in step.tasks:
                if each.purpose not in words or (each.work < 0 and each.task in opened):
                    continue
                key = (trace.rank, each.body, each.work, each.stage, each.phase, each.op)
                length = each.end - each.start
                shared = sum(max(0.0, min(each.end, b) - max(each.start, a)) for a, b in spans)
                if length > 0:
                    where = beside if shared > BESIDE * length else alone
                    where[key].append(each.seconds)
    both = [key for key in beside if key in alone]
    without = sum(_mean(alone[key]) for key in both)
    return sum(_mean(beside[key]) for key in both) / without if without > 0 else None


def _spans(tasks: Sequence[TaskTime]) -> list[tuple[float, float]]:
    """When something is on its way, overlaps joined: from its start until it was there."""
    spans: list[tuple[float, float]] = []
    for start, end in sorted((each.start, max(each.end, each.done or 0.0)) for each in tasks):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((start, end))
    return spans


def _predicted_bubble(matched: MatchedRun) -> float:
    timeline = matched.timeline
    busy, lanes = timeline.busy().tolist(), timeline.program.lanes
    own = [b for b, lane in zip(busy, lanes, strict=True) if lane.kind == "device"]
    return max(0.0, 1 - _mean(own) / timeline.makespan) if timeline.makespan else 0.0


def _measured_bubble(matched: MatchedRun) -> float:
    busy = _mean([rank.compute_s + rank.issue_s + rank.host_s for rank in matched.ranks])
    return max(0.0, 1 - busy / matched.step_s) if matched.step_s else 0.0
