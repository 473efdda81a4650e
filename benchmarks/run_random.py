"""Random verified plans: the numbers of the whole model, and ranks that are killed.

    python benchmarks/run_random.py --local 10000 --plans 300 --kills 1000 --workers 8

Local: any cut, mesh, split, ZeRO stage, checkpointing and schedule of random graphs, lowered,
verified and executed on small tensors, all ranks in one process; outputs, gradients and updated
parameters are held against the whole model's. Plans: such plans of seven small PyTorch models on
two to four gloo ranks (`--ranks 6,8`: on other numbers); losses, gradients and parameters after
two steps are held against the model in one process. Kills: a rank of such a plan gets SIGKILL at a
random moment of a run with checkpoints; the others must end within the timeout and name it, and a
second run that goes on from the last checkpoint must end with the parameters of a run that was left
alone, bit by bit. With `--shared` every plan has stages that several groups of devices run
together, beside others.
"""

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forked here, and compute on CPUs

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [
    str(TESTS.parent), str(TESTS / "lower"), str(TESTS / "run" / "distributed"),
    str(Path(__file__).resolve().parent),
]  # fmt: skip

from distributed_models import make  # noqa: E402
from distributed_plans import (  # noqa: E402
    apart,
    graph_of,
    in_half,
    in_one_process,
    random_plan_on,
    sgd,
)
from distributed_ranks import PRELOADED, run_on_ranks  # noqa: E402
from exported_models import MODELS, exported_once  # noqa: E402

from partita.errors import PartitaError, PlanError  # noqa: E402
from partita.graph import training_graph  # noqa: E402
from partita.plans import device_groups, shared_stages  # noqa: E402
from partita.run.distributed import engine as engines  # noqa: E402
from partita.run.distributed import train as trains  # noqa: E402
from partita.run.distributed.launch import open_world  # noqa: E402
from tests.lower.random_graphs import random_graph, random_training  # noqa: E402
from tests.lower.random_plans import random_plan  # noqa: E402
from tests.run.local.plans import trial  # noqa: E402
from tests.run.local.small_models import MODELS as SMALL_MODELS  # noqa: E402

CLOSE = 1e-5
LOSS_CLOSE = 5e-6
LOCAL_CLOSE = 1e-9  # float64
TIMEOUT_S = 20.0  # a rank is missed after half of it; less is too little on a busy machine
EXPORTED = (*PRELOADED, "exported_models")
STEPS, EVERY = 8, 2
WIDE = 4  # one seed of so many: a model in bf16 whose gradients are added up in f32
# Of bf16, whose products are rounded otherwise in shards; the loss within two of its spacings.
HALF_CLOSE, HALF_LOSS_CLOSE = 0.05, 2**-6
A_START = 12  # plans that run one after the other on the same ranks
KILLS_A_PLAN = 10  # on one run that is left alone


def made(model, seed):
    """A module with its arguments; of some seeds in bf16, with gradients that are added in f32."""
    return in_half(*make(model)) if seed % WIDE == 0 else make(model)


def plan_for(model, world, seed, shared=False):
    """The random plan of a seed."""
    graph = graph_of(*made(model, seed), grad_dtype="" if seed % WIDE else "f32")
    return random_plan_on(world, seed, graph, shared=shared)


# All ranks in one process.


@functools.cache
def small_model(name):
    """A model with its backward, made once in a process."""
    return training_graph(SMALL_MODELS[name]())


