"""A limit on time ends the joint search early enough for named strategies, also inside a step."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from partita.cluster import resolve
from partita.compiled import work_clock
from partita.costs.collectives import Collectives
from partita.graph.chain import chain_of
from partita.jobs.constraints import parse_constraints
from partita.jobs.plan import plan
from partita.jobs.plan_simulator import Clock, _ending, ops_in_full
from partita.jobs.strategies import PIPELINES
from partita.jobs.workload import load
from partita.problems.joint import Cell
from partita.search.base import Status, Stop
from partita.search.joint.auto import Auto
from partita.search.joint.bounds import PlanBounds
from partita.search.joint.candidates import Candidates
from partita.search.joint.cells import LikelyCells
from partita.search.joint.model import JointModel


def joint(interrupted=lambda: False, batch=32):
    """A model, and its groupings by their number of groups."""
    cluster = resolve("4xA100")
    graph = load("gpt2", batch=batch).graph
    joint_model = JointModel(graph, "adamw", cluster, Collectives(cluster), interrupted=interrupted)
    return joint_model, {g.num_groups: k for k, g in enumerate(joint_model.problem.groupings)}


def test_the_last_part_of_the_time_is_for_named_strategies():
    begun = work_clock()
    assert Clock(Stop(time_s=100.0), begun - 80).is_late()
    assert not Clock(Stop(time_s=100.0), begun - 50).is_late()
    assert not Clock(Stop(), begun - 1e6).must_end()
    assert Clock(Stop(interrupted=lambda: True), begun).must_end()


def test_a_large_answer_gets_the_time_that_it_needs_in_the_end():
    stop, begun = Stop(time_s=10.0), work_clock() - 5
    small, large = Clock(stop, begun, ending_s=1.0), Clock(stop, begun, ending_s=4.0)
    assert not small.is_late()
    assert large.is_late()
    assert not large.is_over()
    assert Clock(stop, begun - 2, ending_s=4.0).is_over()
    assert not Clock(Stop(), begun, ending_s=1e6).is_over()


def test_stages_that_are_alike_are_lowered_in_full_once():
    work, cluster = load("gpt2", batch=32), resolve("4xA100")
    stages, schedule = PIPELINES["1f1b"].plans(work.graph, chain_of(work.graph), cluster, 32)[0]
    asked = SimpleNamespace(workload=work, cluster=cluster)
    whole = ops_in_full(stages, schedule, asked)
    assert whole == pytest.approx(2 * len(work.graph.ops))
    assert ops_in_full((*stages, *stages), schedule, asked) == whole


def single_stage_bound(spec, level, most):
    """A bound of one stage with time to ask so often; how many meshes were looked at then."""
    asked, graph, cluster = [], load("gpt2", batch=32).graph, resolve(spec)

    def interrupted():
        asked.append(1)
        return len(asked) > most

    model = JointModel(graph, "adamw", cluster, Collectives(cluster), interrupted=interrupted)
    cell = next(c for c in model.problem.cells if c.num_microbatches == 1)
    bound = PlanBounds(model).bound(cell, level, math.inf)
    return bound, sum("quickest" in mesh.__dict__ for mesh in model._meshes.values())


@pytest.mark.parametrize(("spec", "level"), [("8xA100", 1), ("2xA100+4xH100", 0)])
def test_bounds_ask_for_the_time_before_each_mesh(spec, level):
    bound, meshes = single_stage_bound(spec, level, math.inf)
    assert bound > 0
    assert meshes > 2
    for most in (0, 1, 2):
        early, few = single_stage_bound(spec, level, most)
        assert early == 0.0
        assert few < max(1, most)


@pytest.mark.parametrize(("spec", "level"), [("8xA100", 3), ("2xA100+4xH100", 3)])
def test_without_time_a_bound_proves_nothing(spec, level):
    assert single_stage_bound(spec, level, math.inf)[0] > 0
    assert single_stage_bound(spec, level, 1)[0] == 0.0


def test_the_limit_that_is_named_is_the_one_that_was_given():
    stop, best = Stop(time_s=10.0), SimpleNamespace(objective_s=2.0)
    late = Clock(stop, work_clock() - 8)
    simulator = SimpleNamespace(stop=stop, clock=late, best=lambda: best, cut=lambda: "")
    inside = SimpleNamespace(status=Status.STOPPED, why="the time limit of 6.3 s is used up")
    words = "the time limit of 10 s is used up"
    assert _ending(simulator, inside, 1.0) == (Status.STOPPED, words)


def test_too_little_time_for_what_was_asked_is_told_as_that():
    stop, asked = Stop(time_s=10.0), parse_constraints(["pp=2"])
    simulator = SimpleNamespace(
        stop=stop, clock=Clock(stop, work_clock() - 8), best=lambda: None, cut=lambda: "late",
        constraints=asked,
    )  # fmt: skip
    inside = SimpleNamespace(status=Status.STOPPED, why="")
    status, words = _ending(simulator, inside, 1.0)
    assert status is Status.STOPPED
    assert words.startswith(
        "nothing that fits with what was asked for (pp=2) was found in the time"
    )
    simulator.cut, simulator.clock = (lambda: ""), Clock(stop, work_clock())
    inside.status = Status.INFEASIBLE
    status, words = _ending(simulator, inside, 1.0)
    assert status is Status.INFEASIBLE
    assert words == "nothing fits with what was asked for (pp=2); drop one of these constraints"


def test_an_interrupted_candidate_ends_inside_its_searches():
    asked = []

    def interrupted():
        asked.append(1)
        return True

    model, known = joint(interrupted)
    begun = time.process_time()
    Candidates(model.problem).best(Cell(known[2], 4), 0)
    assert asked
    assert time.process_time() - begun < 10


def test_micro_batches_are_some_for_each_stage():
    assert LikelyCells().wanted(1) == 1
    assert LikelyCells().wanted(4) == 16
    model, known = joint()
    looked_at = []

    class Never:
        """An evaluator that refuses all: every cell is only looked at."""

        num_levels, is_cheap = 1, False

        def __call__(self, solution):
            looked_at.append(solution.cell)

        def bound(self, cell, level, enough):
            return 0.0

        def reorder(self, solution):
            pass

        def incumbent_s(self):
            return float("inf")

    Auto()(model.problem, evaluator=Never())
    assert {4, 8} <= {cell.num_microbatches for cell in looked_at if cell.grouping == known[2]}


def test_small_micro_batches_are_tried_before_it_is_said_that_nothing_fits():
    usual = resolve("2xA100-40GB-SXM")
    kind = replace(usual.kinds[0], memory_bytes=int(1.6 * 1024**3))
    planned = plan("gpt2", replace(usual, kinds=(kind,)), batch=64)
    assert planned.best is not None
    assert planned.best.simulation.schedule.num_microbatches >= 32
