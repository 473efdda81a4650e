"""What devices send each other and how much of it is hidden, by hand."""

import math
from dataclasses import replace

import pytest

from partita.engine import run
from partita.jobs.simulate import simulate
from partita.jobs.traffic import hidden_share, messages, sent
from partita.meaning import Purpose, Work
from partita.plans import Schedule
from partita.program import Kind, ProgramBuilder
from tests.report.plans import fully_sharded, line


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        ("all_reduce", {(0, 1): 12.0, (1, 2): 12.0, (2, 3): 12.0, (3, 0): 12.0}),
        ("all_gather", {(0, 1): 6.0, (1, 2): 6.0, (2, 3): 6.0, (3, 0): 6.0}),
        ("broadcast", {(0, 1): 8.0, (1, 2): 8.0, (2, 3): 8.0}),
        ("halo", {(a, b): 8.0 for a in range(4) for b in range(4) if abs(a - b) == 1}),
        ("all_to_all", {(a, b): 2.0 for a in range(4) for b in range(4) if a != b}),
    ],
)
def test_a_collective_of_eight_bytes_among_four(collective, expected):
    work = Work(Purpose.CONVERSION, collective=collective, size_bytes=8.0)
    assert messages(work, ((0, 1, 2, 3),)) == expected


def test_a_message_is_shared_by_those_it_goes_to_and_none_is_sent_to_oneself():
    work = Work(Purpose.SEND, size_bytes=8.0)
    assert messages(work, ((0, 2), (0, 3), (1, 1))) == {(0, 2): 4.0, (0, 3): 4.0}


def test_every_micro_batch_sends_once():
    few = simulate(line("squeezenet1_1@64", "2xA100", 2, batch=4))
    many = simulate(line("squeezenet1_1@64", "2xA100", 4, batch=8))
    (first,), (second,) = (
        [one for one in sent(s.timeline.program) if one.purpose is Purpose.SEND]
        for s in (few, many)
    )
    assert set(first.traffic) == {(0, 1), (1, 0)}
    assert math.isclose(second.total_bytes, 2 * first.total_bytes)


def test_a_sharded_plan_gathers_its_parameters_twice_and_reduces_once():
    simulation = simulate(fully_sharded("squeezenet1_1@64", "4xA100", batch=8))
    sizes = {one.purpose: one.total_bytes for one in sent(simulation.timeline.program)}
    gathered = sizes[Purpose.PARAMETER_GATHER] / sizes[Purpose.GRADIENT_REDUCTION]
    assert math.isclose(gathered, 2.0, rel_tol=0.02)


def test_what_is_sent_while_the_device_computes_is_hidden():
    b = ProgramBuilder()
    gpu, _, net, _ = b.lane("g0"), b.lane("g1"), b.lane("n0", "link"), b.lane("n1", "link")
    first = b.add("a", gpu, 2.0, kind=Kind.FORWARD)
    b.add("b", gpu, 3.0, kind=Kind.FORWARD)  # 2 to 5
    b.add("c", net, 4.0, [first], kind=Kind.COLLECTIVE)  # 2 to 6: three of four are hidden
    share = hidden_share(run(b.build()))
    assert (share.sending_s, share.hidden_s, share.share) == (4.0, 3.0, 0.75)


def test_nothing_sent_is_all_hidden():
    assert hidden_share(run(ProgramBuilder().build())).share == 1.0
    assert sent(ProgramBuilder().build()) == ()


def test_blocks_of_a_pipeline_count_as_often_as_they_run():
    plan = fully_sharded("squeezenet1_1@64", "2xA100", batch=8)
    two, four = (
        hidden_share(simulate(replace(plan, schedule=Schedule("1f1b", n))).timeline) for n in (2, 4)
    )
    assert 0 < two.hidden_s < two.sending_s
    assert four.sending_s > two.sending_s
