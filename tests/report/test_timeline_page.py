"""Pages of any timeline: schedules, streams, units, placements, saved files; tables, snapshots."""

import csv
import io
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner, Result

from partita.cli import partita
from partita.jobs.memory_parts import PARTS, memory_parts
from partita.jobs.run_trace import RankTrace, TaskTime, TracedStep, plan_fingerprint, write_trace
from partita.jobs.simulate import simulate
from partita.program import Kind, ProgramBuilder
from partita.report.live_timeline import families, task_colors
from partita.report.memory_snapshot import memory_snapshot
from partita.report.page import plan_page
from partita.report.small_timeline import SmallTimeline, small_timelines
from partita.report.task_table import task_table
from partita.report.timeline_page import TimelineStory, timeline_page
from tests.report.browser import needs_chromium, quiet
from tests.report.conftest import timed
from tests.report.plans import line


def run(*words: str) -> Result:
    return CliRunner().invoke(partita, list(words))


HOSTILE = "</script><img src=x onerror=alert(1)>"


def test_a_page_tells_steps_in_steps_and_draws_rivals_on_one_axis(pipeline):
    rival = SmallTimeline("slower", "99 steps", pipeline)
    story = TimelineStory("1F1B", "by hand", pipeline, lower_bound=24.0, rivals=(rival,))
    page = timeline_page(story)
    assert "lower bound 24 steps" in page
    assert "9 steps of 33 steps are above the proven bound" in page
    picture = page.split("<h2>On one axis</h2>")[1].split("</svg>")[0]
    assert picture.count(">27%</text>") == 8  # four devices each: 9 of 33 are idle
    assert ">slower</text>" in picture


def test_without_a_bound_the_time_of_the_busiest_device_is_told(pipeline):
    page = timeline_page(TimelineStory("1F1B", "by hand", pipeline))
    section = page.split("<h2>Where the time goes</h2>")[1].split("<h2>")[0]
    assert "</i>computing 24 steps (72.7%)" in section
    assert "</i>dependency (bubble) 9 steps (27.3%)" in section
    assert "bound" not in section.replace("(bubble)", "")


def test_a_timeline_of_nothing_has_a_page(nothing):
    assert "<h2>Timeline</h2>" in timeline_page(TimelineStory("nothing", "", nothing))
    assert "<svg" in small_timelines("nothing", [])


@needs_chromium
def test_names_in_any_page_are_text(browser, hostile):
    story = TimelineStory(HOSTILE, HOSTILE, hostile, [(HOSTILE,) * 3], by_block=True,
                          as_in_papers=True)  # fmt: skip
    tab = browser.open(timeline_page(story))
    tab.frames()
    assert tab.run("document.images.length") == 0
    assert quiet(tab)
    tab.close()


def test_colours_by_block_leave_out_numbers_until_there_are_few_enough():
    names = [f"l{layer}.s{step}" for layer in range(3) for step in range(5)]
    assert families(names, 20) == names
    assert set(families(names, 13)) == {"l0.s*", "l1.s*", "l2.s*"}
    assert set(families(names, 2)) == {"l*.s*"}
    b = ProgramBuilder()
    lane = b.lane("unit", "unit")
    for number in range(40):
        b.add(chr(65 + number), lane, 1.0 + number, kind=Kind.FORWARD)
    program = b.build()
    end = np.cumsum(program.duration)
    colors = task_colors(timed(program, (end - program.duration).tolist()), by_block=True)
    assert colors.names[-1] == "others"
    assert len(colors.names) == 14
    assert colors.of_task.tolist() == [13] * 27 + list(range(13))  # the longest have their own


def test_the_table_of_tasks_keeps_formulas_from_being_formulas():
    b = ProgramBuilder()
    lane = b.lane("=cmd()")
    b.add('a,"b"\n', lane, 1.0, kind=Kind.FORWARD, microbatch=3)
    rows = list(csv.DictReader(io.StringIO(task_table(timed(b.build(), [0.0])))))
    assert rows == [
        {"lane": "'=cmd()", "task": 'a,"b"\n', "kind": "forward", "microbatch": "3",
         "start": "0.0", "end": "1.0", "critical": "1"}
    ]  # fmt: skip


