"""From a traced run to a calibration: what of the costs must change so that they say what it took.

Devices. Each measured block is a sum over its ops,

    seconds = sum of factor[phase, class] * roofline + launch_s[phase] * launches

with classes product, attention and elementwise. Factors and launches are the non-negative least
squares of relative errors; each is drawn lightly towards what fits all blocks at once, so that what
a run does not tell apart stays equal. Blocks as a whole tell little apart, and nothing of sizes:
all micro-batches have one. So ops of a step that ran op by op count too, with launches of their
own, since there each op is started by itself; and where there are such, seconds per FLOP and per
byte of a class are fitted beside its factor. Then all are scaled alike, so that the whole host's
time of a step (computing, starting collectives, gaps between tasks) is in the sum. What is still
missing of the measured step (ranks that wait for each other by chance, collectives that do not
overlap as they should) is spread over the ops by a last factor. Where the step comes out too long,
that factor is on messages as well: tasks that went in one message were each measured as the whole
of it. So the step that results is that of the run; it is told apart into causes only as far as
blocks differ.

Links. A message is a * latency part + b * bandwidth part of what was predicted and a fixed part; a
collective has a fixed and a bandwidth part of its own, since all ranks of a machine send at once
there, and go in steps. The parts come from lowering the plan once more on links of no
size-dependent time. Collectives that were tried before the run (`RankTrace.probes`) count like
those of the plan, and an optimizer that was tried with tensors of nothing tells what each tensor
takes beside its bytes.

Replay is a traced step on cores of their own: the program of the plan with what its tasks took.
Where ranks had to share their cores, the clock says little. The processor time of a task is what it
would take alone; a rank's time between tasks is spread over its computing. Messages and collectives
take what those took that were tried before the first traced step, by their latency, fixed and
bandwidth parts. Then the engine says when everything would have run.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster, Link
from partita.cluster.calibration import (
    FIXED_ACROSS,
    FIXED_INSIDE,
    ISSUE,
    MESSAGE,
    OP_BY_OP,
    PART,
    PER_BYTE,
    PER_FLOP,
    TAKEN_APART,
    Calibration,
    KindCalibration,
    LinkCalibration,
    OpScale,
    calibrated,
)
from partita.costs.collectives import HUGE_BYTES, Collectives, reached
from partita.costs.roofline import op_class, op_cost
from partita.costs.sharding import ways_of
from partita.engine import run
from partita.jobs.run_trace import APART, SEND
from partita.jobs.run_trace import UPDATE as UPDATE_PROBE
from partita.jobs.simulate import uncalibrated
from partita.jobs.trace_match import (
    ALL_UPDATES,
    COMPUTE,
    MatchedRun,
    TaskMatch,
    containers,
    inside,
)
from partita.lower import Lowered, lower_plan
from partita.meaning import COMMUNICATION, Phase, Purpose, Work
from partita.program import Kind, Program

F64 = npt.NDArray[np.float64]
PULL = 0.01  # of the prior, beside relative errors of 1
LIGHT_PULL = 1e-6  # where ops were measured one by one
ROUNDS = 2000
MOST_FOR_PARTS = 0.9  # of an update, for the number of its tensors
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
# Latency, what collectives and what messages cost at once, bandwidth of either; and what it took.
LinkRow = tuple[tuple[float, float, float, float, float], float]
Took = dict[int | None, dict[int, float]]  # None: by task; else by work of this body


@dataclass(frozen=True)
class LinkFit:
    """Factors on the latency and on the seconds per byte of messages and collectives."""

    latency: float
    per_byte: float
    num_measured: int
    fixed: float = 1.0  # of collectives
    collective: float = 1.0  # on their seconds per byte
    message_s: float = 0.0  # what a message costs besides

    def scaled(self, ratio: float) -> "LinkFit":
        """All of it so many times as long."""
        return LinkFit(
            self.latency * ratio, self.per_byte * ratio, self.num_measured, self.fixed * ratio,
            self.collective * ratio, self.message_s * ratio,
        )  # fmt: skip


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
            link = link.scaled(ratio)
    return own


def link_calibration(matched: MatchedRun, cluster: Cluster, link: LinkFit) -> Calibration:
    """What is known of messages and collectives alone."""
    kinds = sorted({cluster.kind_of(d).name for d in matched.devices})
    fixed = _fixed(cluster, link)
    own = tuple(KindCalibration(kind, fixed) for kind in kinds)
    return Calibration("", own, _links(matched, cluster, link))


def _fixed(cluster: Cluster, link: LinkFit) -> tuple[OpScale, ...]:
    """What it takes to start a collective or a message, and what collectives reach."""
    known, share = reached(cluster), link.per_byte / link.collective
    return (
        OpScale(FIXED_INSIDE, share, known.inside_s * link.fixed),
        OpScale(FIXED_ACROSS, share, (known.across_s + known.hop_s) * link.fixed),
        OpScale(MESSAGE, 1.0, link.message_s),
    )


# Devices.


class OpSum(NamedTuple):
    """Ops of one class: seconds of the roofline, launches, arithmetic and traffic."""

    roofline_s: float = 0.0
    launches: float = 0.0
    flops: float = 0.0
    traffic_bytes: float = 0.0

    def plus(self, other: "OpSum") -> "OpSum":
        """Both together."""
        return OpSum(*(a + b for a, b in zip(self, other, strict=True)))


class Scale(NamedTuple):
    """What a class of ops takes: on the roofline, per launch, per FLOP and per byte.

    `apart_s` is what a launch costs more where each op is started by itself.
    """

    factor: float
    launch_s: float
    flop_s: float = 0.0
    byte_s: float = 0.0
    apart_s: float = 0.0

    def seconds(self, own: OpSum) -> float:
        """Of some ops of the class."""
        return sum(a * b for a, b in zip(self[:4], own, strict=True))


@dataclass(frozen=True)
class Observation:
    """A block or op: what it took, and the roofline and launches of what is in it, by class."""

    seconds: float
    parts: dict[str, "OpSum"]
    count: float = 1.0  # ranks
    by_op: bool = False  # an op that was started by itself, where blocks run as a whole


def _op_scales(matched: MatchedRun, base: Lowered, cluster: Cluster) -> tuple[OpScale, ...]:
    known = _observed(matched, matched.tasks, base, cluster)
    apart = _observed(matched, matched.by_op, base, cluster, by_op=True)
    between_s = _between_works(matched)
    parts, weighed_s = _taken_apart(matched, base, cluster)
    # What ran on a CPU does not follow the curve of another device.
    on_host = any(trace.steps[0].cpu_s is not None for trace in matched.traces)
    scales = fit_scales([*known, *parts, *apart], on_host=on_host)
    updates = [m for m in matched.tasks if m.work.purpose is Purpose.UPDATE]
    spent = sum(sum(match.by_rank.values()) for match in updates)
    assumed = sum(_update_s(match, base.program) * len(match.by_rank) for match in updates)
    # The whole time of the host: it is busy for all of it, whatever it does.
    total = sum(rank.compute_s + rank.issue_s + rank.host_s for rank in matched.ranks) - spent
    started = _starts(matched)
    if started:  # what collectives cost computing is told by itself
        total -= sum(
            sum(match.by_rank.values())
            for match in matched.tasks
            if match.is_communication and match.work.purpose is not Purpose.SEND
        )
    fitted = sum(own.count * _fitted(own, scales) for own in known)
    norm = total / fitted if fitted > 0 else 1.0
    entries = [
        OpScale(name, own.factor * norm, own.launch_s * norm) for name, own in scales.items()
    ]
    for name, own in scales.items():
        each = {PER_FLOP: own.flop_s, PER_BYTE: own.byte_s}
        entries += [OpScale(f"{name} {k}", 1.0, s * norm) for k, s in each.items() if s > 0]
    apart_s = {name.split()[0]: own.apart_s + between_s for name, own in scales.items()}
    entries += [OpScale(f"{k} {OP_BY_OP}", 1.0, s * norm) for k, s in apart_s.items() if s > 0]
    entries += [OpScale(TAKEN_APART, 1.0, weighed_s)] if weighed_s > 0 else []
    probes = [probe for trace in matched.traces for probe in trace.probes]
    issued = [p.issue_s for p in probes if p.collective not in (SEND, UPDATE_PROBE)]
    if started:
        once_s, byte_s = (float(x) for x in started)
        entries.append(OpScale(ISSUE, 1.0, once_s + between_s))
        entries += [OpScale(f"{ISSUE} {PER_BYTE}", 1.0, byte_s)] if byte_s > 0 else []
    elif issued and any(issued):
        entries.append(OpScale(ISSUE, 1.0, statistics.median(issued)))
    if spent > 0 and assumed > 0:
        tried = [probe.seconds for probe in probes if probe.collective == UPDATE_PROBE]
        count = sum(_num_updated(m, base.program) * len(m.by_rank) for m in updates)
        part_s = (
            min(statistics.median(tried), MOST_FOR_PARTS * spent / max(count, 1)) if tried else 0.0
        )
        entries.append(OpScale(UPDATE, (spent - part_s * count) / assumed, 0.0))
        entries += [OpScale(PART, 1.0, part_s)] if part_s > 0 else []
    return tuple(entries)


def _starts(matched: MatchedRun) -> tuple[float, ...]:
    """What a collective costs its rank's processor, at once and per byte; nothing: not tried."""
    tried = [
        (probe.size_bytes, probe.host_s)
        for trace in matched.traces
        for probe in trace.probes
        if probe.host_s is not None
    ]
    if not tried:
        return ()
    sizes, seconds = np.array([size for size, _ in tried]), np.array([each for _, each in tried])
    weight = 1 / np.maximum(seconds, 1e-9)
    unit = max(float(seconds.max() / sizes.max()), 1e-15)
    columns = np.stack([np.full(len(sizes), float(np.median(seconds))), sizes * unit], 1)
    fit = nonnegative(columns * weight[:, None], seconds * weight, np.zeros(2), LIGHT_PULL)
    return float(fit[0] * np.median(seconds)), float(fit[1] * unit)


