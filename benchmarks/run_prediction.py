"""Is a run predicted once it was calibrated? Five kinds of plan on ranks of this CPU.

    python benchmarks/run_prediction.py [--steps 10] [--only 1f1b,zb-h1] [--layers 4] [--json]
    python benchmarks/run_prediction.py --ranks 8 --layers 16 --batch 32 --microbatches 16

Each plan of a GPT-2 of moderate size (for as many A100s, run on gloo ranks of one thread) is
traced, compared and calibrated from its own trace; then it is predicted again. The last column but
one is what a calibration from the first plan's run (1F1B) says of the others: what is learned from
one plan and used for another. Where ranks had less than 95 % of their cores, a step is replayed
with the processor time of its tasks (`jobs/calibrate.py`), and the clock's is told beside it;
`--repeat 3` runs all plans several times in turns and tells medians too. The speed-up of the first
plan over one process is told, too. `--order FILE` keeps the searched order there, or takes it from
there where it is known: a machine without the search's solver can then run it.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from partita.cluster import resolve
from partita.cluster.calibration import Calibration, calibrated
from partita.costs.collectives import Collectives
from partita.jobs.compare_trace import TraceComparison, compare_trace
from partita.jobs.plan_settings import USUAL
from partita.jobs.run_trace import read_traces, trace_path
from partita.jobs.shapes import searched_schedule
from partita.jobs.simulate import Simulation, simulate, simulate_stages
from partita.jobs.strategies import STRATEGIES
from partita.jobs.workload import Workload, load
from partita.lower import Memo
from partita.plans import ClusterRef, Mesh, OpSplit, Origin, Plan, Schedule, Stage
from partita.search.base import Stop

ROOT = Path(__file__).resolve().parent.parent
BATCH = 8
SPEC = f"{Path(__file__).resolve()}:make"
KINDS = ("1f1b", "zb-h1", "searched", "zero3", "tensor")


def make(batch: int = BATCH) -> Any:
    """A GPT-2 of moderate size and its arguments; layers and heads come from the environment."""
    import torch

    spec = importlib.util.spec_from_file_location("gpt2", ROOT / "examples/gpt2_two_ranks.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    layers = int(os.environ.get("RUN_PREDICTION_LAYERS", "4"))
    ids = torch.randint(512, (batch, 64))
    heads = int(os.environ.get("RUN_PREDICTION_HEADS", "4"))
    width = int(os.environ.get("RUN_PREDICTION_WIDTH", "256"))
    return example.GPT2(512, width, heads, layers, 64), (ids, ids.clone())


@dataclass(frozen=True)
class Figures:
    """Steps of one plan in seconds."""

    kind: str
    planned_s: float
    measured_s: float
    calibrated_s: float
    from_first_s: float
    worst: str
    clock_s: float  # the measured step by the clock; measured_s is replayed where cores were shared
    had: float  # of their cores, while ranks computed


def _equal(workload: Workload, ranks: int) -> tuple[Stage, ...]:
    """Stages with equal numbers of ops, one for each rank."""
    ops = [op for op in workload.graph.ops if op.phase == "forward"]
    cuts = [i * len(ops) // ranks for i in range(ranks + 1)]
    return tuple(
        Stage(f"stage{i}", Mesh((), (i,)), tuple(OpSplit(op.name, ()) for op in ops[a:b]))
        for i, (a, b) in enumerate(pairwise(cuts))
    )


def _simulated(kind: str, workload: Workload, options: argparse.Namespace) -> Simulation:
    machine, ranks = resolve(f"{options.ranks}xA100"), options.ranks
    if kind == "zero3":
        stages = STRATEGIES["fsdp"].stages(workload.graph, ranks)[:1]
        return simulate_stages(workload, machine, stages, Schedule())
    if kind == "tensor":
        stages = STRATEGIES["tensor"].stages(workload.graph, ranks)
        one = [stage for stage in stages if len(stage.mesh.axes) == 1][:1]
        return simulate_stages(workload, machine, tuple(one), Schedule())
    count, stages = options.microbatches, _equal(workload, ranks)
    if kind != "searched":
        return simulate_stages(workload, machine, stages, Schedule(kind, count))
    if options.order is not None and options.order.exists():
        order = Schedule("listed", count, tuple(json.loads(options.order.read_text())))
        return simulate_stages(workload, machine, stages, order)
    first = simulate_stages(workload, machine, stages, Schedule("1f1b", count))
    settings = replace(USUAL, largest_order=10**4)
    memo = Memo(Collectives(machine))
    searched = searched_schedule(first, memo, Stop(time_s=20.0), 0, settings)
    if searched is None:
        return first
    if options.order is not None:
        options.order.write_text(json.dumps(searched.order))
    return simulate_stages(workload, machine, stages, searched)


def _plan(kind: str, workload: Workload, options: argparse.Namespace) -> Plan:
    simulation, machine = _simulated(kind, workload, options), resolve(f"{options.ranks}xA100")
    return Plan(
        workload.ref(),
        ClusterRef(f"{options.ranks}xA100", machine.num_devices, machine.fingerprint()),
        simulation.decided,
        simulation.prediction(0.0),
        Origin("benchmark", "feasible", kind, 0, 0.0, ""),
        simulation.schedule,
    )


def _traced(plan: Plan, folder: Path, ranks: int, steps: int) -> Path:
    """Run a plan on its ranks, and record all steps but the first three."""
    file, traces = folder / "plan.json", folder / "trace"
    file.write_bytes(plan.to_json())
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), "-m", "partita", "run", str(file), "--device", "cpu", "--steps", str(steps + 3),
        "--trace", str(traces), "--trace-steps", str(steps), "--trace-warmup", "3",
    ]  # fmt: skip
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=settings, capture_output=True, text=True, check=False)
    if not all(trace_path(traces, rank).exists() for rank in range(ranks)):
        raise SystemExit(f"the run of {plan} failed:\n{ended.stdout}\n{ended.stderr}")
    if ended.returncode:  # all steps were taken and recorded: the figures are good
        print(f"the run of {plan} was traced and then ended badly", file=sys.stderr)
    return traces


def measure(options: argparse.Namespace) -> list[Figures]:
    """Plan, run, calibrate and predict again, one kind after the other."""
    rows: list[Figures] = []
    first: Calibration | None = None
    workload = load(SPEC, batch=options.batch)
    for kind in options.only.split(",") * options.repeat:
        plan = _plan(kind, workload, options)
        with tempfile.TemporaryDirectory() as folder:
            traces = _traced(plan, Path(folder), options.ranks, options.steps)
            compared = compare_trace(plan, read_traces(traces))
        own = compared.calibration
        if first is None and len(plan.stages) > 1:
            print(speed_up(workload, plan, compared), flush=True)
        first = first or own
        uncapped = replace(plan, prediction=replace(plan.prediction, capacity_bytes=(0.0,)))
        worst = compared.worst
        rows.append(
            Figures(
                kind, compared.predicted_s, compared.measured_s,
                simulate(uncapped, calibration=own).step_s,
                simulate(uncapped, calibration=first).step_s,
                "none" if worst is None else worst.name,
                compared.matched.clock_s, compared.matched.had,
            )
        )  # fmt: skip
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def speed_up(workload: Workload, plan: Plan, compared: TraceComparison) -> str:
    """What a plan gains over the module in one process: predicted, and measured alike."""
    import torch

    torch.set_num_threads(1)
    here = calibrated(resolve(plan.cluster.spec), compared.calibration)
    ops = (op for op in workload.graph.ops if op.phase == "forward")
    whole = Stage("model", Mesh((), (0,)), tuple(OpSplit(op.name, ()) for op in ops))
    alone = simulate_stages(workload, here, (whole,), plan.schedule).step_s
    step = simulate_stages(workload, here, plan.stages, plan.schedule).step_s
    module, args = make(workload.batch)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    count, took = plan.schedule.num_microbatches, []
    for _ in range(14):
        began = time.thread_time()
        optimizer.zero_grad()
        for part in zip(*(arg.chunk(count) for arg in args), strict=True):
            (module(*part) / count).backward()
        optimizer.step()
        took.append(time.thread_time() - began)
    measured = statistics.median(took[3:]) / compared.measured_s
    return (
        f"speed-up over one process (processor time): predicted {alone / step:.2f}, measured "
        f"{measured:.2f} ({measured * step / alone:.0%} of it)"
    )


def _line(row: Figures) -> str:
    def off(seconds: float) -> str:
        return f"{seconds * 1e3:8.1f} ms ({seconds / row.measured_s - 1:+.0%})"

    return (
        f"{row.kind:10} planned for A100s {row.planned_s * 1e3:7.2f} ms   "
        f"measured {row.measured_s * 1e3:8.1f} ms   calibrated {off(row.calibrated_s)}   "
        f"from the first {off(row.from_first_s)}   most wrong: {row.worst}   "
        f"by the clock {row.clock_s * 1e3:.1f} ms with {row.had:.0%} of the cores"
    )


def main() -> None:
    """Print a line per plan."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--order", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["RUN_PREDICTION_LAYERS"] = str(options.layers)
    os.environ["RUN_PREDICTION_HEADS"] = str(max(4, options.ranks))  # each rank has some of them
    rows = measure(options)
    for kind in options.only.split(",") if options.repeat > 1 else ():
        own = [row for row in rows if row.kind == kind]
        off = statistics.median(row.from_first_s / row.measured_s - 1 for row in own)
        measured = statistics.median(row.measured_s for row in own)
        print(f"{kind:10} median of {len(own)}: {measured * 1e3:.1f} ms, from the first {off:+.0%}")
    if options.json:
        print(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
