"""Schedule search: least periods against recorded ones, makespans against Tessel's, ends, bubbles.

    python benchmarks/schedule_search.py [FOLDER] [--only periods,...] [--quick]

FOLDER holds problems (`<name>.json`) and `periods.json`: name -> cap -> least period with one
micro-batch per repetition. Without it the problems of the tests are taken. Tables:

    periods      every (problem, cap) recorded, with one micro-batch per repetition and with several
    sixteen      shapes on 16 devices, which are not recorded
    makespans    `auto` against `tessel` for 4 to 64 micro-batches on 4 devices, 4 and 16 on 8
    assemble     1,024 micro-batches on 16 stages, unrolled and verified once the period is known
    split        backward in two pieces, caps of 1, 1.5 and 2 activations a stage, published ones
    command      `partita schedule mshape --devices 4 --microbatches 6 --memory 6`

Times are CPU seconds in one process; the solver has one thread.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from partita.jobs.baselines import compare, device_spans
from partita.jobs.schedule import schedule
from partita.problems import schedule as problems
from partita.problems.schedule import ScheduleProblem
from partita.schedules.shapes import SHAPES, ShapeOptions, shape
from partita.search.base import UNTIL_DONE, Run
from partita.search.schedule import SEARCHES
from partita.search.schedule.lightest import lightest_order, why_infeasible
from partita.search.schedule.period_search import FIRST_EFFORT, PeriodSearch
from partita.search.schedule.solver import Allowance
from partita.search.schedule.tessel import Tessel

TESTS = Path(__file__).parent.parent / "tests" / "data" / "schedule"
LIMIT_S = 60.0
Row = tuple[object, ...]


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=TESTS, help="problems to solve")
    parser.add_argument("--only", help="names of tables with commas between")
    parser.add_argument("--quick", action="store_true", help="fewer micro-batches and caps")
    args = parser.parse_args()
    tables: dict[str, Callable[[Path, bool], Iterator[Row]]] = {
        "periods": periods,
        "sixteen": sixteen,
        "makespans": makespans,
        "assemble": assemble,
        "split": split,
        "command": command,
    }
    for name in args.only.split(",") if args.only else tables:
        print(f"\n{name}")
        for row in tables[name](args.folder, args.quick):
            print("  ".join(map(_cell, row)), flush=True)


def periods(folder: Path, quick: bool) -> Iterator[Row]:
    """Recorded, with one per repetition (proven?), with several, the bound, CPU seconds of each."""
    yield "problem", "cap", "recorded", "one", "proven", "CPU", "several", "bound", "status", "CPU"
    recorded = json.loads((folder / "periods.json").read_bytes())
    for name, caps in recorded.items():
        if not (folder / f"{name}.json").exists():
            continue
        for cap, period in caps.items():
            memory = None if cap == "None" else int(cap)
            problem = problems.read(folder / f"{name}.json", memory=memory)
            yield name, cap, period, *_one_and_several(problem)


def sixteen(folder: Path, quick: bool) -> Iterator[Row]:
    """Shapes on 16 devices, with one micro-batch per repetition."""
    yield "problem", "cap", "period", "bound", "proven", "CPU"
    for name in SHAPES:
        for cap in (8, 20) if quick else (4, 8, 15, 16, 32):
            yield name, cap, *_one(shape(name, 16).problem(cap, None))


def _one_and_several(problem: ScheduleProblem) -> Row:
    if why_infeasible(problem, lightest_order(problem)):
        return ("infeasible",)
    least, _, proven, took = _one(problem)
    begin = time.process_time()
    result = SEARCHES["auto"](problem, UNTIL_DONE, 0)
    several = time.process_time() - begin
    return least, proven, took, result.objective, result.lower_bound, str(result.status), several


def _one(problem: ScheduleProblem) -> Row:
    """The least period with one micro-batch per repetition, the bound, whether it is proven."""
    if why_infeasible(problem, lightest_order(problem)):
        return None, None, "infeasible", 0.0
    run: Run[Any] = Run(UNTIL_DONE, "one", 0)
    begin = time.process_time()
    one = PeriodSearch(problem, run, 1, lambda pattern: None)
    one.try_first_fit()
    effort = FIRST_EFFORT
    while not one.done() and time.process_time() - begin < LIMIT_S:
        one.go_on(1, effort, Allowance(effort * 8))
        effort *= 2
    took = time.process_time() - begin
    least = None if one.period is None else _plain(one.period)
    return least, float(one.bound), one.done(), took


def makespans(folder: Path, quick: bool) -> Iterator[Row]:
    """`auto` against `tessel`."""
    yield ("problem", "devices", "cap", "N", "tessel", "CPU", "auto", "bound", "gap", "CPU",
           "not above")  # fmt: skip
    worse = 0
    for name, devices, cap, count in _counted(quick):
        problem = shape(name, devices).problem(cap, count)
        begin = time.process_time()
        theirs = Tessel(6)(problem)
        took = time.process_time() - begin
        begin = time.process_time()
        ours = SEARCHES["auto"](problem, UNTIL_DONE, 0)
        ours_s = time.process_time() - begin
        if ours.objective is None or theirs.objective is None:
            continue
        above = ours.objective > theirs.objective
        worse += above
        bound, gap = ours.lower_bound, ours.gap
        yield (name, devices, cap, count, theirs.objective, took, ours.objective, bound, gap,
               ours_s, not above)  # fmt: skip
    yield (f"longer than tessel's: {worse}",)


def _counted(quick: bool) -> Iterator[tuple[str, int, int, int]]:
    """(shape, devices, cap, micro-batches)."""
    for name in ("vshape", "xshape", "kshape", "mshape", "nnshape", "finetune", "alphafold"):
        for cap in (3,) if quick else (2, 3, 4, 6):
            for count in (4, 8, 16, 32, 64):
                yield name, 4, cap, count
    for name in ("vshape", "kshape", "mshape", "finetune"):
        for cap in (6,) if quick else (4, 6, 8):
            for count in (4, 16):
                yield name, 8, cap, count


def assemble(folder: Path, quick: bool) -> Iterator[Row]:
    """Unroll and verify 1,024 micro-batches on 16 stages."""
    yield "shape", "period", "micro-batches", "makespan", "CPU"
    for name in ("vshape", "mshape", "xshape"):
        forever = schedule(shape(name, 16), memory=20)
        begin = time.process_time()
        unrolled = forever.unroll(1024)
        took = time.process_time() - begin
        yield name, forever.period, unrolled.num_microbatches, unrolled.makespan, took


def split(folder: Path, quick: bool) -> Iterator[Row]:
    """Ours beside the published schedules that fit the same cap on the same placement.

    A span is the longest that a device takes from its first start to its last end; less its work it
    is the bubble as it is published.
    """
    yield ("placement", "devices", "N", "cap", "published: makespan", "span", "ours: makespan",
           "span", "bound", "CPU")  # fmt: skip
    options = ShapeOptions(backward_span=1, weight_span=1)
    for name, chunks in (("vshape", 1), ("wave", 2)):
        for devices in (4,) if quick else (4, 8):
            for count in (2 * devices, 4 * devices):
                for times in (1, 1.5, 2):
                    cap = math.ceil(times * devices * chunks)
                    yield _split_row(name, devices, count, cap, options)


def _split_row(name: str, devices: int, count: int, cap: int, options: ShapeOptions) -> Row:
    problem = shape(name, devices, options).problem(cap, count)
    fitting = [b for b in compare(problem, count).ran if b.placement == "as given"]
    fitting = [b for b in fitting if b.fits(problem)]
    makespan = min((b.makespan for b in fitting), default=None)
    span = min((b.longest_span for b in fitting), default=None)
    begin = time.process_time()
    ours = schedule(problem)
    took = time.process_time() - begin
    our_span = max(device_spans(ours.timeline()))
    return (name, devices, count, cap, makespan, span, ours.makespan, our_span, ours.lower_bound,
            took)  # fmt: skip


def command(folder: Path, quick: bool) -> Iterator[Row]:
    """What `partita schedule` does after it has started."""
    yield "case", "makespan", "bound", "status", "CPU"
    for name, count, cap in (("mshape", 6, 6), ("mshape", 6, 4), ("mshape", 6, 3)):
        begin = time.process_time()
        result = schedule(shape(name, 4), memory=cap, microbatches=count)
        took = time.process_time() - begin
        yield f"{name} {count} {cap}", result.makespan, result.lower_bound, str(result.status), took


def _plain(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
