"""A plan as a strategy that frameworks can be told, and what of the plan that leaves out.

Degrees are read off the stage with the most ops, layers off the stages, ZeRO and checkpointing off
what most parameters and stages do. Then the strategy is turned into stages again, and compared op
by op: what differs is said in words.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from partita.degrees import TITLES, axis_names, copied_bytes, shard_group, stage_degrees
from partita.errors import PlanError
from partita.graph.record import Graph
from partita.jobs.frameworks import (
    FrameworkPlan,
    FrameworkStrategy,
    even_layers,
    framework_plan,
    layer_stack,
)
from partita.plans import Plan, Schedule, Stage, device_groups, shared_stages

KNOWN = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v")


@dataclass(frozen=True)
class ReadOff:
    """The strategy nearest to a plan, and in words what the plan does otherwise."""

    strategy: FrameworkStrategy
    differences: tuple[str, ...]


def read_off(plan: Plan, graph: Graph) -> ReadOff:
    """The degrees of a plan; refuses one whose devices make no grid of pp x dp x cp x tp."""
    told: list[str] = []
    groups = device_groups(plan.stages)
    if shared := shared_stages(groups):
        raise PlanError(
            f"{plan.stages[min(shared)].name} runs on several groups of devices together, which "
            "frameworks have no word for",
            fix="run the plan with: partita run",
            field="stages",
        )
    pp, vpp = len(groups), max(len(group) for group in groups)
    stage = max(plan.stages, key=lambda one: (len(one.splits), len(one.mesh.devices)))
    degrees = stage_degrees(stage, axis_names(graph, stage))
    used = len({device for one in plan.stages for device in one.mesh.devices})
    tp = degrees["tp"]
    cp = degrees["cp"]
    if degrees["spatial"] > 1:
        told.append(f"spatial parallelism (spatial={degrees['spatial']})")
    if used % (pp * tp * cp):
        raise PlanError(
            f"{used} devices in {pp} groups of tp={tp} x cp={cp} make no grid of pp x dp x cp x tp",
            fix="plan with --pin pp=N and --pin tp=N that divide the devices",
            field="stages",
        )
    if len({len(one.mesh.devices) for one in plan.stages}) > 1:
        told.append("stages of unequal numbers of devices")
    if any(axis.weights for one in plan.stages for axis in one.mesh.axes):
        told.append("unequal shares of heterogeneous devices")
    layers, cut = _layers(plan.stages, graph) if pp > 1 else ((), False)
    told += ["cuts inside of layers"] * cut
    dp = used // (pp * tp * cp)
    count = plan.schedule.num_microbatches
    micro = max(1, plan.model.batch // (count * dp))
    if plan.model.batch % dp:
        raise PlanError(
            f"{dp} replicas share a batch of {plan.model.batch}, and frameworks give each whole "
            "samples",
            fix=f"plan with a batch that {dp} divides, or with fewer devices",
            field="model",
        )
    if micro * count * dp != plan.model.batch:
        count = plan.model.batch // dp
        micro = 1
        told.append("samples of a micro-batch that are shared by several replicas")
    zero = _zero(plan.stages, graph)
    group = shard_group(stage, axis_names(graph, stage)) if zero else 0
    if group and (dp % group or group in (1, dp) or degrees["cp"] > 1):
        told.append(f"shard groups of {group} replicas")
        group = 0
    strategy = FrameworkStrategy(
        tp=tp, sp=bool(degrees["sp"]) and tp > 1, pp=pp, vpp=vpp if pp > 1 else 1, dp=dp,
        zero=zero, hsdp=group, micro_batch=micro, num_microbatches=count,
        recompute=_recompute(plan.stages, graph), schedule=_schedule(plan.schedule, pp, vpp),
        layers=layers, cp=cp,
    )  # fmt: skip
    return ReadOff(strategy, tuple(told))


def _layers(stages: tuple[Stage, ...], graph: Graph) -> tuple[tuple[int, ...], bool]:
    """Layers of each stage, each where most of its ops are; is one in two stages?"""
    stack = layer_stack(graph)
    if stack is None:
        return even_layers(len(stages), len(stages)), False
    stage_of = {split.op: i for i, stage in enumerate(stages) for split in stage.splits}
    votes: dict[int, Counter[int]] = {}
    for op, unit in stack.units:
        votes.setdefault(unit, Counter())[stage_of[op]] += 1
    counts = [0] * len(stages)
    for unit in range(1, stack.num_layers + 1):
        counts[votes[unit].most_common(1)[0][0]] += 1
    return tuple(counts), any(len(vote) > 1 for vote in votes.values())


def _zero(stages: tuple[Stage, ...], graph: Graph) -> int:
    """The ZeRO stage of most bytes of parameters that have copies."""
    sizes: Counter[int] = Counter()
    for stage in stages:
        for split in stage.splits:
            sizes[split.zero] += int(copied_bytes(graph, stage, split))
    level, size = max(sizes.items(), key=lambda item: (item[1], -item[0]))
    return level if size else 0


def _recompute(stages: tuple[Stage, ...], graph: Graph) -> str:
    """What most stages do; of selective checkpointing the kind that names most alike."""
    kinds = Counter(stage.checkpointing for stage in stages)
    kind = kinds.most_common(1)[0][0]
    if kind != "selective":
        return kind
    again = {op for stage in stages for op in stage.recomputed}
    own = {graph.op(op).kind for op in again}
    if own == {"attention"}:
        return "attention"
    return "norms" if own <= {"layer_norm", "rms_norm"} else "selective"


def _schedule(schedule: Schedule, pp: int, vpp: int) -> str:
    if pp == 1:
        return "1f1b"
    if schedule.name in KNOWN and not schedule.order:
        return schedule.name
    return "interleaved" if vpp > 1 else "1f1b"


def differences(
    plan: Plan, graph: Graph, strategy: FrameworkStrategy, made: FrameworkPlan | None = None
) -> tuple[str, ...]:
    """What a plan does otherwise than a strategy, in words; nothing where they are the same."""
    stages, schedule = made or framework_plan(graph, strategy)
    told = []
    if [_places(stage) for stage in stages] != [_places(stage) for stage in plan.stages]:
        told.append("other cuts or devices of stages")
    mine, its = _splits(stages, graph), _splits(plan.stages, graph)
    split = [op for op in its if mine[op][0] != its[op][0]]
    if split:
        told.append(f"{len(split)} of {len(its)} ops split otherwise (first {split[0]})")
    shared = [op for op in its if mine[op][1] != its[op][1]]
    if shared:
        told.append(f"another ZeRO stage of {len(shared)} ops (first {shared[0]})")
    if plan.model.matmul_dtype:
        told.append(f"linear layers that multiply in {plan.model.matmul_dtype}")
    if _replicas(stages) != _replicas(plan.stages):
        told.append("parameters sharded over other replicas")
    if [_buffers(stage) for stage in stages] != [_buffers(stage) for stage in plan.stages]:
        told.append("other buckets of gradients or prefetching of parameters")
    if [_again(stage) for stage in stages] != [_again(stage) for stage in plan.stages]:
        told.append("other ops that are recomputed")
    if len(stages) > 1 and (schedule.name, ()) != (plan.schedule.name, plan.schedule.order):
        own = TITLES.get(plan.schedule.name, plan.schedule.name)
        told.append(f"its order of micro-batches ({own})")
    if schedule.num_microbatches != plan.schedule.num_microbatches:
        told.append(f"{plan.schedule.num_microbatches} micro-batches")
    return tuple(told)


def _places(stage: Stage) -> tuple[object, ...]:
    return tuple(sorted(split.op for split in stage.splits)), frozenset(stage.mesh.devices)


def _replicas(stages: tuple[Stage, ...]) -> list[tuple[int, ...]]:
    """Of each stage that shards, the sizes of axes along which it keeps replicas."""
    return [
        tuple(axis.size for axis in stage.mesh.axes if axis.replicates and axis.size > 1)
        if any(split.zero for split in stage.splits)
        else ()
        for stage in stages
    ]


def _buffers(stage: Stage) -> tuple[int, int]:
    return stage.prefetch, stage.bucket_bytes


def _again(stage: Stage) -> tuple[object, ...]:
    return stage.checkpointing, frozenset(stage.recomputed), frozenset(stage.segments)


def _splits(stages: tuple[Stage, ...], graph: Graph) -> dict[str, tuple[object, int]]:
    """Of each op how it is split along axes of several devices, and its ZeRO stage."""
    splits: dict[str, tuple[object, int]] = {}
    for stage in stages:
        for split in stage.splits:
            along = _merged(
                (axis.size, dim)
                for axis, dim in zip(stage.mesh.axes, split.dims, strict=True)
                if axis.size > 1
            )
            zero = split.zero if copied_bytes(graph, stage, split) else 0
            splits[split.op] = (along, zero)
    return splits


def _merged(along: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Neighbouring axes that split one dim are as one."""
    merged: list[tuple[int, str]] = []
    for size, dim in along:
        if merged and merged[-1][1] == dim:
            merged[-1] = (merged[-1][0] * size, dim)
        else:
            merged.append((size, dim))
    return tuple(merged)
