"""Named strategies as candidates: some at once, all at the end, and the sharding search alone."""

import math
from collections.abc import Iterator
from functools import partial

from partita.graph.chain import chain_of
from partita.jobs.field import FIELD, whole_field
from partita.jobs.framework_plan import FrameworkStrategy, framework_plan, layer_stack
from partita.jobs.mixed import by_kind, kinds_of, unequal
from partita.jobs.pipelines import PIPELINES
from partita.jobs.plan_simulator import Simulator
from partita.jobs.shard import shard
from partita.jobs.strategies import STRATEGIES
from partita.plans import Schedule, Stage

TRAINING_ONLY = ("zero1", "fsdp")  # they keep states, which inference has none of


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
    """On heterogeneous devices the first that fits with samples by speed."""
    make = partial(unequal, simulator.workload.graph, simulator.cluster, simulator.workload.batch)
    for stages, schedule in simulator.attempt("unequal", make) or ():
        if simulator.allowed(stages, schedule):
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
