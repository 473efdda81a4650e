"""Every named schedule of every kind of model on 2 to 8 ranks: the numbers of one process.

    python benchmarks/run_schedules.py [--ranks 2,3,4,8] [--models mlp,gpt] [--seconds 600]

Nine small models (MLP, GPT, residual network, U-Net, LSTM, experts, encoder and decoder with tied
weights, GPT-2 and Llama of `transformers`) are cut into stages of equal numbers of ops, one or two
on a rank, and run under every named schedule that holds the model once, on gloo ranks of one
thread. Losses, gradients and parameters after two steps of SGD are held against the module alone.
Where a model has fewer ops than stages, or a schedule refuses the number of micro-batches, it says
so. Chimera and DualPipe hold the model twice: no plan has them.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS / "run" / "distributed"))

import test_distributed_transformers as of_transformers  # noqa: E402
from distributed_models import BATCH, make  # noqa: E402
from distributed_plans import graph_of, pipeline  # noqa: E402
from distributed_ranks import run_on_ranks  # noqa: E402
from exported_models import MODELS  # noqa: E402
from run_random import CLOSE, EXPORTED, LOSS_CLOSE, _last_line, compare_one  # noqa: E402

from partita.errors import PartitaError  # noqa: E402
from partita.schedules.named import NAMED  # noqa: E402

LARGE = ("gpt2", "llama")  # of transformers
SCHEDULES = [name for name, schedule in NAMED.items() if schedule.layout != "two-way"]


def made(model):
    """A module and its arguments, twice as many samples as the tests take."""
    module, args = of_transformers.make(model) if model in LARGE else make(model)
    return module, tuple(torch.cat([arg, arg.flip(0)]) for arg in args)


@functools.cache
def graph(model):
    """Its training graph, made once in a process."""
    return graph_of(*made(model))


def plan_of(model, world, schedule):
    """Equal stages on so many ranks, or why there are none."""
    layout = NAMED[schedule].layout
    chunks = 1 if layout == "line" else 2
    num_ops = sum(op.phase == "forward" for op in graph(model).ops)
    if num_ops < world * chunks:
        return f"{num_ops} ops are fewer than {world * chunks} stages"
    refuses = NAMED[schedule].refuses
    counts = [n for n in (8, 4, 2, 1) if not refuses(world, chunks, n)]  # of two samples or more
    if not counts:
        return refuses(world, chunks, 8)
    return pipeline(
        graph(model), world, schedule, counts[0], chunks=chunks, waves=layout == "wave",
        batch=2 * BATCH,
    )  # fmt: skip


def run_model(rank, world, model, schedules, path):
    """All schedules of a model, one after the other."""
    for schedule in schedules:
        try:
            plan = plan_of(model, world, schedule)
        except PartitaError as error:
            plan = str(error)
        line = {"model": model, "schedule": schedule, "ranks": world}
        if isinstance(plan, str):
            if rank == 0:
                with open(path, "a") as file:
                    file.write(json.dumps({**line, "refused": plan}) + "\n")
            continue
        compare_one(rank, plan, functools.partial(made, model), path, **line)


def main():
    """One start of ranks for each model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", default="2,3,4,8")
    parser.add_argument("--models", default=",".join((*MODELS, *LARGE)))
    parser.add_argument("--seconds", type=float, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began, ran, wrong, refused = time.monotonic(), Counter(), [], Counter()
    worst = dict.fromkeys(("loss", "gradients", "state"), 0.0)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for world in map(int, options.ranks.split(",")):
        for model in options.models.split(","):
            if options.seconds and time.monotonic() - began > options.seconds:
                break
            with tempfile.TemporaryDirectory() as place:
                path = Path(place) / "lines"
                path.write_text("")
                ends = run_on_ranks(
                    world, run_model, world, model, SCHEDULES, path, folder=Path(place),
                    limit_s=900, preloaded=EXPORTED[:-1],
                )  # fmt: skip
                lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                if "refused" in line:
                    refused[line["refused"]] += 1
                    continue
                ran[world] += 1
                worst = {key: max(worst[key], line[key]) for key in worst}
                if max(line["gradients"], line["state"]) > CLOSE or line["loss"] > LOSS_CLOSE:
                    wrong.append(line)
            if len(lines) < len(SCHEDULES):
                wrong.append((world, model, SCHEDULES[len(lines)], _last_line(ends)))
            print(
                f"  {world} ranks, {model}: {dict(ran)}; worst {worst}; {len(wrong)} wrong",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    print(f"ran, by number of ranks: {dict(ran)}; worst {worst}; {len(wrong)} wrong or failed")
    for line in wrong:
        print(f"  {line}")
    for text, count in refused.items():
        print(f"  {count} times: {text[:200]}")


if __name__ == "__main__":
    main()
