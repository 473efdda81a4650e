"""CUDA graphs: whatever is launched, captured once and replayed; without a GPU it is run again."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Again:
    """Without a GPU: what is replayed is run again."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


@contextmanager
def quiet_capture() -> Iterator[None]:
    """Nothing else may touch the device while a graph is captured."""
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def capture(run: Callable[[], object], warm_up: int = 1) -> Any:
    """A CUDA graph of whatever `run` launches; run before, so that all is compiled and chosen."""
    if not torch.cuda.is_available():
        return _Again(run)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with quiet_capture(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a step may only look
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    return graph
