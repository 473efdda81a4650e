import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interleave import interleaved

from partita.costs.blocks import blocks, crossing
from partita.gpu.flow.steps import Flow, Step
from partita.gpu.streams import order
from partita.gpu.streams.order import Launch, LaunchPlan, uncovered, with_waits


@st.composite
def flows(draw):
    """Steps that read some earlier ones; some are views."""
    count = draw(st.integers(1, 14))
    steps = []
    for index in range(count):
        names = ["x", *(step.name for step in steps)]
        chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        kind = "cat" if index and draw(st.integers(0, 4)) == 0 else "call"
        steps.append(Step(f"s{index}", kind, tuple(chosen)))
    steps.append(Step("end", "call", (steps[-1].name,)))
    shapes = dict.fromkeys(("x", *(step.name for step in steps)), (1,))
    return Flow(tuple(steps), ("x",), ("end",), shapes, {}, {})


@given(flow=flows(), num_streams=st.integers(1, 5), seed=st.integers(0, 9))
def test_list_scheduling_keeps_every_dependency(flow, num_streams, seed):
    draw = random.Random(seed)
    times = {step: draw.uniform(0.1, 3) for step in order.launched(flow)}
    plan = order.listed(flow, num_streams, times, {step: draw.gauss(0, 2) for step in times})
    assert sorted(launch.step for launch in plan.launches) == list(order.launched(flow))
    assert uncovered(plan, order.depends(flow)) == []
    needs = order.depends(flow)
    done: set[int] = set()
    for step in interleaved(plan, draw):
        assert set(needs[step]) <= done
        done.add(step)


@given(flow=flows(), data=st.data())
def test_no_wait_can_be_left_out(flow, data):
    times = dict.fromkeys(order.launched(flow), 1.0)
    plan = order.listed(flow, 3, times)
    waits = [(at, wait) for at, each in enumerate(plan.launches) for wait in each.waits]
    if not waits:
        return
    at, wait = data.draw(st.sampled_from(waits))
    old = plan.launches[at]
    fewer = Launch(old.step, old.stream, tuple(each for each in old.waits if each != wait))
    launches = (*plan.launches[:at], fewer, *plan.launches[at + 1 :])
    assert uncovered(LaunchPlan("", launches), order.depends(flow))


@given(flow=flows(), seed=st.integers(0, 9))
def test_stages_have_a_barrier_between_them(flow, seed):
    draw, needs = random.Random(seed), order.depends(flow)
    stages, left = [], list(order.launched(flow))
    while left:
        able = [step for step in left if not set(needs[step]) & set(left)]
        taken = draw.sample(able, draw.randint(1, len(able)))
        stages.append([[step] for step in taken])
        left = [step for step in left if step not in taken]
    plan = order.staged(flow, stages)
    assert uncovered(plan, needs) == []
    number = {step: at for at, stage in enumerate(stages) for group in stage for step in group}
    sizes = [len(stage) for stage in stages]
    order_drawn = interleaved(plan, draw)
    for at, step in enumerate(order_drawn):
        if sizes[number[step]] > 1:
            assert all(number[other] >= number[step] for other in order_drawn[at:])


def test_what_is_seen_through_another_stream_needs_no_second_wait():
    needs = ((), (0,), (0, 1))
    plan = with_waits("", [(0, 0), (1, 1), (2, 2)], needs)
    assert [launch.waits for launch in plan.launches] == [(), (0,), (1,)]


def test_a_plan_without_waits_is_found_out():
    plan = LaunchPlan("", (Launch(0, 0), Launch(1, 1)))
    assert uncovered(plan, ((), (0,))) == [(1, 0)]


def test_blocks_end_where_everything_goes_through_one_op():
    diamonds = [(), (0,), (0,), (1, 2), (3,), (4,), (4,), (5, 6)]
    assert blocks(diamonds) == ((0,), (1, 2, 3), (4,), (5, 6, 7))
    assert blocks([(), (0,), (1,)]) == ((0, 1, 2),)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_long_blocks_are_cut(most):
    ladder = [(), *((max(0, op - 2), op - 1) for op in range(1, 30))]
    parts = blocks(ladder, most)
    assert [op for block in parts for op in block] == list(range(30))
    assert max(map(len, parts)) <= most
    assert max(crossing(ladder)) == 2
