"""Fewer devices are named where they are faster, and only there."""

import functools

from partita.graph import GraphBuilder
from partita.jobs.fewer import fewer_devices
from partita.jobs.plan import plan
from partita.report.planned import fewer_text
from partita.search.base import Stop


@functools.cache
def planned(batch, machine):
    g = GraphBuilder("small")
    x = g.input("x", (batch, 512))
    for layer in range(4):
        x = g.relu(g.linear(x, 512, f"l{layer}"))
    return plan(g.finish(g.linear(x, 16, "last")), machine, stop=Stop(gap=0.9))


def test_four_of_seven_devices_are_faster_where_seven_divide_nothing():
    answer = fewer_devices(planned(8192, "7xA100"))
    assert answer is not None
    assert (answer.num_devices, answer.of_devices) == (4, 7)
    best = planned(8192, "4xA100").best.step_s
    assert best <= answer.step_s * (1 + 1e-9) < planned(8192, "7xA100").best.step_s
    assert fewer_text(answer).startswith("fewer devices are faster: 4 of these 7 as dp=4")


def test_nothing_is_said_where_the_batch_divides_and_of_one_device():
    assert fewer_devices(planned(64, "4xA100")) is None
    assert fewer_devices(planned(64, "1xA100")) is None


def test_what_is_told_is_never_slower_than_the_plan():
    for machine in ("3xA100", "5xA100"):
        answer = fewer_devices(planned(64, machine))
        assert answer is None or answer.step_s < planned(64, machine).best.step_s
