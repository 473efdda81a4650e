"""explain on whole plans, as a user would read it; one op is in the tests of the jobs."""

import json

import pytest
from click.testing import CliRunner

from partita.cli import partita


def made(path, *words):
    result = CliRunner().invoke(partita, [*words, "-o", str(path), "--quiet"])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A plan of two stages, with alternatives."""
    path = tmp_path_factory.mktemp("explain") / "pipeline.json"
    words = ("plan", "squeezenet1_1", "--cluster", "2xA100", "--batch", "4", "--pin", "pp=2")
    return made(path, *words)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """A plan of one stage, by shard."""
    path = tmp_path_factory.mktemp("explain") / "split.json"
    return made(path, "shard", "alexnet", "--cluster", "4xV100", "--batch", "32")


def changed(path, tmp_path, change):
    value = json.loads(path.read_text())
    change(value)
    other = tmp_path / "changed.json"
    other.write_text(json.dumps(value))
    return str(other)


def test_people_read_where_time_and_memory_go_and_what_would_help(run, pipeline):
    text = run("explain", str(pipeline)).stdout
    for words in (
        "bound by",
        "no plan of the search's space is below",
        "Where the step goes, on the busiest devices",
        "weight gradient",
        "All groups of devices; the bubble is",
        "What fills the memory, on the fullest devices",
        "activations",
        "What was not taken, and why",
        "what stood against it",
        "What would help most",
        "nvlink3 inside nodes (300 GB/s) twice as fast",
        "arithmetic of the devices twice as fast",
        " -> ",
        "How the parameters lie",
    ):
        assert words in text


def test_all_waits_for_other_stages_are_one_row(run, tmp_path):
    path = made(
        tmp_path / "deep.json", "plan", "squeezenet1_1", "--cluster", "4xA100", "--batch", "8",
        "--pin", "pp=4", "--pin", "schedule=1f1b",
    )  # fmt: skip
    rows = [line for line in run("explain", str(path)).stdout.split("\n") if "longest for" in line]
    assert len(rows) == 1
    assert " waiting for stages " in rows[0]
    assert "longest for stage" in rows[0]


def test_programs_get_everything_and_it_adds_up(run_json, pipeline):
    answer = run_json("explain", str(pipeline))
    step = answer["step_s"]
    assert len(answer["groups"]) == 2
    for group in answer["groups"]:
        assert sum(part["seconds"] for part in group["parts"]) == pytest.approx(step)
    assert sum(answer["bounds_s"].values()) == pytest.approx(step)
    memory = answer["memory"]
    assert sum(memory["parts_bytes"].values()) == pytest.approx(memory["peak_bytes"])
    assert answer["busiest"] in [group["devices"] for group in answer["groups"]]
    assert answer["alternatives"]
    assert all(other["why"] for other in answer["alternatives"])
    assert answer["what_ifs"][0]["gain"] == max(what["gain"] for what in answer["what_ifs"])


def test_without_time_nothing_is_simulated_and_that_is_said(run, run_json, split):
    assert run_json("explain", str(split), "--time-limit", "0")["what_ifs"] == []
    assert "not tried: " in run("explain", str(split), "--time-limit", "0").stdout


def test_a_plan_of_the_first_version_has_no_alternatives_and_says_how_to_get_some(
    run, split, tmp_path
):
    def old(value):
        value["format"] = "partita/plan@1"
        del value["schedule"], value["origin"]["history"], value["origin"]["alternatives"]
        for stage in value["stages"]:
            del stage["checkpointing"], stage["segments"], stage["recomputed"], stage["overlap"]
            for split in stage["splits"]:
                names = ("none", "states", "gradients", "parameters")
                split["sharded"] = names[split.pop("zero")]

    result = run("explain", changed(split, tmp_path, old))
    assert result.exit_code == 0, result.output
    assert "partita compare alexnet --cluster 4xV100 --batch 32" in result.stdout
    assert "Where the step goes, on the busiest devices: n0.gpu0" in result.stdout


def test_what_a_plan_file_says_is_shown_as_plain_text(run, pipeline, tmp_path):
    def hostile(value):
        value["stages"][0]["name"] = "\x1b[31mred\nline"
        value["origin"]["alternatives"] = [
            {
                "name": "\x1b[2J", "arrangement": "a\nb", "step_s": 0.0,
                "peak_memory_bytes": -1.0, "why": "\u202e",
            }
        ]  # fmt: skip

    result = run("explain", changed(pipeline, tmp_path, hostile))
    assert result.exit_code == 0, result.output
    assert not any(c in result.stdout for c in "\x1b\u202e")
    assert "?[31mred?line" in result.stdout


def test_a_plan_for_another_machine_is_refused(run, split, tmp_path):
    def moved(value):
        value["cluster"]["fingerprint"] = "0" * 16

    result = run("explain", changed(split, tmp_path, moved))
    assert result.exit_code == 2
    assert "plan again for this machine" in result.stderr


def test_the_bubble_is_the_same_number_for_every_command(run, pipeline, split):
    """Of what it is made `explain` says; a plan of one stage has none."""
    for name, path in (("deep", pipeline), ("flat", split)):
        told = [json.loads(run(c, str(path), "--json").stdout) for c in ("explain", "report")]
        bubbles = {each["bubble"] for each in told}
        assert len(bubbles) == 1
        (bubble,) = bubbles
        assert (bubble > 0) == (name == "deep")
        assert 0 <= told[0]["waiting"] <= bubble + 1e-9
        text = run("explain", str(path)).stdout
        assert (f"the bubble is {bubble:.1%} on average" in text) == (name == "deep")
        same = json.loads(run("diff", str(path), str(path), "--json").stdout)
        figures = {each["name"]: each["first"] for each in same["figures"]}
        assert figures["bubble"] == bubble
        assert figures["step"] == told[0]["step_s"]
