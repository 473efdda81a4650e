"""Named strategies and our searches side by side: time, memory, bubble, what the search took.

Every named strategy is simulated on all meshes and depths it knows, by the same simulator as the
search's plan. The best that fits stands for it; where nothing fits, the thriftiest.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from partita.cluster import Cluster, resolve
from partita.costs.collectives import Collectives
from partita.graph.chain import chain_of
from partita.graph.record import Graph
from partita.jobs.pipelines import PIPELINES
from partita.jobs.plan import DEFAULT_STOP, plan
from partita.jobs.shard import shard
from partita.jobs.simulate import Simulation, simulate_stage, simulate_stages
from partita.jobs.strategies import STRATEGIES
from partita.jobs.workload import Workload, load
from partita.lower import Memo
from partita.plans import Schedule, Stage, runs_once
from partita.search.base import Stop

Pipeline = tuple[tuple[Stage, ...], Schedule]
MOST_PLANS = 12  # of one strategy: depths and meshes beyond are left out, evenly


@dataclass(frozen=True)
class Compared:
    """One way of the table; `simulation` is None where it cannot run here at all."""

    name: str
    summary: str
    simulation: Simulation | None
    seconds: float
    num_plans: int

    @property
    def fits(self) -> bool:
        """Is there a plan of it that fits?"""
        return self.simulation is not None and self.simulation.fits

    @property
    def step_s(self) -> float:
        """Seconds of one step; infinite where there is none."""
        return math.inf if self.simulation is None else self.simulation.step_s


@dataclass(frozen=True)
class Comparison:
    """All ways, our searches last, and the lower bound of the joint search."""

    rows: tuple[Compared, ...]
    lower_bound_s: float

    @property
    def best(self) -> Compared | None:
        """The fastest that fits."""
        return min((r for r in self.rows if r.fits), key=lambda r: r.step_s, default=None)


def compare(
    model: str | Graph,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    stop: Stop = DEFAULT_STOP,
    seed: int = 0,
) -> Comparison:
    """Every named strategy, the search for splits, and the joint search."""
    machine = resolve(cluster) if isinstance(cluster, str) else cluster
    work = load(model, batch=batch, dtype=dtype, training=training, optimizer=optimizer)
    memo = Memo(Collectives(machine))
    chain = chain_of(work.graph)
    rows = []
    for name, strategy in STRATEGIES.items():
        if training or name not in ("zero1", "fsdp"):
            plans = [((s,), Schedule()) for s in strategy.stages(work.graph, machine.num_devices)]
            rows.append(_named(name, strategy.summary, plans, work, machine, memo))
    for name, pipeline in PIPELINES.items():
        found = pipeline.plans(work.graph, chain, machine, work.batch)
        rows.append(_named(name, pipeline.summary, found, work, machine, memo))
    split = shard(
        model, machine, batch=batch, dtype=dtype, training=training, optimizer=optimizer,
        stop=stop, seed=seed,
    )  # fmt: skip
    best = None if split.best is None else split.best.simulation
    rows.append(Compared("shard", "our search for splits", best, split.seconds, len(split.tried)))
    joint = plan(
        model, machine, batch=batch, dtype=dtype, training=training, optimizer=optimizer,
        stop=stop, seed=seed,
    )  # fmt: skip
    best = None if joint.best is None else joint.best.simulation
    rows.append(Compared("plan", "our joint search", best, joint.seconds, joint.num_simulated))
    return Comparison(tuple(rows), joint.lower_bound_s)


def _named(
    name: str, summary: str, plans: Sequence[Pipeline], work: Workload, machine: Cluster, memo: Memo
) -> Compared:
    """The best of a strategy's plans: those that fit first, then the fastest."""
    started = time.perf_counter()
    if len(plans) > MOST_PLANS:
        plans = [plans[i * len(plans) // MOST_PLANS] for i in range(MOST_PLANS)]
    found = [_simulate(stages, schedule, work, machine, memo) for stages, schedule in plans]
    best = min(found, key=lambda s: (not s.fits, s.step_s), default=None)
    return Compared(name, summary, best, time.perf_counter() - started, len(found))


def _simulate(
    stages: tuple[Stage, ...], schedule: Schedule, work: Workload, machine: Cluster, memo: Memo
) -> Simulation:
    if runs_once(stages, schedule):
        return simulate_stage(work, machine, stages[0], 1, memo.collectives)
    return simulate_stages(work, machine, stages, schedule, memo)
