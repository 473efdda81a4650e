"""Export a plan: what a framework is told, what that leaves out, and what the difference costs.

    plan -> strategy -> (nearest that the target can say) -> text -> strategy -> stages -> step

The text is read back by our own reader, and what was read is simulated: the step that is told
is that of the file. Where the target can say the plan itself, it is the plan's own step.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.errors import InputError, PartitaError, PlanError
from partita.export.read_off import differences, read_off
from partita.export.scope import ExportScope
from partita.export.targets import NAMES, TARGETS, TORCH_SCHEDULE, ExportTarget
from partita.jobs.frameworks import RECOMPUTE, SEVERAL, FrameworkStrategy, even_layers
from partita.jobs.frameworks import framework_plan as plan_of
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.torch_schedule import plan_with_schedule, schedule_of_plan
from partita.jobs.workload import Workload, load_cluster, load_model
from partita.lower import Memo
from partita.plans import Plan, device_groups, shared_stages
from partita.schedules.torch_csv import parse_torch_csv
from partita.suggest import suggest

AT_A_TIME = 6  # strategies that are simulated before it is asked whether one fits
MOST = 24  # of them in all


@dataclass(frozen=True)
class Export:
    """A plan in a target's own format, and the step of what the file says."""

    target: str
    version: str
    text: str
    told: str  # the strategy in words
    step_s: float
    likely_step_s: tuple[float, float]  # the step lies in here with 80 %
    plan_step_s: float
    fits: bool
    differences: tuple[str, ...] = ()  # what the plan does that the file does not say
    why: str = ""  # why the plan's own strategy cannot be said, where another one is

    @property
    def is_exact(self) -> bool:
        """Does the file say all of the plan?"""
        return not self.differences and not self.why


@dataclass(frozen=True)
class _Room:
    """What candidates are simulated in."""

    plan: Plan
    workload: Workload
    cluster: Cluster
    scope: ExportScope
    memo: Memo

    def simulate(self, strategy: FrameworkStrategy, *, quick: bool) -> Simulation:
        stages, schedule = plan_of(self.workload.graph, strategy)
        memo = self.memo if quick else None
        most = {"most_devices": 1} if quick else {}
        simulation = simulate_stages(
            self.workload, self.cluster, stages, schedule, memo, quick=quick, **most
        )
        allowed = max(self.plan.prediction.capacity_bytes, default=0.0)
        return simulation.capped(allowed) if allowed > 0 else simulation


def export(plan: Plan, target: str) -> Export:
    """A plan for a target, or the nearest plan that the target can be told."""
    if target not in NAMES:
        raise InputError(f"found {target!r}", fix=suggest(target, list(NAMES)), field="--to")
    if target == TORCH_SCHEDULE:
        return _torch_schedule(plan)
    if not plan.model.training:
        raise PlanError(
            f"is for inference, and {target} trains", fix="plan without --infer", field="model"
        )
    room = _room(plan)
    own = read_off(plan, room.workload.graph)
    chosen, why = _nearest(TARGETS[target], own.strategy, room)
    text = TARGETS[target].write(chosen, room.scope)
    return _told(TARGETS[target], text, room, own.differences, why)


def read_export(plan: Plan, target: str, text: str) -> Export:
    """What a file of a target says, for the model and machine of a plan: simulated."""
    if target not in TARGETS:
        raise InputError(f"found {target!r}", fix=suggest(target, list(TARGETS)), field="--to")
    return _told(TARGETS[target], text, _room(plan))


def fitting_targets(plan: Plan, workload: Workload) -> dict[str, str]:
    """For each target nothing if it can say a plan's degrees, else why not; no simulation."""
    scope = _scope(plan, workload, None)
    answers: dict[str, str] = {}
    try:
        own = read_off(plan, workload.graph)
    except PlanError as error:
        answers = dict.fromkeys(TARGETS, error.found)
    else:
        answers = {name: target.refusal(own.strategy, scope) for name, target in TARGETS.items()}
    groups = device_groups(plan.stages)
    answers[TORCH_SCHEDULE] = "" if len(groups) > 1 else "the plan has no pipeline to order"
    if shared_stages(groups):
        answers[TORCH_SCHEDULE] = "a stage runs on several groups of devices together"
    return answers


def _room(plan: Plan) -> _Room:
    workload, cluster = load_model(plan), load_cluster(plan)
    return _Room(
        plan, workload, cluster, _scope(plan, workload, cluster), Memo(Collectives(cluster))
    )


def _scope(plan: Plan, workload: Workload, cluster: Cluster | None) -> ExportScope:
    used = {device for stage in plan.stages for device in stage.mesh.devices}
    nodes = 1
    if cluster is not None:
        counts: dict[str, int] = {}
        for device in used:
            node = cluster.devices[device].node
            counts[node] = counts.get(node, 0) + 1
        nodes = len(counts) if len(set(counts.values())) == 1 else 1
    return ExportScope(
        plan.model.spec, workload.graph, plan.model.batch, plan.model.dtype, plan.model.optimizer,
        len(used), nodes, plan.model.training,
    )  # fmt: skip


def _told(
    target: ExportTarget, text: str, room: _Room, extra: tuple[str, ...] = (), why: str = ""
) -> Export:
    """The export of a text: what our reader takes it for, simulated in full."""
    strategy = target.read(text, room.scope)
    if refused := target.refusal(strategy, room.scope):
        raise PlanError(f"says {strategy}: {refused}", fix="change it", field=target.name)
    simulation = room.simulate(strategy, quick=False)
    other = differences(room.plan, room.workload.graph, strategy)
    named = tuple(dict.fromkeys((*extra, *other))) if other else ()
    return Export(
        target.name, target.version, text, str(strategy), simulation.step_s,
        simulation.likely_step_s, room.plan.prediction.step_s, simulation.fits, named, why,
    )  # fmt: skip


