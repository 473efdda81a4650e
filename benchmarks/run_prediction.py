"""Is a run predicted once it was calibrated? Five kinds of plan on two ranks of this CPU.

    python benchmarks/run_prediction.py [--steps 10] [--only 1f1b,zb-h1] [--layers 4] [--json]

Each plan of a GPT-2 of moderate size (for two A100s, run on two gloo ranks of one thread) is
traced, compared and calibrated from its own trace; then it is predicted again. The last column but
one is what a calibration from the first plan's run (1F1B) says of the others: what is learned from
one plan and used for another. Figures depend on what else the machine does.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.cluster import resolve
from partita.cluster.calibration import Calibration
from partita.costs.collectives import Collectives
from partita.jobs.compare_trace import compare_trace
from partita.jobs.plan_order import searched_schedule
from partita.jobs.run_trace import read_traces, trace_path
from partita.jobs.simulate import Simulation, simulate, simulate_stages
from partita.jobs.strategies import STRATEGIES
from partita.jobs.workload import Workload, load
from partita.lower import Memo
from partita.plans import ClusterRef, Mesh, OpSplit, Origin, Plan, Schedule, Stage
from partita.search.base import Stop

ROOT = Path(__file__).resolve().parent.parent
CLUSTER, BATCH, MICRO_BATCHES = "2xA100", 8, 4
SPEC = f"{Path(__file__).resolve()}:make"
KINDS = ("1f1b", "zb-h1", "searched", "zero3", "tensor")


def make(batch: int = BATCH) -> Any:
    """A GPT-2 of moderate size and its arguments; the layers come from the environment."""
    import torch

    spec = importlib.util.spec_from_file_location("gpt2", ROOT / "examples/gpt2_two_ranks.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    layers = int(os.environ.get("RUN_PREDICTION_LAYERS", "4"))
    ids = torch.randint(512, (batch, 64))
    return example.GPT2(512, 256, 4, layers, 64), (ids, ids.clone())


@dataclass(frozen=True)
class Figures:
    """Steps of one plan in seconds."""

    kind: str
    planned_s: float
    measured_s: float
    calibrated_s: float
    from_first_s: float
    worst: str


def _halves(workload: Workload) -> tuple[Stage, ...]:
    """Two stages with equal numbers of ops."""
    ops = [op for op in workload.graph.ops if op.phase == "forward"]
    cut = len(ops) // 2
    return tuple(
        Stage(f"stage{i}", Mesh((), (i,)), tuple(OpSplit(op.name, ()) for op in own))
        for i, own in enumerate((ops[:cut], ops[cut:]))
    )


def _simulated(kind: str, workload: Workload) -> Simulation:
    machine = resolve(CLUSTER)
    named = {"zero3": "fsdp", "tensor": "tensor"}
    if kind in named:
        stages = STRATEGIES[named[kind]].stages(workload.graph, 2)[:1]
        return simulate_stages(workload, machine, stages, Schedule())
    name = "1f1b" if kind == "searched" else kind
    stages = _halves(workload)
    first = simulate_stages(workload, machine, stages, Schedule(name, MICRO_BATCHES))
    if kind != "searched":
        return first
    order = searched_schedule(first, Memo(Collectives(machine)), Stop(time_s=10.0), 0)
    return first if order is None else simulate_stages(workload, machine, stages, order)


def _plan(kind: str, workload: Workload) -> Plan:
    simulation, machine = _simulated(kind, workload), resolve(CLUSTER)
    return Plan(
        workload.ref(),
        ClusterRef(CLUSTER, machine.num_devices, machine.fingerprint()),
        simulation.decided,
        simulation.prediction(0.0),
        Origin("benchmark", "feasible", kind, 0, 0.0, ""),
        simulation.schedule,
    )


def _traced(plan: Plan, folder: Path, steps: int) -> Path:
    """Run a plan on two ranks, and record all steps but the first three."""
    file, traces = folder / "plan.json", folder / "trace"
    file.write_bytes(plan.to_json())
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "partita", "run", str(file), "--device", "cpu", "--steps", str(steps + 3),
        "--trace", str(traces), "--trace-steps", str(steps), "--trace-warmup", "3",
    ]  # fmt: skip
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=settings, capture_output=True, text=True, check=False)
    if not all(trace_path(traces, rank).exists() for rank in (0, 1)):
        raise SystemExit(f"the run of {plan} failed:\n{ended.stdout}\n{ended.stderr}")
    if ended.returncode:  # all steps were taken and recorded: the figures are good
        print(f"the run of {plan} was traced and then ended badly", file=sys.stderr)
    return traces


def measure(kinds: list[str], steps: int) -> list[Figures]:
    """Plan, run, calibrate and predict again, one kind after the other."""
    rows: list[Figures] = []
    first: Calibration | None = None
    workload = load(SPEC, batch=BATCH)
    for kind in kinds:
        plan = _plan(kind, workload)
        with tempfile.TemporaryDirectory() as folder:
            compared = compare_trace(plan, read_traces(_traced(plan, Path(folder), steps)))
        own = compared.calibration
        first = first or own
        uncapped = replace(plan, prediction=replace(plan.prediction, capacity_bytes=(0.0,)))
        worst = compared.worst
        rows.append(
            Figures(
                kind, compared.predicted_s, compared.measured_s,
                simulate(uncapped, calibration=own).step_s,
                simulate(uncapped, calibration=first).step_s,
                "none" if worst is None else worst.name,
            )
        )  # fmt: skip
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: Figures) -> str:
    def off(seconds: float) -> str:
        return f"{seconds * 1e3:8.1f} ms ({seconds / row.measured_s - 1:+.0%})"

    return (
        f"{row.kind:10} planned for A100s {row.planned_s * 1e3:7.2f} ms   "
        f"measured {row.measured_s * 1e3:8.1f} ms   calibrated {off(row.calibrated_s)}   "
        f"from the first {off(row.from_first_s)}   most wrong: {row.worst}"
    )


def main() -> None:
    """Print a line per plan."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["RUN_PREDICTION_LAYERS"] = str(options.layers)
    rows = measure(options.only.split(","), options.steps)
    if options.json:
        print(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
