"""Random verified plans on real ranks: the numbers of the whole model, and ranks that are killed.

    python benchmarks/run_random.py --plans 40 --kills 10

Plans: any cut, mesh, split, ZeRO stage, checkpointing and schedule, of seven small models, on two
to four gloo ranks. Losses, gradients and parameters after two steps are held against the model in
one process. Kills: a rank of such a plan gets SIGKILL at a random moment of a run with checkpoints;
the others must end within the timeout and name it, and a second run that goes on from the last
checkpoint must end with the parameters of a run that was left alone, bit by bit.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS / "lower"), str(TESTS / "run" / "distributed")]

from distributed_models import make  # noqa: E402
from distributed_plans import (  # noqa: E402
    apart,
    graph_of,
    in_one_process,
    random_plan_on,
    sgd,
)
from distributed_ranks import run_on_ranks  # noqa: E402

from partita.errors import PartitaError  # noqa: E402
from partita.run.distributed import train as trains  # noqa: E402
from partita.run.distributed.engine import execute  # noqa: E402

MODELS = ("mlp", "gpt", "resnet", "unet", "lstm", "moe", "t5")
CLOSE = 1e-5
LOSS_CLOSE = 5e-6
TIMEOUT_S = 20.0
STEPS, EVERY = 8, 2


def plan_for(model, world, seed):
    """The random plan of a seed."""
    return random_plan_on(world, seed, graph_of(*make(model)))


# Numbers.


def compare(rank, world, cases, path):
    """Take two steps of every plan; rank 0 writes a line for each as it goes."""
    for model, seed in cases:
        plan = plan_for(model, world, seed)
        module, args = make(model)
        line = {"model": model, "seed": seed}
        try:
            engine = execute(
                plan, module, optimizer=sgd, device="cpu", keep_gradients=True,
                timeout_s=120, example=args,
            )  # fmt: skip
        except PartitaError as error:
            _write(rank, path, {**line, "refused": str(error)})
            continue
        losses = [engine.step(*args) for _ in range(2)]
        state, gradients = engine.full_state_dict(), engine.full_gradients()
        engine.board.close()
        if rank == 0:
            count = plan.schedule.num_microbatches
            wanted, grads, after = in_one_process(make(model)[0], args, count, 2, sgd)
            off = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
            line |= {
                "loss": off,
                "gradients": apart(gradients, grads),
                "state": apart(state, after),
            }
            _write(rank, path, {**line, "stages": len(plan.stages), "name": plan.schedule.name})


def _write(rank, path, line):
    if rank == 0:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def numbers(options, folder):
    """Run the plans, world by world; a plan that ends its ranks is one that failed."""
    chance = random.Random(options.seed)
    lines, failed = [], []
    for world, share in ((2, 0.4), (3, 0.3), (4, 0.3)):
        number = round(options.plans * share)
        cases = [(chance.choice(MODELS), chance.randrange(10**6)) for _ in range(number)]
        while cases:
            path = folder / f"numbers{world}-{len(cases)}"
            path.write_text("")
            ends = run_on_ranks(world, compare, world, cases, path, folder=folder, limit_s=500)
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


class Killer:
    """Kills its own process some moments after a task."""

    def __init__(self, task, delay_s):
        self.left, self.delay_s = task, delay_s

    def start(self, task, name):
        """Count."""
        self.left -= 1
        if self.left == 0:
            kill = threading.Timer(self.delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()

    def end(self, task, name):
        """Nothing."""


def trained(rank, world, model, seed, folder, victim, task, delay_s):
    """A run with checkpoints, from the last on; its losses and a digest of what it ends with."""
    plan = plan_for(model, world, seed)
    module, args = make(model)
    settings = trains.TrainSettings(STEPS, 1e-2, "cpu", folder, EVERY, TIMEOUT_S, 0)
    killer = Killer(task, delay_s) if rank == victim else None
    losses = {}
    for done in trains.train(plan, module, args, None, settings, killer):
        losses[done.number] = done.loss
    return losses


def kill(options, number, folder):
    """One run that is left alone, one that loses a rank, one that goes on."""
    chance = random.Random(options.seed + 1000 + number)
    model, world = chance.choice(MODELS), 2
    while True:
        seed = chance.randrange(10**6)
        ends = run_on_ranks(
            world, trained, world, model, seed, folder / "whole", -1, 0, 0.0, folder=folder
        )
        if all(end.code == 0 for end in ends):
            break
        print(f"  {model} {seed}: {_last_line(ends)}", flush=True)
    victim = chance.randrange(world)
    task, delay_s = chance.randrange(5, 60), chance.random() * 0.05
    began = time.monotonic()
    lost = run_on_ranks(
        world, trained, world, model, seed, folder / "killed", victim, task, delay_s,
        folder=folder, limit_s=90,
    )  # fmt: skip
    took = time.monotonic() - began
    other = lost[1 - victim]
    was_killed = lost[victim].code == -signal.SIGKILL
    if not was_killed:
        return {"outcome": "ended before it was killed"}
    named = f"rank {victim} failed in" in other.stderr or "rank 0 (or what" in other.stderr
    again = run_on_ranks(
        world, trained, world, model, seed, folder / "killed", -1, 0, 0.0, folder=folder
    )
    states = [_final(folder / name) for name in ("whole", "killed")]
    same = states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )
    return {
        "outcome": "killed", "model": model, "seed": seed, "victim": victim, "took_s": took,
        "ended": other.code == 1, "named": named, "went_on": all(e.code == 0 for e in again),
        "from_step": min(again[0].result or {0: 0}), "same": same, "said": _last_line([other]),
    }  # fmt: skip


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
        if max(line["state"], line["gradients"]) > CLOSE or line["loss"] > LOSS_CLOSE
    ]
    refused = Counter(line["refused"] for line in lines if "refused" in line)
    print(
        f"{len(lines) + len(failed)} plans: {len(ran)} ran, {len(ran) - len(far)} with the numbers"
    )
    print(f"  of one process; {sum(refused.values())} refused, {len(failed)} failed")
    for what in ("loss", "gradients", "state"):
        print(f"  worst {what}: {max((line[what] for line in ran), default=0.0):.2g}")
    print(f"  schedules: {dict(Counter(line['name'] for line in ran))}")
    for line in far:
        print(f"  other numbers: {line}")
    for text, number in refused.items():
        print(f"  refused {number} times: {text[:200]}")
    for each in failed:
        print(f"  failed: {each}", flush=True)


def main():
    """Plans, then kills."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as place:
        tell_numbers(*numbers(options, Path(place)))
    counts: Counter[str] = Counter()
    for number in range(options.kills):
        with tempfile.TemporaryDirectory() as place:
            result = kill(options, number, Path(place))
        counts[result["outcome"]] += 1
        counts.update(k for k in ("ended", "named", "went_on", "same") if result.get(k))
        print(f"  {result}", flush=True)
    print(f"kills: {dict(counts)}")


if __name__ == "__main__":
    main()
