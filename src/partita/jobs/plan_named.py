"""Named strategies as candidates: some at once, all at the end, and the sharding search alone."""

import math
from collections.abc import Iterator

from partita.graph.chain import chain_of
from partita.jobs.pipelines import PIPELINES
from partita.jobs.plan_tried import Tried
from partita.jobs.shard import shard
from partita.jobs.strategies import STRATEGIES
from partita.plans import Schedule, Stage

FIRST = ("data", "zero1", "fsdp")
SMALL_OPS, SMALL_DEVICES = 1000, 64  # up to this size the sharding search is asked as well


def something_at_once(tried: Tried) -> None:
    """Named ways on one stage, of a large model the first that fits: something to show."""
    graph, size = tried.workload.graph, tried.cluster.num_devices
    small = len(graph.ops) <= SMALL_OPS
    for name in STRATEGIES if small else FIRST:
        if tried.workload.training or name not in FIRST[1:]:
            for stage in STRATEGIES[name].stages(graph, size):
                if tried.allowed((stage,), Schedule()):
                    tried.add(name, (stage,), Schedule())
        if tried.done() or (tried.best() is not None and not small):
            return


def all_named(tried: Tried) -> None:
    """Every named strategy that is allowed, unless its floor rules it out."""
    for name, stages, schedule in _plans(tried):
        if tried.is_cut() and tried.candidates:
            return
        if tried.allowed(stages, schedule):
            tried.add(name, stages, schedule)


def _plans(tried: Tried) -> Iterator[tuple[str, tuple[Stage, ...], Schedule]]:
    graph, size = tried.workload.graph, tried.cluster.num_devices
    chain = chain_of(graph)
    for name, strategy in STRATEGIES.items():
        if tried.workload.training or name not in FIRST[1:]:
            for stage in strategy.stages(graph, size):
                yield name, (stage,), Schedule()
    for name, pipeline in PIPELINES.items():
        found = pipeline.plans(graph, chain, tried.cluster, tried.workload.batch)
        for stages, schedule in found:
            yield name, stages, schedule


def splits_alone(tried: Tried) -> None:
    """What the search for splits alone finds on one stage, where that is quick."""
    graph = tried.workload.graph
    small = len(graph.ops) <= SMALL_OPS and tried.cluster.num_devices <= SMALL_DEVICES
    if not small or tried.wishes or tried.max_memory < math.inf:
        return
    found = shard(
        graph, tried.cluster, training=tried.workload.training,
        optimizer=tried.workload.optimizer, stop=tried.left(),
    )  # fmt: skip
    if found.best is not None:
        tried.add("sharding", (found.best.simulation.stage,), Schedule())
