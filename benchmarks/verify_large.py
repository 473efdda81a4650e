"""How long does a large plan take to lower in full, and its meaning to verify?

    python benchmarks/verify_large.py [--case gpt3-175b 128x8xA100 1536] [--pin pp=8] [--runs 3]
                                      [--json]

The plan is made by `partita.plan`, then lowered as its answer is: every op of every stage, bodies
of pipelines too. The verifier follows every layout (`verify_meaning`), looks for deadlock
(`verify_program`) and at the simulated run (`verify_timeline`). Best of `--runs`, CPU seconds.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from partita.cluster import resolve
from partita.engine import run
from partita.jobs.plan import plan
from partita.jobs.workload import load
from partita.lower import lower_plan
from partita.program import Program
from partita.search.base import Stop
from partita.verify import verify_meaning, verify_program, verify_timeline

CASE = ("gpt3-175b", "128x8xA100", "1536")
ASKED_S = 5.0  # the most that verifying the meaning may take


@dataclass(frozen=True, slots=True)
class Times:
    """CPU seconds of each step, and what was looked at."""

    plan: str
    tasks: int
    works: int
    plan_s: float
    lower_s: float
    meaning_s: float
    program_s: float
    timeline_s: float
    refused: tuple[str, ...]


def timed(runs: int, step: Callable[[], Any]) -> tuple[float, Any]:
    """The least CPU seconds of some runs, and what the last gave."""
    seconds, answer = [], None
    for _ in range(runs):
        begun = time.process_time()
        answer = step()
        seconds.append(time.process_time() - begun)
    return min(seconds), answer


def size(program: Program) -> tuple[int, int]:
    """Tasks and works, with those inside of blocks."""
    inside = [size(body.program) for body in program.bodies]
    tasks = program.num_tasks + sum(own for own, _ in inside)
    return tasks, len(program.works) + sum(own for _, own in inside)


def measure(model: str, cluster: str, batch: int, pins: list[str], runs: int) -> Times:
    """Plan once, then lower and verify some times."""
    begun = time.process_time()
    planned = plan(model, cluster, batch=batch, pin=pins, stop=Stop(gap=0.05))
    plan_s = time.process_time() - begun
    if planned.plan is None:
        raise SystemExit(f"no plan: {planned.why}")
    chosen, graph, machine = planned.plan, load(model, batch=batch).graph, resolve(cluster)
    stages, schedule = chosen.stages, chosen.schedule
    lower_s, lowered = timed(runs, lambda: lower_plan(stages, schedule, graph, machine, run))
    program, decided = lowered.program, lowered.stages
    meaning_s, wrong = timed(runs, lambda: verify_meaning(program, graph, decided, schedule))
    program_s, stuck = timed(runs, lambda: verify_program(program))
    timeline = run(program)
    free = replace(program, memories=tuple(replace(m, capacity=None) for m in program.memories))
    timeline_s, untrue = timed(runs, lambda: verify_timeline(free, timeline))
    tasks, works = size(program)
    name = f"{model} on {cluster}, batch {batch}: {planned.best.simulation.arrangement}"
    refused = (*wrong, *stuck, *untrue)
    return Times(
        name, tasks, works, plan_s, lower_s, meaning_s, program_s, timeline_s, refused
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", nargs=3, default=CASE, metavar=("MODEL", "CLUSTER", "BATCH"))
    parser.add_argument("--pin", action="append", default=[], help="as of `partita plan`")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    model, cluster, batch = args.case
    times = measure(model, cluster, int(batch), args.pin, args.runs)
    if args.json:
        print(json.dumps({name: getattr(times, name) for name in times.__slots__}))
        return
    print(f"{times.plan}\n{times.tasks:,} tasks, {times.works:,} works")
    print(f"planned in {times.plan_s:.1f} s, lowered in full in {times.lower_s:.2f} s")
    print(
        f"meaning verified in {times.meaning_s:.2f} s (asked: {ASKED_S:g} s), program in "
        f"{times.program_s:.2f} s, timeline in {times.timeline_s:.2f} s"
    )
    print(f"refused: {times.refused[0] if times.refused else 'nothing'}")
    print(f"CPU seconds, best of {args.runs}, {platform.processor() or platform.machine()}")


if __name__ == "__main__":
    main()
