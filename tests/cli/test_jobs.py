"""simulate, shard, explain, report and verify on real models, as a user would call them."""

import json
import re
from html.parser import HTMLParser

import pytest

SMALL = ("squeezenet1_1", "--cluster", "2xA100", "--batch", "4")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    from click.testing import CliRunner

    from partita.cli import partita

    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = CliRunner().invoke(partita, ["shard", *SMALL, "-o", str(path), "--quiet"])
    assert result.exit_code == 0, result.output
    return path


class TestSimulate:
    def test_people_read_time_bounds_and_memory(self, run):
        text = run("simulate", *SMALL).stdout
        for word in ("step", "compute", "bound by", "memory", "slowest ops"):
            assert word in text

    def test_programs_get_every_op(self, run_json):
        answer = run_json("simulate", *SMALL)
        assert answer["format"] == "partita/simulation@1"
        assert answer["fits"] is True
        assert sum(op["seconds"] for op in answer["ops"]) == pytest.approx(
            answer["compute_s"], rel=0.1
        )

    def test_what_does_not_fit_exits_with_1(self, run):
        result = run("simulate", "llama-7b", "--cluster", "1xGTX-1080-Ti", "--batch", "1")
        assert result.exit_code == 1
        assert "DOES NOT FIT" in result.stdout

    def test_the_timeline_is_drawn_on_request(self, run):
        assert re.search(r"9[0-9]% busy|100% busy", run("simulate", *SMALL, "--gantt").stdout)

    def test_a_trace_and_a_graph_are_written_once(self, run, tmp_path):
        trace, graph = tmp_path / "t.json", tmp_path / "g.txt"
        options = ("--trace", str(trace), "--dump-graph", str(graph))
        assert run("simulate", *SMALL, *options).exit_code == 0
        assert json.loads(trace.read_text())["traceEvents"]
        assert graph.read_text().startswith("graph squeezenet1_1")
        again = run("simulate", *SMALL, *options)
        assert again.exit_code == 2
        assert "exists already" in again.stderr

    def test_a_saved_graph_is_a_model(self, run, run_json, tmp_path):
        path = tmp_path / "g.json"
        run("models", "squeezenet1_1", "--batch", "4", "--dump-graph", str(path))
        answer = run_json("simulate", str(path), "--cluster", "2xA100")
        plain = run_json("simulate", *SMALL)
        assert answer["step_s"] == pytest.approx(plain["step_s"])

    def test_a_plan_is_simulated_on_its_own_machine(self, run_json, plan):
        answer = run_json("simulate", str(plan))
        assert answer["step_s"] == pytest.approx(
            json.loads(plan.read_text())["prediction"]["step_s"]
        )

    def test_a_model_needs_a_cluster(self, run):
        result = run("simulate", "gpt2")
        assert result.exit_code == 2
        assert "--cluster: no cluster is given; add --cluster 4xA100" in result.stderr


class TestShard:
    def test_the_answer_holds_what_every_search_promises(self, run_json):
        answer = run_json("shard", *SMALL)
        wanted = [
            "format",
            "problem",
            "method",
            "status",
            "objective",
            "lower_bound",
            "seconds",
            "seed",
            "solution",
            "plan",
        ]
        assert set(wanted) <= set(answer)
        assert answer["lower_bound"] <= answer["objective"]
        assert answer["plan"] is None
        assert "features.0" in answer["solution"]["splits"]

    def test_comparing_names_every_strategy(self, run):
        text = run("shard", *SMALL, "--compare").stdout
        for name in ("data", "zero1", "fsdp"):
            assert re.search(rf"^{name} ", text, re.M), name

    def test_an_existing_plan_is_kept_unless_forced(self, run, plan):
        before = plan.read_bytes()
        refused = run("shard", *SMALL, "-o", str(plan))
        assert refused.exit_code == 2
        assert "exists already; choose another name or add --force" in refused.stderr
        assert plan.read_bytes() == before

    def test_what_cannot_fit_exits_with_1_and_says_by_how_much(self, run):
        result = run("shard", "llama-7b", "--cluster", "2xGTX-1080-Ti", "--batch", "2")
        assert result.exit_code == 1
        assert re.search(r"needs [0-9.]+ GiB on a device of [0-9.]+ GiB", result.stdout)

    def test_neither_model_nor_graph_is_bad_input(self, run):
        assert run("shard").exit_code == 2
        assert run("shard", "gpt2", "--graph", "alexnet").exit_code == 2


