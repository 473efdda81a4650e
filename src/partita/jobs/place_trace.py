"""The timeline of Exprimo's simulation: the oracle's own run, watched.

Each device and each channel is a lane; every job and transfer the oracle starts becomes a task
with the start and end it has there, waiting for what the rules say it waits for. The verifier can
check such a timeline like any other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from partita.problems import placement as rules
from partita.problems.placement import PlacementProblem
from partita.program import Kind, ProgramBuilder
from partita.timeline import Timeline

MS = 1e-3


class _WatchedSimulation(rules._Simulation):
    """The oracle's simulation, noting what starts when."""

    def __init__(self, problem: PlacementProblem, placement: Sequence[int]) -> None:
        super().__init__(problem, placement)
        self.started: list[tuple[Any, Any, float, float]] = []  # slot, item, start, end

    def start_next(self, slot: Any) -> None:
        super().start_next(slot)
        item = slot.current
        if item is not None:
            job = isinstance(item, rules._LayerRun)
            lasts = self.job_ms(item) if job else self.transfer_ms(item)
            self.started.append((slot, item, self.now_ms, self.now_ms + lasts))


def exprimo_timeline(problem: PlacementProblem, placement: Sequence[int]) -> Timeline:
    """When every job and transfer runs, by Exprimo's rules; in seconds."""
    watched = _WatchedSimulation(problem, placement)
    watched.run()
    builder = ProgramBuilder()
    lanes = _lanes(builder, problem, watched)
    made: dict[tuple[Any, ...], int] = {}  # what a job or transfer has made -> its task
    times = []
    for slot, item, start, end in watched.started:
        name, kind, key, waits = _described(problem, placement, item, made)
        lasts = (end - start) * MS
        task = builder.add(name, lanes[id(slot)], lasts, waits, kind=kind, microbatch=item.batch)
        times.append((start * MS, end * MS))
        if kind == Kind.SEND:  # received the moment it is sent: there is no latency
            got = builder.add(name, (), 0.0, [task], kind=Kind.RECEIVE, microbatch=item.batch)
            builder.pair(task, got)
            times.append((end * MS, end * MS))
            task = got
        made[key] = task
    start_s, end_s = np.array(times).reshape(-1, 2).T
    return Timeline(builder.build(), start_s, end_s)


def _lanes(
    builder: ProgramBuilder, problem: PlacementProblem, watched: _WatchedSimulation
) -> dict[int, int]:
    lanes = {}
    for index, (slot, device) in enumerate(zip(watched.devices, problem.devices, strict=True)):
        lanes[id(slot)] = builder.lane(f"{index} {device.model}".strip(), "device")
    for index, (slot, channel) in enumerate(zip(watched.channels, problem.channels, strict=True)):
        lanes[id(slot)] = builder.lane(f"channel {index} {channel.type}".strip(), "link")
    return lanes


def _described(
    problem: PlacementProblem, placement: Sequence[int], item: Any, made: dict[tuple[Any, ...], int]
) -> tuple[str, Kind, tuple[Any, ...], list[int]]:
    """(block, kind, key, waits) of a job or a transfer."""
    batch, layer, backward = item.batch, item.layer, item.backward
    name = problem.layers[layer].name
    own = (batch, layer, backward, placement[layer])
    if isinstance(item, rules._Transfer):
        label = f"{name}{' gradients' if backward else ''} to device {item.target}"
        key = (batch, layer, backward, item.target)
        return label, Kind.SEND, key, [made[own]]
    neighbours = problem.layers[layer].children if backward else problem.layers[layer].parents
    # What a neighbour made is here: on this device, or sent to it.
    waits = [made[batch, other, backward, placement[layer]] for other in neighbours]
    if backward and not neighbours:
        waits = [made[batch, layer, False, placement[layer]]]
    return name, Kind.DGRAD if backward else Kind.FORWARD, own, waits
