"""Why lanes are idle: cases worked by hand, and sums that hold for every plan."""

import math
from dataclasses import replace

import numpy as np
import pytest

from partita.engine import run
from partita.jobs.idle import (
    CAUSES,
    DEPENDENCY,
    EXPOSED,
    HOST,
    IMBALANCE,
    MEMORY_CAP,
    bound_gap,
    idle_account,
)
from partita.jobs.simulate import simulate
from partita.plans import Schedule
from partita.program import Kind, ProgramBuilder
from partita.timeline import Timeline
from tests.report.plans import fully_sharded, line


def of(lane) -> dict[str, float]:
    return {cause: seconds for cause, seconds in lane.seconds.items() if seconds > 1e-9}


def adds_up(account) -> bool:
    return all(
        math.isclose(lane.busy_s + lane.idle_s, account.step_s, rel_tol=1e-9)
        for lane in account.lanes
    )


def two_stages(forward: float, later: float) -> Timeline:
    """gpu0 computes, sends for 1, gpu1 computes."""
    b = ProgramBuilder()
    gpu0, gpu1, link = b.lane("gpu0"), b.lane("gpu1"), b.lane("0>1", "link")
    first = b.add("a", gpu0, forward, kind=Kind.FORWARD)
    sent = b.add("s", link, 1.0, [first], kind=Kind.SEND)
    b.add("b", gpu1, later, [sent], kind=Kind.FORWARD)
    return run(b.build())


def test_a_device_waits_for_another_one_and_then_for_the_message():
    first, second = idle_account(two_stages(2.0, 2.0)).lanes
    assert of(second) == {DEPENDENCY: 2.0, EXPOSED: 1.0}
    assert [(gap.begin, gap.end, gap.cause) for gap in second.gaps] == [
        (2.0, 3.0, EXPOSED),
        (0.0, 2.0, DEPENDENCY),
    ]
    assert of(first) == {DEPENDENCY: 2.0, EXPOSED: 1.0}  # the step ends without it


def test_what_the_busiest_device_has_more_to_do_is_imbalance():
    account = idle_account(two_stages(5.0, 2.0))
    first, second = account.lanes
    assert of(second) == {DEPENDENCY: 2.0, IMBALANCE: 3.0, EXPOSED: 1.0}
    assert of(first) == {DEPENDENCY: 2.0, EXPOSED: 1.0}
    assert account.busiest is first
    assert adds_up(account)


def test_a_delay_after_a_milestone_is_the_host_and_after_a_task_a_message():
    b = ProgramBuilder()
    lane, other = b.lane("gpu"), b.lane("gpu1")
    begin = b.add("begin", (), 0.0)
    b.add("a", lane, 1.0, [(begin, 2.0)], kind=Kind.FORWARD)
    last = b.add("b", lane, 1.0, [(begin, 4.0)], kind=Kind.FORWARD)
    b.add("c", other, 1.0, [(last, 3.0)], kind=Kind.FORWARD)
    first, second = idle_account(run(b.build())).lanes
    assert of(first) == {HOST: 3.0, EXPOSED: 3.0, DEPENDENCY: 1.0}
    assert second.busy_s + second.idle_s == 9.0
    assert of(second)[EXPOSED] == 3.0


def memory_bound(capacity: float) -> Timeline:
    """F0 and F1 of one device, each holding 1 until its B; B0 waits for another device until 5."""
    b = ProgramBuilder()
    gpu0, gpu1 = b.lane("gpu0"), b.lane("gpu1")
    held = b.memory("gpu0", capacity)
    f0 = b.add("s", gpu0, 1.0, (), [(held, 1.0, 0.0)], Kind.FORWARD, 0)
    away = b.add("t", gpu1, 4.0, [f0], (), Kind.FORWARD, 0)
    b.add("s", gpu0, 1.0, [away], [(held, 0.0, -1.0)], Kind.BACKWARD, 0)
    f1 = b.add("s", gpu0, 1.0, (), [(held, 1.0, 0.0)], Kind.FORWARD, 1)
    b.add("s", gpu0, 1.0, [f1], [(held, 0.0, -1.0)], Kind.BACKWARD, 1)
    return run(b.build())


def test_where_the_next_task_is_ready_and_does_not_fit_the_memory_cap_is_to_blame():
    capped, _ = idle_account(memory_bound(1.0)).lanes
    assert of(capped) == {MEMORY_CAP: 4.0}
    free, _ = idle_account(memory_bound(2.0)).lanes
    assert of(free) == {DEPENDENCY: 4.0}  # the order leaves it free
    over, _ = idle_account(memory_bound(0.5)).lanes
    assert of(over) == {DEPENDENCY: 4.0}  # what does not fit anyway has not waited for the cap


def test_a_lane_that_never_works_and_a_program_without_tasks():
    b = ProgramBuilder()
    b.lane("idle")
    b.add("a", b.lane("gpu"), 2.0, kind=Kind.FORWARD)
    account = idle_account(run(b.build()))
    assert of(account.lanes[0]) == {IMBALANCE: 2.0}
    nothing = idle_account(Timeline(ProgramBuilder().build(), np.zeros(0), np.zeros(0)))
    assert nothing.lanes == ()
    assert nothing.busiest is None
    assert bound_gap(nothing, 1.0).bound_s == 0.0


@pytest.mark.parametrize(
    "plan",
    [
        line("squeezenet1_1@64", "4xA100", 4, batch=8),
        line("squeezenet1_1@64", "2xV100+2xP100", 2, batch=4, training=False),
        fully_sharded("squeezenet1_1@64", "2xV100+2xP100", batch=8),
    ],
    ids=["pipeline", "inference", "sharded"],
)
def test_busy_and_idle_add_up_to_the_step_and_causes_to_the_gap(plan):
    simulation = simulate(plan)
    account = idle_account(simulation.timeline)
    assert adds_up(account)
    assert all(seconds >= 0 for lane in account.lanes for seconds in lane.seconds.values())
    mean = account.mean()
    assert math.isclose(account.mean_busy_s + sum(mean.values()), account.step_s, rel_tol=1e-9)
    for share in (0.0, 0.3, 0.97, 2.0):
        gap = bound_gap(account, share * account.step_s)
        parts = [gap.bound_s, gap.work_s, *(gap.causes[cause] for cause in CAUSES)]
        assert all(part >= 0 for part in parts)
        assert math.isclose(math.fsum(parts), account.step_s, rel_tol=1e-9)


def test_inside_a_block_the_network_is_exposed():
    """A pipeline of one stage in two micro-batches: its blocks hold collectives."""
    plan = fully_sharded("squeezenet1_1@64", "4xA100", batch=8)
    account = idle_account(simulate(replace(plan, schedule=Schedule("1f1b", 2))).timeline)
    assert account.lanes[0].seconds[EXPOSED] > 0
    assert adds_up(account)
