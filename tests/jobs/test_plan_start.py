"""A plan to start from is never lost to a worse one, also on a machine with other figures."""

import functools
from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.errors import InputError
from partita.graph import GraphBuilder
from partita.jobs.plan import plan
from partita.jobs.simulate import simulate_stages
from partita.jobs.workload import load
from partita.search.base import Stop

LATENCY = (3, 6)


@functools.cache
def model(batch=2048):
    g = GraphBuilder("small")
    x = g.input("x", (batch, 1024))
    for layer in range(4):
        x = g.relu(g.linear(x, 2048 if layer % 2 else 1024, f"l{layer}"))
    return g.finish(g.linear(x, 16, "last"))


@functools.cache
def planned(batch=2048):
    return plan(model(batch), "2x2xA100", stop=Stop(gap=0.01))


def slower(times):
    cluster = resolve("2x2xA100")
    links = tuple(replace(link, latency_s=link.latency_s * times) for link in cluster.links)
    return replace(cluster, name=f"latency x{times}", links=links)


def test_without_time_for_a_search_the_answer_is_the_plan_to_start_from(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(planned().plan.to_json())
    other = plan(model(), "2x2xA100", start=path, stop=Stop(time_s=1e-6))
    assert other.best.step_s == pytest.approx(planned().best.step_s)
    assert other.best.name == "start"


@pytest.mark.parametrize("times", LATENCY)
def test_on_a_slower_machine_it_is_simulated_there(times):
    given, cluster = planned().plan, slower(times)
    there = simulate_stages(load(model()), cluster, given.stages, given.schedule)
    assert there.step_s > planned().best.step_s
    again = plan(model(), cluster, start=given, stop=Stop(time_s=1e-6))
    assert again.best.step_s <= there.step_s * (1 + 1e-9)


@pytest.mark.parametrize("times", LATENCY)
def test_the_search_alone_is_no_worse_there_either(times):
    given, cluster = planned().plan, slower(times)
    there = simulate_stages(load(model()), cluster, given.stages, given.schedule)
    anew = plan(model(), cluster, stop=Stop(gap=0.01))
    assert anew.best.step_s <= there.step_s * (1 + 1e-9)


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(InputError, match=r"of another model \(batch 32 instead of 2048\)"):
        plan(model(), "2x2xA100", start=planned(32).plan)


def test_a_plan_on_devices_that_are_not_there_is_refused():
    with pytest.raises(InputError, match="does not exist; there are 2"):
        plan(model(), "2xA100", start=planned().plan)


def test_a_plan_that_constraints_rule_out_is_refused():
    with pytest.raises(InputError, match="does not keep to pp=4; leave --start or that"):
        plan(model(), "2x2xA100", start=planned().plan, pin=["pp=4"])
