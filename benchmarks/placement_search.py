"""What the placement methods find, how fast, and how far from proven.

    python benchmarks/placement_search.py [FOLDER] [--methods auto,...] [--seconds 10] [--seeds 1]
    python benchmarks/placement_search.py --nets NET.json,... --machine GRAPH.json
                                          --batches 10 --in-flight 4 --seeds 5
    python benchmarks/placement_search.py --bounds 3000

FOLDER holds problems and may hold `recorded.json` with the best known scores; without it the
problems of the tests are taken; with `--nets` networks on a machine, all of them Exprimo's files.
Each method gets so many seconds of CPU per problem and seed: the worst score of the seeds, the
bound, evaluations per CPU second, and the CPU seconds after which the score was within 1 % of that
found. A generated network of 2,000 layers on eight heterogeneous devices is added with `--large`;
compare a run of 20 s with one of 300 s. With `--bounds` as many random problems of a few layers,
with several batches, are solved by trying all placements, and the lower bounds compared with the
best.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from partita.jobs.place_subject import load_subject
from partita.problems.placement import (
    Channel,
    PlacementDevice,
    PlacementLayer,
    PlacementProblem,
    RecordConstraints,
    read,
)
from partita.search.base import Improvement, Stop
from partita.search.placement import SEARCHES
from partita.search.placement.fastsim import PlacementSimulator
from partita.search.placement.labels import LabelBound
from partita.search.placement.tables import tables

TESTS = Path(__file__).parent.parent / "tests" / "data" / "placement"
SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.05)  # of the devices of the large problem


def main() -> None:
    """Run and print a line per problem and method."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=TESTS, help="problems to solve")
    parser.add_argument("--methods", default="auto", help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="of CPU per problem and seed")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--large", action="store_true", help="only the generated large problem")
    parser.add_argument("--nets", default="", help="networks by Exprimo's files, by commas")
    parser.add_argument("--machine", default="", help="their device graph")
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--bounds", type=int, default=0, help="so many random problems instead")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    PlacementSimulator(read(TESTS / "alexnet-malvik.json")).evaluate(
        [1] * 15
    )  # compiled before the clock
    if args.bounds:
        print(bounds_of_random_problems(args.bounds))
        return
    if args.nets:
        problems = [
            network_problem(net, args.machine, args.batches, args.in_flight)
            for net in args.nets.split(",")
        ]
        for problem in problems:  # compiled before the clock
            LabelBound(tables(problem)).search(5, np.inf)
        made = solved(problems, {}, args.methods.split(","), args.seconds, args.seeds)
    else:
        made = rows(args.folder, args.methods.split(","), args.seconds, args.seeds, args.large)
    for row in made:
        print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()))


def rows(
    folder: Path, methods: list[str], seconds: float, seeds: int, large: bool
) -> Iterator[dict[str, Any]]:
    """One row per problem and method."""
    at = folder / "recorded.json"
    recorded = json.loads(at.read_bytes()) if at.exists() else {}
    paths = [] if large else sorted(path for path in folder.glob("*.json") if path != at)
    problems = [large_problem()] if large else [read(path) for path in paths]
    yield from solved(problems, recorded, methods, seconds, seeds)


def network_problem(net: str, machine: str, batches: int, in_flight: int) -> PlacementProblem:
    """The problem of Exprimo's own files."""
    make = load_subject(net, machine).exprimo
    if make is None:
        raise SystemExit(f"{net} and {machine} are not both Exprimo's files")
    return make(batches, in_flight, RecordConstraints())


def solved(
    problems: list[PlacementProblem],
    recorded: dict[str, Any],
    methods: list[str],
    seconds: float,
    seeds: int,
) -> Iterator[dict[str, Any]]:
    """One row per problem and method."""
    for problem in problems:
        best = recorded.get(problem.name, {}).get("best_known_ms")
        for method in methods:
            by_seed = [_timed(problem, method, seconds, seed) for seed in range(seeds)]
            worst = max(by_seed, key=lambda row: row["ms"])
            each = {"ms of seeds": [row["ms"] for row in by_seed]} if seeds > 1 else {}
            against = {"of recorded": round(worst["ms"] / best, 5)} if best else {}
            yield {"problem": problem.name, "method": method, **worst, **each, **against}


def _timed(problem: PlacementProblem, method: str, seconds: float, seed: int) -> dict[str, Any]:
    started = time.process_time()
    steps: list[tuple[float, float]] = []

    def note(step: Improvement) -> None:
        if step.objective is not None:
            steps.append((time.process_time() - started, step.objective))

    stop = Stop(
        time_s=100 * seconds,  # a limit at all: `auto` then uses what it is given
        interrupted=lambda: time.process_time() - started > seconds,
        progress=note,
    )
    result = SEARCHES[method](problem, stop, seed)
    used = time.process_time() - started
    assert result.objective is not None
    assert result.lower_bound is not None
    return {
        "ms": round(result.objective, 3),
        "bound": round(result.lower_bound, 3),
        "gap": f"{1 - result.lower_bound / result.objective:.1%}",
        "status": str(result.status),
        "evaluations/s": round(result.evaluations / used),
        "cpu_s": round(used, 2),
        "within 1 % after": round(
            next(at for at, score in steps if score <= 1.01 * result.objective), 2
        ),
    }


