"""The whole page of a plan in a real browser: hostile names, 50,000 tasks, the user's cap."""

import re
from dataclasses import replace
from html import unescape

from partita.cluster import resolve
from partita.graph import GraphBuilder
from partita.graph.files import write_graph
from partita.jobs.simulate import simulate
from partita.jobs.workload import load
from partita.plans import (
    Alternative,
    Axis,
    ClusterRef,
    Mesh,
    OpSplit,
    Origin,
    Plan,
    Prediction,
    Progress,
    Schedule,
    Stage,
)
from partita.report.page import plan_page
from tests.report.browser import needs_chromium, opened

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


def line(spec: str, cluster: str, microbatches: int, name: str = "stage", **options) -> Plan:
    """A plan with the ops of a model in equal parts, one on each device of a cluster."""
    workload, machine = load(spec, **options), resolve(cluster)
    ops = [op.name for op in workload.graph.ops if op.phase == "forward"]
    count = machine.num_devices
    stages = tuple(
        Stage(f"{name}{s}", Mesh((Axis("x", 1),), (s,)), tuple(
            OpSplit(op, ("",)) for i, op in enumerate(ops) if i * count // len(ops) == s
        ))
        for s in range(count)
    )  # fmt: skip
    other = Alternative(name, name, 2.0, 1.0, name)
    return Plan(
        workload.ref(),
        ClusterRef(cluster, count, machine.fingerprint()),
        stages,
        Prediction(1.0, 0.5, 1.0, 0.0, (0.0,) * count, (2.0**34,) * count),
        Origin(name, "feasible", name, 0, 2.0, "0", (Progress(1.0, 1.0, 0.5),), (other,)),
        Schedule("1f1b", microbatches),
    )


@needs_chromium
def test_a_page_of_fifty_thousand_tasks_is_small_quick_and_alone(tmp_path):
    plan = line("squeezenet1_1@64", "16xA100", 1024, batch=1024)
    found = simulate(plan)
    assert found.timeline.program.num_tasks > 50_000
    page = plan_page(plan, found)
    assert len(page.encode()) < 8e6
    document, console, network = opened(page, tmp_path)
    ready = re.search(r'data-ready="(\d+)"', document)
    assert ready is not None
    assert int(ready[1]) < 2000
    assert "CONSOLE" not in console
    asked = set(re.findall(r'"url":"(https?://[^"]*)"', network))
    assert not {url for url in asked if "google" not in url}  # the browser's own


@needs_chromium
def test_names_of_ops_stages_devices_and_searches_show_as_text(tmp_path):
    g = GraphBuilder(HOSTILE)
    x = g.input(HOSTILE, (4, 8))
    x = g.relu(g.linear(x, 8, name=HOSTILE + "1"), name=HOSTILE + "2")
    graph, cluster = tmp_path / "net.json", tmp_path / "two.toml"
    write_graph(graph, g.finish(g.linear(x, 4, name=HOSTILE + "3")))
    cluster.write_text(f'name = "{HOSTILE}"\n[[nodes]]\nname = "{HOSTILE}"\ndevices = "2xA100"\n')
    plan = line(str(graph), str(cluster), 2, HOSTILE, training=False)
    document, console, _ = opened(plan_page(plan, simulate(plan)), tmp_path)
    assert "<title>broken" not in document
    assert "data-ready" in document
    assert "CONSOLE" not in console
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
    assert ">between stages<" in page  # what stages exchange inside is part of their time
    table = page.split("<h2>The stages</h2>")[1].split("</table>")[0]
    assert "<td>stage1</td><td>n0.gpu1</td>" in table
    alone = line("squeezenet1_1@64", "1xA100", 1, batch=4)
    lonely = plan_page(alone, simulate(alone))
    assert "<h2>The stages</h2>" not in lonely
    assert ">communication<" in lonely


def test_rows_that_stand_for_several_devices_say_so():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4)
    few = simulate("squeezenet1_1@64", "2xA100", batch=4)
    many = simulate("squeezenet1_1@64", "64xA100", batch=64)
    assert "devices in" not in plan_page(plan, few)
    assert "64 devices in 1 row: of each kind the first is drawn" in plan_page(plan, many)


def test_only_ops_with_parameters_keep_them_somehow():
    plan = line("squeezenet1_1@64", "1xA100", 1, batch=4)
    rows = plan_page(plan, simulate(plan)).split("How every op is split")[1]
    assert re.search(r"<td>features.0</td>.*?<td>copies</td>", rows)
    assert re.search(r"<td>features.1</td><td>stage0</td><td>–</td><td></td>", rows)


def test_a_plan_for_batches_in_a_row_is_measured_by_them():
    plan = line("squeezenet1_1@64", "2xA100", 2, batch=4, training=False)
    found = simulate(plan)
    half = replace(
        plan.prediction, step_s=found.step_s, interval_s=found.interval_s,
        lower_bound_s=found.interval_s / 2,
    )  # fmt: skip
    assert found.interval_s < found.step_s
    assert "≤ 50.0%" in plan_page(replace(plan, prediction=half), found)
