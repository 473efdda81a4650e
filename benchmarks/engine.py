"""How fast is the event engine, and how much memory does a task take?

    python benchmarks/engine.py [--tasks 1000000] [--repeats 5] [--json]

The program is a 1F1B pipeline of 16 stages with about two waits and one memory effect per task,
and durations that vary, so that queues form. Rates are tasks per second of the best of `repeats`
runs, the making of the timeline included. "static, unsorted" is the same program with its indices
shuffled and its order given lane by lane, so that the engine must sort it. "First call" is that of
a small program, which compiles the mode or loads it from the cache; "second process" is a fresh
Python that times a small program, imports included.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.engine.events import MODES, run
from partita.program import I32, Kind, Lane, Memory, Program
from partita.verify import verify_timeline

NUM_STAGES = 16


def one_f_one_b(num_stages: int, num_microbatches: int, seed: int = 0) -> Program:
    """A 1F1B pipeline in the order of its ideal start times, made with array operations only."""
    p, m = num_stages, num_microbatches
    tasks = 2 * p * m
    stage, microbatch = (x.ravel() for x in np.indices((p, m), np.int32))
    warm = microbatch < p - stage
    forward_at = np.where(warm, stage + microbatch, 2 * microbatch + stage)
    backward_at = 2 * p - 1 - stage + 2 * microbatch
    order = np.lexsort((np.tile(stage, 2), np.concatenate((forward_at, backward_at))))
    index = np.argsort(order).astype(np.int32)

    def task(kind: int, s: I32, b: I32) -> I32:
        """Index of the task, -1 where there is none."""
        there = (s >= 0) & (s < p) & (b >= 0)
        return np.where(there, index[(kind * p * m + s * m + b).clip(0, tasks - 1)], np.int32(-1))

    # A forward waits for the stage before it and for a free slot; a backward for its forward and
    # the stage after it.
    forward_waits = (task(0, stage - 1, microbatch), task(1, stage, microbatch - (p - stage)))
    backward_waits = (task(0, stage, microbatch), task(1, stage + 1, microbatch))
    waits = np.concatenate((np.stack(forward_waits, 1), np.stack(backward_waits, 1)))[order]
    kind = np.repeat(np.array((Kind.FORWARD, Kind.BACKWARD), np.int8), p * m)[order]
    amount = np.where(kind == Kind.FORWARD, 1.0, 0.0)
    noise = np.random.default_rng(seed).uniform(0.9, 1.1, tasks)
    one_each = np.arange(tasks + 1, dtype=np.int32)
    stage, microbatch = np.tile(stage, 2)[order], np.tile(microbatch, 2)[order]
    return Program(
        lanes=tuple(Lane(f"gpu{s}") for s in range(p)),
        duration=np.where(kind == Kind.FORWARD, 1e-3, 2e-3) * noise,
        lane_start=one_each,
        lane_of=stage,
        wait_start=running_total((waits >= 0).sum(1)),
        wait_on=waits[waits >= 0],
        memories=tuple(Memory(f"gpu{s}", float(p)) for s in range(p)),
        effect_start=one_each,
        effect_memory=stage,
        effect_at_start=amount,
        effect_at_end=amount - 1.0,
        blocks=tuple(f"stage{s}" for s in range(p)),
        block=stage,
        kind=kind,
        microbatch=microbatch,
        priority=(kind == Kind.BACKWARD).astype(np.float64),
    )


def unsorted(program: Program, seed: int = 0) -> Program:
    """The same tasks with random indices and an order lane by lane: the engine must sort them."""
    place = np.random.default_rng(seed).permutation(program.num_tasks).astype(np.int32)
    at = np.argsort(place)  # place: old index -> new; at: new -> old
    counts = np.diff(program.wait_start)[at]
    wait_start = running_total(counts)
    entry = np.arange(wait_start[-1]) + np.repeat(program.wait_start[at] - wait_start[:-1], counts)
    return Program(
        lanes=program.lanes,
        duration=program.duration[at],
        lane_start=program.lane_start,
        lane_of=program.lane_of[at],
        wait_start=wait_start,
        wait_on=place[program.wait_on[entry]],
        order=place[np.argsort(program.lane_of, kind="stable")],
    )


def running_total(counts: npt.NDArray[Any]) -> I32:
    """Where each list begins, and the end of the last."""
    return np.concatenate(([0], counts.cumsum())).astype(np.int32)


def best_of(repeats: int, job: Callable[..., object], *arguments: object) -> float:
    """The shortest of a few timings, in seconds."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        job(*arguments)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def second_process() -> float:
    """Seconds of a fresh Python that runs a small program in static order, cache filled."""
    code = (
        "from partita.program import ProgramBuilder\n"
        "from partita.engine.events import run\n"
        "b = ProgramBuilder(); g = b.lane('g'); f = b.add('x', g, 1.0); b.add('y', g, 1.0, [f])\n"
        "assert run(b.build()).makespan == 2.0\n"
    )
    return best_of(2, lambda: subprocess.run([sys.executable, "-c", code], check=True))


def measure(num_tasks: int, repeats: int) -> dict[str, Any]:
    """All figures, by name."""
    tiny = one_f_one_b(2, 2)
    first_call = {mode: best_of(1, run, tiny, mode) for mode in MODES}
    program = one_f_one_b(NUM_STAGES, max(1, num_tasks // (2 * NUM_STAGES)))
    tasks = program.num_tasks
    timeline = run(program)
    seconds: dict[str, float] = {mode: best_of(repeats, run, program, mode) for mode in MODES}
    seconds["static, unsorted"] = best_of(repeats, run, unsorted(program))
    return {
        "tasks": tasks,
        "waits_per_task": len(program.wait_on) / tasks,
        "tasks_per_s": {mode: tasks / spent for mode, spent in seconds.items()},
        "first_call_s": first_call,
        "second_process_s": second_process(),
        "bytes_per_task": (program.nbytes + timeline.nbytes) / tasks,
        "verify_s": best_of(1, verify_timeline, program, timeline),
        "violations": len(verify_timeline(program, timeline)),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How fast is the event engine?")
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(options.tasks, options.repeats)
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{figures['tasks']:,} tasks, {figures['waits_per_task']:.2f} waits each")
    print(f"{'mode':<18}{'million tasks/s':>17}{'first call, s':>16}")
    for mode, rate in figures["tasks_per_s"].items():
        first = figures["first_call_s"].get(mode)
        print(f"{mode:<18}{rate / 1e6:>17.1f}{'' if first is None else f'{first:.2f}':>16}")
    print(f"bytes per task, program and timeline  {figures['bytes_per_task']:.0f}")
    print(f"second process, s                     {figures['second_process_s']:.2f}")
    print(f"verified in, s                        {figures['verify_s']:.2f}")


if __name__ == "__main__":
    main()
