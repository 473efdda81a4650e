"""Plans of strategies by name, for the tests of exports."""

import functools
from pathlib import Path

from partita.cluster import resolve
from partita.export.job import Export, export
from partita.jobs.frameworks import FrameworkStrategy, framework_plan
from partita.jobs.simulate import simulate_stages
from partita.jobs.workload import Workload, cluster_ref, load
from partita.plans import Origin, Plan

MACHINE = "2x4xA100"
LLAMA = str(Path(__file__).parents[1] / "data/export/config.json")  # four layers
DECODER = f"{Path(__file__).parent / 'tiny_decoder.py'}:make"


@functools.cache
def workload(model: str, batch: int) -> Workload:
    return load(model, batch=batch)


@functools.cache
def plan_of(strategy: FrameworkStrategy, model: str = LLAMA, machine: str = MACHINE) -> Plan:
    """The plan of a strategy, as if a search had found it."""
    work, cluster = workload(model, strategy.batch), resolve(machine)
    stages, schedule = framework_plan(work.graph, strategy)
    simulation = simulate_stages(work, cluster, stages, schedule)
    return Plan(
        work.ref(), cluster_ref(machine, cluster), simulation.decided,
        simulation.prediction(0.0), Origin("test", "feasible", "", 0, 0.0, "0"), schedule,
    )  # fmt: skip


def exported(strategy: FrameworkStrategy, target: str, model: str = LLAMA) -> Export:
    return export(plan_of(strategy, model), target)
