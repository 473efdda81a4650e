"""Times on the GPU: CUDA events around replays, medians, candidates in turns against drift.

Without a GPU the clock of the host is read instead: for tests of what is done with the times.
"""

import statistics
from collections.abc import Callable, Sequence

import torch

from partita.gpu.graphs import GraphReplay, capture
from partita.run.clock import run_times_s

COPIES = 10  # of a step in the graph that is timed, so that a launch is small beside them


def run_us(run: Callable[[], object], replays: int = 8) -> float:
    """Some launches on one stream, over and over in one graph."""

    def again() -> None:
        for _ in range(COPIES):
            run()

    replay = capture(again).replay
    replay()
    return replay_us(replay, replays) / COPIES


class DriftGauge:
    """Work that is always the same: what it takes now against what it took first is the drift.

    It is replayed for as long as the gauge is used: whoever captures it sees to it that what it
    reads stays in memory.
    """

    def __init__(self, graph: GraphReplay) -> None:
        self.graph = graph
        self.replay: Callable[[], object] = graph.replay
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


def _times_us(run: Callable[[], object], runs: int) -> list[float]:
    return [1e6 * each for each in run_times_s(run, runs, on_gpu=torch.cuda.is_available())]


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