def _between_works(matched: MatchedRun) -> float:
    """Processor time between the works of blocks that ran op by op, for each of them."""
    blocks_s = works_s = 0.0
    count = 0
    for trace in matched.traces:
        for step in trace.by_op:
            opened = containers(step.tasks)
            works = [each for each in step.tasks if each.work >= 0]
            blocks_s += sum(t.seconds for t in step.tasks if t.work < 0 and t.task in opened)
            works_s += sum(each.seconds for each in works)
            count += len(works)
    return max(0.0, blocks_s - works_s) / count if count else 0.0


def _taken_apart(
    matched: MatchedRun, base: Lowered, cluster: Cluster
) -> tuple[list[Observation], float]:
    """Data and weight gradients by themselves; what each of the latter costs more than in one.

    Steps differ by what else the machine does: those of the run and this one are held against each
    other by their forwards. The two parts are told as parts of what both take in one.
    """
    tried: dict[tuple[int, str], list[float]] = defaultdict(list)
    for trace in matched.traces:
        for task in (task for step in trace.apart for task in step.tasks):
            is_forward = task.phase == "forward" and task.purpose == Purpose.COMPUTE.words
            if task.op == APART or is_forward:
                tried[task.stage, task.phase].append(task.seconds)
    usual: dict[tuple[int, str], list[TaskMatch]] = defaultdict(list)
    for match in matched.tasks:
        if match.work.purpose is Purpose.COMPUTE and match.key[2] < 0:
            usual[match.work.stage, match.work.phase.name.lower()].append(match)
    known: list[Observation] = []
    more_s = count = 0.0
    for stage in sorted({stage for stage, phase in tried if phase == "weight"}):
        forward, both = (usual.get((stage, phase)) for phase in ("forward", "backward"))
        if not forward or not both or not tried[stage, "forward"]:
            continue
        load = _usual_s(forward) / statistics.median(tried[stage, "forward"])
        one_s, other_s = (
            statistics.median(tried[stage, phase]) * load for phase in ("backward", "weight")
        )
        whole_s, (first, *_) = _usual_s(both), both
        parts = _parts(first, matched, base, cluster)
        for phase, seconds in (("dgrad", one_s), ("wgrad", other_s)):
            own = {name: each for name, each in parts.items() if name.startswith(phase)}
            if own and seconds > 0:
                told_s = seconds * whole_s / (one_s + other_s)
                known.append(Observation(told_s, own, float(len(both) * len(first.by_rank))))
        number = _num_weighed(first, base)
        more_s += max(0.0, one_s + other_s - whole_s) * (number > 0)
        count += number
    return known, more_s / count if count else 0.0


