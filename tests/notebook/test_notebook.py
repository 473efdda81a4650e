"""Results in notebooks: HTML that runs nothing, tables for pandas and polars, charts."""

import functools
import importlib.util
import inspect
import json
import tempfile
import typing
from pathlib import Path

import pytest
import torch

import partita
from partita.errors import MissingExtraError
from partita.forecast.compare import sensitivity
from partita.gpu.accelerate.api import Accelerated
from partita.gpu.accelerate.report import AcceleratedReport
from partita.gpu.rtasks.fused import FusedModel
from partita.gpu.rtasks.outcome import Outcome, RegionOutcome
from partita.gpu.streams.api import Streamed
from partita.gpu.streams.order import LaunchPlan
from partita.gpu.streams.record import StreamSchedule
from partita.jobs.compare_curve import ComparedTask, compare_curve
from partita.jobs.compare_trace import compare_trace
from partita.jobs.curve import curve_of
from partita.jobs.diff import diff
from partita.jobs.experiment import run_experiment
from partita.jobs.experiment_file import experiment_from
from partita.jobs.explain import explain
from partita.jobs.explain_plan import explain_plan
from partita.jobs.kineto import compare_kineto, read_kineto
from partita.jobs.published import read_rows
from partita.jobs.rtasks import plan_rtasks
from partita.jobs.streams import streams_by_costs
from partita.jobs.sweep import Sweeper
from partita.jobs.validate import validate
from partita.notebook import charts, html, rows
from partita.notebook.charts import ResultChart, altair_chart, chart_of
from partita.notebook.table import ResultTable
from partita.program import Kind, ProgramBuilder

DATA = Path(__file__).parent.parent / "data"
ROWS = DATA / "validate" / "rows.json"
QUICK = partita.Stop(time_s=5, gap=0.5)


@functools.cache
def planned():
    return partita.plan("squeezenet1_1", "2xA100", batch=4, stop=QUICK)


@functools.cache
def forecast():
    return partita.simulate("gpt2", "8xA100", batch=64, micro_batch=2, pp=2)


def small_graph():
    g = partita.GraphBuilder("small")
    x = g.input("x", (4, 8, 8, 8))
    return g.finish(g.relu(g.conv(x, 8, 3, padding=1)))


