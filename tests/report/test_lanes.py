"""What is inside blocks is drawn, lanes that do the same are one row, names that are cut differ."""

import functools
import json

import numpy as np
import pytest

from partita.graph import GraphBuilder
from partita.program import ProgramBuilder
from partita.report.lanes import alike, folded, group_name, representative, short_names, unfolded
from partita.report.live_timeline import live_timeline
from partita.report.svg_timeline import timeline_svg
from partita.report.task_table import task_table
from partita.report.tasks import CATEGORIES, categories
from partita.report.terminal import gantt
from partita.report.trace import chrome_trace
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


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["n0.gpu0"], "n0.gpu0"),
        (["n0.gpu0", "n0.gpu1", "n0.gpu2", "n0.gpu3"], "n0.gpu0-3"),
        (["n0.gpu0 net", "n0.gpu1 net"], "n0.gpu0-1 net"),
        (["n0.gpu2 to n0.gpu3", "n0.gpu0 to n0.gpu1"], "n0.gpu0-3"),
        (["n0.gpu0", "n0.gpu1", "n1.gpu0", "n1.gpu1"], "n0-1.gpu0-1"),
        (["n0.gpu0", "n1.gpu1"], "n0.gpu0 +1 alike"),  # not all four
        (["n0.gpu0", "n0.gpu2"], "n0.gpu0 +1 alike"),
        (["n0.gpu0", "cpu"], "n0.gpu0 +1 alike"),
        (["rack1-2", "rack1-3"], "rack1-2-3"),  # a name of the user's, its last number counts
        (["a", "b"], "a +1 alike"),
    ],
)
def test_lanes_that_are_alike_are_named_by_where_they_begin_and_end(names, name):
    assert group_name(names) == name


def four_lanes():
    b = ProgramBuilder()
    for number in range(4):
        b.add("layer", b.lane(f"gpu{number}"), 2.0 if number == 3 else 1.0, microbatch=0)
    return Timeline(b.build(), np.zeros(4), np.array([1.0, 1.0, 1.0, 2.0]))


def test_lanes_that_do_the_same_are_one_row():
    timeline = four_lanes()
    assert alike(timeline, range(4)) == [[0, 1, 2], [3]]
    rows = gantt(timeline, fold=True, legend=False).splitlines()[3:]
    assert [row.split(" │")[0].strip() for row in rows] == ["gpu0-2", "gpu3"]
    drawn = timeline_svg(timeline, fold=True)
    assert "gpu0-2" in drawn
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


@functools.cache
def sharded():
    """One stage on four devices that keep their parameters sharded: all do the same."""
    from partita.cluster import resolve
    from partita.engine import run
    from partita.graph import training_graph
    from partita.lower import lower_plan
    from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage

    g = GraphBuilder("small")
    x = g.input("x", (8, 16))
    for name in ("a", "b", "c"):
        x = g.linear(x, 16, name)
    splits = tuple(OpSplit(name, ("b",), zero=3) for name in ("a", "b", "c"))
    stage = Stage("all", Mesh((Axis("dp", 4),), (0, 1, 2, 3)), splits)
    graph = training_graph(g.finish(x))
    return run(lower_plan((stage,), Schedule(), graph, resolve("4xA100"), run).program)


@pytest.mark.parametrize("timeline_of", [four_lanes, pipelined, sharded])
def test_what_is_folded_is_the_same_for_every_lane_and_memory(timeline_of):
    timeline = unfolded(timeline_of())
    few = folded(timeline)
    small = few.timeline
    assert small.makespan == timeline.makespan
    for row, lane in enumerate(few.lanes):
        own, mine = timeline.lane_tasks(lane), small.lane_tasks(row)
        assert np.array_equal(timeline.start[own], small.start[mine])
        assert np.array_equal(timeline.end[own], small.end[mine])
        assert [timeline.program.task_label(t) for t in own] == [
            small.program.task_label(t) for t in mine
        ]
    for row, memory in enumerate(few.memories):
        for one, other in zip(timeline.memory_steps(memory), small.memory_steps(row), strict=True):
            assert np.array_equal(one, other)
    for task in range(small.program.num_tasks):
        for on, delay in small.program.waits_of(task):
            assert small.start[task] >= small.end[on] + delay - 1e-12
    assert folded(small).timeline.program.num_tasks == small.program.num_tasks


def test_gathers_and_reductions_of_sharded_plans_are_on_one_row_in_every_picture():
    """Terminal, picture, page, trace and table show the same rows, named alike."""
    rows = ["n0.gpu0-3", "n0.gpu0-3 net"]
    few = representative(sharded()).timeline
    assert [lane.name for lane in few.program.lanes] == rows
    events = json.loads(chrome_trace(few))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == rows
    slices = [e["cat"] for e in events if e["ph"] == "X"]
    assert slices.count("parameter gather") >= 1
    assert "gradient reduction" in slices
    table = task_table(few).splitlines()[1:]
    assert len(table) == len(slices)
    assert list(dict.fromkeys(line.split(",")[0] for line in table)) == rows
    text = gantt(sharded(), fold=True)
    assert [line.split(" │")[0].strip() for line in text.splitlines() if " │" in line][:2] == rows
    assert all(f">{name}<" in timeline_svg(sharded(), fold=True) for name in rows)
    page = live_timeline(sharded())
    data = json.loads(page.split('<script type="application/json">')[1].split("</script>")[0])
    assert data["lanes"] == rows
    assert [memory["name"] for memory in data["memories"]] == ["n0.gpu0-3"]
