"""Candidates of `plan` beside the joint search: the plan to start from, named strategies, shapes.

A plan that is there already is the first candidate: the answer is never worse than it. It is
simulated as it stands, op by op, on the machine that is asked for, which may have other figures
than the one it was made for. Its collectives are tried in an order made anew, too.

Named strategies are candidates, some at once, all at the end, and so is what the sharding search
alone finds.

Tessel's shapes have a stage on each device, beside what all devices share. They are no cells of the
joint space. M and NN pay only beside pipelines: what would burden one stage (an embedding, a stem
on large inputs) is spread over all. K pays where a model has branches: they run at the same time.
So they are tried where one is pinned (`shape=m`, `nn`, `k`); where nobody asked for degrees, M
beside a pipeline that has won, and K beside anything. How much is shared and the number of
micro-batches are tried one after the other; the order of blocks is searched for the best.
"""

import logging
import math
from collections.abc import Iterator
from functools import partial

from partita import units
from partita.errors import InputError, PlanError
from partita.graph.chain import chain_of, inside_blocks
from partita.jobs.check_plan import refuse_wrong_decisions
from partita.jobs.constraints import SEARCHED, WHOLE_BLOCKS
from partita.jobs.frameworks import (
    FIELD,
    FrameworkStrategy,
    framework_plan,
    layer_stack,
    whole_field,
)
from partita.jobs.plan_simulator import SimulatedPlan, Simulator, rank
from partita.jobs.shapes import SHAPES, searched_schedule
from partita.jobs.shard import shard
from partita.jobs.strategies import PIPELINES, STRATEGIES, by_kind, kinds_of, unequal
from partita.plans import Plan, Schedule, Stage, device_groups
from partita.search.base import Result, Status
from partita.search.joint.cells import divisors
from partita.search.joint.cuts import cuts_at

log = logging.getLogger("partita")
TRAINING_ONLY = ("zero1", "fsdp")  # they keep states, which inference has none of
PINS = ("pp", "vpp", "dp", "tp", "cp", "ep", "sp", "mesh")  # what a pipeline was asked for with


def start_from(simulator: Simulator, plan: Plan) -> None:
    """Simulate a given plan; refuses one that is of another model or that constraints rule out."""
    workload = simulator.workload
    if plan.model.fingerprint != workload.graph.fingerprint():
        mine, its = workload.ref(), plan.model
        names = ("spec", "batch", "dtype", "training", "optimizer")
        pairs = [(name, getattr(its, name), getattr(mine, name)) for name in names]
        unlike = [f"{name} {old} instead of {new}" for name, old, new in pairs if old != new]
        raise InputError(
            f"the plan to start from is of another model ({', '.join(unlike) or 'other ops'})",
            fix="ask for the model, batch and dtype of that plan, or leave --start out",
            field="start",
        )
    refuse_wrong_decisions(plan, workload.graph, simulator.cluster)
    if not simulator.allowed(plan.stages, plan.schedule):
        raise InputError(
            f"the plan to start from does not keep to {simulator.constraints}",
            fix="leave --start or that constraint out",
            field="start",
        )
    given = simulator.add("start", plan.stages, plan.schedule, quick=False)
    if given is not None and not given.fits:
        peak, capacity = given.simulation.fullest
        log.warning(
            "the plan to start from does not fit: it needs %s of %s per device",
            units.size(peak), units.size(capacity),
        )  # fmt: skip
    anew = tuple(stage.undecided() for stage in plan.stages)
    simulator.add("start", anew, plan.schedule)


def something_at_once(simulator: Simulator) -> None:
    """Named ways on one stage, of a large model the first that fits: something to show.

    Of a large stack of layers that is the best of what frameworks do; on heterogeneous devices,
    where those wait for the slowest one, samples by speed come before it.
    """
    graph, settings = simulator.workload.graph, simulator.settings
    _by_speed_at_once(simulator)
    small = len(graph.ops) <= settings.small_ops
    if not small:
        tuned(simulator)
        if simulator.best() is not None:
            return
    for name in STRATEGIES if small else settings.first:
        if simulator.workload.training or name not in TRAINING_ONLY:
            for stage in _stages(simulator, name):
                if simulator.allowed((stage,), Schedule()):
                    simulator.add(name, (stage,), Schedule())
        if simulator.done() or (simulator.best() is not None and not small):
            return


