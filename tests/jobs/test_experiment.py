"""Experiments: files checked before anything runs, runs saved and resumed, pictures that parse."""

import base64
import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from partita.errors import ClusterError, FileError, InputError
from partita.jobs.experiment import changed_machine, run_experiment
from partita.jobs.experiment_file import experiment_from, read_experiment
from partita.jobs.place_subject import load_subject
from partita.report.charts import ChartLine, bar_chart, diagonal_chart, heat_map, line_chart
from partita.report.experiment import write_report

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
NET, MACHINE = (str(DATA / "exprimo" / name) for name in ("alexnet.json", "malvik.json"))
SMALL = {
    "name": "small",
    "semantics": "exprimo",
    "evaluations": 300,
    "networks": [{"model": NET, "name": "alex"}],
    "clusters": [{"cluster": MACHINE}],
    "optimisers": [
        {"method": "map-elites", "parameters": {"rounds": 3, "brood": 20, "initial": 30}},
        {"method": "heft"},
    ],
}


def experiment(**changes):
    return experiment_from({**SMALL, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One finished experiment with a sweep, two seeds and a measurement."""
    path = tmp_path_factory.mktemp("experiment") / "out"
    setup = experiment(
        clusters=[{"cluster": MACHINE, "bandwidth": [0.5, 2]}],
        seeds=2,
        measured=[{"step_s": 0.05, "source": "a <b>book</b>", "network": "alex"}],
    )
    outcome = run_experiment(setup, path)
    write_report(outcome, path)
    return path


class TestFiles:
    def test_a_number_of_seeds_is_so_many_seeds(self):
        assert experiment(seeds=3).seeds == (0, 1, 2)
        assert experiment(seeds=[5]).seeds == (5,)

    def test_a_single_value_is_a_sweep_of_one(self):
        outcome = experiment(batches=4, clusters=[{"cluster": MACHINE, "bandwidth": 2}])
        assert outcome.batches == (4,)
        assert outcome.clusters[0].bandwidth == (2.0,)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"optimisers": [{"method": "map-elite"}]},
             r"optimisers\[0\].method: there is no optimiser 'map-elite'; did you mean map-elites"),
            ({"optimisers": [{"method": "genetic", "parameters": {"populaton": 3}}]},
             "genetic has no parameter 'populaton'; did you mean population"),
            ({"optimisers": [{"method": "heft", "parameters": {"x": 3}}]},
             "heft has no parameter 'x'; leave it out"),
            ({"optimisers": [{"method": "genetic", "parameters": {"population": "many"}}]},
             r"parameters.population: found 'many'; give something like \d+"),
            ({"optimisers": [{"method": "heft"}, {"method": "heft"}]},
             "two optimisers have one name"),
            ({"optimisers": []}, r"optimisers: is missing; give \[\[optimisers\]\]"),
            ({"networks": []}, "there is nothing to place"),
            ({"semantics": "paleo"}, "semantics: found 'paleo'; known are exprimo, partita"),
            ({"evaluation": 3}, "there is no field 'evaluation'; did you mean evaluations"),
            ({"networks": [{"modle": "x"}]}, "there is no field 'modle'; did you mean model"),
            ({"networks": [{"model": 3}]}, r"networks\[0\].model: Expected `str`"),
            ({"networks": 3}, r"networks: is no table; write \[\[networks\]\]"),
            ({"evaluations": 0}, "evaluations: found 0; give a number above 0"),
            ({"seeds": []}, r"seeds: found \[\]"),
            ({"in_flight": [0]}, r"in_flight: found \[0\]"),
            ({"batches": [1, 1]}, r"batches: found \[1, 1\]"),
            ({"clusters": [{"cluster": MACHINE, "bandwidth": [1, 0]}]},
             r"clusters\[0\].bandwidth: found \[1.0, 0.0\]; give factors above 0"),
            ({"seeds": 9000}, "asks for 18,000 runs"),
        ],
    )  # fmt: skip
    def test_a_mistake_is_named_before_anything_runs(self, changes, message):
        with pytest.raises(InputError, match=message):
            experiment(**changes)

    def test_the_file_is_named(self, tmp_path):
        path = tmp_path / "e.toml"
        path.write_text("name = 'x'\n[[optimisers]]\nmethod = 'geneti'\n")
        with pytest.raises(InputError, match=r"e.toml: networks: there is nothing"):
            read_experiment(path)
        path.write_text("name = ")
        with pytest.raises(FileError, match=r"e.toml: is not TOML"):
            read_experiment(path)

    def test_a_machine_that_cannot_be_is_refused_before_anything_runs(self, tmp_path):
        raw = json.loads(Path(MACHINE).read_text())
        raw["comm_channels"][0]["bandwidth"] = -1
        broken = tmp_path / "broken.json"
        broken.write_text(json.dumps(raw))
        with pytest.raises(ClusterError, match=r"comm_channels\[0\].bandwidth: found -1"):
            run_experiment(experiment(clusters=[{"cluster": str(broken)}]), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "path", sorted((ROOT / "examples" / "placement").glob("*.toml")), ids=lambda p: p.stem
    )
    def test_the_examples_are_good_files(self, path):
        assert read_experiment(path).name == path.stem


class TestMachines:
    def test_bandwidth_and_memory_are_multiplied(self):
        subject = load_subject("alexnet", "malvik")
        changed = changed_machine(subject, 0.5, 0.25, {"gpu1": 3.0}).cluster
        assert changed.links[0].bytes_per_s == subject.cluster.links[0].bytes_per_s / 2
        whole = [subject.cluster.kind_of(i).memory_bytes for i in range(3)]
        assert [changed.kind_of(i).memory_bytes for i in range(3)] == [
            round(whole[0] / 4), round(whole[1] / 4), 3_000_000_000,
        ]  # fmt: skip

    def test_exprimos_machine_is_changed_with_its_cluster(self):
        changed = changed_machine(load_subject(NET, MACHINE), 2.0, 1.0, {"gpu*": 0.2})
        assert changed.machine.channels[0][1] == 256
        assert [device.memory_gb for device in changed.machine.devices] == [395, 0.2, 0.2]
        assert changed.cluster.kind_of(1).memory_bytes == 200_000_000

    def test_a_device_that_is_not_there_is_named(self):
        with pytest.raises(
            InputError, match=r"memory_GB: no device is called 'tpu\*'; there is cpu"
        ):
            changed_machine(load_subject("alexnet", "malvik"), 1.0, 1.0, {"tpu*": 1.0})


class TestRuns:
    def test_every_case_optimiser_and_seed_is_a_run(self, folder):
        rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
        assert len(rows) == 2 * 2 * 2
        assert {row["case"] for row in rows} == {
            "alex on malvik, bandwidth x0.5",
            "alex on malvik, bandwidth x2",
        }
        assert all(float(row["step_ms"]) >= float(row["bound_ms"]) for row in rows)

    def test_an_interrupted_experiment_goes_on_where_it_stopped(self, tmp_path):
        outcome, out = experiment(seeds=3), tmp_path / "out"
        asked = iter([False] * 40 + [True] * 10_000)
        first = run_experiment(outcome, out, interrupted=lambda: next(asked))
        assert first.missing > 0
        kept = sorted(path.name for path in (out / "runs").iterdir())
        assert len(kept) == len(first.runs)
        second = run_experiment(outcome, out)
        assert second.missing == 0
        assert second.resumed == len(first.runs)
        assert len(second.runs) == 6
        assert second.runs[: len(first.runs)] == first.runs
        assert set(kept) <= {path.name for path in (out / "runs").iterdir()}

    def test_in_one_go_or_in_two_the_answers_are_the_same(self, tmp_path):
        def answers(outcome):
            return [(run.key, run.objective_s, run.placement) for run in outcome.runs]

        whole = run_experiment(experiment(seeds=2), tmp_path / "a")
        part = run_experiment(experiment(seeds=1), tmp_path / "b")
        rest = run_experiment(experiment(seeds=2), tmp_path / "b")
        assert answers(rest) == answers(whole)
        assert rest.resumed == len(part.runs) == 2

    def test_side_by_side_the_answers_are_the_same(self, tmp_path, folder):
        seeds = experiment(clusters=[{"cluster": MACHINE, "bandwidth": [0.5, 2]}], seeds=1)
        told = []
        beside = run_experiment(
            seeds, tmp_path / "b", told=lambda text, *_: told.append(text), workers=2
        )
        alone = run_experiment(replace(seeds, seeds=(0,)), tmp_path / "a")
        assert [(r.key, r.objective_s, r.placement) for r in beside.runs] == [
            (r.key, r.objective_s, r.placement) for r in alone.runs
        ]
        assert len(told) == len(beside.runs) == 4
        assert run_experiment(seeds, tmp_path / "b", workers=2).resumed == 4

    def test_a_changed_parameter_is_run_anew(self, tmp_path):
        run_experiment(experiment(), tmp_path / "out")
        changed = experiment(optimisers=[SMALL["optimisers"][1], {"method": "etf"}])
        again = run_experiment(changed, tmp_path / "out")
        assert (again.resumed, len(again.runs)) == (1, 2)

    def test_batches_in_flight_can_be_swept(self, tmp_path):
        outcome = experiment(batches=[2, 4], in_flight=[1, 2], optimisers=[{"method": "heft"}])
        runs = run_experiment(outcome, tmp_path / "out").runs
        assert [(run.batches, run.in_flight) for run in runs] == [(2, 1), (2, 2), (4, 1), (4, 2)]
        assert runs[3].case == "alex on malvik, 4 batches, 2 in flight"

    def test_a_damaged_record_is_made_again(self, tmp_path):
        outcome = experiment(optimisers=[{"method": "heft"}])
        run_experiment(outcome, tmp_path / "out")
        (record,) = (tmp_path / "out" / "runs").iterdir()
        record.write_text('{"format": "partita/experi')
        assert run_experiment(outcome, tmp_path / "out").resumed == 0
        assert run_experiment(outcome, tmp_path / "out").resumed == 1

    def test_the_folder_of_something_else_is_left_alone(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(FileError, match="is not empty; choose another folder"):
            run_experiment(experiment(), tmp_path)
        run_experiment(experiment(optimisers=[{"method": "heft"}]), tmp_path / "out")
        with pytest.raises(FileError, match="holds the experiment 'small'"):
            run_experiment(replace(experiment(), name="other"), tmp_path / "out")

    def test_memory_that_can_never_fit_is_a_row_without_an_answer(self, tmp_path):
        answer = experiment(clusters=[{"cluster": MACHINE, "memory_GB": {"*": 0.01}}])
        outcome = run_experiment(answer, tmp_path / "out")
        assert {run.status for run in outcome.runs} == {"infeasible"}
        assert "alone holds" in outcome.runs[0].why
        write_report(outcome, tmp_path / "out")
        assert "| none |" in (tmp_path / "out" / "table.md").read_text()

    def test_saved_problems_and_our_own_rules_run_too(self, tmp_path):
        file = str(DATA / "placement" / "alexnet-malvik.json")
        outcome = run_experiment(
            experiment(networks=[], clusters=[], problems=[{"file": file}]), tmp_path / "a"
        )
        assert outcome.runs[0].case == "alexnet-malvik"
        assert outcome.runs[1].objective_s * 1e3 >= 43.4
        own = experiment(semantics="partita", pin=["conv1=1"], optimisers=[{"method": "heft"}])
        (run,) = run_experiment(own, tmp_path / "b").runs
        assert run.placement[run.layers.index("conv1")] == 1


class TestPictures:
    def test_every_picture_is_xml_and_the_page_shows_it(self, folder):
        names = {path.name for path in (folder / "charts").iterdir()}
        kinds = {re.sub(r"-\d+\.svg$|\.svg$", "", name) for name in names}
        assert kinds == {
            "sweep-bandwidth", "measured", "compared", "convergence", "archive", "placement",
        }  # fmt: skip
        page = (folder / "index.html").read_text()
        for name in names:
            ElementTree.parse(folder / "charts" / name)
            held = base64.b64encode((folder / "charts" / name).read_bytes()).decode()
            assert held in page
            assert f'href="charts/{name}"' in page

    def test_names_are_text_not_markup(self, folder):
        page = (folder / "index.html").read_text()
        assert "a &lt;b&gt;book&lt;/b&gt;" in page
        assert "<b>book" not in page

    def test_the_animation_holds_its_data(self, folder):
        page = (folder / "animation.html").read_text()
        data = json.loads(re.search(r"const RUNS=(.*);\n", page).group(1))
        assert len(data) == 8
        first = data[0]
        assert first["frames"]
        assert len(first["frames"][-1]["p"]) == len(first["layers"]) == 15
        steps = [frame["s"] for frame in first["frames"]]
        assert steps == sorted(steps, reverse=True)

    def test_charts_of_nothing_say_so(self):
        assert "nothing to draw yet" in line_chart("t", [], "x", "y")
        assert "nothing to draw yet" in diagonal_chart("t", [], "x", "y")
        ElementTree.fromstring(heat_map("t", [], ["1"], ["a"], "r", "c", "ms"))
        ElementTree.fromstring(bar_chart("t", [], "x", None))

    def test_a_point_far_up_is_drawn_high(self):
        low, high = ((1.0, 1.0), (10.0, 100.0))
        text = line_chart("t", [ChartLine("a <b>", (low, high))], "x", "y", log_x=True, log_y=True)
        path = re.search(r'<path d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', text)
        left, bottom, right, top = map(float, path.groups())
        assert left < right
        assert top < bottom
        assert "a &lt;b&gt;" in text
