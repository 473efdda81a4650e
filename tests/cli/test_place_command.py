"""partita place, as a user would call it."""

import json
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data" / "exprimo"
NET, MACHINE = str(DATA / "alexnet.json"), str(DATA / "malvik.json")
QUICK = ("--method", "heft", "--quiet")


def test_people_read_the_step_the_bound_the_devices_and_a_chart(run):
    text = run("place", "alexnet", "--cluster", "malvik", *QUICK).stdout
    for word in ("step  ", "lower bound", "from optimal", "gpu0", "memory", "forward", "all on"):
        assert word in text


def test_programs_get_the_device_of_every_op(run_json):
    answer = run_json("place", "alexnet", "-c", "malvik", *QUICK, "--pin", "features.*=gpu1")
    assert answer["format"] == "partita/result@1"
    assert answer["solution"]["devices"]["features.0"] == 2
    assert answer["objective"] >= answer["lower_bound"] > 0
    assert {"candidates", "front", "status", "seconds", "plan"} <= set(answer)


def test_exprimos_files_and_rules(run_json):
    answer = run_json("place", NET, "-c", MACHINE, "--semantics", "exprimo", "--method", "single")
    assert answer["status"] == "optimal"
    assert answer["objective"] == pytest.approx(0.043407329867080456)


def test_map_elites_shows_its_archive(run, run_json):
    words = ("place", NET, "-c", MACHINE, "--semantics", "exprimo", "--method", "map-elites", "-q")
    assert "archive: best step of the search by devices used" in run(*words).stdout
    cells = run_json(*words)["archive"]
    assert {cell["devices"] for cell in cells} == {1, 2, 3}
    assert min(cell["step_s"] for cell in cells) == pytest.approx(0.043407329867080456)


def test_the_page_and_exprimos_own_solution_are_written(run, tmp_path):
    page, net = tmp_path / "p.html", tmp_path / "net.json"
    words = ("place", NET, "-c", MACHINE, *QUICK, "--pin", "conv1=2", "--page", str(page))
    assert run(*words, "--net", str(net)).exit_code == 0
    text = page.read_text()
    assert text.count("<h2>Timeline</h2>") == 1
    assert 'class="ops"' in text.split("<h2>Where every op is</h2>")[1]
    assert "gpu2" in text
    assert text.count("data-pick=") == text.count("data-picked=") > 1  # a mark tells of itself
    assert run(*words).exit_code == 2  # the page is there already
    assert run(*words, "--force").exit_code == 0
    layers = json.loads(net.read_text())["layers"]
    assert layers["conv1"]["device"] == 2
    assert layers["conv1"]["filter"] == [11, 11, 3, 64]
    again = run("place", str(net), "-c", MACHINE, "--semantics", "exprimo", *QUICK)
    assert again.exit_code == 0


def test_only_exprimos_networks_can_be_written_as_such(run, tmp_path, monkeypatch):
    def searched(*_, **__):
        raise AssertionError("searched for what cannot be written")

    monkeypatch.setattr("partita.jobs.place.place", searched)
    words = ("place", "alexnet", "-c", "malvik", *QUICK, "--net", str(tmp_path / "n.json"))
    result = run(*words)
    assert result.exit_code == 2
    assert "alexnet is no network of Exprimo's; use -o instead" in result.stderr


def test_a_written_placement_is_looked_at_again(run, tmp_path):
    path = tmp_path / "placement.json"
    wrote = run("place", "alexnet", "-c", "malvik", *QUICK, "-o", str(path))
    assert f"partita place {path}" in wrote.stdout
    again = run("place", str(path))
    assert again.exit_code == 0
    step = next(line for line in wrote.stdout.split("\n") if line.startswith("step"))
    assert step in again.stdout


def test_the_front_is_shown(run):
    text = run("place", "alexnet", "-c", "malvik", *QUICK, "--front").stdout
    assert "no other placement tried is better" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pin", "features.0"), "op=device is needed"),
        (("--pin", "featurs.0=0"), "did you mean features.0"),
        (("--method", "genetc"), "did you mean genetic?"),
        (("--colocate", "x,y"), "colocated: no op is called 'x'"),
        (("--batches", "0"), "0 is not in the range"),
    ],
)
def test_mistakes_are_answered_with_the_nearest(run, words, message):
    result = run("place", "alexnet", "-c", "malvik", "--time-limit", "1", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_cluster_is_needed(run):
    result = run("place", "alexnet")
    assert result.exit_code == 2
    assert "give --cluster" in result.stderr


def test_what_cannot_fit_exits_with_1_and_says_why(run):
    result = run("place", "llama-7b", "-c", "2xGTX-1080-Ti", "--batch", "1", *QUICK)
    assert result.exit_code == 1
    assert "infeasible: all layers together hold" in result.stdout
