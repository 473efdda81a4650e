"""Seconds to build GPT-3 175B with its backward, and to cost every op of it on 1,024 H100.

    python benchmarks/gpt3.py [--json]

Each figure is the first call in a fresh process (nothing remembered), median of several processes.
The cost of an op is its roofline under every legal split over 8 devices, and the all-reduce of its
parameter gradients over all 1,024.
"""

import argparse
import json
import statistics
import subprocess
import sys

RUNS = 5
ONE_RUN = """
import json, time
from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.roofline import op_cost
from partita.graph import training_graph
from partita.graph.splits import splittable
from partita.zoo import build
start = time.perf_counter()
graph = training_graph(build("gpt3-175b"))
built = time.perf_counter()
cluster = resolve("128x8xH100")
kind = cluster.kind_of(0)
collectives = Collectives(cluster)
everyone = (tuple(range(cluster.num_devices)),)
ready = time.perf_counter()
costs = 0
for op in graph.ops:
    for dim in ("", *splittable(graph.call(op), 8)):
        op_cost(graph, op, kind, ((dim, 8),) if dim else ())
        costs += 1
    if op.phase == "update":
        size = graph.tensor(op.inputs[1]).size_bytes
        collectives.seconds("all_reduce", size, everyone)
done = time.perf_counter()
print(json.dumps({"ops": len(graph.ops), "costs": costs, "build_s": built - start,
                  "cluster_s": ready - built, "cost_s": done - ready}))
"""


def main() -> None:
    """Run and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", ONE_RUN], check=True, capture_output=True, text=True
            ).stdout
        )
        for _ in range(RUNS)
    ]
    result = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    if args.json:
        print(json.dumps(result))
        return
    print(f"graph of GPT-3 175B with backward, {result['ops']:,.0f} ops: {result['build_s']:.3f} s")
    print(f"cluster of 1,024 H100: {result['cluster_s']:.3f} s")
    print(f"{result['costs']:,.0f} costs of all ops and splits: {result['cost_s']:.3f} s")


if __name__ == "__main__":
    main()
