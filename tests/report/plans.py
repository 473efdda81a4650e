"""Plans small enough to look at, made without a search."""

from partita.cluster import resolve
from partita.jobs.simulate import Simulation, data_parallel, simulate_stages
from partita.jobs.workload import Workload, cluster_ref, load
from partita.plans import (
    Alternative,
    Axis,
    Mesh,
    OpSplit,
    Origin,
    Plan,
    Prediction,
    Progress,
    Schedule,
    Stage,
)
from partita.timeline import LaneSketch
from partita.zoo.gpt import GptSizes, gpt


def line(
    model: str, cluster: str, microbatches: int, name: str = "stage", **options: object
) -> Plan:
    """A plan with the ops of a model in equal parts, one on each device of a cluster."""
    workload, machine = load(model, **options), resolve(cluster)  # type: ignore[arg-type]
    ops = [op.name for op in workload.graph.ops if op.phase == "forward"]
    count = machine.num_devices
    stages = tuple(
        Stage(f"{name}{s}", Mesh((Axis("x", 1),), (s,)), tuple(
            OpSplit(op, ("",)) for i, op in enumerate(ops) if i * count // len(ops) == s
        ))
        for s in range(count)
    )  # fmt: skip
    return plan_of(workload, cluster, stages, Schedule("1f1b", microbatches), name)


def fully_sharded(model: str, cluster: str, **options: object) -> Plan:
    """A plan of one stage with the batch split and all parameters sharded (ZeRO 3)."""
    workload = load(model, **options)  # type: ignore[arg-type]
    stage = data_parallel(workload.graph, resolve(cluster), 3)
    return plan_of(workload, cluster, (stage,), Schedule())


def plan_of(
    workload: Workload, cluster: str, stages: tuple[Stage, ...], schedule: Schedule,
    name: str = "by hand",
) -> Plan:  # fmt: skip
    """A plan with these decisions and a prediction that nobody computed."""
    machine = resolve(cluster)
    count = machine.num_devices
    lanes = (LaneSketch(name, "F0:400 -:100 B0:500"),)
    other = Alternative(name, name, 2.0, 1.0, name, None, lanes)
    return Plan(
        workload.ref(),
        cluster_ref(cluster, machine),
        stages,
        Prediction(1.0, 1e-6, 1.0, 0.0, (0.0,) * count, (2.0**34,) * count),
        Origin(name, "feasible", name, 0, 2.0, "0", (Progress(1.0, 1.0, 0.5),), (other,)),
        schedule,
    )


def tiny_gpt(batch: int = 8) -> Workload:
    """A GPT of one layer for training, with tokens."""
    sizes = GptSizes(layers=1, width=64, heads=4, vocab=256, positions=32)
    return load(gpt("tiny-gpt", sizes, batch, 32, "bf16", True, True))


def simulated(plan: Plan, workload: Workload) -> Simulation:
    """The plan of a model that has no name to be found by."""
    return simulate_stages(workload, resolve(plan.cluster.spec), plan.stages, plan.schedule)
