"""Models as one persistent kernel: costs, proofs, timelines and the command."""

import pytest

from partita.cluster import resolve
from partita.costs.rtasks import rtasks_model
from partita.errors import ProblemError
from partita.graph import GraphBuilder, training_graph
from partita.jobs.rtasks import plan_rtasks, timeline_of
from partita.problems.rprogram import check_rprogram
from partita.problems.rtasks import evaluate
from partita.search.base import Stop

H200 = resolve("H200").kinds[0]


def mlp(layers: int = 3, width: int = 512):
    g = GraphBuilder("mlp")
    x = g.input("x", (1, width))
    for index in range(layers):
        x = g.relu(g.linear(x, width, name=f"l{index}"), name=f"r{index}")
    return g.finish(x)


def test_elementwise_tiles_wait_for_their_part_and_products_for_the_whole():
    problem = rtasks_model(mlp(), H200).problem
    names = [operator.name for operator in problem.operators]
    kinds = {(names[e.src], names[e.dst]): e.aligned for e in problem.edges}
    assert kinds[("l0", "r0")] is True
    assert kinds[("r0", "l1")] is False


def test_views_are_read_through():
    g = GraphBuilder("views")
    x = g.linear(g.input("x", (4, 8)), 8, name="first")
    y = g.reshape(x, (8, 4))
    problem = rtasks_model(g.finish(g.linear(y, 2, name="second")), H200).problem
    assert [operator.name for operator in problem.operators] == ["first", "second"]
    assert len(problem.edges) == 1


def test_more_tiles_are_shorter_but_not_free():
    (operator, *_) = rtasks_model(mlp(), H200).problem.operators
    times = [tiling.tile_us for tiling in operator.tilings]
    assert times == sorted(times, reverse=True)
    works = [tiling.num_tiles * tiling.tile_us for tiling in operator.tilings]
    assert works == sorted(works)


def test_ops_without_tiles_are_named():
    g = GraphBuilder("odd")
    (y,) = g.op("cumsum", g.input("x", (4, 8)), shapes=[(4, 8)], name="odd_one")
    model = rtasks_model(g.finish(g.relu(y)), H200)
    assert model.fallbacks == ("odd_one",)


def test_a_graph_with_a_backward_is_refused():
    g = GraphBuilder("m")
    logits = g.linear(g.input("x", (4, 8)), 3)
    graph = training_graph(g.finish(g.cross_entropy(logits, g.input("t", (4,), "i64"))))
    with pytest.raises(ProblemError, match="backward"):
        rtasks_model(graph, H200)


def test_a_plan_is_safe_drawn_and_faster_than_kernel_by_kernel():
    fused = plan_rtasks(mlp(6), stop=Stop(time_s=20))
    problem, solution = fused.model.problem, fused.result.solution
    assert check_rprogram(problem, fused.program, problem.num_veus(solution.tilings)) == ()
    timeline = fused.timeline()
    assert timeline.makespan * 1e6 == pytest.approx(evaluate(problem, solution))
    assert {lane.kind for lane in timeline.program.lanes} == {"unit"}
    assert fused.fused_s < fused.model.unfused_s


def test_small_cells_of_a_recurrent_stack_gain_by_fusion():
    fused = plan_rtasks("lstm@6", method="list")
    assert fused.fused_s < fused.model.unfused_s / 2


def test_of_too_many_tiles_runs_of_one_op_are_drawn_as_one(monkeypatch):
    fused = plan_rtasks(mlp(2), method="list")
    problem, solution = fused.model.problem, fused.result.solution
    each = timeline_of(problem, solution)
    monkeypatch.setattr("partita.jobs.rtasks.MOST_TILES", 3)
    runs = timeline_of(problem, solution)
    assert runs.makespan == pytest.approx(each.makespan)
    assert runs.program.num_tasks < each.program.num_tasks


def test_two_models_in_one_kernel_take_less_than_one_after_the_other():
    fused = plan_rtasks(mlp(4), beside=[mlp(4)], stop=Stop(time_s=20))
    problem, solution = fused.model.problem, fused.result.solution
    assert check_rprogram(problem, fused.program, problem.num_veus(solution.tilings)) == ()
    assert len(problem.operators) == 16
    assert max(fused.alone_s) <= fused.fused_s * (1 + 1e-9)
    assert fused.fused_s < sum(fused.alone_s)
