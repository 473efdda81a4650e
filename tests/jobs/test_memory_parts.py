"""Memory by part: the parts are the whole, at every moment."""

import numpy as np
import pytest

from partita.engine import run
from partita.jobs.explain import memory_account
from partita.jobs.memory_parts import (
    PARTS,
    few_steps,
    memory_parts,
    parts_of_memory,
    peak_moment,
)
from partita.jobs.simulate import simulate
from partita.meaning import Purpose, Value, Work
from partita.program import Kind, ProgramBuilder
from tests.report.plans import fully_sharded, line


def test_every_part_by_hand():
    """10 resident; an activation of 4 from 0 to 3, a gathered parameter of 2, a gradient of 3."""
    b = ProgramBuilder()
    gpu, net = b.lane("gpu"), b.lane("gpu net", "link")
    held = b.memory("gpu", 100.0)
    values = [b.value(Value(name, ())) for name in ("x", "w", "w.grad")]
    b.add(Work(Purpose.RESIDENT), (), 0.0, (), [(held, 10.0, 0.0)])
    gather = b.add(
        Work(Purpose.PARAMETER_GATHER, writes=(values[1],)), net, 1.0, (), [(held, 2.0, 0.0)],
        Kind.COLLECTIVE,
    )  # fmt: skip
    first = b.add(
        Work(Purpose.COMPUTE, op="f", reads=(values[1],), writes=(values[0],)), gpu, 1.0,
        [gather], [(held, 4.0, -2.0)], Kind.FORWARD,
    )  # fmt: skip
    b.add(
        Work(Purpose.COMPUTE, op="g", reads=(values[0],), writes=(values[2],)), gpu, 1.0, [first],
        [(held, 3.0, -4.0)], Kind.WGRAD,
    )  # fmt: skip
    b.add(Work(Purpose.UPDATE, reads=(values[2],)), gpu, 1.0, (), [(held, 0.0, -3.0)], Kind.UPDATE)
    timeline = run(b.build())
    resident = {"parameters": 6.0, "states": 3.0, "workspace": 1.0}
    parts = parts_of_memory(timeline, 0, resident, {"w.grad"}, 100.0)
    assert parts.times.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {part: parts.parts[part].tolist() for part in PARTS} == {
        "parameters": [6.0] * 5,
        "states": [3.0] * 5,
        "workspace": [1.0] * 5,
        "gradients": [0.0, 0.0, 3.0, 3.0, 0.0],
        "buffers": [2.0, 2.0, 0.0, 0.0, 0.0],
        "activations": [0.0, 4.0, 4.0, 0.0, 0.0],
    }
    moment = peak_moment(timeline, 0, parts)
    assert (moment.moment, timeline.program.task_name(moment.task)) == (2.0, "W@g")


@pytest.mark.parametrize(
    "plan",
    [
        line("squeezenet1_1@64", "2xA100", 4, batch=8),
        fully_sharded("squeezenet1_1@64", "2xA100", batch=8),
        line("squeezenet1_1@64", "1xA100", 1, batch=4),
    ],
    ids=["pipeline", "sharded", "alone"],
)
def test_the_parts_of_a_plan_add_up_to_what_is_held(plan):
    simulation = simulate(plan)
    every = memory_parts(simulation)
    for memory, parts in enumerate(every):
        times, amounts = simulation.timeline.memory_steps(memory)
        assert np.array_equal(parts.times, times)
        np.testing.assert_allclose(parts.held, amounts, rtol=1e-12)
        assert all((curve >= 0).all() for curve in parts.parts.values())
    fullest = max(every, key=lambda parts: float(parts.held.max()))
    told = memory_account(simulation)
    at_peak = fullest.at_peak()
    assert at_peak["parameters"] == pytest.approx(told.parameters_bytes)
    assert at_peak["states"] == pytest.approx(told.states_bytes)
    # Those that are whole until they are reduced count here, and as activations there.
    assert at_peak["gradients"] >= 0.99 * told.gradients_bytes
    assert at_peak["gradients"] <= told.gradients_bytes * simulation.num_devices * 1.01


def test_micro_batches_under_way_are_counted_until_their_last_task_ends():
    simulation = simulate(line("squeezenet1_1@64", "2xA100", 4, batch=8))
    parts = memory_parts(simulation)
    assert peak_moment(simulation.timeline, 0, parts[0]).in_flight == 2  # 1F1B, first of two
    assert peak_moment(simulation.timeline, 1, parts[1]).in_flight == 1


def test_fewer_steps_keep_the_peak():
    simulation = simulate(fully_sharded("squeezenet1_1@64", "2xA100", batch=8))
    parts = memory_parts(simulation)[0]
    few = few_steps(parts, 20)
    assert len(few.times) == 20
    assert few.held.max() == parts.held.max()
    assert few_steps(few, 20) is few
