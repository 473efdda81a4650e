"""Times on the GPU: CUDA events around replays, medians, candidates in turns against drift.

Without a GPU the clock of the host is read instead: for tests of what is done with the times.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from partita.run.streams.bound import Bound
from partita.run.streams.graphs import capture
from partita.run.streams.steps import Step
from partita.run.streams.ways import Way

COPIES = 10  # of a step in the graph that is timed, so that a launch is small beside them


def step_us(bound: Bound, step: Step, way: Way, replays: int = 8) -> float:
    """One step by itself, run over and over in one graph."""
    return run_us(lambda: bound.run(step, way), replays)


def run_us(run: Callable[[], object], replays: int = 8) -> float:
    """Some launches on one stream, over and over in one graph."""

    def again() -> None:
        for _ in range(COPIES):
            run()

    replay = capture(again).replay
    replay()
    return replay_us(replay, replays) / COPIES


class Reference:
    """Work that is always the same: what it takes now against what it took first is the drift."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay: Callable[[], object] = capture(run).replay
        self.first_us = compare_us([self.replay])[0]

    def timed_us(self, replay: Callable[[], object]) -> float:
        """A replay in turns with the reference, as if it had been timed when that was."""
        mine_us, now_us = compare_us([replay, self.replay], rounds=2, replays=4)
        return mine_us * self.first_us / now_us


def replay_us(run: Callable[[], object], replays: int) -> float:
    """The median of some runs back to back."""
    return statistics.median(_times_us(run, replays))


def wait() -> None:
    """Until the GPU has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def raise_interrupt(error: BaseException | None) -> None:
    """Raise Ctrl-C again where a graph that was just being captured has made an error of it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        error = error.__context__


def _times_us(run: Callable[[], object], replays: int) -> list[float]:
    if not torch.cuda.is_available():
        return [_host_us(run) for _ in range(replays)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def _host_us(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - began)


def compare_us(
    runs: Sequence[Callable[[], object]], rounds: int = 5, replays: int = 20
) -> list[float]:
    """The median of each candidate, in turns: what drifts, drifts for all."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        for _ in range(3):
            run()
    for _ in range(rounds):
        for number, run in enumerate(runs):
            times[number] += _times_us(run, replays)
    return [statistics.median(each) for each in times]
