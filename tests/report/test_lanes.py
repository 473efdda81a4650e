"""What is inside blocks is drawn, lanes that do the same are one row, names that are cut differ."""

import functools

import numpy as np
import pytest

from partita.graph import GraphBuilder
from partita.program import ProgramBuilder
from partita.report.lanes import alike, short_names, unfolded
from partita.report.svg_timeline import timeline_svg
from partita.report.tasks import CATEGORIES, categories
from partita.report.terminal import gantt
from partita.timeline import Timeline


@pytest.mark.parametrize(
    ("names", "most", "short"),
    [
        (["gpu0", "gpu1"], 4, ["gpu0", "gpu1"]),
        (["n0.gpu0 to n0.gpu3", "n0.gpu4 to n0.gpu7"], 12, ["n0.gpu0-3", "n0.gpu4-7"]),
        (["a.long.name.of.one", "a.long.name.of.two"], 11, ["a.lon…f.one", "a.lon…f.two"]),
        (["aaaaaaaa1aaaaaaaa", "aaaaaaaa2aaaaaaaa"], 9, ["aaaa…aaaa", "aaaa…aa#1"]),
    ],
)
def test_names_that_differ_differ_when_they_are_cut(names, most, short):
    assert short_names(names, most) == short
    assert all(len(name) <= most for name in short)


def four_lanes():
    b = ProgramBuilder()
    for number in range(4):
        b.add("layer", b.lane(f"gpu{number}"), 2.0 if number == 3 else 1.0, microbatch=number)
    return Timeline(b.build(), np.zeros(4), np.array([1.0, 1.0, 1.0, 2.0]))


def test_lanes_that_do_the_same_are_one_row():
    timeline = four_lanes()
    assert alike(timeline, range(4)) == [[0, 1, 2], [3]]
    rows = gantt(timeline, fold=True, legend=False).splitlines()[3:]
    assert [row.split(" │")[0].strip() for row in rows] == ["gpu0 +2 alike", "gpu3"]
    drawn = timeline_svg(timeline, fold=True)
    assert "gpu0 +2 alike" in drawn
    assert "gpu1" not in drawn
    assert len(gantt(timeline, legend=False).splitlines()) == 7  # each by itself unless asked


@functools.cache
def pipelined():
    """Two stages whose parameters are sharded, two micro-batches."""
    from partita.cluster import resolve
    from partita.engine import run
    from partita.graph import training_graph
    from partita.lower import lower_plan
    from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage

    g = GraphBuilder("small")
    x = g.input("x", (8, 16))
    for name in ("a", "b"):
        x = g.linear(x, 16, name)
    graph = training_graph(g.finish(x))
    stages = tuple(
        Stage(name, Mesh((Axis("dp", 2),), devices), (OpSplit(name, ("b",), zero=3),))
        for name, devices in (("a", (0, 1)), ("b", (2, 3)))
    )
    lowered = lower_plan(stages, Schedule("gpipe", 2), graph, resolve("4xA100"), run)
    return run(lowered.program)


def test_collectives_inside_blocks_are_drawn_when_they_happen():
    timeline = unfolded(pipelined())
    program = timeline.program
    names = [CATEGORIES[number] for number in categories(program).tolist()]
    before = pipelined().program.num_tasks
    gathers = [t for t in range(before, program.num_tasks) if names[t] == "parameter gather"]
    assert len(gathers) >= 4  # each stage, each micro-batch
    for task in gathers:
        lane = program.lanes[program.lanes_of(task)[0]].name.removesuffix(" inside")
        (stage,) = (i for i, each in enumerate(program.lanes) if each.name == lane)
        blocks = timeline.lane_tasks(stage)
        assert any(
            timeline.start[block] <= timeline.start[task] + 1e-12
            and timeline.end[task] <= timeline.end[block] + 1e-12
            for block in blocks.tolist()
        )
    assert "parameter gather" in gantt(pipelined(), fold=True)
    assert "parameter gather" not in gantt(pipelined())
    assert timeline.makespan == pipelined().makespan


def test_a_timeline_without_blocks_stays_as_it_is():
    timeline = four_lanes()
    assert unfolded(timeline) is timeline
