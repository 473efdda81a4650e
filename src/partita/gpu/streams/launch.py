"""A launch plan on its streams: forked from the current stream, joined into it at the end."""

from collections.abc import Mapping
from typing import Any

import torch

from partita.gpu.streams.bound import Bound
from partita.gpu.streams.order import LaunchPlan
from partita.gpu.streams.ways import EAGER, Way


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
