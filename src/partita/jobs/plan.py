"""Plan a model: splits, stages, devices, micro-batches, recompute and schedule in one search.

1. Something to show at once: named strategies on one stage (`plan_named`).
2. The model becomes a chain of segments with its repeats folded. For every number of stages (and,
   on unlike devices, every way to give kinds to stages) and a few numbers of micro-batches, the
   best cuts are drafted, the best drafts simulated, and other orders tried around the leaders
   (`plan_pipelines`, `search/joint`).
3. The named strategies are candidates too: those that could still win are simulated.

The fastest that fits wins (`plan_tried`); it is never slower than a named strategy. The lower bound
is the larger of all work over all devices, and of the least bound over all numbers of stages and
micro-batches that were looked at (`search/joint/bounds.py`).
"""

import math
from collections.abc import Sequence

from partita.cluster import Cluster, resolve
from partita.costs.collectives import Collectives
from partita.costs.sharding import LEVELS
from partita.errors import InputError
from partita.graph.record import Graph
from partita.jobs.plan_named import all_named, something_at_once, splits_alone
from partita.jobs.plan_pipelines import Pipelines
from partita.jobs.plan_result import Planned, planned, rejection
from partita.jobs.plan_tried import Candidate, Clock, Tried
from partita.jobs.wish_check import check_wishes
from partita.jobs.wishes import parse_wishes
from partita.jobs.workload import load
from partita.lower import Memo
from partita.search.base import Stop
from partita.search.joint.drafts import Drafting

__all__ = ("DEFAULT_STOP", "OBJECTIVES", "Candidate", "Planned", "plan", "rejection")

OBJECTIVES = ("throughput", "latency")
DEFAULT_STOP = Stop(time_s=60.0, gap=0.01)


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
) -> Planned:
    """Find the fastest way to run a model on a cluster.

    `objective` matters for inference: `latency` is the time of one batch, `throughput` the time
    from one batch to the next. `max_memory` is bytes per device; `pin` and `forbid` hold texts
    such as `stages=4` or `schedule=gpipe`.
    """
    if objective not in OBJECTIVES:
        raise InputError(
            f"found {objective!r}", fix=f"use one of {', '.join(OBJECTIVES)}", field="objective"
        )
    if max_memory is not None and max_memory <= 0:
        raise InputError(f"found {max_memory:g} bytes", fix="give more than 0", field="max_memory")
    wishes = parse_wishes(pin, forbid)
    machine = resolve(cluster) if isinstance(cluster, str) else cluster
    spec = cluster if isinstance(cluster, str) else cluster.name
    workload = load(model, batch=batch, dtype=dtype, training=training, optimizer=optimizer)
    limit, memo, clock = max_memory or math.inf, Memo(Collectives(machine)), Clock(stop)
    level = wishes.pinned_to("sharded")
    drafting = Drafting(
        workload.graph, workload.optimizer, machine, memo.collectives, wishes.allow,
        LEVELS if level is None else (level,), limit, clock.must_end,
    )  # fmt: skip
    check_wishes(
        wishes, batch=workload.batch, cluster=machine, num_segments=drafting.chain.num_segments,
        inner_size=drafting.patterns.inner_size, training=training,
    )  # fmt: skip
    tried = Tried(workload, machine, objective, wishes, limit, stop, drafting, memo, clock)
    pipelines = Pipelines(tried, seed)
    something_at_once(tried)
    for step in (
        pipelines.draft_all,
        pipelines.take_turns,
        pipelines.simulate_leaders,
        pipelines.other_orders,
    ):
        if not tried.done():
            step()
    if not tried.pressed():
        pipelines.one_to_show()
    if not tried.is_cut():  # a gap that is small enough is no reason to lose to a named way
        all_named(tried)
        splits_alone(tried)
    return planned(tried, pipelines, spec, seed)