class TestPase:
    def test_its_optimum_is_found_and_printed_by_name(self, run):
        result = run("shard", "--graph", "alexnet", "--procs", "8", "--algo", "dp")
        assert result.exit_code == 0, result.output
        assert "Total cost: 97,098,296,512 FLOP" in result.stdout
        assert "fc6: n/" in result.stdout

    def test_the_default_method_agrees(self, run_json):
        answer = run_json("shard", "--graph", "rnnlm", "--procs", "4", "--costs", "pase")
        assert answer["objective"] == 13247562153984
        assert answer["status"] == "optimal"

    def test_the_graph_is_dumped_in_dot(self, run, tmp_path):
        path = tmp_path / "graph.dot"
        run("shard", "--graph", "rnnlm", "--procs", "4", "--dump-graph", str(path))
        assert path.read_text().startswith('digraph "rnnlm" {')

    def test_measuring_and_profiling_work(self, run):
        words = ("shard", "--graph", "rnnlm", "--procs", "4", "--measure", "--profile")
        result = run(*words)
        assert "(mean of 5)" in result.stdout
        assert "function calls" in result.stderr

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--graph", "alexnett"), "did you mean alexnet"),
            (("--graph", "alexnet", "--algo", "luck"), "--algo: found 'luck'; use dp (0) or brute"),
            (("--graph", "alexnet", "--flops", "-1"), "tflops"),
        ],
    )
    def test_bad_options_are_refused(self, run, words, message):
        result = run("shard", *words)
        assert result.exit_code == 2
        assert message in result.stderr


class TestExplain:
    def test_a_plan_shows_how_its_parameters_lie(self, run, run_json, plan):
        assert re.search(r"Shard\([0-9]\)|Replicate\(\)", run("explain", str(plan)).stdout)
        answer = run_json("explain", str(plan))
        assert "features.0.weight" in answer["parameters"]

    def test_an_op_shows_its_alternatives(self, run, run_json, plan):
        text = run("explain", str(plan), "features.0").stdout
        assert "why: " in text
        assert "instead" in text
        answer = run_json("explain", str(plan), "features.0")
        assert answer["alternatives"]

    def test_an_unknown_op_is_answered_with_the_nearest(self, run, plan):
        result = run("explain", str(plan), "feature.0")
        assert result.exit_code == 2
        assert "did you mean features.0" in result.stderr


class _Page(HTMLParser):
    """Counts tags and notes anything that would be fetched or run."""

    def __init__(self):
        super().__init__()
        self.tags = []
        self.fetched = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [
            v for k, v in attrs if k in ("src", "href") and v and not v.startswith("data:")
        ]


class TestReport:
    def test_the_page_is_complete_and_fetches_nothing(self, run, plan, tmp_path):
        path = tmp_path / "r.html"
        assert run("report", str(plan), "-o", str(path)).exit_code == 0
        page = _Page()
        page.feed(path.read_text())
        assert {"svg", "table", "title", "canvas"} <= set(page.tags)
        assert page.fetched == []

    @pytest.mark.parametrize(
        ("name", "start"), [("r.svg", "<svg"), ("r.trace.json", "{"), ("r.txt", "squeezenet1_1")]
    )
    def test_the_ending_decides_the_form(self, run, plan, tmp_path, name, start):
        path = tmp_path / name
        assert run("report", str(plan), "-o", str(path)).exit_code == 0
        assert path.read_text().startswith(start)

    def test_an_ending_that_says_nothing_is_refused(self, run, plan, tmp_path):
        result = run("report", str(plan), "-o", str(tmp_path / "r.docx"))
        assert result.exit_code == 2
        assert (
            "end the name in one of .html, .svg, .trace.json, .csv, .pickle, .txt" in result.stderr
        )

    def test_hostile_names_show_as_text(self):
        from dataclasses import replace

        from partita.jobs.shard import shard
        from partita.jobs.simulate import simulate
        from partita.report.page import plan_page

        plan = shard("squeezenet1_1", "2xA100", batch=4).plan
        hostile = replace(plan, origin=replace(plan.origin, why="<script>alert(1)</script>"))
        page = plan_page(hostile, simulate(plan))
        assert (
            page.count("<script") == 3
        )  # ours: the data, what draws it, what else the page answers
        assert "&lt;script&gt;" in page


class TestVerify:
    def test_a_plan_of_ours_is_verified(self, run, plan):
        result = run("verify", str(plan))
        assert result.exit_code == 0, result.output

    @pytest.mark.parametrize(
        ("claim", "value"), [("step_s", 1e-6), ("peak_memory_bytes", [1.0, 2.0])]
    )
    def test_a_tampered_plan_is_not(self, run, plan, tmp_path, claim, value):
        written = json.loads(plan.read_text())
        written["prediction"][claim] = value
        value = written
        path = tmp_path / "bad.json"
        path.write_text(json.dumps(value))
        result = run("verify", str(path))
        assert result.exit_code == 1
        assert "predicts" in result.stdout