def _by_speed_at_once(simulator: Simulator) -> None:
    """On heterogeneous devices the first that fits with samples by speed.

    Of each shares what holds least is looked at: where that does not fit, the others do not.
    """
    make = partial(unequal, simulator.workload.graph, simulator.cluster, simulator.workload.batch)
    allowed = [
        (stages, schedule)
        for stages, schedule in simulator.attempt("unequal", make) or ()
        if simulator.allowed(stages, schedule)
    ]
    thriftiest = {stages[0].mesh: (stages, schedule) for stages, schedule in allowed}
    for stages, schedule in thriftiest.values():
        simulator.add("unequal", stages, schedule)
        if simulator.best() is not None:
            return


def all_named(simulator: Simulator) -> None:
    """Every named strategy that is allowed, unless its bound rules it out."""
    tuned(simulator)
    for name, stages, schedule in _plans(simulator):
        if simulator.cut() and simulator.candidates:
            return
        if simulator.allowed(stages, schedule):
            simulator.add(name, stages, schedule)


def tuned(simulator: Simulator) -> None:
    """The most promising of what frameworks do, all families together, until enough are there."""
    workload, settings = simulator.workload, simulator.settings
    if not (simulator.model.is_cut and workload.training):
        return
    if simulator.field_ranked is None:
        make = partial(
            whole_field, workload.graph, simulator.cluster, workload.batch, settings.field
        )
        simulator.field_ranked = simulator.attempt("the field", make) or ()
    ranked = simulator.field_ranked
    left = settings.field_plans
    for one in [one for one in ranked if _may(simulator, one.strategy)][: settings.field_tried]:
        if simulator.cut() and simulator.candidates:
            return
        build = partial(framework_plan, workload.graph, one.strategy)
        plan = simulator.attempt(f"{one.family} as {one.strategy}", build)
        if plan is None or not simulator.allowed(*plan):
            continue
        simulator.add(one.family, *plan)
        left -= 1
        if left <= 0 and simulator.best() is not None:
            return


def _may(simulator: Simulator, strategy: FrameworkStrategy) -> bool:
    """Do the pins that a strategy shows at once allow it?"""
    allow = simulator.constraints.allow
    recompute = strategy.recompute if strategy.recompute in ("none", "full") else "selective"
    return (
        allow("pp", strategy.pp)
        and allow("vpp", strategy.vpp)
        and allow("tp", strategy.tp)
        and allow("dp", strategy.dp)
        and allow("zero", strategy.zero)
        and _may_group(simulator, strategy)
        and allow("micro-batches", strategy.num_microbatches)
        and allow("recompute", recompute)
        and simulator.constraints.allow_order(strategy.schedule, strategy.pp)
    )


def _may_group(simulator: Simulator, strategy: FrameworkStrategy) -> bool:
    """Are parameters sharded over as many replicas as was asked for?"""
    wanted = simulator.constraints.pinned_to("hsdp")
    if strategy.hsdp and not simulator.constraints.allow("hsdp", strategy.hsdp):
        return False
    return wanted is None or (strategy.hsdp or strategy.dp) == int(wanted)


def _plans(simulator: Simulator) -> Iterator[tuple[str, tuple[Stage, ...], Schedule]]:
    graph, batch = simulator.workload.graph, simulator.workload.batch
    chain = chain_of(graph, whole_blocks=simulator.model.settings.whole_blocks)
    for name in STRATEGIES:
        if simulator.workload.training or name not in TRAINING_ONLY:
            for stage in _stages(simulator, name):
                yield name, (stage,), Schedule()
    if len(kinds_of(simulator.cluster)) > 1:
        for name, plans in (
            ("by-kind", partial(by_kind, graph, chain, simulator.cluster, batch)),
            ("unequal", partial(unequal, graph, simulator.cluster, batch)),
        ):
            if simulator.model.is_cut or name == "unequal":
                for stages, schedule in simulator.attempt(name, plans) or ():
                    yield name, stages, schedule
    is_stack = layer_stack(graph) is not None and simulator.workload.training
    for name, pipeline in PIPELINES.items() if simulator.model.is_cut else ():
        if name in FIELD and is_stack:
            continue  # tuned above
        make = partial(
            pipeline.plans, graph, chain, simulator.cluster, batch, simulator.settings.pipelines
        )
        for stages, schedule in simulator.attempt(name, make) or ():
            yield name, stages, schedule


