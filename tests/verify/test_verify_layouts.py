"""Every sentence that the verifier can say about the layouts of one stage: a program that earns it.

Each program is a right one in which one work or value is changed.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from partita.graph import GraphBuilder, training_graph
from partita.graph.splits import PARTIAL, REPLICATE, TensorPlacement
from partita.meaning import Value
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.verify import verify_meaning
from tests.verify.wrong_programs import (
    COMPUTE,
    CONVERSION,
    EXCHANGE,
    GATHER,
    RECOMPUTE,
    REDUCTION,
    UPDATE,
    Right,
    number,
    one_image,
    one_stage,
    reading,
    value,
    with_new_value,
    with_value,
    with_work,
    without,
    without_waits,
)

ROWS, COLUMNS = TensorPlacement("shard", 0), TensorPlacement("shard", 1)


@functools.cache
def right(name):
    if name == "image":
        return one_image()
    if name == "again":
        return one_stage(again=("up", "tanh"))
    return one_stage(name)


def refused(name, change, sentence):
    made = right(name)
    said = made.says(change(made.program))
    assert any(sentence in line for line in said), said


def op_on_one_rank(p):
    task = int(np.flatnonzero(p.work == number(p, COMPUTE, "tanh"))[0])
    column = p.work.copy()
    column[task] = -1
    return replace(p, work=column)


def reads_two_ways(p):
    p, other = with_new_value(p, Value("up.bias", (REPLICATE, REPLICATE), "parameter"))
    return reading(p, number(p, COMPUTE, "up"), 2, other)


def no_slice(p):
    base = value(p, "tanh [S(1) S(0)]")
    p, other = with_new_value(p, Value("tanh", (COLUMNS, REPLICATE), of=base))
    return reading(p, number(p, COMPUTE, "norm"), 0, other)


def partial_input(p):
    p, other = with_new_value(p, Value("x", (REPLICATE, PARTIAL), "input"))
    return reading(p, number(p, COMPUTE, "up"), 0, other)


def sum_of_one_twice(p):
    n = number(p, COMPUTE, "tanh.grad.sum")
    return reading(p, n, 1, p.works[n].reads[0])


def written_twice(p):
    n = number(p, COMPUTE, "tanh")
    return with_work(p, n, writes=(value(p, "up [S(1) S(0)]"),))


def recomputed_twice(p):
    n = number(p, RECOMPUTE, "up")
    other = number(p, RECOMPUTE, "tanh")
    column = p.work.copy()
    column[column == other] = n
    works = [*p.works, p.works[n]]
    mine = np.flatnonzero(p.work == other)
    column[mine] = len(works) - 1
    return replace(p, works=tuple(works), work=column)


def gradient_in_two_places(p):
    base = value(p, "up.bias.grad [S(0) P]")
    return with_new_value(p, Value("up.bias.grad", (ROWS, PARTIAL), "gradient", of=base))[0]


def update_writes(p, flat):
    n = next(n for n, v in enumerate(p.values) if v.tensor == "up.weight.next")
    return with_value(p, n, flat=flat)


def with_gradient(p, text):
    """The update of up.weight reads this."""
    n = number(p, UPDATE)
    reads = list(p.works[n].reads)
    place = [p.values[v].tensor for v in reads].index("up.weight")
    reads[place + 1] = value(p, text)
    return with_work(p, n, reads=tuple(reads))


def fewer_readers(p, purpose, **fields):
    n = number(p, purpose, **fields)
    return with_work(p, n, reads=p.works[n].reads[:-1])


OPS = [
    (0, op_on_one_rank, "F@tanh does not run once on every rank"),
    (0, lambda p: without_waits(p, number(p, CONVERSION)),
     "reads down without waiting for F@down"),
    (0, lambda p: reading(p, number(p, COMPUTE, "tanh"), 0, value(p, "add [S(1) S(0)]")),
     "reads add [S(1) S(0)], which nothing has made"),
    (0, lambda p: without(p, number(p, EXCHANGE, "norm")),
     "reads norm before its statistics are exchanged"),
    (0, partial_input, "reads x [R P] as partial sums, which nothing has made"),
    (0, no_slice, "takes tanh [S(1) R] as a slice of tanh, which it is not"),
    (0, lambda p: with_work(p, number(p, COMPUTE, "tanh"), dims=("b", "b")),
     "is split as b x b, not as the plan says"),
    (0, lambda p: fewer_readers(p, COMPUTE, op="add"),
     "does not read and write the tensors of its op"),
    (3, lambda p: reading(p, number(p, COMPUTE, "up"), 1, 0),
     "reads up.weight in parts, before it is gathered"),
    (0, lambda p: reading(p, number(p, COMPUTE, "add"), 0, value(p, "down [P S(0)]")),
     "F@add needs down as S(1) S(0), and finds P S(0)"),
    (0, lambda p: reading(p, number(p, COMPUTE, "norm"), 0, value(p, "up [S(1) S(0)]")),
     "reads up where it needs tanh"),
    (0, lambda p: reading(p, number(p, COMPUTE, "add.dgrad"), 0, value(p, "up [S(1) S(0)]")),
     "reads up where it needs add.grad"),
    (0, lambda p: reading(p, number(p, COMPUTE, "tanh.dgrad"), 0,
                               value(p, "norm.grad [S(1) S(0)]")),
     "reads norm.grad where it needs the gradient of tanh"),
    (0, lambda p: reading(p, number(p, COMPUTE, "tanh.dgrad"), 0,
                               value(p, "tanh.grad.norm [S(1) S(0)]")),
     "reads the gradient of tanh without what add.dgrad adds to it"),
    ("image", lambda p: without(p, number(p, EXCHANGE, "conv")),
     "runs before its borders along axis 0 are fetched"),
    (0, lambda p: with_value(p, value(p, "up [S(1) S(0)]"), layout=(ROWS, ROWS)),
     "F@up writes up [S(0) S(0)] where it makes up as S(1) S(0)"),
    (0, lambda p: with_work(p, number(p, COMPUTE, "up"), op="down.more", writes=()),
     "is no op of the model"),
    (0, lambda p: reading(p, number(p, COMPUTE, "tanh.grad.sum"), 0,
                               value(p, "down.grad [R S(0)]")),
     "adds tensors that lie unlike tanh.grad [S(1) S(0)]"),
    (0, lambda p: reading(p, number(p, COMPUTE, "tanh.grad.sum"), 0,
                               value(p, "down.grad [S(1) S(0)]")),
     "adds what are no gradients of one tensor"),
    (0, sum_of_one_twice, "adds a gradient twice"),
    (0, written_twice, "up [S(1) S(0)] is written twice"),
    (0, reads_two_ways, "parameter up.bias is stored twice, in two layouts"),
]  # fmt: skip
COMMUNICATION = [
    (0, lambda p: with_work(p, number(p, CONVERSION), axis=2),
     "runs along axis 2, which the mesh does not have"),
    (0, lambda p: with_work(p, number(p, CONVERSION), group=1),
     "does not run among the devices of axis t"),
    (0, lambda p: with_work(p, number(p, EXCHANGE, "norm"), axis=1, group=1),
     "exchanges statistics that no op of its split needs there"),
    (0, lambda p: fewer_readers(p, REDUCTION), "reads 5 values and writes 6"),
    (0, lambda p: reading(p, number(p, CONVERSION), 0, value(p, "norm [S(1) S(0)]")),
     "turns norm into down"),
    (0, lambda p: with_work(p, number(p, CONVERSION), collective="broadcast"),
     "is no conversion: broadcast"),
    (0, lambda p: with_work(p, number(p, CONVERSION), collective="all_reduce"),
     "cannot turn P S(0) into S(1) S(0)"),
    (0, lambda p: with_work(p, number(p, CONVERSION), size_bytes=1.0),
     "is said to move 1 bytes of 128"),
    (3, lambda p: with_work(p, number(p, GATHER), collective="all_reduce"),
     "gathers by all_reduce"),
    (3, lambda p: with_work(p, number(p, GATHER), axis=0, group=0),
     "cannot make up.weight [S(0) R] of parts along [1]"),
    (3, lambda p: with_value(p, value(p, "up.weight [S(0) R]"), layout=(COLUMNS,
                                        REPLICATE)),
     "cannot turn S(0) R into S(1) R"),
    (0, lambda p: with_work(p, number(p, REDUCTION), collective="all_gather"),
     "reduces by all_gather"),
    (0, lambda p: with_work(p, number(p, REDUCTION), axis=0, group=0),
     "cannot make up.weight.grad [S(0) R] of up.weight.grad as S(0) P"),
]  # fmt: skip
END = [
    (0, lambda p: fewer_readers(p, UPDATE),
     "does not read a parameter and a gradient for each it updates"),
    (0, lambda p: with_value(p, value(p, "up.weight.next [S(0) R]"), tensor="up.bias.next"),
     "updates up.weight into up.bias.next"),
    (0, lambda p: with_gradient(p, "up.bias.grad [S(0) R]"),
     "updates up.weight with up.bias.grad"),
    (0, lambda p: with_gradient(p, "up.weight.grad [S(0) P]"),
     "updates up.weight, which lies as S(0) R, with a gradient that lies as S(0) P"),
    (0, lambda p: update_writes(p, (1,)), "updates up.weight in parts along [], not []"),
    (1, lambda p: with_value(p, value(p, "up.weight [S(0) R]"), flat=(1,)),
     "finds up.weight in parts along [1]"),
    (0, lambda p: without(p, number(p, COMPUTE, "up.wgrad")),
     "op up.wgrad runs 0 times, and once is needed"),
    ("again", recomputed_twice, "op up is recomputed 2 times"),
    (0, lambda p: without(p, number(p, EXCHANGE, "norm.dgrad")),
     "the statistics of tanh.grad.norm are never exchanged"),
    (0, lambda p: without(p, number(p, COMPUTE, "add")),
     "the model returns add as partial sums that nobody adds up"),
    (0, gradient_in_two_places, "gradients of up.bias are added up in two places"),
    (0, lambda p: with_value(p, value(p, "up.bias.grad [S(0) P]"), source="task"),
     "nobody adds up.wgrad to the gradient of up.bias"),
    (0, lambda p: without(p, number(p, UPDATE)), "parameter up.weight is never updated"),
    (1, lambda p: without(p, number(p, GATHER)),
     "parameter up.weight is not gathered after its update"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "change", "sentence"), OPS)
def test_an_op_that_reads_or_writes_wrongly_is_refused(plan, change, sentence):
    refused(plan, change, sentence)


@pytest.mark.parametrize(("plan", "change", "sentence"), COMMUNICATION)
def test_a_collective_that_does_something_else_is_refused(plan, change, sentence):
    refused(plan, change, sentence)


@pytest.mark.parametrize(("plan", "change", "sentence"), END)
def test_a_step_that_ends_wrongly_is_refused(plan, change, sentence):
    refused(plan, change, sentence)


def test_a_program_without_meaning_is_refused():
    made = right(0)
    nothing = np.full_like(made.program.work, -1)
    assert made.says(replace(made.program, works=(), work=nothing)) == (
        "the tasks of the program do not say what they are",
    )


def test_gradients_that_are_kept_whole_are_refused_where_the_plan_shards_them():
    made, other = right(0), right(2)
    said = verify_meaning(made.program, made.graph, other.stages, made.schedule)
    assert "the gradient of up.weight is not reduced in every micro-batch" in said


def test_an_update_without_one_of_the_gradients_of_a_tied_parameter_is_refused():
    g = GraphBuilder("tied")
    x = g.input("x", (4, 8))
    weight = g.parameter("w", (8, 8))
    y = g.one("linear", x, weight, name="first")
    graph = training_graph(g.finish(g.one("linear", y, weight, name="second")))
    splits = (OpSplit("first", ("b",)), OpSplit("second", ("b",)))
    stage = Stage("model", Mesh((Axis("d", 2),), (0, 1)), splits)
    made = Right(graph, (stage,), Schedule())
    p = made.program
    change = reading(p, number(p, REDUCTION), 0, value(p, "w.grad.first [P]"))
    change = with_value(change, value(p, "w.grad [R]"), tensor="w.grad.first")
    said = made.says(change)
    assert any("updates w without what second.wgrad adds to its gradient" in s for s in said), said
