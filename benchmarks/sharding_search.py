"""How fast are sharding problems solved, with what proof, time and memory, and against PaSE?

    python benchmarks/sharding_search.py FOLDER [--method exact] [--repeats 3] [--json]
    python benchmarks/sharding_search.py --stress [--json]

FOLDER holds sharding problems as .npz. `--stress` makes large ones instead: PaSE's graphs and cost
model for 32, 64 and 128 devices; the transformer and DenseNet-121 (with dense connections) again
as "noisy", where every edge has a matrix of its own with each cost changed by a random factor, so
that no two rows, columns or blocks are equal; and as "scarce", where a tenth of all pairs of
choices is forbidden.

CPU seconds are the best of `repeats` searches, with the problem in memory and the code compiled.
Each instance has a process of its own, forked after compilation; its peak memory is that process's,
Python and the problem included. "recorded" is how far the objective is from an optimum in the file.
PaSE's seconds are CPU seconds of its search alone, the best over all runs of its code (commit
32aa761, Python 3.11, pandas 2.2.3) on the same instances, on the same kind of machine on another
day; "-" where it did not finish or was not run.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import platform
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.costs.pase import pase_problem
from partita.problems.sharding import ShardingProblem, read
from partita.search.base import Stop
from partita.search.sharding import SEARCHES

DENSENET = "densenet-6-12-24-16-dense"
PASE_CPU_S = {
    "alexnet_p4": 0.0635, "alexnet_p8": 0.0688, "alexnet_p16": 0.0743, "alexnet_p32": 0.0949,
    "alexnet_p64": 0.13, "alexnet_p128": 0.213, "rnnlm_p4": 0.0165, "rnnlm_p8": 0.0201,
    "rnnlm_p16": 0.025, "rnnlm_p32": 0.0426, "rnnlm_p64": 0.0799, "rnnlm_p128": 0.149,
    "resnet101_p4": 2.83, "resnet101_p8": 7.47, "resnet101_p16": 26.5, "resnet101_p32": 90.5,
    "inception3_p4": 1.6, "inception3_p8": 2.77, "inception3_p16": 6.11, "inception3_p32": 17.3,
    "inception3_p64": 47.9, "inception3_p128": 115.0, "transformer_p4": 2.27,
    "transformer_p8": 11.1, "transformer_p16": 107.0, "densenet-3-3-3-3-dense_p4": 2.99,
    "densenet-4-4-4-4-dense_p4": 28.8, "densenet-6-12-24-16-chain_p4": 7.75,
}  # fmt: skip


def stress() -> Iterator[tuple[str, ShardingProblem]]:
    """The problems made here, each with its name."""
    graphs = ("alexnet", "rnnlm", "resnet101", "inception3", "transformer", DENSENET)
    for graph, devices in itertools.product(graphs, (32, 64, 128)):
        yield f"{graph}_p{devices}", pase_problem(graph, devices)[0]
    for graph, devices in itertools.product(("transformer", DENSENET), (32, 64, 128)):
        plain = pase_problem(graph, devices)[0]
        yield f"{graph}_p{devices} noisy", noisy(plain)
        yield f"{graph}_p{devices} scarce", scarce(plain)


def noisy(problem: ShardingProblem) -> ShardingProblem:
    """Every edge with a matrix of its own, and every cost of it changed at random."""
    rng = np.random.default_rng(0)
    chosen = (problem.matrices[index] for index in problem.matrix_of)
    changed = tuple(
        (matrix + matrix.mean() / 10) * rng.uniform(0.8, 1.25, matrix.shape) for matrix in chosen
    )
    return replace(problem, matrices=changed, matrix_of=tuple(range(len(changed))))


def scarce(problem: ShardingProblem) -> ShardingProblem:
    """A tenth of all pairs of choices forbidden."""
    rng = np.random.default_rng(0)
    holes = tuple(
        np.where(rng.random(matrix.shape) < 0.1, math.inf, matrix) for matrix in problem.matrices
    )
    return replace(problem, matrices=holes)


def measure(
    name: str, problem: ShardingProblem, method: str, repeats: int, limit_s: float
) -> dict[str, Any]:
    """All figures of one problem, measured in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_search, args=(there, problem, method, repeats, limit_s))
    child.start()
    figures: dict[str, Any] = here.recv()
    child.join()
    known, objective, pase = problem.known_cost, figures["objective"], PASE_CPU_S.get(name)
    off = None if known is None or objective is None else (objective - known) / abs(known)
    return {
        "instance": name,
        "ops": problem.num_ops,
        "edges": len(problem.edges),
        "max_choices": max(problem.num_choices),
        **figures,
        "gap_to_recorded": off,
        "pase_cpu_s": pase,
        "times_faster_than_pase": None if pase is None else pase / figures["cpu_s"],
    }


def _search(
    there: Any, problem: ShardingProblem, method: str, repeats: int, limit_s: float
) -> None:
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        result = SEARCHES[method](problem, Stop(time_s=limit_s))
        seconds.append(time.process_time() - began)
    there.send(
        {
            "objective": result.objective,
            "lower_bound": result.lower_bound,
            "status": str(result.status),
            "why": result.why,
            "cpu_s": min(seconds),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    )


HEADER = (
    f"{'instance':<40}{'ops':>5}{'K':>5}{'objective':>16}{'recorded':>10}{'lower bound':>16} "
    f"{'status':<9}{'CPU ms':>9}{'peak MB':>9}{'x PaSE':>9}"
)


def line(figures: dict[str, Any]) -> str:
    """One row of the table."""

    def number(key: str, form: str) -> str:
        return "-" if figures[key] is None else format(figures[key], form)

    return (
        f"{figures['instance']:<40}{figures['ops']:>5}{figures['max_choices']:>5}"
        f"{number('objective', '.9g'):>16}{number('gap_to_recorded', '.1e'):>10}"
        f"{number('lower_bound', '.9g'):>16} {figures['status']:<9}{figures['cpu_s'] * 1e3:>9.1f}"
        f"{figures['peak_mb']:>9.0f}{number('times_faster_than_pase', ',.0f'):>9}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How fast are sharding problems solved?")
    parser.add_argument("folder", nargs="?", type=Path, help="of .npz files")
    parser.add_argument("--stress", action="store_true", help="large problems made here")
    parser.add_argument("--method", default="exact", choices=list(SEARCHES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per search")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.folder is None and not options.stress:
        parser.error("give a folder of .npz files, or --stress")
    began = time.process_time()
    plain = pase_problem("alexnet", 8)[0]
    for problem in (plain, noisy(plain), scarce(plain)):
        SEARCHES[options.method](problem)
    first_s = time.process_time() - began
    files = sorted(options.folder.glob("*.npz")) if options.folder else []
    problems = itertools.chain(
        ((file.stem, read(file)) for file in files), stress() if options.stress else ()
    )
    rows = []
    if not options.json:
        print(f"first call, compiling or loading what was compiled: {first_s:.2f} s of CPU")
        print(HEADER)
    for name, problem in problems:
        rows.append(measure(name, problem, options.method, options.repeats, options.time_limit))
        if not options.json:
            print(line(rows[-1]), flush=True)
    if options.json:
        about = {"method": options.method, "first_call_cpu_s": first_s}
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        print(json.dumps({**about, **machine, "instances": rows}))


if __name__ == "__main__":
    main()
