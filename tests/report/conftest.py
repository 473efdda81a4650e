"""Timelines small enough to draw by hand."""

import numpy as np
import pytest

from partita.program import KINDS, Kind, Program, ProgramBuilder
from partita.timeline import Timeline
from tests.report.browser import browser

__all__ = ["browser"]  # a fixture


def timed(program: Program, start: list[float]) -> Timeline:
    return Timeline(program, np.array(start), np.array(start) + program.duration)


@pytest.fixture
def pipeline() -> Timeline:
    """1F1B: four stages, eight microbatches, a forward takes 1 and a backward 2."""
    b = ProgramBuilder(time_unit="")
    lanes = [b.lane(f"gpu{s}") for s in range(4)]
    stores = [b.memory(f"gpu{s}", 4.0) for s in range(4)]
    end: dict[tuple[str, int, int], float] = {}
    free, start = [0.0] * 4, []
    todo = []
    for stage in range(4):
        warm = 4 - stage
        todo.append([("F", i) for i in range(warm)])
        for i in range(8):
            todo[-1] += [("B", i)] + ([("F", i + warm)] if i + warm < 8 else [])
    while any(todo):
        for stage in range(4):
            if not todo[stage]:
                continue
            kind, i = todo[stage][0]
            before = (
                [("F", stage - 1, i)] if kind == "F" else [("F", stage, i), ("B", stage + 1, i)]
            )
            before = [key for key in before if 0 <= key[1] < 4]
            if any(key not in end for key in before):
                continue
            todo[stage].pop(0)
            start.append(max([free[stage], *(end[key] for key in before)]))
            duration = 1 if kind == "F" else 2
            end[kind, stage, i] = free[stage] = start[-1] + duration
            effect = (stores[stage], 1.0, 0.0) if kind == "F" else (stores[stage], 0.0, -1.0)
            b.add(f"stage{stage}", lanes[stage], duration, (), [effect], KINDS[kind], i)
    return timed(b.build(), start)


@pytest.fixture
def overlapped() -> Timeline:
    """Two devices and a link: what is sent while the next is computed, then reduced and applied."""
    b = ProgramBuilder()
    gpu0, gpu1 = b.lane("gpu0"), b.lane("gpu1")
    link = b.lane("gpu0→gpu1", "link")
    memory = b.memory("gpu1", 8 * 2.0**30)
    start: list[float] = []
    for i in range(3):
        b.add("stage0", gpu0, 2e-3, kind=Kind.FORWARD, microbatch=i)
        send = b.add("act", link, 1e-3, kind=Kind.SEND, microbatch=i)
        receive = b.add("act", gpu1, 5e-4, [send], (), Kind.RECEIVE, i)
        b.add("stage1", gpu1, 1e-3, (), [(memory, 2.0**31, -(2.0**31))], Kind.DGRAD, i)
        b.pair(send, receive)
        now = i * 2e-3
        start += [now, now + 2e-3, now + 3e-3, now + 3.5e-3]
    b.add("stage1", gpu1, 1.5e-3, kind=Kind.WGRAD)
    b.add("grads", [gpu0, gpu1], 2e-3, kind=Kind.COLLECTIVE)
    b.add("stage0", gpu0, 1e-3, kind=Kind.UPDATE)
    b.add("done", (), 0.0)
    return timed(b.build(), [*start, 8.5e-3, 1e-2, 1.2e-2, 1.3e-2])


@pytest.fixture
def hostile() -> Timeline:
    """Names that try to be something else."""
    b = ProgramBuilder()
    b.memory("<script>m</script>", 1.0)
    lane = b.lane('</text><script>alert("1")</script>\x1b[2J\n\u202e', "<b>&kind")
    b.add("<img src=x onerror=alert(1)>&\x00", lane, 1.0, (), [(0, 1.0, -1.0)], Kind.FORWARD, 0)
    return timed(b.build(), [0.0])


@pytest.fixture
def crowd() -> Timeline:
    """A hundred lanes with a hundred short tasks each, two thirds of them backward."""
    b = ProgramBuilder()
    start = []
    for lane in range(100):
        b.lane(f"unit{lane}", "unit")
        for i in range(100):
            kind = Kind.FORWARD if i % 3 == 0 else Kind.BACKWARD
            b.add(f"tile{lane}", lane, 1e-6, kind=kind, microbatch=i)
            start.append(i * 1e-6 * (1 + lane / 100))
    return timed(b.build(), start)


@pytest.fixture
def nothing() -> Timeline:
    return timed(ProgramBuilder().build(), [])
