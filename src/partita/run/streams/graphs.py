"""A launch plan as one CUDA graph: captured once over side streams, replayed with one call."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from partita.run.streams.bound import Bound
from partita.run.streams.order import LaunchPlan
from partita.run.streams.ways import EAGER, Way


def launch_all(bound: Bound, plan: LaunchPlan, ways: Mapping[str, Way]) -> None:
    """Launch a plan: forked from the current stream, joined into it at the end."""
    if bound.device.type != "cuda":
        for launch in plan.launches:
            step = bound.flow.steps[launch.step]
            bound.run(step, ways.get(step.name, EAGER))
        return
    main = torch.cuda.current_stream()
    streams = _streams(plan, main)
    needed = {step for launch in plan.launches for step in launch.waits}
    events: dict[int, Any] = {}
    started = {main}
    fork = torch.cuda.Event()
    fork.record(main)
    for launch in plan.launches:
        stream, step = streams[launch.stream], bound.flow.steps[launch.step]
        if stream not in started:
            if not launch.waits:
                stream.wait_event(fork)
            started.add(stream)
        for wait in launch.waits:
            stream.wait_event(events[wait])
        with torch.cuda.stream(stream):
            bound.run(step, ways.get(step.name, EAGER))
        if launch.step in needed:
            events[launch.step] = torch.cuda.Event()
            events[launch.step].record(stream)
    for stream in started - {main}:
        event = torch.cuda.Event()
        event.record(stream)
        main.wait_event(event)


_SIDE: dict[tuple[int, int], Any] = {}  # side streams of a device, made once: they are few


def _streams(plan: LaunchPlan, main: Any) -> dict[int, Any]:
    device = torch.cuda.current_device()
    names = list(dict.fromkeys(launch.stream for launch in plan.launches))
    streams = {}
    for number, name in enumerate(names):
        if number == 0:
            streams[name] = main
            continue
        if (device, number) not in _SIDE:
            _SIDE[device, number] = torch.cuda.Stream()
        streams[name] = _SIDE[device, number]
    return streams


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
