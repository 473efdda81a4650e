"""Seconds to make PaSE's problems, and whether they are those that were recorded.

    python benchmarks/pase_interface.py [FOLDER] [--search] [--json]

Without a folder every graph is built for 4 to 128 devices. With a folder of recorded problems
(`<graph>_p<devices>.npz`) each is built again and compared: choices, costs of ops and of tensors,
and with --search also the optimum that PaSE's method finds. CPU seconds, best of three.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from partita.costs.pase import pase_problem
from partita.problems.sharding import ShardingProblem, from_npz
from partita.search.sharding import SEARCHES
from partita.zoo.pase_graphs import GRAPHS

RUNS = 3
DEVICES = (4, 8, 16, 32, 64, 128)
PAPER = {"batch": 128, "flops_T": 10.0, "bw_GBs": 16.0}


def main() -> None:
    """Run and print a line per problem."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="recorded problems")
    parser.add_argument("--search", action="store_true", help="compare the optimum too")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    rows = compared(args.folder, args.search) if args.folder else built()
    for row in rows:
        print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()))


def built() -> Iterator[dict[str, Any]]:
    """Every graph for every number of devices."""
    for graph in GRAPHS:
        for devices in DEVICES:
            yield measured({"graph": graph, "p": devices, **PAPER})[1]


def compared(folder: Path, search: bool) -> Iterator[dict[str, Any]]:
    """Every recorded problem beside the one that is built."""
    for path in sorted(folder.glob("*.npz")):
        recorded = from_npz(path.read_bytes(), str(path))
        problem, row = measured(json.loads(recorded.meta))
        row["equal"] = same(problem, recorded)
        if search:
            result = SEARCHES["pase"](problem)
            row["status"] = str(result.status)  # PaSE's tables do not fit a large DenseNet
            row["objective"], row["recorded"] = result.objective, recorded.known_cost
        yield row


def measured(meta: dict[str, Any]) -> tuple[ShardingProblem, dict[str, Any]]:
    """The problem, and how long it took."""
    best = math.inf
    for _ in range(RUNS):
        start = time.process_time()
        problem, _ = pase_problem(
            meta["graph"], meta["p"], meta["batch"], meta["flops_T"], meta["bw_GBs"]
        )
        best = min(best, time.process_time() - start)
    return problem, {
        "graph": meta["graph"],
        "p": meta["p"],
        "ops": problem.num_ops,
        "choices": max(problem.num_choices),
        "cpu_ms": round(1000 * best, 1),
    }


def same(ours: ShardingProblem, theirs: ShardingProblem) -> bool:
    """Whether choices, costs and matrices agree, the recorded choices brought into our order."""
    orders = [np.lexsort(splits.T[::-1]) for splits in theirs.splits]
    pairs = zip(ours.splits, theirs.splits, ours.costs, theirs.costs, orders, strict=True)
    ops = all(
        np.array_equal(splits, recorded[order]) and np.allclose(cost, known[order], 1e-9, 0)
        for splits, recorded, cost, known, order in pairs
    )
    return (
        ops
        and ours.edges == theirs.edges
        and all(
            np.allclose(
                ours.matrices[ours.matrix_of[edge]],
                theirs.matrices[theirs.matrix_of[edge]][np.ix_(orders[src], orders[dst])],
                1e-9,
                0,
            )
            for edge, (src, dst) in enumerate(ours.edges)
        )
    )


if __name__ == "__main__":
    main()