def bounds_of_random_problems(count: int) -> str:
    """The lower bounds of random problems against the best of all placements."""
    parts = []
    for seed in range(count):
        generator = np.random.default_rng(seed)
        problem = small_problem(generator)
        size, devices = len(problem.layers), len(problem.devices)
        every = np.array(list(itertools.product(range(devices), repeat=size)), np.int64)
        best = float(PlacementSimulator(problem).scores(every).min())
        label_bound = LabelBound(tables(problem))
        width, most = int(generator.integers(1, 40)), best * generator.choice([1.0, 1.3, np.inf])
        for bound in (label_bound.root(), label_bound.search(width, most)):
            assert bound <= best * (1 + 1e-9), (seed, bound, best)
        parts.append(bound / best if best else 1.0)
    return (
        f"{count} problems: none above the best; {np.mean(parts):.3f} of it on average, "
        f"equal in {np.mean(np.array(parts) > 1 - 1e-6):.0%}"
    )


def small_problem(generator: np.random.Generator) -> PlacementProblem:
    """At most seven layers in blocks of branches, on two or three devices, some of them alike."""
    devices = int(generator.integers(2, 4))
    most = 7 if devices == 2 else 6
    parents: list[tuple[int, ...]] = [()]
    while len(parents) < generator.integers(3, most + 1):
        fork, ends = len(parents) - 1, []
        for _ in range(int(generator.integers(1, 3))):
            before = fork
            for _ in range(int(generator.integers(0, 3))):
                if len(parents) < most - 1:
                    parents.append((before,))
                    before = len(parents) - 1
            ends.append(before)
        parents.append(tuple(dict.fromkeys(ends)))
    children: list[list[int]] = [[] for _ in parents]
    for layer, above in enumerate(parents):
        for parent in above:
            children[parent].append(layer)

    def some(size: tuple[int, ...], zero: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        amounts: np.ndarray[Any, np.dtype[np.float64]] = generator.exponential(1.0, size)
        return amounts * (generator.random(size) >= zero)

    alike = generator.random() < 0.5
    times = some((2, len(parents), 1), 0.2) * (1 if alike else 0.3 + some((1, 1, devices), 0.0))
    times = np.broadcast_to(times, (2, len(parents), devices))
    channels = int(generator.integers(1, devices + 1))
    sizes = some((len(parents), 1), 0.1) * generator.choice([0.01, 0.1, 0.5])
    transfers = np.broadcast_to(sizes, (len(parents), channels))
    layers = tuple(
        PlacementLayer(
            name=f"l{index}",
            parents=parents[index],
            children=tuple(children[index]),
            output_bytes=float(sizes[index, 0]),
            weight_bytes=0.1,
            fwd_ms=tuple(times[0, index].tolist()),
            bwd_ms=tuple(times[1, index].tolist()),
            transfer_ms=tuple(transfers[index].tolist()),
        )
        for index in range(len(parents))
    )
    room = float(generator.choice([1e3, 0.1 * len(parents)]))
    return PlacementProblem(
        name="small",
        devices=(PlacementDevice(room),) * devices,
        channels=(Channel(128.0),) * channels,
        route=tuple(
            tuple(-1 if a == b else a % channels for b in range(devices)) for a in range(devices)
        ),
        layers=layers,
        batches=int(generator.integers(1, 11)),
        pipeline_batches=int(generator.integers(1, 6)),
    )


def large_problem(num_layers: int = 2000, seed: int = 0) -> PlacementProblem:
    """Blocks of parallel branches, log-normal work and sizes; eight heterogeneous devices.

    Nothing is limited by memory.
    """
    generator = np.random.default_rng(seed)
    parents: list[tuple[int, ...]] = [()]
    while len(parents) < num_layers:
        fork, ends = len(parents) - 1, []
        for _ in range(int(generator.integers(1, 5))):
            before = fork
            for _ in range(int(generator.integers(1, 5))):
                parents.append((before,))
                before = len(parents) - 1
            ends.append(before)
        parents.append(tuple(ends))
    children: list[list[int]] = [[] for _ in parents]
    for layer, above in enumerate(parents):
        for parent in above:
            children[parent].append(layer)
    work_ms, output, weight = generator.lognormal(0, 1, (3, len(parents)))
    layers = tuple(
        PlacementLayer(
            name=f"l{index}",
            parents=parents[index],
            children=tuple(children[index]),
            output_bytes=float(output[index] * 20e6),
            weight_bytes=float(weight[index] * 4e6),
            fwd_ms=tuple(float(work_ms[index] / speed) for speed in SPEEDS),
            bwd_ms=tuple(float(2 * work_ms[index] / speed) for speed in SPEEDS),
            transfer_ms=tuple(float(output[index] * 20 / (16 if c < 6 else 8)) for c in range(8)),
        )
        for index in range(len(parents))
    )
    # A transfer uses the link of its source; from the last device, a CPU, that of its target.
    route = [[-1 if a == b else (a if a != 7 else b) for b in range(8)] for a in range(8)]
    return PlacementProblem(
        name="large",
        devices=(PlacementDevice(1e15),) * len(SPEEDS),
        channels=(Channel(128.0),) * len(SPEEDS),
        route=tuple(map(tuple, route)),
        layers=layers,
    )


if __name__ == "__main__":
    main()
