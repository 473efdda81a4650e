"""The model by cost, the front of plans, the same stages in other orders."""

import math
from itertools import pairwise

from partita.cluster import resolve
from partita.costs.roofline import op_cost
from partita.graph.rebatch import rebatch
from partita.jobs.cost_tree import CostNode, cost_tree
from partita.jobs.other_orders import other_orders
from partita.jobs.pareto import pareto_front
from partita.jobs.simulate import data_parallel, simulate, simulate_stages
from partita.jobs.workload import load
from partita.plans import Schedule
from partita.zoo.gpt import GptSizes, gpt
from tests.report.plans import line


def three_layers():
    sizes = GptSizes(layers=3, width=64, heads=4, vocab=256, positions=32)
    return load(gpt("tiny-gpt", sizes, 8, 32, "bf16", True, True))


def walk(node: CostNode):
    yield node
    for child in node.children:
        yield from walk(child)


def test_children_add_up_and_equal_layers_are_one_node():
    workload = three_layers()
    cluster = resolve("2xA100")
    stage = data_parallel(workload.graph, cluster)
    simulation = simulate_stages(workload, cluster, (stage,), Schedule())
    tree = cost_tree(simulation)
    assert tree.num_ops == len(stage.splits)
    for node in walk(tree):
        if node.children:
            assert math.isclose(node.device_s, sum(child.total_s for child in node.children))
    (layers,) = [node for node in walk(tree) if node.count == 3]
    assert (layers.name, layers.last) == ("0", "2")
    chips = {node.name: node.chip for node in walk(layers) if node.chip}
    assert chips["c_fc"].words == "dp: b / 2"
    assert chips["c_fc"].output == "8×32×256 bf16"
    assert chips["c_fc"].output_bytes == 8 * 32 * 256 * 2 / 2


def test_an_op_costs_what_it_and_its_gradients_take_in_all_micro_batches():
    plan = line("squeezenet1_1@64", "2xA100", 4, batch=8)
    simulation = simulate(plan)
    graph = rebatch(simulation.workload.graph, 2)
    kind = simulation.cluster.kind_of(0)
    own = [op for op in graph.ops if op.name == "features.0" or op.forward == "features.0"]
    seconds = 4 * sum(op_cost(graph, op, kind, ()).seconds for op in own if op.phase != "update")
    (node,) = [
        node
        for node in walk(cost_tree(simulation))
        if node.name == "0" and node.chip is not None and node.chip.kind == "conv"
    ]
    assert math.isclose(node.seconds, seconds)


def test_the_front_is_what_no_other_plan_beats_in_both():
    points = [(1.0, 9.0), (2.0, 5.0), (2.0, 7.0), (3.0, 5.0), (4.0, 1.0), (1.0, 9.0)]
    assert pareto_front(points) == (0, 1, 4)
    assert pareto_front([]) == ()
    assert pareto_front([(1.0, 1.0)]) == (0,)


def test_other_orders_of_the_same_stages_are_timed_on_the_same_blocks():
    simulation = simulate(line("squeezenet1_1@64", "4xA100", 4, batch=8))
    orders = other_orders(simulation)
    assert {"1f1b", "gpipe", "zb-h1"} <= {order.name for order in orders}
    assert all(a.simulation.step_s <= b.simulation.step_s for a, b in pairwise(orders))
    (own,) = [order for order in orders if order.name == "1f1b"]
    assert own.simulation is simulation
    (gpipe,) = [order for order in orders if order.name == "gpipe"]
    assert max(gpipe.simulation.peak_bytes) >= max(simulation.peak_bytes)
    assert other_orders(simulate(line("squeezenet1_1@64", "1xA100", 1, batch=4))) == ()
