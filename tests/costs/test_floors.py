"""Floors: below what any split of any op costs, and so below every simulated plan."""

import pytest

from partita.cluster import resolve
from partita.costs.roofline import op_cost, op_lower_bound_s, work_bound_s
from partita.costs.sharding import dims_of, ways_of
from partita.graph import training_graph
from partita.jobs.simulate import simulate
from partita.plans import Axis
from partita.zoo import build


@pytest.mark.parametrize("name", ["alexnet", "gpt2", "moe", "rnnlm", "unet"])
@pytest.mark.parametrize("machine", ["1xA100", "1xP100", "laptop"])
def test_shares_of_an_op_add_up_to_at_least_its_floor(name, machine):
    kind = resolve(machine).kind_of(0)
    graph = training_graph(build(name, batch=16))
    axes = (Axis("x", 2), Axis("y", 4))
    seen = set()
    for op in graph.ops:
        if op.phase == "update" or graph.call(op) in seen:
            continue
        seen.add(graph.call(op))
        floor = op_lower_bound_s(graph, op, kind)
        assert op_cost(graph, op, kind).seconds >= floor * (1 - 1e-9)
        origin = graph.op(op.forward) if op.forward else op
        for dims in dims_of(graph.call(origin), axes)[:40]:
            ways = ways_of(dims, axes)
            parts = 1.0
            for factor in ways.values():
                parts *= factor
            cost = op_cost(graph, op, kind, tuple(sorted(ways.items())))
            assert cost.seconds * parts >= floor * (1 - 1e-9), (op.name, dims)


@pytest.mark.parametrize("spec", ["1xA100", "4xA100", "2xV100+2xP100"])
def test_no_simulated_step_is_below_the_bound(spec):
    simulation = simulate("gpt2", spec, batch=8)
    assert work_bound_s(simulation.workload.graph, simulation.cluster) <= simulation.step_s


def test_twice_the_devices_halve_the_bound():
    graph = training_graph(build("alexnet", batch=16))
    one, two = (work_bound_s(graph, resolve(spec)) for spec in ("1xA100", "2xA100"))
    assert two == pytest.approx(one / 2)