def local_case(seed, shared=False):
    """What is wrong with a random plan of a random graph, or nothing."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    if seed % 2:
        graph = random_training(chance, random_graph(chance))
    else:
        graph = small_model(chance.choice(sorted(SMALL_MODELS)))
    plan = random_plan(chance, graph, shared=shared)
    while shared and not shared_stages(device_groups(plan.stages)):
        plan = random_plan(chance, graph, shared=shared)
    name = plan.schedule.name
    try:
        ran = trial(plan, seed)
    except PlanError as error:  # a parameter that nothing trains is refused on purpose
        return seed, "refused", "" if "gives it no gradient" in str(error) else str(error)
    wrong, error = ran.refused(), ran.error()
    return seed, name, "; ".join(map(str, wrong[:1])) or ("" if error <= LOCAL_CLOSE else error)


def local(options):
    """Many plans at once, and those that differ."""
    first = options.seed * 10**6
    context, began = multiprocessing.get_context("spawn"), time.monotonic()
    names, wrong = Counter(), []
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        case = functools.partial(local_case, shared=options.shared)
        for seed, name, what in pool.map(case, range(first, first + options.local), chunksize=20):
            names[name] += 1
            if what != "":
                wrong.append((seed, what))
            if options.seconds and time.monotonic() - began > options.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            if names.total() % 100 == 0:
                print(f"  {names.total()} plans", file=sys.stderr, flush=True)
    print(
        f"local runtime: {names.total()} plans verified and executed in "
        f"{time.monotonic() - began:.0f} s, {len(wrong)} with other numbers than the whole model"
    )
    print(f"  schedules: {dict(names)}")
    for each in wrong:
        print(f"  {each}", flush=True)


# Numbers.


def compare(rank, world, cases, path, shared):
    """Take two steps of every plan; rank 0 writes a line for each as it goes."""
    for model, seed in cases:
        plan = plan_for(model, world, seed, shared)
        compare_one(
            rank, plan, functools.partial(made, model, seed), path, functools.partial(make, model),
            model=model, seed=seed, wide=seed % WIDE == 0,
        )  # fmt: skip


def compare_one(rank, plan, made, path, in_f32=None, **line):
    """Take two steps of a plan and of the module by itself; rank 0 writes how far they differ.

    `in_f32` makes the module of one in bf16 whose gradients are added up in f32.
    """
    module, args = made()
    try:
        with mock.patch.object(engines, "RunModel", exported_once):
            engine = engines.execute(
                plan, module, optimizer=sgd, device="cpu", keep_gradients=True,
                timeout_s=120, example=args,
            )  # fmt: skip
    except PartitaError as error:
        _write(rank, path, {**line, "refused": str(error)})
        return
    losses = [engine.step(*args) for _ in range(2)]
    state, gradients = engine.full_state_dict(), engine.full_gradients()
    engine.board.close()
    if rank == 0:
        count = plan.schedule.num_microbatches
        wide = torch.float32 if line.get("wide") else None
        wanted, grads, after = in_one_process(made()[0], args, count, 2, sgd, wide)
        assert all(wide in (None, own.dtype) for own in gradients.values()), "f32 sums"
        # Running statistics follow the order of micro-batches, which these plans choose.
        after = {name: own for name, own in after.items() if "running_" not in name}
        far = apart(gradients, grads)
        if wide is not None:  # beyond twice what bf16 in one process is from f32 itself
            truth = in_one_process(*in_f32(), count, 2, sgd)[1]
            far = max(0.0, apart(gradients, truth) - 2 * apart(grads, truth))
        off = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, wanted, strict=True))
        line |= {"loss": off, "gradients": far, "state": apart(state, after)}
        _write(rank, path, {**line, "stages": len(plan.stages), "name": plan.schedule.name})


def _write(rank, path, line):
    if rank == 0:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def numbers(options, folder):
    """Run the plans, many in one start of ranks; one that ends its ranks is one that failed."""
    chance = random.Random(options.seed)
    starts = []
    worlds = [int(world) for world in options.ranks.split(",")]
    for world in worlds:
        number = -(-options.plans // len(worlds))
        cases = [(chance.choice(MODELS), chance.randrange(10**6)) for _ in range(number)]
        starts += [(world, cases[i : i + A_START]) for i in range(0, number, A_START)]
    lines, failed, began = [], [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(max(1, options.workers // 3)) as pool:
        places = [folder / str(i) for i in range(len(starts))]
        runs = functools.partial(_numbers, shared=options.shared)
        for done, lost in pool.map(runs, starts, places):
            lines += done
            failed += lost
            print(f"  {len(lines)} plans", file=sys.stderr, flush=True)
            if options.seconds and time.monotonic() - began > options.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return lines, failed


def _numbers(start, folder, shared):
    (world, cases), lines, failed = start, [], []
    folder.mkdir()
    while cases:
        path = folder / f"numbers{len(cases)}"
        path.write_text("")
        ends = run_on_ranks(world, compare, world, cases, path, shared, folder=folder, limit_s=500)
        done = [json.loads(line) for line in path.read_text().splitlines()]
        lines += done
        cases = cases[len(done) :]
        if cases:
            failed.append((world, *cases.pop(0), _last_line(ends)))
    return lines, failed


def _last_line(ends):
    said = [end.stderr.strip().splitlines()[-1] for end in ends if end.stderr.strip()]
    return said[0][:300] if said else "no word"


# Kills.


@dataclass(frozen=True)
class Moment:
    """When a rank is killed: so many seconds after it began a task, or after it met the others."""

    victim: int = -1
    task: int = 0  # 0: count from when all had met
    delay_s: float = 0.0


class Killer:
    """Kills its own process at a moment."""

    def __init__(self, moment, rank):
        self.moment, self.is_victim = moment, rank == moment.victim
        self.count, self.met = 0, 0.0

    def meet(self, *args):
        """All have met: the process group is made."""
        self.met = time.monotonic()
        if self.is_victim and self.moment.task == 0:
            self._kill_later()
        open_world(*args)

    def start(self, task, name):
        """Count."""
        self.count += 1
        if self.is_victim and self.count == self.moment.task:
            self._kill_later()

    def end(self, task, name):
        """Nothing."""

    def _kill_later(self):
        kill = threading.Timer(self.moment.delay_s, os.kill, (os.getpid(), signal.SIGKILL))
        kill.daemon = True
        kill.start()


def trained(rank, plan, model, folder, moment):
    """A run with checkpoints, from the last on: losses, how many tasks this rank had, seconds."""
    module, args = make(model)
    settings = trains.TrainSettings(STEPS, 1e-2, "cpu", folder, EVERY, TIMEOUT_S, 0)
    killer = Killer(moment, rank)
    losses = {}
    with (
        mock.patch.object(engines, "RunModel", exported_once),
        mock.patch.object(engines, "open_world", killer.meet),
    ):
        for done in trains.train(plan, module, args, None, settings, killer):
            losses[done.number] = done.loss
    return losses, killer.count, time.monotonic() - killer.met


@functools.cache
def training_graphs(model):
    """The training graph of a model, made once; exporting is nothing for several threads."""
    return graph_of(*make(model))


def kills(options, number, folder):
    """One run that is left alone, then runs of the same that lose a rank and go on."""
    chance = random.Random(options.seed + 1000 + number)
    model, world = chance.choice(MODELS), 2
    while True:
        seed = chance.randrange(10**6)
        plan = random_plan_on(world, seed, training_graphs(model))
        ends = run_on_ranks(
            world, trained, plan, model, folder / "whole", Moment(), folder=folder,
            preloaded=EXPORTED,
        )  # fmt: skip
        if all(end.code == 0 for end in ends):
            break
        print(f"  {model} {seed}: {_last_line(ends)}", flush=True)
        shutil.rmtree(folder / "whole", ignore_errors=True)
    whole = _final(folder / "whole")
    spans = [end.result[1:] for end in ends]
    lines = []
    for k in range(KILLS_A_PLAN):
        place = folder / f"killed{k}"
        lines.append(_kill(chance, model, spans, plan, whole, place, folder) | {"seed": seed})
        shutil.rmtree(place, ignore_errors=True)
    return lines


def _kill(chance, model, spans, plan, whole, place, folder):
    world = len(spans)
    victim = chance.randrange(world)
    num_tasks, seconds = spans[victim]
    if chance.random() < 0.5:  # within a task of a step
        moment = Moment(victim, chance.randint(1, num_tasks), chance.random() * 0.002)
    else:  # at any time: while all prepare, step, save and end
        moment = Moment(victim, 0, chance.random() * seconds)
    began = time.monotonic()
    lost = run_on_ranks(
        world, trained, plan, model, place, moment, folder=folder, limit_s=300,
        preloaded=EXPORTED,
    )  # fmt: skip
    took = time.monotonic() - began
    other = lost[1 - victim]
    if lost[victim].code != -signal.SIGKILL:
        return {"outcome": "ended before it was killed"}
    if other.code == 0 and _last_step(place) == STEPS:
        return {"outcome": "killed when the run was over"}
    named = f"rank {victim} failed in" in other.stderr or "rank 0 (or what" in other.stderr
    again = run_on_ranks(
        world, trained, plan, model, place, Moment(), folder=folder, preloaded=EXPORTED
    )
    state = _final(place)
    same = whole.keys() == state.keys() and all(
        torch.equal(whole[name], state[name]) for name in whole
    )
    return {
        "outcome": "killed", "model": model, "victim": victim, "took_s": took,
        "within_task": bool(moment.task),
        "ended": other.code == 1, "code": other.code, "named": named,
        "went_on": all(e.code == 0 for e in again),
        "from_step": min((again[0].result or ({0: 0},))[0], default=STEPS), "same": same,
        "said": _last_line([other]), "said_again": _last_line(again),
    }  # fmt: skip


def _last_step(folder):
    from partita.run.distributed.checkpoints import latest

    last = latest(folder)
    return 0 if last is None else int(last.name.removeprefix("step-"))


def _final(folder):
    from partita.run.distributed.checkpoints import latest, read_plain

    last = latest(folder)
    return {} if last is None else read_plain(last)


def tell_numbers(lines, failed):
    """Counts, and everything that was not as it should be."""
    ran = [line for line in lines if "state" in line]
    far = [
        line
        for line in ran
        if max(line["state"], line["gradients"]) > (HALF_CLOSE if line.get("wide") else CLOSE)
        or line["loss"] > (HALF_LOSS_CLOSE if line.get("wide") else LOSS_CLOSE)
    ]
    refused = Counter(line["refused"] for line in lines if "refused" in line)
    print(
        f"{len(lines) + len(failed)} plans: {len(ran)} ran, {len(ran) - len(far)} with the numbers"
    )
    print(f"  of one process; {sum(refused.values())} refused, {len(failed)} failed")
    for wide, name in ((False, ""), (True, " in bf16 with f32 sums")):
        some = [line for line in ran if bool(line.get("wide")) is wide]
        print(f"  {len(some)} plans{name}")
        for what in ("loss", "gradients", "state"):
            print(f"    worst {what}: {max((line[what] for line in some), default=0.0):.2g}")
    print(f"  schedules: {dict(Counter(line['name'] for line in ran))}")
    for line in far:
        print(f"  other numbers: {line}")
    for text, number in refused.items():
        print(f"  refused {number} times: {text[:200]}")
    for each in failed:
        print(f"  failed: {each}", flush=True)


def tell_kills(options):
    """Counts of what became of the ranks, and every run that was not as it should be."""
    counts, began, took = Counter(), time.monotonic(), []
    rounds = -(-options.kills // KILLS_A_PLAN)
    for model in MODELS:
        training_graphs(model)
    with (
        tempfile.TemporaryDirectory() as place,
        concurrent.futures.ThreadPoolExecutor(max(1, options.workers // 2)) as pool,
    ):
        folders = [Path(place) / str(number) for number in range(rounds)]
        for folder in folders:
            folder.mkdir()
        for lines in pool.map(lambda n: kills(options, n, folders[n]), range(rounds)):
            for line in lines:
                well = [key for key in ("ended", "named", "went_on", "same") if line.get(key)]
                counts[line["outcome"]] += 1
                counts["at any time"] += line.get("within_task") is False
                counts.update(well)
                took.append(line.get("took_s", 0.0))
                if line["outcome"] == "killed" and len(well) < 4:
                    print(f"  {line}", flush=True)
            print(f"  kills: {dict(counts)}", file=sys.stderr, flush=True)
            if options.seconds and time.monotonic() - began > options.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    print(f"kills: {dict(counts)}; the longest run until all had ended {max(took):.0f} s")


def main():
    """Plans, then kills."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", type=int, default=200)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", default="2,3,4", help="as many plans on each number")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=0, help="of each of the three")
    parser.add_argument("--shared", action="store_true", help="stages on devices of several others")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    if options.local:
        local(options)
    if options.plans:
        with tempfile.TemporaryDirectory() as place:
            tell_numbers(*numbers(options, Path(place)))
    if options.kills:
        tell_kills(options)


if __name__ == "__main__":
    main()
