"""What planners for heterogeneous devices do, by name: stages by kind, shares by speed.

    by-kind   each kind of devices forms stages of its own, as wide as it has devices, with as much
              of the model as it is fast (Metis, Sailor); data parallel inside, any order of kinds
    unequal   one stage of all devices, each with samples in proportion to its speed (as in
              HexiScale), parameters replicated or sharded

Speed is that of the model's forward on one such device, op by op. Nothing here knows transformers.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partita.cluster import Cluster, DeviceKind
from partita.costs.roofline import op_cost
from partita.graph.chain import Chain
from partita.graph.record import Graph
from partita.graph.work import flops
from partita.jobs.simulate import data_splits
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.search.joint.groupings import divisors

MixedPlan = tuple[tuple[Stage, ...], Schedule]


@dataclass(frozen=True, slots=True)
class MixedSettings:
    """How many plans there are."""

    stages: tuple[int, ...] = (1, 2, 4)  # of each kind
    per_stage: tuple[int, ...] = (4, 8)  # micro-batches for every stage
    finest_share: int = 12  # samples of the slowest at most, and so many numbers of them
    shares: int = 3
    plans: int = 12


USUAL = MixedSettings()


def kinds_of(cluster: Cluster) -> dict[str, list[int]]:
    """The devices of each kind."""
    kinds: dict[str, list[int]] = {}
    for device in range(cluster.num_devices):
        kinds.setdefault(cluster.kind_of(device).name, []).append(device)
    return kinds


def by_kind(
    graph: Graph, chain: Chain, cluster: Cluster, batch: int, settings: MixedSettings = USUAL
) -> list[MixedPlan]:
    """Stages of one kind each, in every order of kinds, with work by speed."""
    kinds = kinds_of(cluster)
    if len(kinds) < 2:
        return []
    plans = []
    for order in itertools.permutations(sorted(kinds)):
        for counts in itertools.product(settings.stages, repeat=len(order)):
            groups = _groups(kinds, order, counts)
            if groups is None or len(groups) > chain.num_segments:
                continue
            for count in _numbers(batch, groups, settings):
                for checkpointing in ("none", "full") if graph.is_training else ("none",):
                    stages = _stages(graph, chain, cluster, groups, checkpointing)
                    plans.append((stages, Schedule("1f1b", count)))
    return _evenly(plans, settings.plans)


def unequal(
    graph: Graph, cluster: Cluster, batch: int, settings: MixedSettings = USUAL
) -> list[MixedPlan]:
    """One stage, samples by speed."""
    if len(kinds_of(cluster)) < 2:
        return []
    speeds = [_speed(graph, cluster, device) for device in range(cluster.num_devices)]
    plans: list[MixedPlan] = []
    for weights in _shares(speeds, batch, settings):
        mesh = Mesh((Axis("dp", len(weights), weights),), tuple(range(len(weights))))
        for zero in (0, 1, 3) if graph.is_training else (0,):
            stage = Stage("model", mesh, data_splits(graph, mesh, zero))
            plans.append(((stage,), Schedule()))
    return plans[: settings.plans]


def _speed(graph: Graph, cluster: Cluster, device: int) -> float:
    return _speed_of(graph, cluster.kind_of(device))


@functools.lru_cache(maxsize=64)
def _speed_of(graph: Graph, kind: DeviceKind) -> float:
    """Forwards in a second."""
    seconds = sum(op_cost(graph, op, kind, ()).seconds for op in graph.ops if op.phase == "forward")
    return 1 / seconds if seconds else 1.0


def _groups(
    kinds: dict[str, list[int]], order: Sequence[str], counts: Sequence[int]
) -> list[list[int]] | None:
    """The devices of each stage; None where a kind's devices are not divided by its stages."""
    groups = []
    for name, count in zip(order, counts, strict=True):
        devices = kinds[name]
        if len(devices) % count:
            return None
        width = len(devices) // count
        groups += [devices[i * width : (i + 1) * width] for i in range(count)]
    return groups


def _numbers(batch: int, groups: list[list[int]], settings: MixedSettings) -> Iterator[int]:
    """Numbers of micro-batches whose samples every stage can share out evenly."""
    widths = math.lcm(*(len(group) for group in groups))
    good = [count for count in divisors(batch) if (batch // count) % widths == 0]
    wanted = [each * len(groups) for each in settings.per_stage]
    yield from sorted({min(good, key=lambda c: (abs(c - w), c)) for w in wanted} if good else ())


def _stages(
    graph: Graph, chain: Chain, cluster: Cluster, groups: list[list[int]], checkpointing: str
) -> tuple[Stage, ...]:
    speeds = [sum(_speed(graph, cluster, device) for device in group) for group in groups]
    ends = cuts_by_speed(chain, speeds)
    stages = []
    bounds = zip((0, *ends), (*ends, chain.num_segments), groups, strict=True)
    for number, (first, last, group) in enumerate(bounds):
        mesh = Mesh((Axis("dp", len(group)),), tuple(group))
        splits = _splits(graph, mesh)
        segments = chain.segments[first:last]
        mine = tuple(splits[op] for segment in segments for op in segment.ops)
        kept = tuple(segment.ops[0] for segment in segments[1:]) if checkpointing == "full" else ()
        stages.append(Stage(f"stage{number}", mesh, mine, checkpointing, kept))
    return tuple(stages)


def _splits(graph: Graph, mesh: Mesh) -> dict[str, OpSplit]:
    return {split.op: split for split in data_splits(graph, mesh)}


def cuts_by_speed(chain: Chain, speeds: Sequence[float]) -> tuple[int, ...]:
    """Segments before which a stage begins, such that work is in proportion to speeds."""
    graph = chain.graph
    work = [sum(flops(graph.call(graph.op(n))) for n in s.ops) for s in chain.segments]
    total, whole, done = sum(work), sum(speeds), 0.0
    cuts: list[int] = []
    wanted = list(itertools.accumulate(speeds))[:-1]
    for index, own in enumerate(work):
        left = len(wanted) - len(cuts)
        reached = left and total and done + own / 2 >= total * wanted[len(cuts)] / whole
        begun = index > (cuts[-1] if cuts else 0)
        if left and begun and (reached or len(work) - index <= left):
            cuts.append(index)
        done += own
    return tuple(cuts)


def _shares(speeds: Sequence[float], batch: int, settings: MixedSettings) -> list[tuple[int, ...]]:
    """Whole numbers of samples by speed whose sum divides the batch, the truest first."""
    slowest, whole = min(speeds), sum(speeds)
    shares: dict[tuple[int, ...], float] = {}
    steps = 4 * settings.finest_share
    for scale in (1 + i / 4 for i in range(steps)):
        weights = tuple(max(1, round(scale * speed / slowest)) for speed in speeds)
        common = math.gcd(*weights)
        weights = tuple(weight // common for weight in weights)
        if batch % sum(weights) == 0:
            pairs = zip(weights, speeds, strict=True)
            shares[weights] = max(w / sum(weights) * whole / speed for w, speed in pairs)
    return sorted(shares, key=lambda weights: (shares[weights], weights))[: settings.shares]


def _evenly(plans: list[MixedPlan], most: int) -> list[MixedPlan]:
    if len(plans) <= most:
        return plans
    return [plans[i * len(plans) // most] for i in range(most)]