def test_a_snapshot_holds_at_every_moment_what_the_plan_holds():
    simulation = simulate(line("squeezenet1_1@64", "2xA100", 4, batch=8))
    curves = memory_parts(simulation)
    snapshot = pickle.loads(memory_snapshot(curves))
    for own, events in zip(curves, snapshot["device_traces"], strict=True):
        for part in PARTS:
            held = peak = 0
            live: dict[int, int] = {}
            for event in events:
                if event["frames"][0]["name"] != part:
                    continue
                if event["action"] == "alloc":
                    assert event["addr"] not in live
                    live[event["addr"]] = event["size"]
                    held += event["size"]
                elif event["action"] == "free_completed":
                    held -= live.pop(event["addr"])
                peak = max(peak, held)
            assert peak == round(own.parts[part].max())
            assert held == round(own.parts[part][-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plan of two stages, and a trace of a run of it that took twice as long."""
    folder = tmp_path_factory.mktemp("run")
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    (folder / "plan.json").write_bytes(plan.to_json())
    timeline = simulate(plan).timeline
    for rank in range(2):
        tasks = tuple(
            TaskTime(
                task, -1, -1, int(timeline.program.microbatch[task]),
                100 + 2 * float(timeline.start[task]), 100 + 2 * float(timeline.end[task]),
                purpose="compute", phase="forward", stage=rank, name=f"block of rank {rank}",
            )
            for task in timeline.lane_tasks(rank).tolist()
        )  # fmt: skip
        step = TracedStep(0, 100.0, 100 + 2 * timeline.makespan, tasks)
        trace = RankTrace(plan_fingerprint(plan), rank, 2, "cpu", "2", "0", 0.0, (step,))
        write_trace(folder / "trace", trace)
    return folder, plan


def test_measured_lanes_stand_under_the_predicted_ones(saved):
    folder, _ = saved
    page = folder / "page.html"
    told = ("--measured", str(folder / "trace"), "-o", str(page))
    assert run("report", str(folder / "plan.json"), *told).exit_code == 0
    text = page.read_text()
    assert '"measured: rank 0, n0.gpu0","n0.gpu1","measured: rank 1, n0.gpu1"' in text
    assert "block of rank 1" in text


@needs_chromium
def test_measured_lanes_can_be_drawn_as_long_as_the_predicted_ones(saved, browser):
    folder, plan = saved
    page = folder / "scaled.html"
    told = ("--measured", str(folder / "trace"), "-o", str(page))
    assert run("report", str(folder / "plan.json"), *told).exit_code == 0
    assert "2 times the predicted step" in page.read_text()
    step = simulate(plan).step_s
    tab = browser.open(page)
    tab.frames()
    view = "partitaTimelines[0]"
    last = f"Math.max(...{view}.ends)"
    assert tab.run(f"{view}.to") == pytest.approx(2 * step)
    tab.click("[data-length]")
    assert tab.run(f"{view}.to") == pytest.approx(step)
    assert tab.run(last) == pytest.approx(step)
    times = tab.run(f"Array.from({view}.data.slot_task, (t) => {view}.data.end[t])")
    assert max(times) == pytest.approx(2 * step)  # what is told of a task is what was measured
    tab.run("new Promise((done) => setTimeout(done, 200))")
    again = browser.open(page, fragment=tab.run("location.hash"))
    assert again.run(f"{view}.oneLength") is True
    tab.click("[data-length]")
    assert tab.run(f"{view}.to") == pytest.approx(2 * step)
    assert quiet(tab)
    tab.close()
    again.close()


def test_traces_of_another_plan_and_of_no_plan_are_refused(saved):
    folder, plan = saved
    other = replace(plan, origin=replace(plan.origin, seed=99))
    (folder / "other.json").write_bytes(other.to_json())
    told = ["--measured", str(folder / "trace")]
    refused = run("report", str(folder / "other.json"), *told)
    assert refused.exit_code == 2
    assert "the trace is of another plan" in refused.stderr
    (folder / "timeline.json").write_bytes(simulate(plan).timeline.to_json())
    refused = run("report", str(folder / "timeline.json"), *told)
    assert refused.exit_code == 2
    assert "--measured: is for plans; this is a timeline" in refused.stderr


def test_a_plan_is_written_in_every_form_and_a_timeline_in_all_but_one(saved):
    folder, plan = saved
    (folder / "run.json").write_bytes(simulate(plan).timeline.to_json())
    for name, endings in (
        ("plan.json", ("csv", "pickle", "svg", "trace.json")),
        ("run.json", ("html", "csv", "svg", "trace.json", "txt")),
    ):
        for ending in endings:
            path = folder / f"{name}.{ending}"
            assert run("report", str(folder / name), "--quiet", "-o", str(path)).exit_code == 0
            assert path.stat().st_size > 200
    tables = [(folder / f"{name}.csv").read_text() for name in ("plan.json", "run.json")]
    assert tables[0] == tables[1]
    refused = run("report", str(folder / "run.json"), "-o", str(folder / "x.pickle"))
    assert refused.exit_code == 2
    assert "end the name in one of .html" in refused.stderr
    told = json.loads(run("report", str(folder / "run.json"), "--json").stdout)
    assert told["makespan"] == simulate(plan).timeline.makespan


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["schedule", "vshape", "--devices", "2", "--microbatches", "4", "--compare", "--page"],
         (">1F1B</text>", "<h2>On one axis</h2>", "≤ 0.0%", ">2 chunks a device</text>",
          "no order of these blocks is faster", "the bound above is not theirs")),
        (["streams", "squeezenet1_1@64", "--device", "analytic", "--method", "greedy", "-o"],
         (">streams</span>", "<h2>What was tried</h2>", "<td>greedy</td><td class=n>")),
        (["rtasks", "lstm@2", "--method", "list", "-o"],
         (">units busy</span>", "vEU 0")),
    ],
    ids=["schedule", "streams", "rtasks"],
)  # fmt: skip
def test_other_answers_have_pages(command, expected, tmp_path):
    page = tmp_path / "page.html"
    answer = run(*command, str(page))
    assert answer.exit_code == 0, answer.output
    text = page.read_text()
    for part in expected:
        assert part in text


def test_the_page_says_what_its_prediction_assumes():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    page = plan_page(plan, simulate(plan))
    listed = page.split("what this prediction assumes")[1].split("</ul>")[0]
    assert "execution graph" in listed
    assert "A100" in listed
    assert "80 %" in listed
