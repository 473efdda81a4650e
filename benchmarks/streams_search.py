"""CPU milliseconds of the exact streams search, against recorded optima and IOS's own search.

    python benchmarks/streams_search.py [FOLDER] [--lazy] [--json]

FOLDER holds problems (`<model>.json`) and may hold `recorded.json` with their optima; without it
the problems of the tests are taken. A randomly wired block of 33 ops is added. Every problem is
searched with r=3 s=8 and without limits. Times are CPU, best of five in one process, everything
compiled; reading the file is not included. Transitions count a single op as a merge of one too, as
IOS does. "times IOS" divides IOS's CPU seconds (its own Python search, measured once on another
day, its stage costs not included) by ours.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partita.problems import streams
from partita.problems.streams import StreamsConstants, StreamsOp, StreamsProblem
from partita.search.base import UNTIL_DONE
from partita.search.streams import SEARCHES
from partita.search.streams.sweep import rules, solve
from partita.search.streams.units import units

RUNS = 5
TESTS = Path(__file__).parent.parent / "tests" / "data" / "streams"
PRUNINGS: dict[str, tuple[int | None, int | None]] = {"r=3 s=8": (3, 8), "unpruned": (None, None)}
IOS_CPU_S = {
    ("squeezenet", "r=3 s=8"): 0.002,
    ("squeezenet", "unpruned"): 0.006,
    ("inception_v3", "r=3 s=8"): 0.234,
    ("inception_v3", "unpruned"): 0.229,
    ("nasnet_large", "r=3 s=8"): 72.5,
    ("nasnet_large", "unpruned"): 78.5,
}
GPU = StreamsConstants(80, 14e6, 0.6, 9e5, 4.0, 3.0, 0.01)


def main() -> None:
    """Run and print a line per problem and pruning."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=TESTS, help="problems to solve")
    parser.add_argument("--lazy", action="store_true", help="count the stages `lazy` measures too")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    for row in rows(args.folder, args.lazy):
        print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()))


def rows(folder: Path, lazy: bool) -> Iterator[dict[str, Any]]:
    """One row per problem and pruning."""
    at = folder / "recorded.json"
    recorded = json.loads(at.read_bytes()) if at.exists() else {}
    models = sorted(path.stem for path in folder.glob("*.json") if path != at)
    for model in [*models, "random_wiring"]:
        for pruning, (r, s) in PRUNINGS.items():
            if model in models:
                problem = streams.read(folder / f"{model}.json", r=r, s=s)
            else:
                problem = random_wiring(33, 10, r, s)
            yield row(problem, model, pruning, recorded.get(model, {}).get(pruning), lazy)


def row(
    problem: StreamsProblem, model: str, pruning: str, recorded: dict[str, Any] | None, lazy: bool
) -> dict[str, Any]:
    """What the exact search found, and how long it took."""
    search = SEARCHES["exact"]
    search(problem, UNTIL_DONE, 0)  # compiled
    times = []
    for _ in range(RUNS):
        begin = time.process_time()
        result = search(problem, UNTIL_DONE, 0)
        times.append(time.process_time() - begin)
    ios_s = IOS_CPU_S.get((model, pruning))
    states, transitions = counts(problem)
    row = {
        "model": model,
        "pruning": pruning,
        "status": str(result.status),
        "objective_us": result.objective,
        "recorded_us": recorded and recorded["objective_us"],
        "states": states,
        "transitions": transitions,
        "counts_as_recorded": recorded
        and (states, transitions) == (recorded["states"], recorded["transitions"]),
        "cpu_ms": round(1e3 * min(times), 3),
        "times_ios": ios_s and round(ios_s / min(times)),
    }
    if lazy:
        row["lazy_measures"] = SEARCHES["lazy"](problem, UNTIL_DONE, 0).evaluations
    return row


def counts(problem: StreamsProblem) -> tuple[int, int]:
    """States and transitions of all parts; equal parts are counted each."""
    states = transitions = 0
    for unit in units(problem):
        if unit.piece is not None:
            given = rules(problem.constants, problem.r, problem.s)
            answer = solve(unit.piece, given, lambda: False)
            if answer is not None:
                states += answer.states
                transitions += answer.transitions + answer.singles
    return states, transitions


def random_wiring(count: int, width: int, r: int | None, s: int | None) -> StreamsProblem:
    """Ops that take from two of the last `width` ops each, like a randomly wired network."""
    rng = random.Random(0)
    ops = [StreamsOp("input", (), 0.0, 0.0)]
    for index in range(1, count + 1):
        near = range(max(0, index - width), max(1, index - 1))
        preds = tuple(sorted(set(rng.choices(near, k=2))))
        t_us = rng.uniform(5, 30)
        ops.append(StreamsOp("op", preds, t_us, t_us * rng.uniform(0.05, 0.5)))
    return StreamsProblem(tuple(ops), (tuple(range(1, count + 1)),), GPU, r=r, s=s)


if __name__ == "__main__":
    main()
