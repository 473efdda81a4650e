"""Does a searched schedule of an M-shape placement gain in measured time what it gains in theory?

    python benchmarks/run_shapes.py [--ranks 2] [--layers 6] [--microbatches 4] [--steps 60]

A GPT-2 of moderate size: its embedding and first layers run on all ranks together, each with its
part of every micro-batch, the other layers as a pipeline of one stage a rank (Tessel's M shape).
Run under 1F1B with a trace, which gives a calibration of this machine; with it the order of blocks
is searched, and both orders are predicted. Then the same ranks take steps of both, one after the
other in turns, and every pair of neighbours is a comparison: what else the machine does hits both.
With `--pause 0.2 --width 128` steps are short and rare, so that a busy machine lets more of them
through without a break. Gains are 1 - (searched / 1F1B).

Where cores are shared, ranks wait for the machine and not for each other, and the clock says little
of a schedule. So every task's processor time is recorded too, and each step is replayed with it: a
rank's clock goes on by what its tasks took, and to the sender's (and what a message takes in the
calibrated prediction) where it receives. That is the step on cores of their own, as far as tasks
take there what they took here. The speed-up over the module in one process, with the same
micro-batches, is predicted and replayed in the same way.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_prediction import _traced, make

from partita.cluster import resolve
from partita.cluster.calibration import calibrated
from partita.costs.collectives import Collectives
from partita.jobs.compare_trace import compare_trace
from partita.jobs.plan_settings import USUAL
from partita.jobs.run_trace import read_traces
from partita.jobs.shapes import m_shape, searched_schedule
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.workload import Workload, load
from partita.lower import Memo
from partita.meaning import Purpose
from partita.plans import ClusterRef, Mesh, OpSplit, Origin, Plan, Schedule, Stage, read_plan
from partita.program import Program
from partita.search.base import Stop

SPEC = f"{Path(__file__).resolve()}:make"
NAMES = ("1f1b", "searched")


def _plan(workload: Workload, simulation: Simulation, ranks: int) -> Plan:
    machine = resolve(f"{ranks}xA100")
    return Plan(
        workload.ref(),
        ClusterRef(f"{ranks}xA100", machine.num_devices, machine.fingerprint()),
        simulation.decided,
        simulation.prediction(0.0),
        Origin("benchmark", "feasible", "", 0, 0.0, ""),
        simulation.schedule,
    )


def plans(options: argparse.Namespace, folder: Path) -> dict[str, Simulation]:
    """Write both plans into a folder; what is predicted for each on this machine."""
    workload = load(SPEC, batch=options.batch)
    machine = resolve(f"{options.ranks}xA100")
    stages = m_shape(workload, options.ranks, options.shared)
    first = simulate_stages(workload, machine, stages, Schedule("1f1b", options.microbatches))
    plan = _plan(workload, first, options.ranks)
    traces = _traced(plan, folder, options.ranks, min(20, options.steps))
    calibration = compare_trace(plan, read_traces(traces)).calibration
    here = calibrated(machine, calibration)
    usual = simulate_stages(workload, here, stages, first.schedule)
    settings = replace(USUAL, largest_order=10**4)
    order = searched_schedule(
        usual, Memo(Collectives(here)), Stop(time_s=options.search), 0, settings
    )
    assert order is not None, "an M shape has an order"
    searched = simulate_stages(workload, here, stages, order)
    for name, simulation in zip(NAMES, (usual, searched), strict=True):
        (folder / f"{name}.json").write_bytes(_plan(workload, simulation, options.ranks).to_json())
    ops = (op for op in workload.graph.ops if op.phase == "forward")
    whole = Stage("model", Mesh((), (0,)), tuple(OpSplit(op.name, ()) for op in ops))
    alone = simulate_stages(workload, here, (whole,), first.schedule)
    return {"1f1b": usual, "searched": searched, "one": alone}


def one_process(options: argparse.Namespace) -> float:
    """The median processor time of a step of the module by itself."""
    import torch

    torch.set_num_threads(1)
    module, args = make(options.batch)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    rows, took = options.batch // options.microbatches, []
    for _ in range(options.steps // 2 + 3):
        began = time.thread_time()
        optimizer.zero_grad()
        for first in range(0, options.batch, rows):
            loss = module(*(arg[first : first + rows] for arg in args)) / options.microbatches
            loss.backward()
        optimizer.step()
        took.append(time.thread_time() - began)
    return statistics.median(took[3:])


class TaskTimes:
    """The processor time of every task of a rank, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[int, float]] = []
        self.begun: dict[int, float] = {}

    def start(self, task: int, name: str) -> None:
        """Note the moment."""
        self.begun[task] = time.thread_time()

    def end(self, task: int, name: str) -> None:
        """Note how long it was."""
        self.steps[-1][task] = time.thread_time() - self.begun[task]


def replayed(program: Program, took: list[dict[int, float]]) -> float:
    """The seconds of a step in which each rank's tasks take what they took, and messages wait."""
    clock = [0.0] * len(took)
    arrived: dict[int, float] = {}  # by receive
    receive_of = {int(a): int(b) for a, b in program.pairs.tolist()}
    for task in range(program.num_tasks):
        work = program.work_of(task)
        ranks = [rank for rank, tasks in enumerate(took) if task in tasks]
        if work is None or not ranks or work.purpose is Purpose.RECEIVE:
            continue
        for rank in ranks:
            for other, _ in program.waits_of(task):
                clock[rank] = max(clock[rank], arrived.get(other, 0.0))
            clock[rank] += took[rank][task]
        if work.purpose is Purpose.SEND:
            moment = max(clock[rank] for rank in ranks)
            arrived[receive_of[task]] = moment + float(program.duration[task])
        if work.purpose is Purpose.GRADIENT_REDUCTION:
            latest = max(clock[rank] for rank in ranks) + float(program.duration[task])
            for rank in ranks:
                clock[rank] = latest
    return max(clock)


