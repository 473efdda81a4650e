"""Costs, verifier and runtime each work out the groups of tokens by themselves, and agree.

Every sentence that the verifier can say about stages, messages and the end of a step.
"""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.costs.layouts import token_groups
from partita.costs.sharding import dims_of
from partita.graph import GraphBuilder, training_graph
from partita.graph.splits import PARTIAL, routed_pairs
from partita.meaning import Phase
from partita.plans import Axis, Mesh, OpSplit, Stage
from partita.program import Kind
from partita.run.local.compute import routing_groups
from partita.verify.pipelines import unlike_routings
from tests.verify.wrong_programs import (
    COMPUTE,
    RECEIVE,
    REDUCTION,
    SEND,
    UPDATE,
    inside,
    number,
    two_stages,
    value,
    with_value,
    with_work,
    without,
)

torch = pytest.importorskip("torch")


def experts():
    """As many tokens and places as all shares divide."""
    g = GraphBuilder("experts")
    x = g.input("x", (96, 4, 4))
    gates = g.one("moe_router", x, g.parameter("gate.weight", (8, 4)), name="gate", top_k=8)
    tokens = g.one("moe_dispatch", x, gates, name="dispatch", top_k=8)
    return g.finish(g.one("moe_combine", g.relu(tokens), gates, name="combine", top_k=8))


GRAPH = experts()
AXES = st.lists(
    st.sampled_from([(2, ()), (4, ()), (3, ()), (1, ()), (2, (1, 3)), (2, (1, 1)), (3, (1, 2, 1))]),
    min_size=1,
    max_size=3,
).map(lambda shape: tuple(Axis("xyz"[i], size, w) for i, (size, w) in enumerate(shape)))


@st.composite
def sides(draw):
    """A mesh and a split of an op on it, for the dispatch and for the combine."""
    chosen = []
    for op in ("dispatch", "combine"):
        axes = draw(AXES)
        dims = draw(st.sampled_from(dims_of(GRAPH.call(GRAPH.op(op)), axes)))
        chosen.append((op, axes, dims))
    return chosen


@settings(max_examples=300, deadline=None)
@given(sides())
def test_who_works_out_groups_of_tokens_agrees_on_whether_they_are_equal(sides):
    stages, costs, numbers = [], [], []
    for op, axes, dims in sides:
        devices = tuple(range(math.prod(axis.size for axis in axes)))
        stages.append(Stage(op, Mesh(axes, devices), (OpSplit(op, dims),)))
        call = GRAPH.call(GRAPH.op(op))
        costs.append(token_groups(call, dims, axes))
        groups = routing_groups(call, dims, axes)
        numbers.append([start for (start, _), _ in groups] or [0])
    alike = unlike_routings(GRAPH, stages) == []
    assert (costs[0] == costs[1]) is alike
    assert (numbers[0] == numbers[1]) is alike


def test_what_no_stage_runs_is_not_compared():
    stage = Stage("one", Mesh((Axis("x", 2),), (0, 1)), (OpSplit("dispatch", ("b",)),))
    assert len(routed_pairs(GRAPH)) == 1
    assert unlike_routings(GRAPH, [stage]) == []


def tied():
    """Two layers with one weight, a stage each."""
    g = GraphBuilder("tied")
    weight = g.parameter("w", (8, 8))
    x = g.one("linear", g.input("x", (8, 8)), weight, name="first")
    return training_graph(g.finish(g.one("linear", x, weight, name="second")))


@functools.cache
def right(name):
    if name == "tied":
        return two_stages(graph=tied(), cut=1)
    return two_stages(name)


def tasks_of(p, n):
    return np.flatnonzero(p.work == n)


def without_wait(p, task, other):
    """A task no longer waits for another, nor shares a lane with it."""
    owner = np.repeat(np.arange(p.num_tasks), np.diff(p.wait_start))
    keep = ~((owner == task) & np.isin(p.wait_on, other))
    counts = np.bincount(owner[keep], minlength=p.num_tasks)
    return replace(
        p,
        wait_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        wait_on=p.wait_on[keep],
        wait_delay=p.wait_delay[keep],
    )


def longer(p, n):
    duration = p.duration.copy()
    duration[tasks_of(p, n)] *= 2
    return replace(p, duration=duration)


def more_memory(p):
    """The first forward takes twice what is inside it."""
    task = int(tasks_of(p, number(p, COMPUTE, stage=0))[0])
    takes = p.effect_at_start.copy()
    takes[p.effect_start[task]] *= 2
    return replace(p, effect_at_start=takes)


def shifted(p, n):
    """One of its tasks is of another micro-batch."""
    microbatch = p.microbatch.copy()
    microbatch[tasks_of(p, n)[0]] = 1
    return replace(p, microbatch=microbatch)


def crossed(p):
    """The receives of two messages are exchanged."""
    pairs = p.pairs.copy()
    pairs[[0, 1], 1] = pairs[[1, 0], 1]
    return replace(p, pairs=pairs)


