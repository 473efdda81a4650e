"""CUDA graphs: whatever is launched, captured once and replayed; without a GPU it is run again.

A graph knows addresses, not tensors. What it makes lies in memory of its own; what it reads and did
not make must be held for as long as it may be replayed. A tensor that nobody holds goes back to
PyTorch, which gives the memory back to the device at the next capture: a replay then reads
addresses that are no longer there, and the whole process loses the device.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class GraphReplay:
    """Something to replay, and what it needs to stay in memory."""

    __slots__ = ("_run", "held")

    def __init__(self, run: Callable[[], object], held: object = None) -> None:
        self._run, self.held = run, held

    def replay(self) -> None:
        """Once more; who has only this method holds the rest by it."""
        self._run()


@contextmanager
def quiet_capture() -> Iterator[None]:
    """Nothing else may touch the device while a graph is captured."""
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def capture(
    run: Callable[[], object], warm_up: int = 1, holds: Callable[[], object] | None = None
) -> GraphReplay:
    """A CUDA graph of whatever `run` launches; run before, so that all is compiled and chosen.

    `holds` gives what the graph will read, asked right before it is captured: if `run` puts its
    results where the next run finds them, the warm-up has replaced what was there.
    """
    if not torch.cuda.is_available():
        return GraphReplay(run)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            run()
    torch.cuda.current_stream().wait_stream(side)
    held = None if holds is None else holds()
    graph = torch.cuda.CUDAGraph()
    with quiet_capture(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a step may only look
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    return GraphReplay(graph.replay, held)