def _usual_s(matches: Sequence[TaskMatch]) -> float:
    return statistics.median(statistics.fmean(match.by_rank.values()) for match in matches)


def _num_weighed(match: TaskMatch, base: Lowered) -> int:
    """How many ops of a block give weight gradients."""
    phases = {op.name: op.phase for op in base.graph.ops}
    works = inside(base.program, match.work.body).works
    return sum(work.purpose is Purpose.COMPUTE and phases.get(work.op) == "wgrad" for work in works)


def _observed(
    matched: MatchedRun, tasks: Sequence[TaskMatch], base: Lowered, cluster: Cluster,
    by_op: bool = False,
) -> list[Observation]:  # fmt: skip
    """Blocks, and ops; both gradients of an op together, which may be one call."""
    forward = {op.name: op.forward for op in base.graph.ops}
    seconds: dict[object, float] = defaultdict(float)
    parts: dict[object, dict[str, OpSum]] = defaultdict(dict)
    ranks: dict[object, int] = {}
    for match in tasks:
        if match.work.purpose not in (Purpose.COMPUTE, Purpose.RECOMPUTE):
            continue
        task, body, number = match.key
        whose = forward.get(match.work.op) or number
        key = (task, body, whose if number >= 0 else number)
        for name, own in _parts(match, matched, base, cluster, by_op).items():
            parts[key][name] = parts[key].get(name, OpSum()).plus(own)
        seconds[key] += statistics.fmean(match.by_rank.values())
        ranks[key] = len(match.by_rank)
    return [
        Observation(seconds[key], own, ranks[key], by_op)
        for key, own in parts.items()
        if seconds[key] > 0 and own
    ]


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