def experiment():
    machine, network = (str(DATA / "exprimo" / f"{name}.json") for name in ("malvik", "alexnet"))
    asked = experiment_from({
        "name": "small", "semantics": "exprimo", "evaluations": 50,
        "networks": [{"model": network}], "clusters": [{"cluster": machine}],
        "optimisers": [{"method": "heft"}],
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return run_experiment(asked, folder)


def explanation():
    simulation = planned().best.simulation
    plan = partita.shard("alexnet", "2xA100", batch=4).plan
    graph = partita.simulate(plan).workload.graph
    return explain(plan, graph, simulation.cluster, "classifier.1")


def kineto():
    events = [("ProfilerStep#1", "user_annotation", 0, 100), ("sgemm", "kernel", 10, 60)]
    slices = [
        {"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": 1, "ts": ts, "dur": dur}
        for name, cat, ts, dur in events
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        path.write_text(json.dumps({"traceEvents": slices}))
        return compare_kineto(planned().plan, read_kineto(path))


def compared_curve():
    tasks = [ComparedTask("alexnet", f"{n}xA100", n, batch=4, time_s=2.0) for n in (1, 2)]
    return compare_curve(tasks, Sweeper(workers=1))


def accelerated_report():
    times = (("streams, merge", 90.0), ("torch.compile", 120.0), ("the module", 300.0))
    return AcceleratedReport("Net", "a GPU", "streams, merge", "streams", times, 1e-6, 1e-6, 3.0)


def accelerated():
    """A module that was made faster, without the GPU to do so."""
    fast = object.__new__(Accelerated)
    fast._report = accelerated_report()
    return fast


def streamed():
    shown = object.__new__(Streamed)
    shown.module = torch.nn.Identity()
    times = (("sequential graph", 80.0), ("the module", 200.0))
    plan = LaunchPlan("greedy", ())
    shown.schedules = (
        StreamSchedule(((1, 3, 8, 8),), "f32", "a GPU", "sequential", "fold", "0", plan, (), times,
                       1e-6, 1e-6, 1.0),
    )  # fmt: skip
    return shown


def outcome():
    region = RegionOutcome("region 0", 4, 64, 132, 30.0, 20.0, 55.0, 0.1, about="lstm")
    return Outcome("Net", "a GPU", "f16", "fused", (region,), (("pool", "no tiles"),), 0.1, 0.1,
                   0.1, 1e-6, 1e-6, 33.0, 60.0)  # fmt: skip


def fused_model():
    fused = object.__new__(FusedModel)
    fused.outcome = outcome()
    return fused


MADE = {
    "Accelerated": accelerated,
    "AcceleratedReport": accelerated_report,
    "Cluster": lambda: partita.cluster_from("2xV100+1xA100"),
    "FusedModel": fused_model,
    "Graph": lambda: partita.model("squeezenet1_1", 2),
    "Outcome": outcome,
    "Program": lambda: planned().best.simulation.timeline.program,
    "Streamed": streamed,
    "AnalyticStreams": lambda: streams_by_costs("squeezenet1_1", method="greedy"),
    "ComparedCurve": compared_curve,
    "Comparison": lambda: partita.compare("alexnet", "1xA100", batch=4, stop=QUICK),
    "Curve": lambda: curve_of(planned(), None),
    "Difference": lambda: diff(planned().plan, planned().plan),
    "ExperimentOutcome": experiment,
    "Explained": lambda: explain_plan(planned().plan, budget_s=0.1),
    "Explanation": explanation,
    "Forecast": forecast,
    "FusedPlan": lambda: plan_rtasks(small_graph()),
    "KinetoComparison": kineto,
    "Partitioned": lambda: partita.partition("alexnet", devices=2),
    "Placed": lambda: partita.place("alexnet", "malvik", stop=partita.Stop(evaluations=50)),
    "Plan": lambda: planned().plan,
    "Planned": planned,
    "Result": lambda: made("ScheduleResult").outcome,
    "ScheduleResult": lambda: partita.schedule(vshape(), memory=3, microbatches=4),
    "Sensitivity": lambda: sensitivity(forecast()),
    "Sharding": lambda: partita.shard("alexnet", "2xA100", batch=4),
    "Simulation": lambda: planned().best.simulation,
    "Timeline": lambda: planned().best.simulation.timeline,
    "Validation": lambda: validate(*read_rows(ROWS)),
}


def vshape():
    from partita.schedules.shapes import shape

    return shape("vshape", 3)


@functools.cache
def made(name):
    return MADE[name]()


def test_every_result_has_a_table_a_chart_and_figures():
    assert set(rows.TABLES) == set(charts.CHARTS) == set(html.FIGURES)
    assert set(html.TIMELINES) <= set(html.FIGURES)
    assert set(rows.TABLES) - set(MADE) == {"TraceComparison"}  # tests/run has the traces


ASKED = (
    partita.plan, partita.compare, partita.shard, partita.partition, partita.place,
    partita.schedule, explain_plan, explain, curve_of, compare_curve, run_experiment,
    compare_kineto, compare_trace, validate, diff, streams_by_costs, plan_rtasks, sensitivity,
)  # fmt: skip


@pytest.mark.parametrize("job", ASKED, ids=lambda job: job.__name__)
def test_what_a_job_answers_shows_itself(job):
    answered = inspect.signature(job, eval_str=True).return_annotation
    assert answered.__name__ in rows.TABLES
    assert {"_repr_html_", "table", "plot"} <= set(dir(answered))


# What is called or run, not looked at; what is found wrong with a plan is text.
NO_RESULTS = {
    "check_plan", "decode_step", "execute", "generate", "persistent", "pipe", "placed_draws",
    "with_loss",
}  # fmt: skip


def answers(name: str) -> list[type]:
    """The classes that a public function gives."""
    job = getattr(partita, name)
    called = job if inspect.isfunction(job) else job.__call__
    wanted = called.__annotations__["return"]
    if isinstance(wanted, str):
        wanted = getattr(partita, wanted, wanted)
    return [wanted] if inspect.isclass(wanted) else list(typing.get_args(wanted))


def test_what_every_public_function_answers_shows_itself():
    jobs = {name for name in partita.__all__ if callable(getattr(partita, name))}
    jobs = {name for name in jobs if not inspect.isclass(getattr(partita, name))}
    assert jobs > NO_RESULTS
    for name in sorted(jobs - NO_RESULTS):
        for answered in answers(name):
            assert answered.__name__ in rows.TABLES, f"{name} -> {answered}"
            assert {"_repr_html_", "table", "plot"} <= set(dir(answered)), f"{name} -> {answered}"


@pytest.mark.parametrize("name", MADE)
class TestEveryResult:
    def test_is_of_the_class_that_the_tables_name(self, name):
        assert type(made(name)).__name__ == name

    def test_shows_itself_as_html_that_runs_nothing(self, name):
        text = made(name)._repr_html_()
        assert text.startswith("<div><b>")
        assert "<script" not in text
        assert "http://" not in text.replace("http://www.w3.org", "")

    def test_is_a_table_for_pandas(self, name):
        table = made(name).table()
        frame = table.to_pandas()
        assert len(table) == len(frame) > 0
        assert list(frame.columns) == list(table.columns)
        json.dumps(table.to_dicts(), allow_nan=False)

    def test_is_a_chart_of_columns_that_are_there(self, name):
        chart = chart_of(made(name))
        drawn = {chart.x, chart.y, chart.color, chart.x2, *chart.tooltip} - {""}
        assert drawn <= set(chart.table.columns)
        assert chart.table.rows

    def test_is_an_altair_chart(self, name):
        pytest.importorskip("altair")
        spec = made(name).plot().to_dict()  # validated by its schema
        assert spec["encoding"]["x"]["type"] == "quantitative"
        assert spec["mark"]["type"] in ("bar", "circle")


def test_a_hostile_name_is_text_in_html():
    b = ProgramBuilder()
    lane = b.lane("<script>alert(1)</script>")
    b.add("<img src=x onerror=alert(1)>", lane, 1.0, kind=Kind.FORWARD)
    from partita.engine import run

    timeline = run(b.build())
    table = timeline.table()
    assert "<script" not in table._repr_html_() + timeline._repr_html_()
    assert table.to_dicts()[0]["lane"] == "<script>alert(1)</script>"


def test_a_chart_has_the_longest_of_too_many_tasks(monkeypatch):
    pytest.importorskip("altair")
    monkeypatch.setattr(charts, "MOST_ROWS", 20)
    many = tuple(("a", float(i), 2.0 * i) for i in range(30))
    chart = ResultChart("interval", ResultTable(("lane", "start", "end"), many), "start", "lane",
                        x2="end")  # fmt: skip
    values = altair_chart(chart).to_dict()["data"]["values"]
    assert len(values) == 20
    assert min(row["start"] for row in values) == 10


def test_a_table_for_polars():
    pytest.importorskip("polars")
    table = forecast().table()
    assert table.to_polars().shape == (len(table), 3)


@pytest.mark.parametrize(
    ("package", "use", "purpose"),
    [
        ("polars", lambda: forecast().table().to_polars(), "a table for polars"),
        ("pandas", lambda: forecast().table().to_pandas(), "a table for pandas"),
        ("altair", lambda: forecast().plot(), "a chart"),
    ],
)
def test_a_package_that_is_missing_is_named_with_how_to_get_it(monkeypatch, package, use, purpose):
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else known(name)
    )
    with pytest.raises(MissingExtraError) as error:
        use()
    assert str(error.value).startswith(f"{purpose} needs the package {package}")
    assert "pip install 'partita[notebook]'" in str(error.value)


def test_a_long_table_shows_its_first_rows_and_says_how_many_more():
    table = ResultTable(("a",), tuple((i,) for i in range(60)))
    assert "10 more rows" in table._repr_html_()
