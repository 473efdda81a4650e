"""Named strategies as candidates: some at once, all at the end, and the sharding search alone."""

import math
from collections.abc import Iterator
from functools import partial

from partita.graph.chain import chain_of
from partita.jobs.pipelines import PIPELINES
from partita.jobs.plan_simulator import Simulator
from partita.jobs.shard import shard
from partita.jobs.strategies import STRATEGIES
from partita.plans import Schedule, Stage

TRAINING_ONLY = ("zero1", "fsdp")  # they keep states, which inference has none of


def something_at_once(simulator: Simulator) -> None:
    """Named ways on one stage, of a large model the first that fits: something to show."""
    graph, settings = simulator.workload.graph, simulator.settings
    small = len(graph.ops) <= settings.small_ops
    for name in STRATEGIES if small else settings.first:
        if simulator.workload.training or name not in TRAINING_ONLY:
            for stage in _stages(simulator, name):
                if simulator.allowed((stage,), Schedule()):
                    simulator.add(name, (stage,), Schedule())
        if simulator.done() or (simulator.best() is not None and not small):
            return


def all_named(simulator: Simulator) -> None:
    """Every named strategy that is allowed, unless its bound rules it out."""
    for name, stages, schedule in _plans(simulator):
        if simulator.cut() and simulator.candidates:
            return
        if simulator.allowed(stages, schedule):
            simulator.add(name, stages, schedule)


def _plans(simulator: Simulator) -> Iterator[tuple[str, tuple[Stage, ...], Schedule]]:
    graph, batch = simulator.workload.graph, simulator.workload.batch
    chain = chain_of(graph)
    for name in STRATEGIES:
        if simulator.workload.training or name not in TRAINING_ONLY:
            for stage in _stages(simulator, name):
                yield name, (stage,), Schedule()
    for name, pipeline in PIPELINES.items():
        make = partial(pipeline.plans, graph, chain, simulator.cluster, batch)
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
