"""From a traced run to a calibration: what of the costs must change so that they say what it took.

Devices. Each measured block is a sum over its ops,

    seconds = sum of factor[phase, class] * roofline + launch_s[phase] * launches

with classes product, attention and elementwise. Factors and launches are the non-negative least
squares of relative errors; each is drawn lightly towards what fits all blocks at once, so that what
a run does not tell apart stays equal. Then all are scaled alike, so that the whole host's time of a
step (computing, starting collectives, gaps between tasks) is in the sum. What is still missing of
the measured step (ranks that wait for each other by chance, collectives that do not overlap as they
should) is spread over the ops by a last factor. Where the step comes out too long, that factor is
on messages as well: tasks that went in one message were each measured as the whole of it.
So the step that results is that of the run; it is told apart into causes only as far as blocks
differ.

Links. A message or collective is a * latency part + b * bandwidth part of what was predicted; the
parts come from lowering the plan once more on links of no size-dependent time.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster, Link
from partita.cluster.calibration import (
    FIXED_ACROSS,
    FIXED_INSIDE,
    Calibration,
    KindCalibration,
    LinkCalibration,
    OpScale,
    calibrated,
)
from partita.costs.collectives import reached
from partita.costs.roofline import op_class, op_cost
from partita.costs.sharding import ways_of
from partita.engine import run
from partita.jobs.simulate import uncalibrated
from partita.jobs.trace_match import ALL_UPDATES, MatchedRun, TaskMatch, inside
from partita.lower import Lowered, lower_plan
from partita.meaning import Phase, Purpose, Work
from partita.program import Kind, Program

F64 = npt.NDArray[np.float64]
PULL = 0.01  # of the prior, beside relative errors of 1
ROUNDS = 2000
CORRECTIONS, CLOSE, MOST = 4, 0.02, 1.5  # of the step: how often, how close, by how much at once
CLASSES = ("product", "attention", "elementwise")
PHASES = ("forward", "dgrad", "wgrad")
UPDATE = "update elementwise"
NO_TIME = 1e9  # times the bandwidth: what is left is latency
INSIDE = {
    Kind.FORWARD: (Phase.FORWARD,),
    Kind.BACKWARD: (Phase.BACKWARD, Phase.WEIGHT),
    Kind.DGRAD: (Phase.BACKWARD,),
    Kind.WGRAD: (Phase.WEIGHT,),
}  # the phases of a body that a block runs


@dataclass(frozen=True)
class LinkFit:
    """Factors on the latency and on the seconds per byte of messages and collectives."""

    latency: float
    per_byte: float
    num_measured: int


def base_cluster(matched: MatchedRun) -> Cluster:
    """The machine of the plan without an earlier calibration."""
    return uncalibrated(matched.plan, matched.cluster)


def calibration_of(matched: MatchedRun) -> Calibration:
    """What the run says of its devices and links."""
    cluster = base_cluster(matched)
    plan, graph = matched.plan, matched.workload.graph
    base = lower_plan(matched.lowered.stages, plan.schedule, graph, cluster, run)
    kinds = sorted({cluster.kind_of(d).name for d in matched.devices})
    ops = _op_scales(matched, base, cluster)
    link = link_fit(matched, base, cluster)
    where = f"{matched.traces[0].device}, torch {matched.traces[0].torch}"
    for _ in range(CORRECTIONS):
        fixed = () if link is None else _fixed(cluster, link)
        links = () if link is None else _links(matched, cluster, link)
        own = Calibration(where, tuple(KindCalibration(k, (*ops, *fixed)) for k in kinds), links)
        machine = calibrated(cluster, own)
        step_s = run(lower_plan(base.stages, plan.schedule, graph, machine, run).program).makespan
        ratio = matched.step_s / step_s if step_s > 0 else 1.0
        if abs(ratio - 1) < CLOSE:
            break
        ratio = min(max(ratio, 1 / MOST), MOST)
        ops = tuple(OpScale(o.ops, o.factor * ratio, o.launch_s * ratio) for o in ops)
        if ratio < 1 and link is not None:
            link = replace(link, latency=link.latency * ratio, per_byte=link.per_byte * ratio)
    return own


def _fixed(cluster: Cluster, link: LinkFit) -> tuple[OpScale, OpScale]:
    """What it takes to start a collective, inside a node and across."""
    known = reached(cluster)
    return (
        OpScale(FIXED_INSIDE, 1.0, known.inside_s * link.latency),
        OpScale(FIXED_ACROSS, 1.0, (known.across_s + known.hop_s) * link.latency),
    )


# Devices.


@dataclass(frozen=True)
class Observation:
    """A block or op: what it took, and the roofline and launches of what is in it, by class."""

    seconds: float
    parts: dict[str, tuple[float, float]]
    count: float = 1.0  # ranks


def _op_scales(matched: MatchedRun, base: Lowered, cluster: Cluster) -> tuple[OpScale, ...]:
    known = [
        Observation(seconds, parts, len(match.by_rank))
        for match in matched.tasks
        if match.work.purpose in (Purpose.COMPUTE, Purpose.RECOMPUTE)
        and (seconds := statistics.fmean(match.by_rank.values())) > 0
        and (parts := _parts(match, matched, base, cluster))
    ]
    scales = fit_scales(known)
    updates = [m for m in matched.tasks if m.work.purpose is Purpose.UPDATE]
    spent = sum(sum(match.by_rank.values()) for match in updates)
    assumed = sum(_update_s(match, base.program) * len(match.by_rank) for match in updates)
    # The whole time of the host: it is busy for all of it, whatever it does.
    total = sum(rank.compute_s + rank.issue_s + rank.host_s for rank in matched.ranks) - spent
    fitted = sum(own.count * _fitted(own, scales) for own in known)
    norm = total / fitted if fitted > 0 else 1.0
    entries = [
        OpScale(name, factor * norm, launch * norm) for name, (factor, launch) in scales.items()
    ]
    if spent > 0 and assumed > 0:
        entries.append(OpScale(UPDATE, spent / assumed, 0.0))
    return tuple(entries)


def _update_s(match: TaskMatch, program: Program) -> float:
    """What the updates of a stage take on the machine as it is described."""
    task, body, number = match.key
    if number != ALL_UPDATES:
        return float(program.duration[task])
    within = inside(program, body)
    seconds: dict[int, float] = {}
    for k, work in enumerate(within.work.tolist()):
        if work >= 0 and within.works[work].purpose is Purpose.UPDATE:
            seconds[work] = max(seconds.get(work, 0.0), float(within.duration[k]))
    return sum(seconds.values())


def _parts(
    match: TaskMatch, matched: MatchedRun, base: Lowered, cluster: Cluster
) -> dict[str, tuple[float, float]]:
    task, _, number = match.key
    if number >= 0:
        works = [match.work]
    else:
        kind = Kind(int(base.program.kind[task]))
        works = [
            work
            for work in inside(base.program, match.work.body).works
            if work.purpose in (Purpose.COMPUTE, Purpose.RECOMPUTE)
            and work.phase in INSIDE.get(kind, ())
        ]
    rank = next(iter(match.by_rank))
    parts: dict[str, tuple[float, float]] = {}
    for work in works:
        name, seconds, launches = _op(work, matched.devices[rank], base, cluster)
        if name:
            before = parts.get(name, (0.0, 0.0))
            parts[name] = (before[0] + seconds, before[1] + launches)
    return parts


def _op(work: Work, device: int, base: Lowered, cluster: Cluster) -> tuple[str, float, float]:
    """The class of an op, its roofline and its launches; no class for what is free."""
    graph, kind = base.graph, cluster.kind_of(device)
    ops = graph.memo.setdefault(("ops", "by name"), {each.name: each for each in graph.ops})
    op = ops.get(work.op)
    if op is None:
        return "", 0.0, 0.0
    mesh = base.stages[max(0, work.stage)].mesh
    split = tuple(sorted(ways_of(work.dims, mesh.axes, mesh.place(device)).items()))
    cost = op_cost(graph, op, kind, split)
    if cost.seconds <= 0:
        return "", 0.0, 0.0
    call = graph.call(op)
    launches = round(cost.launch_s / kind.launch_s) if kind.launch_s else 1
    return f"{call.phase} {op_class(call)}", cost.seconds - cost.launch_s, float(launches)


def _fitted(own: Observation, scales: dict[str, tuple[float, float]]) -> float:
    return sum(
        scales[name][0] * roofline + scales[name][1] * launches
        for name, (roofline, launches) in own.parts.items()
    )


def fit_scales(known: Sequence[Observation]) -> dict[str, tuple[float, float]]:
    """Factor and seconds per launch of every phase and class of ops; see the module."""
    names = [f"{phase} {each}" for phase in PHASES for each in CLASSES]
    if not known:
        return {}
    roofline = np.array([[own.parts.get(n, (0.0, 0.0))[0] for n in names] for own in known])
    launches = np.array([[own.parts.get(n, (0.0, 0.0))[1] for n in names] for own in known])
    seconds = np.array([own.seconds for own in known])
    weight = np.array([own.count for own in known]) ** 0.5 / seconds
    both = np.stack([roofline.sum(1), launches.sum(1)], 1)
    factor, launch = nonnegative(both * weight[:, None], seconds * weight, np.zeros(2), 0.0)
    if factor <= 0:  # everything is launches: the roofline of what is computed stays as it is
        factor = 1.0
    per_phase = launches.reshape(len(known), len(PHASES), len(CLASSES)).sum(2)
    scale = np.array([factor] * len(names) + [launch] * len(PHASES))
    columns = np.concatenate([roofline, per_phase], 1) * scale * weight[:, None]
    fit = nonnegative(columns, seconds * weight, np.ones(len(scale)), PULL) * scale
    return {
        name: (max(float(fit[i]), 1e-9), float(fit[len(names) + i // len(CLASSES)]))
        for i, name in enumerate(names)
    }


def nonnegative(columns: F64, target: F64, prior: F64, pull: float) -> F64:
    """Least squares with x >= 0, drawn to a prior: coordinate by coordinate until it stays."""
    size = columns.shape[1]
    square = columns.T @ columns / len(target) + pull * np.eye(size)
    right = columns.T @ target / len(target) + pull * prior
    x = prior.copy()
    for _ in range(ROUNDS):
        before = x.copy()
        for j in range(size):
            if square[j, j] > 0:
                x[j] = max(0.0, x[j] + (right[j] - square[j] @ x) / square[j, j])
        if np.abs(x - before).max() <= 1e-12 * (1 + np.abs(x).max()):
            break
    return x


# Links.


def link_fit(matched: MatchedRun, base: Lowered, cluster: Cluster) -> LinkFit | None:
    """How latency and bandwidth of the links must change; None where nothing was waited for."""
    links = tuple(replace(k, bytes_per_s=k.bytes_per_s * NO_TIME) for k in cluster.links)
    fast = replace(cluster, links=links)
    plan, graph = matched.plan, matched.workload.graph
    without = lower_plan(base.stages, plan.schedule, graph, fast, run)
    rows, target = [], []
    for match in matched.tasks:
        if match.is_communication and match.measured_s is not None:
            whole = _duration(base.program, match)
            latency = min(_duration(without.program, match), whole)
            if whole > 0:
                rows.append((latency, whole - latency))
                target.append(match.measured_s)
    if not rows:
        return None
    parts, seconds = np.array(rows), np.array(target)
    ratio = max(float(seconds.sum() / parts.sum()), 1e-6)
    weight = 1 / np.maximum(seconds, max(float(np.median(seconds)), 1e-9))
    fit = nonnegative(parts * ratio * weight[:, None], seconds * weight, np.ones(2), PULL)
    fitted = parts @ (fit * ratio)
    norm = float(seconds.sum() / fitted.sum()) if fitted.sum() > 0 else 1.0
    latency, per_byte = (max(float(x) * ratio * norm, 1e-9) for x in fit)
    return LinkFit(latency, per_byte, len(rows))


def _duration(program: Program, match: TaskMatch) -> float:
    task, body, number = match.key
    if number < 0:
        return float(program.duration[task])
    within = inside(program, body)
    tasks = np.flatnonzero(within.work == number)
    return float(within.duration[tasks].max()) if tasks.size else 0.0


def _links(matched: MatchedRun, cluster: Cluster, fit: LinkFit) -> tuple[LinkCalibration, ...]:
    """The figures of all links that the plan's devices reach each other by."""
    devices = matched.devices
    used = {i for a in devices for b in devices if a != b for i in cluster.route(a, b)}
    figures = sorted({_figures(cluster.links[i]) for i in used})
    return tuple(
        LinkCalibration(latency, rate, latency * fit.latency, rate / fit.per_byte)
        for latency, rate in figures
    )


def _figures(link: Link) -> tuple[float, float]:
    return link.latency_s, link.bytes_per_s
