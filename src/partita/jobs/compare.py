"""Named strategies and our searches side by side: time, memory, bubble, what the search took.

Every named strategy is simulated on all meshes and depths it knows, by the same simulator as the
search's plan. The best that fits stands for it; where nothing fits, the thriftiest.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from partita.cluster import Cluster, resolve
from partita.costs.collectives import Collectives
from partita.graph.chain import chain_of
from partita.graph.record import Graph
from partita.jobs.frameworks import FIELD, field_plans, layer_stack
from partita.jobs.plan import DEFAULT_STOP, plan
from partita.jobs.plan_settings import PlanSettings
from partita.jobs.shard import shard
from partita.jobs.simulate import Attempts, Simulation, in_words, simulate_stages
from partita.jobs.strategies import PIPELINES, STRATEGIES, NamedStrategy, by_kind, kinds_of, unequal
from partita.jobs.workload import Workload, load
from partita.lower import Memo
from partita.plans import Schedule, Stage
from partita.search.base import Stop
from partita.showing import plot_of, repr_html, table_of

Pipeline = tuple[tuple[Stage, ...], Schedule]
FIELD_PLANS = 12  # of frameworks that the joint search looks at, too
MOST_PLANS = 12  # of one strategy: depths and meshes beyond are left out, evenly
TRAINING = ("zero1", "fsdp")  # they differ from data parallel in what only training has
BY_KIND = "stages by kind of device, work by speed"
UNEQUAL = "data parallel, samples by speed"
SHARD = ("shard", "our search for splits")
JOINT = ("plan", "our joint search")


@dataclass(frozen=True)
class ComparedStrategy:
    """One way of the table; `simulation` is None where there is nothing to show, as `note` says."""

    name: str
    summary: str
    simulation: Simulation | None
    seconds: float
    num_plans: int
    steady_state: bool = False  # does the time from batch to batch count, or that of one batch?
    note: str = ""

    @property
    def fits(self) -> bool:
        """Is there a plan of it that fits?"""
        return self.simulation is not None and self.simulation.fits

    @property
    def step_s(self) -> float:
        """Seconds of one step; infinite where there is none."""
        return math.inf if self.simulation is None else self.simulation.step_s

    @property
    def objective_s(self) -> float:
        """Seconds of what counts; infinite where there is none."""
        return _objective_s(self.simulation, self.steady_state) if self.simulation else math.inf


def _objective_s(simulation: Simulation, steady_state: bool) -> float:
    return simulation.interval_s if steady_state else simulation.step_s


@dataclass(frozen=True)
class Comparison:
    """All ways, our searches last, and the lower bound of the joint search."""

    rows: tuple[ComparedStrategy, ...]
    lower_bound_s: float

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def best(self) -> ComparedStrategy | None:
        """The fastest that fits."""
        return min((r for r in self.rows if r.fits), key=lambda r: r.objective_s, default=None)


def compare(
    model: str | Graph,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    objective: str = "throughput",
    stop: Stop = DEFAULT_STOP,
    seed: int = 0,
) -> Comparison:
    """Every named strategy, the search for splits, and the joint search.

    After an interruption the rest of the ways are named and left out. The search for splits knows
    only the time of one step, whatever the objective.
    """
    machine = resolve(cluster) if isinstance(cluster, str) else cluster
    work = load(model, batch=batch, dtype=dtype, training=training, optimizer=optimizer)
    steady_state = not work.training and objective == "throughput"
    named = _Named(work, machine, stop, steady_state, Memo(Collectives(machine)))
    rows = [named.row(*strategy) for strategy in named_plans(work, machine)]
    asked: dict[str, Any] = {
        "batch": batch, "dtype": dtype, "training": training, "optimizer": optimizer,
        "stop": stop, "seed": seed,
    }  # fmt: skip
    if stop.interrupted():
        return Comparison((*rows, _left_out(*SHARD), _left_out(*JOINT)), 0.0)
    attempt = Attempts()
    split = attempt("shard", lambda: shard(model, machine, **asked))
    if split is None:
        rows.append(_failed(*SHARD, attempt))
    else:
        best = None if split.best is None else split.best.simulation
        note = "" if best else f"{split.status}: {split.why}"
        count = len(split.tried)
        rows.append(ComparedStrategy(*SHARD, best, split.seconds, count, steady_state, note))
    settings = PlanSettings(field_plans=FIELD_PLANS)
    joint = attempt(
        "plan", lambda: plan(model, machine, objective=objective, settings=settings, **asked)
    )
    if joint is None:
        return Comparison((*rows, _failed(*JOINT, attempt)), 0.0)
    best = None if joint.best is None else joint.best.simulation
    note = "" if best else f"{joint.status}: {joint.why}"
    count = joint.num_simulated
    rows.append(ComparedStrategy(*JOINT, best, joint.seconds, count, steady_state, note))
    return Comparison(tuple(rows), joint.lower_bound_s)


Make = Callable[[], Sequence[Pipeline]]


def named_plans(work: Workload, machine: Cluster) -> Iterator[tuple[str, str, Make]]:
    """Every named strategy with what makes its plans when it is its turn."""
    graph = work.graph

    def split(strategy: NamedStrategy) -> Sequence[Pipeline]:
        stages = strategy.stages(graph, machine.num_devices)
        return [((stage,), Schedule()) for stage in stages]

    for name, strategy in STRATEGIES.items():
        if work.training or name not in TRAINING:
            yield name, strategy.summary, partial(split, strategy)
    chain, is_stack = chain_of(graph), layer_stack(graph) is not None and work.training
    for name, entry in FIELD.items() if is_stack else ():
        yield name, entry.summary, partial(field_plans, entry, graph, machine, work.batch)
    if len(kinds_of(machine)) > 1:
        yield "by-kind", BY_KIND, partial(by_kind, graph, chain, machine, work.batch)
        yield "unequal", UNEQUAL, partial(unequal, graph, machine, work.batch)
    for name, pipeline in PIPELINES.items():
        if name in FIELD and is_stack:
            continue  # tuned above
        yield name, pipeline.summary, partial(pipeline.plans, graph, chain, machine, work.batch)


def _left_out(name: str, summary: str) -> ComparedStrategy:
    return ComparedStrategy(name, summary, None, 0.0, 0, note="not reached")


def _failed(name: str, summary: str, attempt: Attempts) -> ComparedStrategy:
    return ComparedStrategy(name, summary, None, 0.0, 0, note=in_words(attempt.errors[-1]))


@dataclass(frozen=True)
class _Named:
    """Simulates the plans of named strategies."""

    work: Workload
    machine: Cluster
    stop: Stop
    steady_state: bool
    memo: Memo

    def row(self, name: str, summary: str, make: Make) -> ComparedStrategy:
        """The best of a strategy's plans: those that fit first, then the fastest."""
        started, attempt = time.perf_counter(), Attempts()
        plans = attempt(name, make) or ()
        if len(plans) > MOST_PLANS:
            plans = [plans[i * len(plans) // MOST_PLANS] for i in range(MOST_PLANS)]
        simulations: list[Simulation] = []
        for stages, schedule in plans:
            if self.stop.interrupted():
                break
            what = f"{name} in {len(stages)} stages on {stages[0].mesh}"
            simulation = attempt(what, partial(self._simulate, stages, schedule))
            simulations += [simulation] if simulation is not None else []
        if not simulations and attempt.errors:
            return _failed(name, summary, attempt)
        if not simulations:
            return _left_out(name, summary) if plans else self._impossible(name, summary)
        best = min(simulations, key=lambda s: (not s.fits, _objective_s(s, self.steady_state)))
        seconds = time.perf_counter() - started
        return ComparedStrategy(name, summary, best, seconds, len(simulations), self.steady_state)

    def _impossible(self, name: str, summary: str) -> ComparedStrategy:
        return ComparedStrategy(name, summary, None, 0.0, 0, note="cannot run here")

    def _simulate(self, stages: tuple[Stage, ...], schedule: Schedule) -> Simulation:
        return simulate_stages(
            self.work, self.machine, stages, schedule, self.memo, most_devices=1, quick=True
        )
