"""The whole page of a plan in a real browser: hostile names, 50,000 tasks, the user's cap."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

from partita import units
from partita.cluster import resolve
from partita.graph import GraphBuilder
from partita.graph.files import write_graph
from partita.jobs.idle import idle_account
from partita.jobs.simulate import data_parallel, simulate
from partita.jobs.traffic import hidden_share
from partita.jobs.workload import load
from partita.meaning import Purpose
from partita.plans import Alternative, Mesh, Schedule, Stage
from partita.report.page import plan_page
from partita.report.summary import simulation_text
from partita.timeline import LaneSketch
from tests.report.browser import needs_chromium, quiet
from tests.report.plans import fully_sharded, line, plan_of, simulated, tiny_gpt

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


@needs_chromium
def test_a_page_of_fifty_thousand_tasks_is_small_quick_and_alone(browser):
    plan = line("squeezenet1_1@64", "16xA100", 560, batch=560)
    simulation = simulate(plan)
    assert simulation.timeline.program.num_tasks > 50_000
    page = plan_page(plan, simulation)
    assert len(page.encode()) < 8e6
    tab = browser.open(page)
    assert int(tab.run("document.documentElement.dataset.ready")) < 2000
    assert quiet(tab)
    tab.close()


@needs_chromium
def test_names_of_ops_stages_devices_and_searches_show_as_text(tmp_path, browser):
    g = GraphBuilder(HOSTILE)
    x = g.input(HOSTILE, (4, 8))
    x = g.relu(g.linear(x, 8, name=HOSTILE + "1"), name=HOSTILE + "2")
    graph, cluster = tmp_path / "net.json", tmp_path / "two.toml"
    write_graph(graph, g.finish(g.linear(x, 4, name=HOSTILE + "3")))
    cluster.write_text(f'name = "{HOSTILE}"\n[[nodes]]\nname = "{HOSTILE}"\ndevices = "2xA100"\n')
    plan = line(str(graph), str(cluster), 2, HOSTILE, training=False)
    tab = browser.open(plan_page(plan, simulate(plan)))
    document = tab.run("document.documentElement.outerHTML")
    assert "<title>broken" not in document
    assert "data-ready" in document
    assert quiet(tab)
    tab.close()
    body = document.split("<body>")[1]
    assert "<img src=x" not in body
    assert unescape(body).count(HOSTILE) > 10


def test_the_page_shows_the_memory_that_the_user_allows():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    capped = replace(plan.prediction, capacity_bytes=(3 * 2.0**30,) * 2)
    page = plan_page(replace(plan, prediction=capped), simulate(replace(plan, prediction=capped)))
    assert "of 3.00 GiB per device" in page
    assert '"capacity":3221225472.0' in page


def test_the_page_says_who_runs_what():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    page = plan_page(plan, simulate(plan))
    assert ">bubble<" in page
    assert "the busiest link is in use for" in page
    table = page.split("<h2>The stages</h2>")[1].split("</table>")[0]
    assert "<td>stage1</td><td>n0.gpu1</td>" in table
    alone = line("squeezenet1_1@64", "1xA100", 1, batch=4)
    lonely = plan_page(alone, simulate(alone))
    assert "<h2>The stages</h2>" not in lonely
    assert ">exposed communication<" in lonely


def test_rows_that_stand_for_several_devices_say_so():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    few = simulate("squeezenet1_1@64", "2xA100", batch=4)
    many = simulate("squeezenet1_1@64", "64xA100", batch=64)
    assert "2 devices in 1 row: a row stands for devices that do the same" in plan_page(plan, few)
    assert "64 devices in 1 row: the first of each kind is its representative rank" in plan_page(
        plan, many
    )


def test_only_ops_with_parameters_keep_them_somehow():
    plan = line("squeezenet1_1@64", "1xA100", 1, batch=4)
    rows = plan_page(plan, simulate(plan)).split("How every op is split")[1]
    assert re.search(r"<td>features.0</td>.*?<td>replicated</td>", rows)
    assert re.search(r"<td>features.1</td><td>stage0</td><td>–</td><td></td>", rows)


def test_a_plan_for_batches_in_a_row_is_measured_by_them():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4, training=False)
    simulation = simulate(plan)
    half = replace(
        plan.prediction, step_s=simulation.step_s, interval_s=simulation.interval_s,
        lower_bound_s=simulation.interval_s / 2,
    )  # fmt: skip
    assert simulation.interval_s < simulation.step_s
    assert "≤ 50.0%" in plan_page(replace(plan, prediction=half), simulation)


def plain(page: str) -> str:
    """A page without what costs decide, packed columns and the script."""
    page = re.sub(r"<script>\n.*?</script>", "<script>...</script>", page, flags=re.S)
    page = re.sub(r'"[fiu][1248]:[A-Za-z0-9+/]*={0,2}"', '"..."', page)
    figure = r'<svg class="fig"[^>]*(aria-label="[^"]*").*?</svg>'
    page = re.sub(figure, r"<svg \1>", page, flags=re.S)
    page = re.sub(r'<svg class="range".*?</svg>', "<svg range>", page)
    page = re.sub(r"width:[0-9.]+rem", "width:#rem", page)
    page = re.sub(r'"uneven":\[[^]]*\]', '"uneven":[...]', page)
    page = re.sub(r"<style>.*?</style>", "<style>...</style>", page, flags=re.S)
    page = re.sub(r"base64,[A-Za-z0-9+/=]+", "base64,...", page)
    page = re.sub(r"[0-9][0-9.,]* (s|ms|us|ns|samples/s|tokens/s|[GTM]?FLOP/s)\b", r"# \1", page)
    page = re.sub(r'("makespan"|"predicted"|"times"|"peak"):[0-9.e+-]+', r"\1:#", page)
    return re.sub(r"[0-9][0-9.]*%", "#%", page).replace("><", ">\n<")


def test_the_page_of_a_small_plan_is_the_golden_one(is_golden):
    workload = tiny_gpt()
    stage = data_parallel(workload.graph, resolve("2x2xA100"), 3)
    plan = plan_of(workload, "2x2xA100", (stage,), Schedule())
    is_golden(GOLDEN / "page.html", plain(plan_page(plan, simulated(plan, workload))))


def test_gathers_and_reductions_of_a_fully_sharded_plan_are_seen_on_the_network():
    workload = tiny_gpt()
    stage = data_parallel(workload.graph, resolve("2xA100"), 3)
    plan = plan_of(workload, "2xA100", (stage,), Schedule())
    simulation = simulated(plan, workload)
    page = plan_page(plan, simulation)
    for purpose in (Purpose.PARAMETER_GATHER, Purpose.GRADIENT_REDUCTION):
        assert f"</i>{purpose.words}</button>" in page
        lanes = {
            simulation.timeline.program.lanes[lane].kind
            for task in simulation.timeline.program.tasks_of(purpose)
            for lane in simulation.timeline.program.lanes_of(task)
        }
        assert lanes == {"link"}
    assert "among 2 ranks" in page


def test_the_page_of_a_pipeline_shows_what_is_inside_a_block():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    page = plan_page(plan, simulate(plan))
    assert page.count('<div class="timeline">') == 2
    assert re.search(r"Inside the blocks of stage[01]", page)
    alone = line("squeezenet1_1@64", "1xA100", 1, batch=4)
    assert plan_page(alone, simulate(alone)).count('<div class="timeline">') == 1


def test_models_with_tokens_say_how_many_pass():
    workload = tiny_gpt(batch=4)
    stage = data_parallel(workload.graph, resolve("1xA100"))
    plan = plan_of(workload, "1xA100", (stage,), Schedule())
    simulation = simulated(plan, workload)
    assert f"{4 * 32 / simulation.step_s:,.0f} tokens/s" in plan_page(plan, simulation)
    pictures = line("squeezenet1_1@64", "1xA100", 1, batch=4)
    assert "tokens/s" not in plan_page(pictures, simulate(pictures))


def tried_picture(page: str) -> str:
    return page.split('aria-label="timelines of what was tried"')[1].split("</svg>")[0]


def with_others(*others: Alternative):
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    simulation = simulate(plan)
    given = tuple(replace(one, step_s=one.step_s * simulation.step_s) for one in others)
    return replace(plan, origin=replace(plan.origin, alternatives=given)), simulation


def test_what_was_tried_is_drawn_under_the_plan_on_one_axis():
    lanes = (LaneSketch("gpu0", "F0:400 -:100 B0:500", 3), LaneSketch("net", "-:900 C:100"))
    plan, simulation = with_others(
        Alternative("near", "dp=2", 1.5, 1.0, "no faster", None, lanes),
        Alternative("far", "tp=2", 40.0, 1.0, "no faster", None, lanes),
        Alternative("before", "pp=2", 1.2, 1.0, "no faster"),  # of a file without sketches
    )
    picture = tried_picture(plan_page(plan, simulation))
    titles = re.findall(r'<text x="2"[^>]*>([^<]*)', picture)
    assert [title.split(":")[0] for title in titles] == ["chosen", "near", "far"]
    assert picture.count(">gpu0 +2<") == 2
    assert picture.count("10% idle") == 1  # of what ends within the axis
    assert picture.count(f"→ {units.seconds(40 * simulation.step_s)}") == 2
    ends = [
        float(x) + float(width)
        for x, width in re.findall(r'<rect x="([0-9.]+)" y="[0-9.]+" width="([0-9.]+)"', picture)
    ]
    assert max(ends) <= 1060 - 66 + 0.1


def test_a_plan_of_before_sketches_has_bars_and_no_timelines_of_others():
    plan, simulation = with_others(Alternative("before", "pp=2", 1.2, 1.0, "no faster"))
    page = plan_page(plan, simulation)
    assert "timelines of what was tried" not in page
    assert "On one axis" in page


@needs_chromium
def test_what_was_tried_prints_in_few_bytes(browser):
    spans = " ".join(f"{'FDW'[i % 3]}{i // 3}:8" for i in range(120)) + " -:40"
    lanes = tuple(LaneSketch(f"gpu{lane}", spans) for lane in range(5))
    others = [
        Alternative(f"plan{n}", "pp=4", 1 + n / 9, 1.0, "no faster", None, lanes) for n in range(9)
    ]
    plan, simulation = with_others(*others)
    tab = browser.open(plan_page(plan, simulation))
    assert len(tab.printed()) < 3e6  # as fills with patterns: 22 MB and minutes
    tab.close()


def test_the_fullest_device_is_the_same_everywhere():
    plan = line("squeezenet1_1@64", "1xP100+1xA100", 2, batch=4)
    plan = replace(plan, prediction=replace(plan.prediction, capacity_bytes=(2.0**40,) * 2))
    simulation = simulate(plan)
    fullest = units.size(simulation.fullest[0])
    assert fullest != units.size(max(simulation.peak_bytes))  # the larger device holds more
    page = plan_page(plan, simulation)
    told = page.split('<li data-picked="0">')[1].split("</li>")[0]
    assert f"{fullest} on the fullest device" in told
    assert f"<b>{fullest}</b>" in page


def card(page: str, name: str) -> str:
    """What a card says, its value first."""
    return re.sub(r"<[^>]+>", " ", page.split(f">{name}</span>")[1].split("</div>")[0])


def test_idle_time_of_the_cards_adds_up_to_that_of_the_account():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    simulation = simulate(plan)
    idle = idle_account(simulation.timeline)
    page = plan_page(plan, simulation)
    mean = 1 - idle.mean_busy_s / simulation.step_s
    told = card(page, "bubble")
    parts = [int(number) for number in re.findall(r"(\d+)%", told)]
    assert abs(sum(parts) - 100 * mean) <= 1  # of rounding
    assert f"{mean:.0%} of the step on average" in page


def test_what_bounds_the_busiest_device_leaves_what_it_is_idle():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    simulation = simulate(plan)
    busiest = idle_account(simulation.timeline).busiest
    page = plan_page(plan, simulation)
    told = re.search(r"bubble and exposed communication (\d+)%", page)
    assert told is not None
    assert int(told[1]) == round(100 * busiest.idle_s / simulation.step_s)


def test_waits_inside_of_stages_and_the_bubble_are_told_apart_and_add_up():
    plan = fully_sharded("squeezenet1_1@64", "2xA100", batch=4)
    splits, axes = plan.stages[0].splits, plan.stages[0].mesh.axes
    half = len(splits) // 2
    stages = (
        Stage("first", Mesh(axes, (0, 1)), splits[:half]),
        Stage("second", Mesh(axes, (2, 3)), splits[half:]),
    )
    workload = load("squeezenet1_1@64", batch=4)
    simulation = simulate(plan_of(workload, "4xA100", stages, Schedule("1f1b", 2)))
    told = simulation_text(simulation)
    waiting, bubble = simulation.bounds()["waiting"], simulation.exposed_s
    assert waiting > 1.1 * bubble > 0
    inside = units.seconds(waiting - bubble)
    assert f" on the busiest device, {inside} of it exposed communication; " in told
    assert f"; bubble {units.seconds(bubble)} " in told
    assert f"bubble and exposed communication {waiting / simulation.step_s:.0%}" in told


def test_one_stage_has_no_bubble_and_tells_all_it_waits_for():
    plan = fully_sharded("squeezenet1_1@64", "2xA100", batch=4)
    simulation = simulate(replace(plan, schedule=Schedule("1f1b", 2)))
    told = simulation_text(simulation)
    waiting = simulation.bounds()["waiting"]
    computing = units.seconds(simulation.step_s - waiting)
    assert "bubble" not in told
    assert f"compute    {computing}   exposed communication {units.seconds(waiting)}\n" in told
    assert f"exposed communication {waiting / simulation.step_s:.0%}" in told


def test_the_overlap_is_that_of_one_device():
    plan = fully_sharded("squeezenet1_1@64", "2xA100", batch=4)
    simulation = simulate(plan)
    told = card(plan_page(plan, simulation), "overlap")
    sending = hidden_share(simulation.timeline).sending_s / 2
    assert f"({units.seconds(sending)} a device" in told


def test_the_moment_of_the_peak_is_marked_in_the_curve():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    simulation = simulate(plan)
    picture = plan_page(plan, simulation).split("over the step, by part")[1].split("</svg>")[0]
    assert f">peak {units.size(simulation.fullest[0])}</text>" in picture