def _stages(simulator: Simulator, name: str) -> tuple[Stage, ...]:
    """A strategy on every mesh that it knows."""
    graph, size = simulator.workload.graph, simulator.cluster.num_devices
    return simulator.attempt(name, partial(STRATEGIES[name].stages, graph, size)) or ()


def splits_alone(simulator: Simulator) -> None:
    """What the search for splits alone finds on one stage, where that is quick."""
    graph, settings = simulator.workload.graph, simulator.settings
    small = len(graph.ops) <= settings.small_ops
    small &= simulator.cluster.num_devices <= settings.small_devices
    if not small or simulator.constraints or simulator.max_memory < math.inf:
        return
    sharding = simulator.attempt(
        "the search for splits alone",
        lambda: shard(
            graph, simulator.cluster, training=simulator.workload.training,
            optimizer=simulator.workload.optimizer, stop=simulator.left(),
        ),
    )  # fmt: skip
    if sharding is not None and sharding.best is not None:
        simulator.add("sharding", (sharding.best.simulation.stage,), Schedule())


def whole_blocks(simulator: Simulator) -> None:
    """The best plan with its stages moved to the borders of blocks, unless a cut was asked for.

    Code of whole layers is what people merge; it is taken where it costs next to nothing.
    """
    best, constraints = simulator.best(), simulator.constraints
    if best is None or best.solution is None or simulator.cut():
        return
    if constraints.pinned_to("cut") or not constraints.allow("cut", WHOLE_BLOCKS):
        return
    inside = inside_blocks(simulator.workload.graph)
    if all(stage.splits[0].op not in inside for stage in best.simulation.stages):
        return
    model = simulator.model
    borders = [k for k, own in enumerate(model.chain.segments) if own.ops[0] not in inside]
    moved = cuts_at(model.problem, best.solution, borders)
    if moved is not None:
        schedule = best.simulation.schedule
        simulator.add("search", model.stages(moved), schedule, solution=moved, moved=True)


IN_WORDS = {
    "m": "of the arithmetic on all devices, then a stage on each",
    "nn": "of the arithmetic on all devices, half of it before and half of it halfway through a "
    "stage on each",
    "k": "of the arithmetic on all devices, or just what is behind two branches; before it a "
    "stage of a branch on each",
}


def only_shapes(simulator: Simulator, shape: str) -> Result[object]:
    """All that is tried where a shape is pinned; nothing is known of what was not tried."""
    if not simulator.model.is_cut:
        raise InputError(
            f"shape={shape} is for several micro-batches, and ops of the model mix samples",
            fix=f"drop shape={shape}",
            field="pin",
        )
    placed = _placed(simulator, shape, simulator.settings.shapes.shared)
    candidates = _tried(simulator, shape, placed, _counts(simulator))
    for candidate in sorted(candidates, key=rank)[: simulator.settings.shapes.ordered]:
        _reorder(simulator, shape, candidate)
    return Result(
        f"{shape}-shape", Status.FEASIBLE, None, None, None, "all shapes were tried",
        simulator.clock.seconds(), simulator.seed, len(candidates),
    )  # fmt: skip


def shape_space(simulator: Simulator, shape: str) -> str:
    """What is tried where a shape is pinned, in words."""
    parts = ", ".join(f"{part:.0%}" for part in simulator.settings.shapes.shared)
    counts = " or ".join(map(str, _counts(simulator))) or "no number of"
    orders = simulator.constraints.pinned_to("schedule") or f"1f1b and {SEARCHED}"
    return (
        f"{parts} {IN_WORDS[shape]}; {counts} micro-batches; "
        f"orders {orders}; with {simulator.constraints}"
    )


