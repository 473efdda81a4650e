"""The forecast of a strategy by name against the simulation, op by op, of the plan that it is.

    python benchmarks/forecast_against_ops.py

Both have the same degrees, micro-batches, recompute, types and execution; the parameters of the
devices are one set, the code is not. Printed: step and memory of the fullest device of both.
"""

from dataclasses import asdict

from partita import simulate
from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.jobs.frameworks import (
    FrameworkStrategy,
    even_layers,
    framework_plan,
    layer_stack,
)
from partita.jobs.simulate import simulate_stages
from partita.jobs.workload import load
from partita.lower import Memo

# model, cluster, degrees; the batch is theirs
ROWS = (
    ("llama-7b", "4x8xA100", {"dp": 32, "zero": 1, "micro_batch": 2, "num_microbatches": 2}),
    ("llama-7b", "4x8xA100", {"dp": 32, "zero": 3, "micro_batch": 2, "num_microbatches": 2}),
    (
        "llama-7b", "4x8xA100",
        {"dp": 32, "zero": 3, "hsdp": 8, "micro_batch": 2, "num_microbatches": 2},
    ),
    (
        "llama-3-8b", "2x8xH100",
        {"dp": 8, "tp": 2, "sp": True, "zero": 1, "hsdp": 4, "num_microbatches": 8},
    ),
    (
        "gpt2-xl", "2x8xA100",
        {"dp": 16, "zero": 2, "hsdp": 8, "micro_batch": 4, "num_microbatches": 2},
    ),
    (
        "llama-13b", "4x8xA100",
        {"dp": 4, "tp": 4, "sp": True, "pp": 2, "zero": 1, "num_microbatches": 16},
    ),
)  # fmt: skip
SAME = ("tp", "pp", "dp", "sp", "zero", "hsdp", "micro_batch", "recompute")


def row(model: str, cluster: str, degrees: dict[str, object], matmul: str, execution: str) -> str:
    """One line of the table."""
    batch = 1
    for name in ("dp", "micro_batch", "num_microbatches"):
        batch *= int(degrees.get(name, 1))
    workload = load(
        model, batch=batch, dtype="bf16", grad_dtype="f32", matmul_dtype=matmul, execution=execution
    )
    stack, pp = layer_stack(workload.graph), int(degrees.get("pp", 1))
    layers = even_layers(stack.num_layers, pp) if pp > 1 and stack is not None else ()
    strategy = FrameworkStrategy(**{**degrees, "layers": layers, "recompute": "full"})
    machine = resolve(cluster)
    stages, schedule = framework_plan(workload.graph, strategy)
    memo = Memo(Collectives(machine))
    ops = simulate_stages(workload, machine, stages, schedule, memo, most_devices=1, quick=True)
    keys = {name: value for name, value in asdict(strategy).items() if name in SAME}
    if matmul:
        keys["matmul_dtype"] = matmul
    told = simulate(
        model, cluster, batch=batch, dtype="bf16", grad_dtype="f32", execution=execution, **keys
    )
    return (
        f"| {model} on {cluster} | {strategy} | {matmul or 'bf16'} {execution} | {told.step_s:.3f} "
        f"| {ops.step_s:.3f} | {ops.step_s / told.step_s - 1:+.0%} | {told.memory.total / 1e9:.1f} "
        f"| {ops.fullest[0] / 1e9:.1f} |"
    )


def main() -> None:
    """The table."""
    print("| | strategy | | forecast s | ops s | | GB | GB |\n|---|---|---|---|---|---|---|---|")
    for model, cluster, degrees in ROWS:
        for matmul in ("", "f8") if "H100" in cluster else ("",):
            for execution in ("graph", "eager"):
                print(row(model, cluster, degrees, matmul, execution), flush=True)


if __name__ == "__main__":
    main()