def _num_updated(match: TaskMatch, program: Program) -> int:
    """How many tensors the updates of a stage are of."""
    _, body, number = match.key
    if number != ALL_UPDATES:
        return len(match.work.writes)
    works = inside(program, body).works
    return sum(len(work.writes) for work in works if work.purpose is Purpose.UPDATE)


def _parts(
    match: TaskMatch, matched: MatchedRun, base: Lowered, cluster: Cluster, by_op: bool = False
) -> dict[str, OpSum]:
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
    parts: dict[str, OpSum] = {}
    for work in works:
        name, own = _op(work, matched.devices[rank], base, cluster, by_op)
        if name:
            parts[name] = parts.get(name, OpSum()).plus(own)
    return parts


def _op(work: Work, device: int, base: Lowered, cluster: Cluster, by_op: bool) -> tuple[str, OpSum]:
    """The class of an op, its roofline, launches and work.

    What is free (a view) has no class, except where it is started by itself: that is a launch.
    """
    graph, kind = base.graph, cluster.kind_of(device)
    ops = graph.memo.setdefault(("ops", "by name"), {each.name: each for each in graph.ops})
    op = ops.get(work.op)
    if op is None:
        return "", OpSum()
    mesh = base.stages[max(0, work.stage)].mesh
    split = tuple(sorted(ways_of(work.dims, mesh.axes, mesh.place(device)).items()))
    cost = op_cost(graph, op, kind, split)
    call = graph.call(op)
    if cost.seconds <= 0:
        return (f"{call.phase} elementwise", OpSum(launches=1.0)) if by_op else ("", OpSum())
    launches = round(cost.launch_s / kind.launch_s) if kind.launch_s else 1
    roofline_s = cost.seconds - cost.launch_s
    work_of = OpSum(roofline_s, float(launches), cost.flops, cost.traffic_bytes)
    return f"{call.phase} {op_class(call)}", work_of


