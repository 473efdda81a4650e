"""Plan a model: splits, stages, devices, micro-batches, checkpointing and order in one search.

    workload, cluster, constraints -> model -> problem -> search(problem, simulator) -> plan

1. The model on the cluster is a joint problem (`search.joint.model`): its record states the space,
   and makes tables of strategies when they are asked for.
2. A plan to start from is simulated first, then named strategies on one stage: something to show at
   once (`plan_candidates`).
3. The joint search (`search.joint.auto`) chooses candidates of the space; the simulator has the
   last word on each (`plan_simulator`).
4. The other named strategies are candidates too: those that could still win are simulated.
5. Where a pipeline has won, stages that all devices share are tried beside it (`shapes`).
6. Stages that begin inside of a block of the model are moved to its borders, where that costs
   next to nothing (`PlanSettings.whole_blocks`).

The fastest that fits wins; it is never slower than a named strategy. The lower bound is the larger
of all work over all devices, and of the bound of the whole space that the problem states.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from partita.cluster import Cluster, resolve
from partita.costs.collectives import Collectives
from partita.errors import InputError
from partita.graph.record import Graph
from partita.jobs.constraints import (
    ANYWHERE,
    LINE_SHAPE,
    Constraints,
    check_constraints,
    computation,
    counted,
    keep_splits,
    keeps_degrees,
    parse_constraints,
    roles,
    settled,
    zero_levels,
)
from partita.jobs.plan_candidates import (
    all_named,
    also_shapes,
    only_shapes,
    shape_space,
    something_at_once,
    splits_alone,
    start_from,
    whole_blocks,
)
from partita.jobs.plan_settings import USUAL, PlanSettings
from partita.jobs.plan_simulator import Clock, Planned, SimulatedPlan, Simulator, planned
from partita.jobs.workload import Workload, computed_as, load
from partita.lower import Memo
from partita.plans import Plan, Stage, read_plan
from partita.search.base import Stop, fewer_collections
from partita.search.joint.auto import Auto
from partita.search.joint.model import JointModel, ModelSettings

__all__ = (
    "DEFAULT_STOP",
    "OBJECTIVES",
    "Planned",
    "SimulatedPlan",
    "joint_model",
    "plan",
)

OBJECTIVES = ("throughput", "latency")
DEFAULT_STOP = Stop(time_s=60.0, gap=0.01)
ANYTHING = Constraints()


@fewer_collections()
def plan(
    model: str | Graph,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    objective: str = "throughput",
    pin: Sequence[str] = (),
    forbid: Sequence[str] = (),
    max_memory: float | None = None,
    stop: Stop = DEFAULT_STOP,
    seed: int = 0,
    start: Plan | str | Path | None = None,
    search: Auto | None = None,
    settings: PlanSettings = USUAL,
) -> Planned:
    """Find the fastest way to run a model on a cluster.

    `objective` matters for inference: `latency` is the time of one batch, `throughput` the time
    from one batch to the next. `max_memory` is bytes per device; `pin` and `forbid` hold texts
    such as `pp=4` or `schedule=gpipe`. The answer is never worse than the plan `start`. `search` is
    the joint search with other settings, `settings` are those of what comes before and after it.
    """
    if objective not in OBJECTIVES:
        raise InputError(
            f"found {objective!r}", fix=f"use one of {', '.join(OBJECTIVES)}", field="objective"
        )
    if max_memory is not None and max_memory <= 0:
        raise InputError(f"found {max_memory:g} bytes", fix="give more than 0", field="max_memory")
    constraints = parse_constraints(pin, forbid)
    machine = resolve(cluster) if isinstance(cluster, str) else cluster
    spec = cluster if isinstance(cluster, str) else cluster.name
    workload = load(model, batch=batch, dtype=dtype, training=training, optimizer=optimizer)
    how = computation(constraints, workload.dtype)
    workload = computed_as(workload, how.grad_dtype, how.matmul_dtype, how.execution, machine)
    asked = str(constraints)
    constraints = counted(settled(constraints), workload.batch)
    limit, clock = max_memory or math.inf, Clock(stop)
    joint = joint_model(workload, machine, constraints, limit, clock, asked)
    simulator = Simulator(
        workload,
        machine,
        objective,
        constraints,
        limit,
        joint,
        Memo(joint.collectives),
        clock,
        seed,
        settings,
    )
    if start is not None:
        start_from(simulator, start if isinstance(start, Plan) else read_plan(start))
    something_at_once(simulator)
    shape = constraints.pinned_to("shape") or LINE_SHAPE
    if shape != LINE_SHAPE:
        tried = only_shapes(simulator, shape)
        return planned(simulator, tried, spec, shape_space(simulator, shape))
    result = (search or Auto())(
        joint.problem, clock.search_stop(simulator.heard), seed, evaluator=simulator
    )
    if not simulator.cut():  # a gap that is small enough is no reason to lose to a named strategy
        all_named(simulator)
        splits_alone(simulator)
        also_shapes(simulator)
    whole_blocks(simulator)
    return planned(simulator, result, spec)


def joint_model(
    workload: Workload, cluster: Cluster, constraints: Constraints = ANYTHING,
    max_memory: float = math.inf, clock: Clock | None = None, asked: str = "",
) -> JointModel:  # fmt: skip
    """The joint problem of a workload on a cluster; refuses constraints that no plan can meet.

    `asked` are all constraints in words, also those on how the model is computed.
    """
    stages = constraints.pinned_to("pp")

    def allow(decision: str, value: object) -> bool:
        if decision == "mesh" and isinstance(value, tuple) and roles(constraints, value) is None:
            return False
        return constraints.allow(decision, value)

    joint = JointModel(
        workload.graph, workload.optimizer, cluster, Collectives(cluster), allow,
        zero_levels(constraints), max_memory,
        interrupted=clock.must_end if clock else lambda: False,
        constraints=asked or str(constraints), pinned_schedule=constraints.pinned_to("schedule"),
        pinned_stages=None if stages is None else int(stages), name=workload.spec,
        settings=ModelSettings(whole_blocks=not constraints.allow("cut", ANYWHERE)),
        grad_dtype=workload.grad_dtype, shard_group=int(constraints.pinned_to("hsdp") or 0),
        keeps=lambda axes: keep_splits(constraints, axes),
        suits=lambda mesh, splits: keeps_degrees(
            constraints, workload.graph, [Stage("", mesh, tuple(splits))]
        ),
    )  # fmt: skip
    check_constraints(
        constraints, batch=workload.batch, cluster=cluster,
        num_segments=joint.chain.num_segments, inner_size=joint.patterns.inner_size,
        training=workload.training, has_experts=_has_experts(workload.graph),
        virtual_stages=joint.settings.virtual_stages(joint.pinned_schedule),
    )  # fmt: skip
    return joint


def _has_experts(graph: Graph) -> bool:
    return any(op.kind == "expert_linear" for op in graph.ops)
