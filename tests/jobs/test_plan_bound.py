"""The bound of a number of stages and micro-batches is below every plan that has them."""

import math

import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.jobs.plan import plan
from partita.plans import device_groups
from partita.search.base import Stop
from partita.search.joint.drafts import Drafting
from partita.search.joint.meshes import arrangements

QUICK = Stop(gap=0.0)


def bounds(workload, cluster, max_memory=math.inf):
    drafting = Drafting(
        workload.graph, "adamw", cluster, Collectives(cluster), lambda *_: True,
        max_memory=max_memory,
    )  # fmt: skip
    known = {a.num_stages: a for a in arrangements(cluster, 8)}
    return lambda stages, count: drafting.bound_s(known[stages], count)


@pytest.mark.parametrize(
    ("model", "spec", "batch", "memory", "forbid"),
    [
        ("alexnet", "4xA100", 32, math.inf, []),
        ("rnnlm", "2x2xA100", 16, math.inf, ["stages=1"]),
        ("gpt2", "2xA100", 16, math.inf, ["stages=1"]),
        ("gpt2", "2xA100", 16, 5e9, []),
    ],
)
def test_no_simulated_plan_is_below_the_bound_of_its_kind(model, spec, batch, memory, forbid):
    cluster = resolve(spec)
    limit = None if memory == math.inf else memory
    found = plan(model, cluster, batch=batch, max_memory=limit, forbid=forbid, stop=QUICK)
    bound = bounds(found.best.simulation.workload, cluster, memory)
    for candidate in (found.best, *found.others):
        simulation = candidate.simulation
        groups = len(device_groups(simulation.stages))
        count = simulation.schedule.num_microbatches
        assert groups > 1 or not forbid
        assert bound(groups, count) <= candidate.step_s * (1 + 1e-9), simulation.arrangement


def test_less_memory_raises_the_bound_until_nothing_fits():
    cluster = resolve("2xA100")
    workload = plan("gpt2", cluster, batch=16, stop=Stop(gap=1.0)).best.simulation.workload
    found = [bounds(workload, cluster, memory)(1, 1) for memory in (80e9, 4.5e9, 4e9, 2e9)]
    assert found == sorted(found)
    assert found[0] < found[-2] < math.inf
    assert found[-1] == math.inf
