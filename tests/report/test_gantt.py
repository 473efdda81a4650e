"""The drawing in the terminal. The golden files are what it is meant to look like."""

import re
from pathlib import Path

import numpy as np
import pytest

from partita.jobs.simulate import simulate
from partita.program import Kind, ProgramBuilder
from partita.report.tasks import CATEGORIES
from partita.report.terminal import FILL, gantt
from partita.timeline import Timeline
from tests.report.plans import fully_sharded

GOLDEN = Path(__file__).parent / "golden"
COLOR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", ["pipeline", "overlapped"])
def test_it_looks_as_it_should(name, request, is_golden):
    is_golden(GOLDEN / f"{name}.txt", gantt(request.getfixturevalue(name), width=100))


@pytest.mark.parametrize("name", ["pipeline", "overlapped", "crowd", "nothing"])
@pytest.mark.parametrize("width", [60, 100, 237])
def test_no_line_is_wider_than_asked(name, width, request):
    for line in gantt(request.getfixturevalue(name), width=width, legend=False).splitlines():
        assert len(line) <= width


@pytest.mark.parametrize("name", ["pipeline", "overlapped", "crowd"])
def test_colour_changes_nothing_but_colour(name, request):
    timeline = request.getfixturevalue(name)
    painted = gantt(timeline, color=True)
    assert COLOR.sub("", painted) == gantt(timeline)
    assert COLOR.search(painted)
    assert not COLOR.search(gantt(timeline))


def test_gathers_and_reductions_are_told_apart_and_the_legend_keeps_to_the_width():
    plan = fully_sharded("gpt2@64", "2x1xA100", batch=8)
    text = gantt(simulate(plan).timeline, width=80)
    assert "↓ parameter gather" in text
    assert "↑ gradient reduction" in text
    rows = [row for row in text.split("\n") if " net │" in row]
    assert all("↓" in row and "↑" in row for row in rows)
    assert max(map(len, text.split("\n"))) <= 82


def test_every_category_has_its_own_character():
    assert len(set(FILL)) == len(FILL) == len(CATEGORIES)


def test_rows_can_be_chosen(pipeline):
    drawn = gantt(pipeline, lanes=[2, 0], memory=False, legend=False).splitlines()
    assert [line.split()[0] for line in drawn[3:]] == ["gpu2", "gpu0"]


def test_many_lanes_are_summed_up_and_said_to_be(crowd):
    drawn = gantt(crowd)
    assert len([line for line in drawn.splitlines() if line.startswith("unit")]) == 20
    assert re.search(r"^80 more +│.*│ +\d+% busy$", drawn, re.M)
    assert "the 20 busiest lanes are drawn; the others are busy 51% to 51%" in drawn


def test_kinds_of_a_lane_with_many_tasks_show_by_their_share(crowd):
    drawn = gantt(crowd, width=60, lanes=[99], legend=False)
    row = next(line for line in drawn.splitlines() if line.startswith("unit99"))
    forward, backward = row.count(FILL[Kind.FORWARD]), row.count(FILL[Kind.BACKWARD])
    assert backward == pytest.approx(2 * forward, abs=6)
    assert "mix their kinds by the share of time" in gantt(crowd, width=60, lanes=[99])


def test_a_mostly_idle_column_is_drawn_idle():
    b = ProgramBuilder(time_unit="")
    a = b.lane("a")
    for _ in range(2):
        b.add("x", a, 0.4)
    timeline = Timeline(b.build(), np.array([0.0, 9.6]), np.array([0.4, 10.0]))
    row = gantt(timeline, width=28, legend=False).splitlines()[3]
    assert row == "a │··········│   8% busy"


def test_memory_over_capacity_is_marked(pipeline):
    b = ProgramBuilder(time_unit="")
    a, m = b.lane("a"), b.memory("m", 1.0)
    b.add("x", a, 1, (), [(m, 1.0, 1.0)])
    b.add("y", a, 1, (), [(m, 0.0, -2.0)])
    timeline = Timeline(b.build(), np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    row = gantt(timeline, width=33, legend=False).splitlines()[-1]
    assert row == "m mem │███████!!!!!!!│ 2 of 1"
    assert "!" not in gantt(pipeline)


def test_names_cannot_move_the_cursor_or_break_a_row(hostile):
    drawn = gantt(hostile)
    assert not set(drawn) & {"\x1b", "\x00", "\u202e"}
    assert len(gantt(hostile, legend=False).splitlines()) == 6


def test_long_and_wide_names_keep_rows_aligned():
    b = ProgramBuilder()
    for name in ("a", "計算装置", "x" * 300):
        b.add(name, b.lane(name), 1.0)
    timeline = Timeline(b.build(), np.zeros(3), np.ones(3))
    rows = gantt(timeline, width=60, legend=False).splitlines()[3:]
    assert {row.rindex("│") + row.count("計算装置") * 4 for row in rows} == {rows[0].rindex("│")}
    assert rows[2].startswith("xxxxxxx…xxxxxxx ")


def test_nothing_is_drawn_as_nothing(nothing):
    assert gantt(nothing).startswith("0 s for 0 tasks on 0 lanes\n")


def test_a_program_of_points_is_drawn():
    b = ProgramBuilder()
    b.add("x", b.lane("a"), 0.0)
    timeline = Timeline(b.build(), np.zeros(1), np.zeros(1))
    assert "0% busy" in gantt(timeline)
