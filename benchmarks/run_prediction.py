"""Is a run predicted once it was calibrated? Five kinds of plan on ranks of this CPU.

    python benchmarks/run_prediction.py [--steps 10] [--only 1f1b,zb-h1] [--layers 4] [--json]
    python benchmarks/run_prediction.py --ranks 8 --layers 16 --batch 32 --microbatches 16

Each plan of a GPT-2 of moderate size (for as many A100s, run on gloo ranks of one thread) is
traced, compared and calibrated from its own trace; then it is predicted again. `from the first` is
what a calibration from the first plan's run (1F1B) says of the others: what is learned from one
plan and used for another. `--repeat 3` runs all plans several times in turns and tells medians too;
then `from its kind` is what a calibration from the first run of the same plan says of the later
ones. Where ranks had less than 95 % of their cores, a step is replayed with the processor time of
its tasks (`jobs/calibrate.py`), and the clock's is told beside it (`--replay`: always, so that runs
under changing load compare). The speed-up over the module in one process (with the micro-batches of
the pipelines) is by the clock where ranks had their cores, else in processor time, and told beside
the one that the first calibration predicts. `--order FILE` keeps the searched order there, or takes
it from there where it is known: a machine without the search's solver can then run it. `--json`
prints a line of JSON for each run as it ends.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
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
from partita.jobs.trace_match import MOST_OF
from partita.jobs.workload import Workload, load
from partita.lower import Memo
from partita.plans import ClusterRef, Mesh, OpSplit, Origin, Plan, Schedule, Stage
from partita.search.base import Stop

ROOT = Path(__file__).resolve().parent.parent
BATCH = 8
SPEC = f"{Path(__file__).resolve()}:make"
ALWAYS = 2.0  # more than a rank can have of its core
ALONE_S = 6.0  # for steps in one process, once there are a few
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
    from_kind_s: float | None  # by a calibration from the first run of this plan
    speed_up: float  # over one process
    predicted_speed_up: float  # with the calibration of the first


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
    """Run a plan on its ranks, and record all steps but the first four."""
    file, traces = folder / "plan.json", folder / "trace"
    file.write_bytes(plan.to_json())
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), "-m", "partita", "run", str(file), "--device", "cpu", "--steps", str(steps + 4),
        "--trace", str(traces), "--trace-steps", str(steps), "--trace-warmup", "4",
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
    of_kind: dict[str, Calibration] = {}
    workload = load(SPEC, batch=options.batch)
    alone = one_process(workload.batch, options.microbatches)
    for kind in options.only.split(",") * options.repeat:
        plan = _plan(kind, workload, options)
        with tempfile.TemporaryDirectory() as folder:
            traces = _traced(plan, Path(folder), options.ranks, options.steps)
            most_of = ALWAYS if options.replay else MOST_OF
            compared = compare_trace(plan, read_traces(traces), most_of=most_of)
            if options.keep is not None:
                shutil.copytree(folder, options.keep / f"{len(rows)}-{kind}")
        first = first or compared.calibration
        rows.append(_figures(kind, plan, compared, first, of_kind.get(kind), alone, options))
        of_kind.setdefault(kind, compared.calibration)
        print(_line(rows[-1]), file=sys.stderr, flush=True)
        if options.json:
            print(json.dumps(asdict(rows[-1])), flush=True)
    return rows


def _figures(
    kind: str, plan: Plan, compared: TraceComparison, first: Calibration,
    earlier: Calibration | None, alone: tuple[float, float], options: argparse.Namespace,
) -> Figures:  # fmt: skip
    """What was predicted for a run, in three ways, and measured."""
    uncapped = replace(plan, prediction=replace(plan.prediction, capacity_bytes=(0.0,)))
    predicted = [
        None if each is None else simulate(uncapped, calibration=each).step_s
        for each in (compared.calibration, first, earlier)
    ]
    own_s, first_s, kind_s = predicted
    assert own_s is not None, "a trace gives a calibration"
    assert first_s is not None, "so does the first"
    worst, matched = compared.worst, compared.matched
    return Figures(
        kind, compared.predicted_s, compared.measured_s, own_s, first_s,
        "none" if worst is None else worst.name, matched.clock_s, matched.had, kind_s,
        alone[matched.is_shared] / compared.measured_s,
        predicted_alone(plan, first, options.microbatches) / first_s,
    )  # fmt: skip


def predicted_alone(plan: Plan, calibration: Calibration, count: int) -> float:
    """Seconds of a step of the module in one process, as a calibration has it."""
    workload, here = load(plan.model.spec, batch=plan.model.batch), resolve(plan.cluster.spec)
    ops = (op for op in workload.graph.ops if op.phase == "forward")
    whole = Stage("model", Mesh((), (0,)), tuple(OpSplit(op.name, ()) for op in ops))
    there = calibrated(here, calibration)
    return simulate_stages(workload, there, (whole,), Schedule("1f1b", count)).step_s


def one_process(batch: int, count: int) -> tuple[float, float]:
    """Seconds of a step of the module in one process: by the clock, and of the processor."""
    import torch

    torch.set_num_threads(1)
    module, args = make(batch)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    took: list[tuple[float, float]] = []
    while len(took) < 4 or (len(took) < 10 and sum(own for own, _ in took) < ALONE_S):
        began, busy = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        for part in zip(*(arg.chunk(count) for arg in args), strict=True):
            (module(*part) / count).backward()
        optimizer.step()
        took.append((time.perf_counter() - began, time.thread_time() - busy))
    by_clock, of_processor = (statistics.median(each) for each in zip(*took[1:], strict=True))
    return by_clock, of_processor


def _line(row: Figures) -> str:
    def off(seconds: float) -> str:
        return f"{seconds * 1e3:8.1f} ms ({seconds / row.measured_s - 1:+.0%})"

    return (
        f"{row.kind:10} planned for A100s {row.planned_s * 1e3:7.2f} ms   "
        f"measured {row.measured_s * 1e3:8.1f} ms   calibrated {off(row.calibrated_s)}   "
        f"from the first {off(row.from_first_s)}   most wrong: {row.worst}   "
        f"by the clock {row.clock_s * 1e3:.1f} ms with {row.had:.0%} of the cores   "
        f"from its kind {'not known' if row.from_kind_s is None else off(row.from_kind_s)}   "
        f"speed-up {row.speed_up:.2f} ({row.speed_up / row.predicted_speed_up:.0%} of "
        f"{row.predicted_speed_up:.2f})"
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
    parser.add_argument("--keep", type=Path, help="a folder for the plans and their traces")
    parser.add_argument("--replay", action="store_true", help="steps are replayed, never clocked")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["RUN_PREDICTION_LAYERS"] = str(options.layers)
    os.environ["RUN_PREDICTION_WIDTH"] = str(options.width)
    heads = -(-4 // options.ranks) * options.ranks  # as many for each rank
    os.environ["RUN_PREDICTION_HEADS"] = str(heads)
    rows = measure(options)
    for kind in options.only.split(",") if options.repeat > 1 and not options.json else ():
        own = [row for row in rows if row.kind == kind]
        off = statistics.median(row.from_first_s / row.measured_s - 1 for row in own)
        measured = statistics.median(row.measured_s for row in own)
        print(f"{kind:10} median of {len(own)}: {measured * 1e3:.1f} ms, from the first {off:+.0%}")


if __name__ == "__main__":
    main()
