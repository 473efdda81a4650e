"""Is a plan ever slower than a named strategy? Zoo models on several machines, by one simulator.

    python benchmarks/plan_zoo.py                       the models and machines below
    python benchmarks/plan_zoo.py --models gpt2 unet --clusters 8xA100
    python benchmarks/plan_zoo.py --time-limit 20

Each row has the best named strategy that fits, the plan, its gap, and the CPU seconds of both. The
exit status is 1 if any named strategy was faster.
"""

import argparse
import time

from partita import units
from partita.jobs.compare import compare
from partita.search.base import Stop

MODELS = (
    "alexnet", "resnet50", "inception_v3", "squeezenet1_1", "densenet121", "unet", "vit-b16",
    "rnnlm", "seq2seq", "transformer-base", "bert-large", "gpt2", "gpt2-xl", "gpt3-6.7b",
    "llama-7b", "mixtral-8x7b", "t5-base",
)  # fmt: skip
CLUSTERS = ("8xA100", "2x8xA100", "4xV100+8xP100")
OURS = ("shard", "plan")
PER_DEVICE = 4  # samples
ROUNDING = 1e-6


def row(model: str, cluster: str, batch: int, limit_s: float) -> tuple[tuple[str, ...], bool]:
    """One line of the table, and whether a named strategy is faster than the plan."""
    started = time.process_time()
    comparison = compare(model, cluster, batch=batch, stop=Stop(time_s=limit_s, gap=0.01))
    seconds = time.process_time() - started
    plan = next(r for r in comparison.rows if r.name == "plan")
    named = [r for r in comparison.rows if r.name not in OURS and r.fits]
    best = min(named, key=lambda r: r.step_s, default=None)
    lost = best is not None and best.step_s < plan.step_s * (1 - ROUNDING)
    gap = 1 - comparison.lower_bound_s / plan.step_s if plan.fits else float("nan")
    return (
        model,
        cluster,
        str(batch),
        "none fits" if best is None else f"{best.name} {units.seconds(best.step_s)}",
        units.seconds(plan.step_s) if plan.fits else "does not fit",
        f"{1 - plan.step_s / best.step_s:.1%}" if best is not None and plan.fits else "",
        f"{gap:.1%}",
        f"{seconds:.0f} s",
    ), lost


def main() -> int:
    """Print the table; say which plans lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--batch", type=int, help=f"default: {PER_DEVICE} samples a device")
    parser.add_argument("--time-limit", type=float, default=30.0)
    options = parser.parse_args()
    rows, lost = [], []
    for cluster in options.clusters:
        size = sum(_count(part) for part in cluster.split("+"))
        for model in options.models:
            line, slower = row(
                model, cluster, options.batch or PER_DEVICE * size, options.time_limit
            )
            rows.append(line)
            print(*line, sep="\t", flush=True)
            if slower:
                lost.append(f"{model} on {cluster}")
    header = ("model", "machine", "batch", "best named", "plan", "better", "gap", "took")
    print(units.table(header, rows))
    print(f"{len(rows)} cases; slower than a named strategy: {', '.join(lost) or 'none'}")
    return 1 if lost else 0


def _count(part: str) -> int:
    """Devices of one part of a machine's text: 2x8xA100 has sixteen."""
    total = 1
    for word in part.split("x"):
        total *= int(word) if word.isdigit() else 1
    return total


if __name__ == "__main__":
    raise SystemExit(main())