def rank_main(folder: Path, steps: int, pause_s: float) -> None:
    """One rank: steps of both plans in turns; rank 0 writes what each took."""
    import torch
    import torch.distributed as dist

    import partita

    engines: dict[str, Any] = {}
    recorders = {name: TaskTimes() for name in NAMES}
    _, args = make(read_plan(folder / "1f1b.json").model.batch)
    for name in NAMES:
        engines[name] = partita.execute(
            read_plan(folder / f"{name}.json"), make()[0],
            optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-3), device="cpu", example=args,
            recorder=recorders[name],
        )  # fmt: skip
    took: dict[str, list[float]] = {name: [] for name in NAMES}
    losses = dict.fromkeys(NAMES, 0.0)
    worked = {name: torch.zeros(1, dtype=torch.float64) for name in NAMES}
    for _ in range(steps + 3):
        for name, engine in engines.items():
            time.sleep(pause_s)
            recorders[name].steps.append({})
            dist.barrier()
            began, busy = time.perf_counter(), time.process_time()
            losses[name] = engine.step(*args)
            worked[name] += time.process_time() - busy
            dist.barrier()
            took[name].append(time.perf_counter() - began)
    for total in worked.values():
        dist.all_reduce(total)
    own = {name: recorder.steps[3:] for name, recorder in recorders.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    if dist.get_rank() == 0:
        times = {name: each[3:] for name, each in took.items()}
        cpu_s = {name: float(total) / (steps + 3) for name, total in worked.items()}
        (folder / "times.json").write_text(
            json.dumps({"times": times, "losses": losses, "cpu_s": cpu_s, "tasks": gathered})
        )
    for engine in engines.values():
        engine.board.close()
    os._exit(0)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks; what rank 0 wrote."""
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(options.ranks), str(Path(__file__).resolve()), "--folder", str(folder), "--steps",
        str(options.steps), "--pause", str(options.pause),
    ]  # fmt: skip
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=settings, capture_output=True, text=True, check=False)
    if not (folder / "times.json").exists():
        raise SystemExit(f"the ranks failed:\n{ended.stdout}\n{ended.stderr}")
    result: dict[str, Any] = json.loads((folder / "times.json").read_text())
    return result


def compared(
    simulated: dict[str, Simulation], result: dict[str, Any], alone_s: float
) -> dict[str, Any]:
    """The predicted gain, and the measured one in four ways."""
    predicted = {name: simulation.step_s for name, simulation in simulated.items()}
    replays = {name: _replays(simulated[name], name, result["tasks"]) for name in NAMES}
    usual, searched = (result["times"][name] for name in NAMES)
    ratios = [b / a for a, b in zip(usual, searched, strict=True)]
    few = max(3, len(usual) // 10)
    best = [statistics.mean(sorted(each)[:few]) for each in (usual, searched)]
    return {
        "predicted_s": predicted,
        "predicted_gain": 1 - predicted["searched"] / predicted["1f1b"],
        "cpu_s": result["cpu_s"],
        "one_process_cpu_s": alone_s,
        "predicted_speedup": {name: predicted["one"] / predicted[name] for name in NAMES},
        "replayed_speedup": {name: alone_s / replays[name] for name in NAMES},
        "replayed_s": replays,
        "gain_replayed": 1 - replays["searched"] / replays["1f1b"],
        "best_s": dict(zip(NAMES, best, strict=True)),
        "gain_best_tenth": 1 - best[1] / best[0],
        "gain_of_least": 1 - min(searched) / min(usual),
        "gain_median_of_pairs": 1 - statistics.median(ratios),
        "same_loss": abs(result["losses"]["1f1b"] - result["losses"]["searched"]) < 1e-4,
        "load": os.getloadavg()[0],
    }


def _replays(simulation: Simulation, name: str, tasks: list[dict[str, Any]]) -> float:
    """The median of a plan's steps, replayed."""
    program = simulation.timeline.program
    each = []
    for step in zip(*(rank[name] for rank in tasks), strict=True):
        took = [{int(task): seconds for task, seconds in own.items()} for own in step]
        each.append(replayed(program, took))
    return statistics.median(each)


def main() -> None:
    """Predict, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--shared", type=float, default=0.3, help="part of the work in all ranks")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--search", type=float, default=30.0, help="seconds to look for an order")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before every step")
    parser.add_argument("--folder", type=Path, help="of a rank that this script started")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.folder is not None:
        rank_main(options.folder, options.steps, options.pause)
        return
    os.environ["RUN_PREDICTION_LAYERS"] = str(options.layers)
    os.environ["RUN_PREDICTION_WIDTH"] = str(options.width)
    os.environ["RUN_PREDICTION_HEADS"] = str(max(4, options.ranks))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        simulated = plans(options, folder)
        row = compared(simulated, measured(folder, options), one_process(options))
    if options.json:
        print(json.dumps(row, indent=1))
        return
    for key, value in row.items():
        print(f"{key:22} {value if not isinstance(value, float) else f'{value:.3f}'}")


if __name__ == "__main__":
    main()
