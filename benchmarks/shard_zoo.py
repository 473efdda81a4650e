"""Shard every model of the zoo, training and inference: never worse than a named strategy?

    python benchmarks/shard_zoo.py [--cluster 4xA100] [--models gpt2,resnet50] [--json]

For each model the time of the best plan, of the best named strategy and of plain data parallelism,
the gap to the lower bound, and the seconds the search took.
"""

import argparse
import json
import time

from partita.jobs.shard import shard
from partita.jobs.strategies import STRATEGIES
from partita.zoo import MODELS


def row(model: str, cluster: str, training: bool) -> dict[str, object]:
    """One model, one direction."""
    started = time.process_time()
    sharding = shard(model, cluster, training=training)
    seconds = time.process_time() - started
    fitting = [c for c in sharding.tried if c.simulation.fits]
    named = [c.step_s for c in fitting if c.name in STRATEGIES]
    return {
        "model": model,
        "training": training,
        "status": str(sharding.status),
        "step_s": None if sharding.best is None else sharding.best.step_s,
        "by": None if sharding.best is None else sharding.best.name,
        "best_named_s": min(named, default=None),
        "lower_bound_s": sharding.lower_bound_s,
        "cpu_s": seconds,
    }


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cluster", default="4xA100")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    rows = [
        row(model, args.cluster, training)
        for model in args.models.split(",")
        for training in (True, False)
    ]
    if args.json:
        print(json.dumps({"cluster": args.cluster, "rows": rows}))
        return
    for each in rows:
        step, named = each["step_s"], each["best_named_s"]
        mode = "train" if each["training"] else "infer"
        if not isinstance(step, float):
            print(f"{each['model']:18} {mode}  does not fit")
            continue
        gap = 1 - float(str(each["lower_bound_s"])) / step
        ratio = "" if not isinstance(named, float) else f"named x{named / step:.3f}"
        print(
            f"{each['model']:18} {mode}  {step * 1e3:10.3f} ms  by {each['by']:8} {ratio:14} "
            f"gap {gap:6.1%}  {float(str(each['cpu_s'])):6.1f} s"
        )


if __name__ == "__main__":
    main()