def _nearest(
    target: ExportTarget, strategy: FrameworkStrategy, room: _Room
) -> tuple[FrameworkStrategy, str]:
    """The fastest that fits of the strategies nearest to a plan's; the plan's own if it can be."""
    why = target.refusal(strategy, room.scope)
    if not why and not differences(room.plan, room.workload.graph, strategy):
        return strategy, ""
    candidates = _around(target, strategy, room.scope)
    tried: list[tuple[bool, float, FrameworkStrategy]] = []
    for first in range(0, min(MOST, len(candidates)), AT_A_TIME):
        for candidate in candidates[first : first + AT_A_TIME]:
            try:
                simulation = room.simulate(candidate, quick=True)
            except PartitaError:  # a degree that an op's sizes do not allow
                continue
            tried.append((not simulation.fits, simulation.step_s, candidate))
        if any(not over for over, _, _ in tried):
            break
    if not tried:
        raise PlanError(
            f"{target.name} cannot be told of this plan: {why or 'no strategy near it can run'}",
            fix="export to another target, or run it with `partita run`",
            field="--to",
        )
    return min(tried, key=lambda one: one[:2])[2], why


def _around(
    target: ExportTarget, strategy: FrameworkStrategy, scope: ExportScope
) -> list[FrameworkStrategy]:
    """Strategies that a target can be told, those with the fewest changes first."""
    scored: dict[FrameworkStrategy, float] = {}
    for far, one in _structures(strategy, scope):
        groups = dict.fromkeys((one.hsdp, 0))
        choices = itertools.product(range(4), RECOMPUTE, (False, True), groups)
        for zero, recompute, sp, hsdp in choices:
            if (sp and one.tp == 1) or (hsdp and not zero):
                continue
            changed = replace(one, zero=zero, recompute=recompute, sp=sp, hsdp=hsdp)
            score = far + abs(zero - strategy.zero) + 0.5 * (sp != strategy.sp)
            score += 2.0 * (hsdp != strategy.hsdp)
            score += 0.7 * abs(RECOMPUTE.index(recompute) - RECOMPUTE.index(strategy.recompute))
            if not target.refusal(changed, scope):
                scored[changed] = min(score, scored.get(changed, score))
    return sorted(scored, key=lambda one: (scored[one], str(one)))


def _structures(
    s: FrameworkStrategy, scope: ExportScope
) -> Iterator[tuple[float, FrameworkStrategy]]:
    """Pipelines like a plan's: its own, with other schedules and cuts, without, with less tp."""
    yield 0.0, s
    if s.cp > 1:  # without sharing sequences out: more replicas, or more devices for a layer
        for dp, tp, far in ((s.dp * s.cp, s.tp, 8.0), (s.dp, s.tp * s.cp, 10.0)):
            count, rest = divmod(s.batch, dp)
            if count and not rest:
                one = replace(s, cp=1, dp=dp, tp=tp, sp=s.sp and tp > 1, micro_batch=1)
                for more, near in _structures(replace(one, num_microbatches=count), scope):
                    yield far + more, near
        return
    total = 0 if scope.stack is None else scope.stack.num_layers
    if s.pp > 1 and total:
        for schedule in ("1f1b", "interleaved", "gpipe"):
            vpp = max(2, s.vpp) if schedule in SEVERAL else 1
            if s.pp * vpp <= total and schedule != s.schedule:
                layers = s.layers if vpp == s.vpp else even_layers(total, s.pp * vpp)
                yield 3.0, replace(s, schedule=schedule, vpp=vpp, layers=layers)
        yield 3.0, replace(s, layers=even_layers(total, s.pp * s.vpp))
        yield 4.0, replace(s, schedule="1f1b", vpp=1, layers=even_layers(total, s.pp))
    flat = replace(s, pp=1, vpp=1, layers=(), schedule="1f1b")
    for dp, tp, far in ((s.dp * s.pp, s.tp, 8.0), (s.dp * s.pp * s.tp, 1, 12.0)):
        for micro in {s.micro_batch, 1}:
            count, rest = divmod(s.batch, micro * dp)
            if count and not rest:
                sp = s.sp and tp > 1
                one = replace(flat, dp=dp, tp=tp, sp=sp, micro_batch=micro)
                yield far, replace(one, num_microbatches=count)
    if s.tp > 1:
        dp = s.dp * s.tp
        count, rest = divmod(s.batch, dp)
        if count and not rest:
            one = replace(s, tp=1, sp=False, dp=dp, micro_batch=1, num_microbatches=count)
            yield 8.0, one


def _torch_schedule(plan: Plan) -> Export:
    """The order of micro-batches alone, for torch.distributed.pipelining."""
    if len(plan.stages) == 1:
        raise PlanError(
            "the plan has one stage, and nothing to order",
            fix="export to fsdp2, or plan with --pin pp=2",
            field="--to",
        )
    text = schedule_of_plan(plan).to_csv()
    again = plan_with_schedule(plan, parse_torch_csv(text), "given.csv")
    workload, cluster = load_model(plan), load_cluster(plan)
    simulation = simulate_stages(workload, cluster, again.stages, again.schedule)
    return Export(
        TORCH_SCHEDULE, "torch.distributed.pipelining", text, f"{plan.schedule}",
        simulation.step_s, simulation.likely_step_s, plan.prediction.step_s, simulation.fits,
    )  # fmt: skip