def also_shapes(simulator: Simulator) -> None:
    """Shapes beside a plan that won by itself: M beside a pipeline, on as many micro-batches.

    K wherever there are branches: a chain of segments has no cut between them.
    """
    best, settings = simulator.best(), simulator.settings.shapes
    if best is None or any(simulator.constraints.pinned_to(pin) for pin in PINS):
        return
    if simulator.cluster.num_devices > settings.most_devices:
        return
    if not (simulator.workload.training and simulator.model.is_cut):
        return
    if len(device_groups(best.simulation.stages)) > 1:
        count = best.simulation.schedule.num_microbatches
        _beside(simulator, "m", (count,), best.objective_s)
    _beside(simulator, "k", _counts(simulator), best.objective_s)


def _beside(
    simulator: Simulator, shape: str, counts: tuple[int, ...], best_s: float
) -> None:  # fmt: skip
    """One shape beside the best plan; the order is searched where it could win."""
    batch, size = simulator.workload.batch, simulator.cluster.num_devices
    settings = simulator.settings.shapes
    if not simulator.constraints.allow("shape", shape):
        return
    counts = tuple(n for n in counts if batch // n >= size)  # a sample for every device
    try:
        placed = _placed(simulator, shape, settings.shared[: settings.beside])
    except InputError:
        return  # the model is not of this shape
    fitting = [each for each in _tried(simulator, shape, placed, counts) if each.fits]
    if fitting and min(fitting, key=rank).objective_s < best_s * (1 + settings.gain):
        _reorder(simulator, shape, min(fitting, key=rank))


def _counts(simulator: Simulator) -> tuple[int, ...]:
    """Numbers of micro-batches: a few for each device, each with a sample for every device."""
    batch, size = simulator.workload.batch, simulator.cluster.num_devices
    allow = simulator.constraints.allow
    counts = [n for n in divisors(batch) if batch // n >= size and allow("micro-batches", n)]
    wanted = simulator.settings.shapes.microbatches * size
    return tuple(sorted(sorted(counts, key=lambda n: (abs(n - wanted), n))[:2]))


def _placed(
    simulator: Simulator, shape: str, parts: tuple[float, ...]
) -> list[tuple[Stage, ...]]:  # fmt: skip
    """The stages of a shape with each part shared; refused where the model has none of them."""
    placed: list[tuple[Stage, ...]] = []
    why: PlanError | None = None
    for shared in (0.0, *parts) if shape == "k" else parts:
        try:
            stages = SHAPES[shape](simulator.workload, simulator.cluster.num_devices, shared)
        except PlanError as error:
            why = error  # too few ops for a stage on each device, or no branches
            continue
        placed += [] if stages in placed else [stages]
    if why is not None and not placed:
        raise InputError(f"shape={shape}: {why.found}", fix=why.fix, field="pin") from None
    return placed


def _tried(
    simulator: Simulator, shape: str, placed: list[tuple[Stage, ...]], counts: tuple[int, ...]
) -> list[SimulatedPlan]:
    """Stages of a shape with each number, under 1F1B or the schedule that is asked for."""
    name = simulator.constraints.pinned_to("schedule") or "1f1b"
    tried: list[SimulatedPlan] = []
    for stages in placed:
        for count in counts:
            if simulator.cut():
                return tried
            if not simulator.allowed(stages, Schedule(name, count)):
                continue
            candidate = simulator.add(f"{shape}-shape", stages, Schedule(name, count))
            tried += [] if candidate is None else [candidate]
    return tried


def _reorder(simulator: Simulator, shape: str, candidate: SimulatedPlan) -> None:
    if not simulator.constraints.allow("schedule", SEARCHED) or simulator.cut():
        return
    order = simulator.attempt(
        f"a searched order of {shape}-shape",
        partial(
            searched_schedule, candidate.simulation, simulator.memo, simulator.left(),
            simulator.seed, simulator.settings,
        ),
    )  # fmt: skip
    if order is not None:
        simulator.add(f"{shape}-shape", candidate.simulation.stages, order)
