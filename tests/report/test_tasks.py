"""What tasks are told to be: from their works, whatever they are called."""

import numpy as np
import pytest

from partita.graph.splits import PARTIAL, REPLICATE
from partita.meaning import Phase, Purpose, Value, Work
from partita.program import Kind, Program, ProgramBuilder
from partita.report.tasks import CATEGORIES, COLORS, about, categories, fields
from partita.timeline import Timeline


@pytest.fixture
def program() -> Program:
    """An op, its recomputation, collectives for all purposes, and a task that says nothing."""
    b = ProgramBuilder()
    gpu, net = b.lane("gpu"), b.lane("net", "link")
    sums = b.value(Value("w.grad", (PARTIAL, REPLICATE)))
    whole = b.value(Value("w.grad", (REPLICATE, REPLICATE)))
    group = b.group(((0, 1, 2, 3), (4, 5, 6, 7)))
    compute = Work(Purpose.COMPUTE, Phase.FORWARD, "all_reduce", ("b", ""), 0)
    b.add(compute, gpu, 1.0, kind=Kind.FORWARD)
    again = Work(Purpose.RECOMPUTE, Phase.BACKWARD, "all_reduce", ("b", ""), 0)
    b.add(again, gpu, 1.0, kind=Kind.FORWARD)
    reduction = Work(
        Purpose.GRADIENT_REDUCTION, Phase.REDUCE, stage=0, collective="all_reduce", axis=0,
        group=group, size_bytes=3 * 2.0**20, reads=(sums,), writes=(whole,),
    )  # fmt: skip
    b.add(reduction, net, 1.0, kind=Kind.COLLECTIVE)
    for purpose in (Purpose.PARAMETER_GATHER, Purpose.CONVERSION, Purpose.EXCHANGE):
        b.add(Work(purpose, op="x", collective="all_gather"), net, 1.0, kind=Kind.COLLECTIVE)
    b.add("gradient reduction", gpu, 1.0, kind=Kind.WGRAD)
    return b.build()


def test_a_category_is_the_purpose_where_it_says_more_than_the_kind(program):
    assert [CATEGORIES[category] for category in categories(program)] == [
        "forward",
        "recompute",
        "gradient reduction",
        "parameter gather",
        "layout conversion",
        "exchange of statistics or borders",
        "weight gradient",
    ]


def test_every_category_has_a_color():
    assert len(COLORS) == len(CATEGORIES) == len(set(CATEGORIES))


def test_lines_tell_collective_bytes_ranks_and_layouts(program):
    assert about(program, program.works[0]) == ("split: b x none",)
    assert about(program, program.works[2]) == (
        "all-reduce of 3.00 MiB among 4 ranks in each of 2 groups",
        "reads w.grad [P R]",
        "writes w.grad [R R]",
    )


def test_many_tensors_are_counted():
    b = ProgramBuilder()
    many = tuple(b.value(Value(f"t{i}", (REPLICATE,))) for i in range(9))
    b.add(Work(Purpose.UPDATE, Phase.UPDATE, reads=many), b.lane("gpu"), 1.0)
    program = b.build()
    (line,) = about(program, program.works[0])
    assert line == "reads t0 [R], t1 [R], t2 [R], t3 [R] and 5 more"
    assert len(fields(program, program.works[0])["reads"]) == 9


def test_fields_hold_only_what_a_work_has(program):
    assert fields(program, program.works[0]) == {
        "purpose": "compute", "phase": "forward", "op": "all_reduce", "split": ["b", ""],
        "stage": 0,
    }  # fmt: skip
    assert fields(program, program.works[2]) == {
        "purpose": "gradient reduction", "phase": "reduce", "stage": 0,
        "collective": "all_reduce", "bytes": 3 * 2.0**20, "ranks": 4, "groups": 2,
        "first_group": [0, 1, 2, 3], "reads": ["w.grad [P R]"], "writes": ["w.grad [R R]"],
    }  # fmt: skip


def test_shares_of_time_can_be_told_by_category(program):
    start = np.arange(program.num_tasks, dtype=float)
    timeline = Timeline(program, start, start + 1.0)
    shares = timeline.shares(7, [0, 1], categories(program), len(CATEGORIES))
    assert shares.sum(axis=(0, 1)).tolist() == pytest.approx(
        [float((categories(program) == category).sum()) for category in range(len(CATEGORIES))]
    )