def _fitted(own: Observation, scales: dict[str, Scale]) -> float:
    return sum(scales[name].seconds(each) for name, each in own.parts.items())


def fit_scales(known: Sequence[Observation], on_host: bool = False) -> dict[str, Scale]:
    """What every phase and class of ops takes; see the module."""
    names = [f"{phase} {each}" for phase in PHASES for each in CLASSES]
    if not known:
        return {}
    sums = np.array([[own.parts.get(name, OpSum()) for name in names] for own in known])
    roofline, launches, flops, moved = (sums[:, :, k] for k in range(4))
    seconds, apart = np.array([own.seconds for own in known]), np.array([k.by_op for k in known])
    weight = _weights(known, seconds, apart)
    counts = [np.where(apart, 0, launches.sum(1)), np.where(apart, launches.sum(1), 0)]
    both = np.stack([roofline.sum(1), *counts], 1)
    factor, *each = nonnegative(both * weight[:, None], seconds * weight, np.zeros(3), 0.0)
    if factor <= 0:  # everything is launches: the roofline of what is computed stays as it is
        factor = 1.0
    phases, size = len(PHASES), len(names)
    per_phase = launches.reshape(len(known), phases, len(CLASSES)).sum(2)
    blocks, ops = np.where(apart[:, None], 0, per_phase), np.where(apart[:, None], per_phase, 0)
    per_flop = seconds.sum() / max(flops.sum(), 1.0) if apart.any() else 0.0
    per_byte = seconds.sum() / max(moved.sum(), 1.0) if apart.any() else 0.0
    scale = np.array(
        [factor] * size + [each[0]] * phases + [each[1]] * phases
        + [per_flop] * size + [per_byte] * size
    )  # fmt: skip
    prior = np.array([1.0] * (size + 2 * phases) + [0.0] * (2 * size))
    if apart.any():  # ops of many sizes tell: nothing is drawn to another device's curve
        prior[: size + phases], scale[size : size + phases] = 0.0, max(each[1], 1e-9)
    columns = np.concatenate([roofline, blocks, ops, flops, moved], 1) * scale * weight[:, None]
    pull = np.full(len(scale), LIGHT_PULL if apart.any() else PULL)
    if apart.any() and on_host:  # work tells what it takes, as far as it can
        pull[:size] = PULL
    fit = (nonnegative(columns, seconds * weight, prior, pull) * scale).tolist()
    at, launch_s = size + 2 * phases, fit[size : size + phases]
    apart_s = [max(0.0, fit[size + phases + k] - launch_s[k]) for k in range(phases)]
    return {
        name: Scale(
            max(fit[i], 1e-9), launch_s[k], fit[at + i], fit[at + size + i],
            apart_s[k] if apart.any() else 0.0,
        )
        for i, name in enumerate(names)
        for k in (i // len(CLASSES),)
    }  # fmt: skip


def _weights(known: Sequence[Observation], seconds: F64, apart: npt.NDArray[np.bool_]) -> F64:
    """Of relative errors; short ops count by their seconds, and all ops as much as all blocks."""
    weight = np.array([own.count for own in known]) ** 0.5 / seconds
    if apart.any():
        typical = float(seconds[apart].mean())
        weight[apart] *= seconds[apart] / np.maximum(seconds[apart], typical)
        weight[apart] *= (max(1, int((~apart).sum())) / int(apart.sum())) ** 0.5
    return np.asarray(weight)


def nonnegative(columns: F64, target: F64, prior: F64, pull: float | F64) -> F64:
    """Least squares with x >= 0, drawn to a prior: coordinate by coordinate until it stays."""
    size = columns.shape[1]
    square = columns.T @ columns / len(target) + np.eye(size) * pull
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
    """How latency and bandwidth of the links must change; None where nothing is known of them."""
    waited, probed = _waited_for(matched, base, cluster), _probed(matched, cluster)
    rows = [*waited, *probed]
    if not rows:
        return None
    parts, seconds = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    ratio = max(float(seconds.sum() / parts.sum()), 1e-6)
    weight = 1 / np.maximum(seconds, max(float(np.median(seconds)), 1e-9))
    if waited and probed:  # those that were tried, of all sizes, count as much as all of the run
        weight[len(waited) :] *= (len(waited) / len(probed)) ** 0.5
    pull = LIGHT_PULL if probed else PULL
    fit = nonnegative(parts * ratio * weight[:, None], seconds * weight, np.ones(5), pull)
    latency, *rest = (max(float(x) * ratio, 1e-9) for x in fit)
    fixed, message, per_byte, collective = rest
    are_known = (parts > 0).sum(0).tolist()
    if not are_known[1]:
        fixed = latency  # nothing is known of collectives
    if not are_known[2]:
        message = fixed
    if not are_known[3] or not are_known[4]:  # of one of the two nothing is known
        per_byte = collective = collective if are_known[4] else per_byte
    message_s = message * reached(cluster).inside_s
    return LinkFit(latency, per_byte, len(rows), fixed, collective, message_s)


def _link_row(fixed: float, rest: float, moving: float, took: float, is_message: bool) -> LinkRow:
    if is_message:
        return (rest, 0.0, fixed, moving, 0.0), took
    return (rest, fixed, 0.0, 0.0, moving), took


def _waited_for(matched: MatchedRun, base: Lowered, cluster: Cluster) -> list[LinkRow]:
    """Messages and collectives of the run that somebody waited for."""
    links = tuple(replace(k, bytes_per_s=k.bytes_per_s * NO_TIME) for k in cluster.links)
    plan, graph, times = matched.plan, matched.workload.graph, Collectives(cluster)
    fast = replace(cluster, links=links)
    without = lower_plan(base.stages, plan.schedule, graph, fast, run)
    rows: list[LinkRow] = []
    one = 0.0  # the part of a message's latency that it costs at once
    if len(matched.devices) > 1:
        a, b = matched.devices[:2]
        one = times.message_s((a, b)) / max(times.send(0.0, a, b), 1e-12)
    for match in matched.tasks:
        if match.is_communication and match.measured_s is not None:
            whole = _duration(base.program, match)
            latency = min(_duration(without.program, match), whole)
            if whole > 0:
                within = inside(base.program, match.key[1])
                is_message = match.work.purpose is Purpose.SEND or match.work.peer >= 0
                if is_message:  # several tensors are as many messages
                    fixed = latency * one
                else:
                    groups = within.groups[match.work.group] if match.work.group >= 0 else ()
                    fixed = min(times.fixed_s(groups), latency)
                rest, moving = latency - fixed, whole - latency
                rows.append(_link_row(fixed, rest, moving, match.measured_s, is_message))
    return rows


def _probed(matched: MatchedRun, cluster: Cluster) -> list[LinkRow]:
    """Messages and collectives of all ranks that were tried before; the mean of the ranks.

    Between computing they take longer than one after the other (memory that is new, threads that
    must be woken). Where cores were shared that shows others' work as well, and does not count.
    """
    tried: dict[tuple[str, float], list[float]] = {}
    for trace in matched.traces:
        for probe in trace.probes:
            if probe.collective != UPDATE_PROBE:
                alone = matched.is_shared or probe.between_s is None
                took = probe.seconds if alone else max(probe.seconds, probe.between_s or 0.0)
                tried.setdefault((probe.collective, probe.size_bytes), []).append(took)
    times, devices = Collectives(cluster), matched.devices
    rows: list[LinkRow] = []
    for (name, size), seconds in tried.items():
        if name == SEND:
            one = (devices[0], devices[1])
            fixed = times.fixed_s((one,))
            whole, huge = times.send(size, *one), times.send(HUGE_BYTES, *one)
        else:
            fixed = times.fixed_s((devices,))
            whole = times.seconds(name, size, (devices,))
            huge = times.seconds(name, HUGE_BYTES, (devices,))
        moving = min(huge * size / HUGE_BYTES, whole - fixed)
        took = statistics.fmean(seconds)
        rows.append(_link_row(fixed, whole - fixed - moving, moving, took, name == SEND))
    return rows


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


def with_replay(matched: MatchedRun) -> MatchedRun:
    """The same run with its replayed step, where it needs one."""
    return replace(matched, replayed_s=replayed_s(matched)) if matched.is_shared else matched


def replayed_s(matched: MatchedRun) -> float:
    """Seconds of the step on cores of their own."""
    base, plan, graph = base_cluster(matched), matched.plan, matched.workload.graph
    lowered = lower_plan(matched.lowered.stages, plan.schedule, graph, base, run)
    fit = link_fit(matched, lowered, base)
    if fit is not None:
        machine = calibrated(base, link_calibration(matched, base, fit))
        lowered = lower_plan(lowered.stages, plan.schedule, graph, machine, run)
    program = lowered.program
    took, inner = _took(matched)
    duration = program.duration.copy()
    _set(duration, program, took.get(-1, {}))
    for task, seconds in took.get(None, {}).items():
        duration[task] = seconds
    for task, seconds in inner.items():
        duration[task] = seconds + _sent_inside(program, task)
    return run(replace(program, duration=duration)).makespan


def _took(matched: MatchedRun) -> tuple[Took, dict[int, float]]:
    """Seconds of computing by task and, of one stage that runs once, by work; of blocks by work."""
    spread = {
        rank.rank: rank.busy_s / rank.compute_s if rank.compute_s > 0 else 1.0
        for rank in matched.ranks
    }
    took: Took = {}
    inner: dict[int, float] = {}
    together: list[TaskMatch] = []  # works of the same ranks since the last collective

    def settle() -> None:
        for match, seconds in _slowest(together, spread):
            task, body, number = match.key
            if body < 0:
                took.setdefault(body, {})[number] = seconds
            else:
                inner[task] = inner.get(task, 0.0) + seconds
        together.clear()

    for match in matched.tasks:
        task, _, number = match.key
        others = bool(together) and together[0].by_rank.keys() != match.by_rank.keys()
        if match.is_communication or others:
            settle()
        if match.work.purpose not in COMPUTE:
            continue
        if number == -1:
            seconds = max(own * spread[rank] for rank, own in match.by_rank.items())
            took.setdefault(None, {})[task] = seconds
        else:
            together.append(match)
    settle()
    return took, inner


def _slowest(
    together: Sequence[TaskMatch], spread: dict[int, float]
) -> list[tuple[TaskMatch, float]]:
    """Seconds of works that ranks do until they meet: those of the rank that takes the longest.

    The longest of each work by itself would be more than any rank takes.
    """
    if not together:
        return []
    sums = {
        rank: sum(match.by_rank[rank] for match in together) * spread[rank]
        for rank in together[0].by_rank
    }
    slowest = max(sums, key=lambda rank: (sums[rank], -rank))
    return [(match, match.by_rank[slowest] * spread[slowest]) for match in together]


def _set(duration: F64, program: Program, took: dict[int, float]) -> None:
    updates = [n for n, work in enumerate(program.works) if work.purpose is Purpose.UPDATE]
    for task, number in enumerate(program.work.tolist()):
        if number in took:
            duration[task] = took[number]
        elif number in updates and ALL_UPDATES in took:
            duration[task] = took[ALL_UPDATES] / len(updates)


def _sent_inside(program: Program, task: int) -> float:
    """What is sent inside of a block that runs op by op, one after the other."""
    work = program.work_of(task)
    if work is None or work.body < 0:
        return 0.0
    within = program.bodies[work.body].program
    kinds = {w: each for w, each in enumerate(within.works) if each.purpose in COMMUNICATION}
    sent: dict[int, float] = {}
    for each, number in enumerate(within.work.tolist()):
        if number in kinds and kinds[number].phase is work.phase:
            sent[number] = max(sent.get(number, 0.0), float(within.duration[each]))
    return sum(sent.values())