def unwaited(p, purpose, of, **fields):
    """The first task of a work does not wait for those of another."""
    task = int(tasks_of(p, number(p, purpose, **fields))[0])
    return without_wait(p, task, of)


def whole_ending(p):
    """The body that ends a step reads other gradients than the micro-batches added up."""
    n = p.works[number(p, UPDATE, stage=0)].body

    def change(body):
        return with_value(body, value(body, "up.bias.grad [P]"), layout=(PARTIAL,), source="task")

    return inside(p, n, change)


FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
CASES = [
    ("1f1b", lambda p: without(p, number(p, COMPUTE, stage=1, phase=BACKWARD)),
     "s1 does not run forward and backward once for micro-batch 0"),
    ("1f1b", lambda p: with_work(p, number(p, COMPUTE, stage=1), body=-1),
     "s1 does not say what is inside it"),
    ("1f1b", lambda p: without(p, number(p, UPDATE, stage=0)), "s0 never updates its parameters"),
    ("1f1b", whole_ending, "s0 ends a step with other gradients of up.bias than"),
    ("1f1b", lambda p: longer(p, number(p, COMPUTE, stage=0)), "is said to last"),
    ("1f1b", more_memory, "is said to take"),
    ("1f1b", lambda p: longer(p, number(p, UPDATE, stage=0)), "s0 is said to end a step in"),
    ("1f1b", lambda p: shifted(p, number(p, RECEIVE)), "does not run once for every micro-batch"),
    ("1f1b", lambda p: replace(p, pairs=p.pairs[1:]), "has no send"),
    ("1f1b", crossed, "another message"),
    ("1f1b", lambda p: with_work(p, number(p, SEND), reads=()), "sends 0 tensors of 1"),
    ("1f1b", lambda p: with_value(p, value(p, "tanh [S(0)]"), tensor="nothing"),
     "sends nothing [S(0)], which its stage does not have"),
    ("1f1b", lambda p: with_value(p, value(p, "tanh [S(0)]"), tensor="up"),
     "sends up where tanh is received"),
    ("1f1b", lambda p: with_value(p, value(p, "tanh.grad.sent [S(0)]"), tensor="down.bias.grad",
                                  layout=(PARTIAL,)),
     "sends down.bias.grad as partial sums"),
    ("1f1b", lambda p: unwaited(p, COMPUTE, tasks_of(p, number(p, RECEIVE)), stage=1,
                                phase=FORWARD),
     "does not wait for"),
    ("1f1b", lambda p: without(p, number(p, REDUCTION, stage=0)),
     "s0 does not reduce its gradients and update once a step"),
    ("1f1b", lambda p: unwaited(p, REDUCTION, np.arange(p.num_tasks), stage=0),
     "s0 reduces its gradients before its last backward"),
    ("tied", lambda p: without(p, number(p, REDUCTION, collective="all_reduce")),
     "s0 updates w without what second.wgrad adds to it"),
    ("tied", lambda p: with_value(p, value(p, "w [R]"), tensor="x"), "x is not held by both"),
    ("tied", lambda p: unwaited(p, REDUCTION, np.arange(p.num_tasks), collective="all_reduce"),
     "comes before the last backward of s0"),
    ("tied", lambda p: unwaited(p, REDUCTION,
                                tasks_of(p, number(p, REDUCTION, collective="all_reduce")),
                                stage=1, peer=-1),
     "s1 updates before gradients that it shares are added"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "change", "sentence"), CASES)
def test_stages_that_do_not_fit_together_are_refused(plan, change, sentence):
    made = right(plan)
    said = made.says(change(made.program))
    assert any(sentence in line for line in said), said


def test_a_gradient_that_is_shared_twice_is_refused():
    made = right("tied")
    p = made.program
    n = number(p, REDUCTION, collective="all_reduce")
    reads = p.works[n].reads
    said = made.says(with_work(p, n, reads=(*reads, *reads)))
    assert any("adds gradients twice" in line for line in said), said


def test_an_update_that_does_not_wait_for_the_reduction_is_refused():
    made = right("1f1b")
    p = made.program
    task = int(tasks_of(p, number(p, UPDATE, stage=0))[0])
    order = [task, *(t for t in range(p.num_tasks) if t != task)]
    said = made.says(replace(without_wait(p, task, np.arange(p.num_tasks)), order=np.array(order)))
    assert any("s0 updates before its gradients are reduced" in line for line in said), said


def test_a_backward_before_its_forward_is_refused():
    made = right("1f1b")
    p = made.program
    task = int(tasks_of(p, number(p, COMPUTE, stage=0, phase=BACKWARD))[0])
    order = [task, *(t for t in range(p.num_tasks) if t != task)]
    said = made.says(replace(without_wait(p, task, np.arange(p.num_tasks)), order=np.array(order)))
    assert any("B0@s0 does not wait for F0@s0" in line for line in said), said


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_right_programs_of_two_stages_pass(schedule):
    kinds = {Kind(int(kind)) for kind in right(schedule).program.kind}
    assert (Kind.DGRAD in kinds) == (schedule == "zb-h1")
