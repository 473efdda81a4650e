import json

import pytest

from partita.cluster import Cluster, list_kinds, list_presets, resolve


def test_all_machines_and_devices_are_listed(run):
    result = run("clusters")
    assert result.exit_code == 0, result.output
    for name in (*list_presets(), *(kind.name for kind in list_kinds())):
        assert name in result.stdout
    assert "2x8xH100" in result.stdout


def test_the_list_as_json(run_json):
    answer = run_json("clusters")
    assert answer["format"] == "partita/clusters@1"
    assert answer["machines"] == list_presets()
    assert [kind["name"] for kind in answer["kinds"]] == [kind.name for kind in list_kinds()]
    assert all(kind["source"] for kind in answer["kinds"])


@pytest.mark.parametrize("spec", ["4xA100", "4xV100+8xP100", *list_presets()])
def test_one_in_full_is_its_summary(run, spec):
    result = run("clusters", spec)
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip("\n") == resolve(spec).summary()


def test_one_as_json_is_a_cluster_file(run, tmp_path):
    result = run("clusters", "2x8xH100", "--json")
    assert Cluster.from_json(result.stdout) == resolve("2x8xH100")
    assert json.loads(result.stdout)["format"] == "partita/cluster@1"


def test_one_as_toml_is_a_cluster_file(run, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(run("clusters", "2x8xH100", "--toml").stdout)
    assert resolve(file) == resolve("2x8xH100")


def test_a_file_can_be_shown(run, tmp_path):
    file = tmp_path / "mine.json"
    file.write_bytes(resolve("4xA100").to_json())
    assert run("clusters", str(file)).stdout.rstrip("\n") == resolve("4xA100").summary()


def test_an_unknown_cluster_is_answered_with_the_nearest(run):
    result = run("clusters", "4xA10O")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cluster: unknown device or machine 'A10O'")
    assert "A100" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--toml"], "--toml needs a CLUSTER"),
        (["4xA100", "--toml", "--json"], "--toml and --json exclude each other"),
    ],
)
def test_options_that_do_not_fit_are_refused(run, words, message):
    result = run("clusters", *words)
    assert result.exit_code == 2
    assert message in result.stderr
