"""What a plan hangs on: assumptions made worse, and the named strategies that win then."""

from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives, reached
from partita.jobs.explain_plan import assumptions, rivals, sensitivity
from partita.jobs.simulate import simulate_stages
from partita.jobs.strategies import STRATEGIES
from partita.jobs.workload import load
from partita.lower import Memo
from partita.plans import Schedule

NEVER = 60.0


@pytest.fixture(scope="module")
def work():
    return load("alexnet", batch=64)


def simulated(work, name, cluster="4xA100"):
    machine = resolve(cluster)
    stage = next(iter(STRATEGIES[name].stages(work.graph, machine.num_devices)))
    return simulate_stages(work, machine, (stage,), Schedule())


def test_every_assumption_makes_the_step_longer_or_leaves_it(work):
    simulation = simulated(work, "data")
    told = sensitivity(simulation, NEVER)
    assert len(told.shifts) == 6
    assert not told.untried
    for shift in told.shifts:
        assert shift.step_s >= simulation.step_s * (1 - 1e-9), shift.assumption
        assert shift.winner_s <= shift.step_s
        assert bool(shift.winner) == (shift.winner_s < shift.step_s)
    products = told.shifts[-1]
    assert simulation.step_s < products.step_s < simulation.step_s / 0.85 * (1 + 1e-9)


def test_dearer_collectives_are_those_of_a_changed_machine(work):
    simulation = simulated(work, "data")
    dearer = sensitivity(simulation, NEVER).shifts[1]
    known = reached(simulation.cluster)
    assumed = replace(
        known, inside_s=2 * known.inside_s + 1e-5, across_s=2 * known.across_s + 1e-5,
        hop_s=2 * known.hop_s,
    )  # fmt: skip
    memo = Memo(Collectives(simulation.cluster, assumed))
    again = simulate_stages(work, simulation.cluster, simulation.stages, simulation.schedule, memo)
    assert "fixed cost" in dearer.assumption
    assert dearer.step_s == pytest.approx(again.step_s)


def test_a_plan_that_a_named_one_beats_is_told_so(work):
    slow = simulated(work, "fsdp", "4x1xV100")
    told = sensitivity(slow, NEVER)
    name, _, step_s = told.rivals[0]
    assert step_s < slow.step_s
    assert [shift.winner for shift in told.flips][:1] == [name]


def test_the_plan_itself_is_no_rival(work):
    simulation = simulated(work, "data")
    names = [rival.name for rival in rivals(simulation, lambda: False)]
    assert "data" not in names
    assert 1 <= len(names) <= 4


def test_one_device_has_no_communication_to_doubt(work):
    alone = simulated(work, "data", "1xA100")
    named = [assumption for assumption, _ in assumptions(alone)]
    assert not any("collective" in one or "links" in one for one in named)
    assert "products reach 85% of what is assumed" in named


def test_without_time_nothing_is_begun_and_it_says_so(work):
    told = sensitivity(simulated(work, "data"), 0.0)
    assert not told.shifts
    assert len(told.untried) == 6
