"""Memory over a step as PyTorch's memory viewer reads it (pytorch.org/memory_viz).

The viewer opens what `torch.cuda.memory._snapshot()` gives, pickled: for each device a list of
allocations and frees in the order of time. Here every part of a memory (parameters, activations,
...) is a stack: where it grows there is an allocation, where it shrinks the latest ones are freed.
The frame of an event names its part. Only plain values are pickled.
"""

import pickle
from collections.abc import Sequence
from typing import Any

from partita.jobs.memory_parts import PARTS, MemoryCurves, few_steps

ADDRESS = 0x100000000  # of the first allocation
MICRO = 1e6
MOST_STEPS = 20_000  # of each memory


def memory_snapshot(memories: Sequence[MemoryCurves]) -> bytes:
    """The pickle of all memories of a plan."""
    snapshot = {
        "segments": [_segment(device) for device in range(len(memories))],
        "device_traces": [_events(few_steps(curves, MOST_STEPS)) for curves in memories],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(snapshot, protocol=2)


def _segment(device: int) -> dict[str, Any]:
    return {
        "device": device, "address": ADDRESS, "total_size": 0, "allocated_size": 0,
        "active_size": 0, "requested_size": 0, "stream": 0, "segment_type": "large", "blocks": [],
        "frames": [],
    }  # fmt: skip


def _events(curves: MemoryCurves) -> list[dict[str, Any]]:
    """Allocations and frees of one memory, by time."""
    events: list[dict[str, Any]] = []
    address = ADDRESS
    for part in PARTS:
        frames = [{"filename": "plan", "line": 0, "name": part}]
        stack: list[tuple[int, int]] = []  # (address, size) of what is held
        held = 0

        def note(action: str, at: int, size: int, moment: int, told: object = frames) -> None:
            events.append(
                {"action": action, "addr": at, "size": size, "stream": 0, "time_us": moment,
                 "frames": told}
            )  # fmt: skip

        for time_s, amount in zip(curves.times.tolist(), curves.parts[part].tolist(), strict=True):
            wanted, moment = round(amount), round(time_s * MICRO)
            while held > wanted:
                at, size = stack.pop()
                note("free_requested", at, size, moment)
                note("free_completed", at, size, moment)
                held -= size
            if wanted > held:
                note("alloc", address, wanted - held, moment)
                stack.append((address, wanted - held))
                address += wanted - held
                held = wanted
    return sorted(events, key=lambda event: event["time_us"])
