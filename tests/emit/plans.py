"""Plans made by hand: the ops of a model in equal parts, each part on a device of its own."""

from partita.cluster import resolve
from partita.jobs.simulate import simulate_stages
from partita.jobs.strategies import STRATEGIES
from partita.jobs.workload import load
from partita.plans import (
    Axis,
    ClusterRef,
    Mesh,
    OpSplit,
    Origin,
    Plan,
    Prediction,
    Schedule,
    Stage,
)  # fmt: skip


def plan_by_strategy(spec: str, strategy: str, num_devices: int, mesh: int = 0, **options) -> Plan:
    """A plan of one stage that runs its batch at once, split as a strategy splits it."""
    workload = load(spec, **options)
    cluster = resolve(f"{num_devices}xA100")
    stages = STRATEGIES[strategy].stages(workload.graph, num_devices)[mesh : mesh + 1]
    simulation = simulate_stages(workload, cluster, stages, Schedule())
    return Plan(
        workload.ref(),
        ClusterRef(f"{num_devices}xA100", num_devices, cluster.fingerprint()),
        simulation.decided,
        simulation.prediction(0.0),
        Origin("by hand", "feasible", "for a test", 0, 0.0, "0"),
        simulation.schedule,
    )


def plan_in_parts(spec: str, num_stages: int, microbatches: int = 1, **options) -> Plan:
    """A plan of `num_stages` stages of as many ops each."""
    workload = load(spec, **options)
    cluster = resolve(f"{num_stages}xA100")
    ops = [op.name for op in workload.graph.ops if op.phase == "forward"]
    stages = tuple(
        Stage(f"stage{s}", Mesh((Axis("x", 1),), (s,)), tuple(
            OpSplit(op, ("",)) for i, op in enumerate(ops) if i * num_stages // len(ops) == s
        ))
        for s in range(num_stages)
    )  # fmt: skip
    return Plan(
        workload.ref(),
        ClusterRef(f"{num_stages}xA100", num_stages, cluster.fingerprint()),
        stages,
        Prediction(1.0, 0.5, 1.0, 0.0, (0.0,) * num_stages, (1.0,) * num_stages),
        Origin("by hand", "feasible", "for a test", 0, 0.0, "0"),
        Schedule("1f1b", microbatches),
    )
