"""plan and compare as a user would call them, and what they make of bad input."""

import json

import pytest

from tests.shallow import GPT2
from tests.zoo.hf_tiny import tiny

SMALL = ("squeezenet1_1", "--cluster", "2xA100", "--batch", "4")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A plan of two stages in a file."""
    from click.testing import CliRunner

    from partita.cli import partita

    path = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ["plan", *SMALL, "--pin", "pp=2", "-o", str(path), "--quiet"]
    result = CliRunner().invoke(partita, words)
    assert result.exit_code == 0, result.output
    return path


def test_people_read_the_plan_the_next_best_and_the_bound(run):
    text = run("plan", *SMALL, "--quiet").stdout
    for words in ("step", "memory", "ops by split", "found by", "from optimal", "simulated in"):
        assert words in text


def test_programs_get_one_object(run_json):
    answer = run_json("plan", *SMALL, "--quiet")
    assert answer["format"] == "partita/result@1"
    assert answer["lower_bound"] <= answer["objective"]
    assert answer["solution"]["stages"][0]["devices"] == [0, 1]
    assert answer["others"]


def test_a_pipeline_plan_is_simulated_verified_drawn_and_explained(
    run, run_json, pipeline, tmp_path
):
    assert run_json("simulate", str(pipeline))["num_microbatches"] >= 1
    assert run("verify", str(pipeline)).exit_code == 0
    page = tmp_path / "report.html"
    assert run("report", str(pipeline), "-o", str(page)).exit_code == 0
    assert "stage1" in page.read_text()
    assert run("explain", str(pipeline)).exit_code == 0
    told = run_json("explain", str(pipeline), "features.0")
    assert told["op"] == "features.0"


def test_what_does_not_fit_exits_with_1_and_says_what_would_help(run):
    result = run("plan", *SMALL, "--max-memory", "1MB", "--quiet")
    assert result.exit_code == 1
    assert "no plan fits" in result.stdout


def test_devices_known_from_a_file_alone_are_advised_on_too(run, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        '[[kinds]]\nname = "tiny"\nbased_on = "A100-40GB-SXM"\nmemory_GiB = 0.02\n'
        '[[nodes]]\ndevices = "2xtiny"\n'
    )
    for command in ("plan", "shard"):
        result = run(command, "squeezenet1_1", "-c", str(path), "--batch", "4", "--quiet")
        assert result.exit_code == 1, result.output
        assert "larger" in result.stdout or "would be enough" in result.stdout


def test_the_cap_of_a_plan_is_shown_by_all_that_read_it(run, tmp_path):
    path = tmp_path / "capped.json"
    words = ("plan", *SMALL, "--max-memory", "2GiB", "--quiet")
    assert "of 2.00 GiB per device" in run(*words, "-o", str(path)).stdout
    assert "of 2.00 GiB per device" in run("simulate", str(path)).stdout
    assert "of 2.00 GiB" in run("explain", str(path)).stdout
    drawn = run("report", str(path)).stdout
    assert "of 2.00 GiB per device" in drawn
    assert "of 80.0 GiB" not in drawn


def test_plans_for_batches_in_a_row_show_both_times(run):
    words = (f"{GPT2}@64", "--cluster", "4xA100", "--batch", "4", "--infer", "--quiet")
    steady = run("plan", *words, "--pin", "pp=2").stdout
    assert "a batch every" in steady
    assert "steady state" in steady
    one = run("plan", *words, "--pin", "pp=2", "--objective", "latency").stdout
    assert "steady state" not in one


def test_parameters_in_shares_are_called_so_though_most_ops_have_none(run_json, run):
    words = (f"{GPT2}@64", "--cluster", "2xA100-80GB-PCIe", "--batch", "4", "--quiet")
    limit = ("--time-limit", "10")
    text = run("plan", *words, *limit, "--pin", "pp=1", "--pin", "zero=3").stdout
    assert "sharded (ZeRO 3)" in text


def test_compare_lists_strategies_and_searches(run_json):
    answer = run_json("compare", *SMALL, "--quiet")
    names = [row["name"] for row in answer["rows"]]
    for name in ("data", "fsdp", "tensor", "megatron", "gpipe", "1f1b", "interleaved", "plan"):
        assert name in names
    steps = {row["name"]: row["step_s"] for row in answer["rows"] if row["fits"]}
    assert steps["plan"] <= min(steps.values()) * (1 + 1e-6)


def test_compare_knows_what_counts_in_inference(run_json, run):
    words = ("compare", f"{GPT2}@64", "--cluster", "2xA100", "--batch", "4", "--infer", "--quiet")
    rows = {row["name"]: row for row in run_json(*words)["rows"]}
    assert rows["1f1b"]["objective_s"] < rows["1f1b"]["step_s"]
    best = min(row["objective_s"] for row in rows.values() if row["fits"])
    assert rows["plan"]["objective_s"] <= best * (1 + 1e-6)
    rows = {row["name"]: row for row in run_json(*words, "--objective", "latency")["rows"]}
    assert all(row["objective_s"] == row["step_s"] for row in rows.values())
    assert rows["gpipe"]["note"] == "cannot run here"
    assert "gpipe: cannot run here" in run(*words).stdout


def test_compare_names_what_an_interruption_left_out():
    from itertools import count

    from partita.jobs.compare import compare
    from partita.search.base import Stop

    asked = count()
    stop = Stop(interrupted=lambda: next(asked) > 3)
    rows = {r.name: r for r in compare("squeezenet1_1", "2xA100", batch=4, stop=stop).rows}
    assert rows["data"].fits
    assert rows["plan"].simulation is None
    assert {row.note for row in rows.values()} == {"", "not reached"}


def test_compare_reads_as_a_table_with_the_best_first(run):
    lines = run("compare", *SMALL, "--quiet").stdout.splitlines()
    assert lines[0].split()[0] == "strategy"
    assert "x1.00" in lines[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pin", "pp=2", "--pin", "pp=1"), "pp=2 and pp=1 contradict"),
        (("--max-memory", "lots"), "write a size such as 40GB"),
        (("--forbid", "colour=red"), "colour=red"),
        (("--gap", "7"), "gap"),
        (("--time-limit", "0"), "time-limit"),
    ],
)
def test_bad_options_exit_with_2_and_say_what_to_change(run, words, message):
    result = run("plan", *SMALL, *words)
    assert result.exit_code == 2
    assert message in result.output


def test_a_cluster_is_needed(run):
    assert run("plan", "gpt2").exit_code == 2


def test_the_problem_of_a_plan_is_saved_and_solved_by_itself(run, run_json, tmp_path):
    file = tmp_path / "joint.json"
    told = run("plan", *SMALL, "--pin", "pp=2", "--save", str(file), "--quiet")
    assert told.exit_code == 0
    assert f"partita solve {file}" in told.stdout
    solved = run_json("solve", str(file))
    assert solved["kind"] == "joint"
    assert 0 < solved["lower_bound"] <= solved["objective"]
    assert len(solved["solution"]["stages"]) >= 2
    assert "step " in run("solve", str(file)).stdout


def test_the_answer_names_the_space_that_its_bound_is_for(run, run_json):
    assert "space: 2 stages" in run("plan", *SMALL, "--pin", "pp=2", "--quiet").stdout
    assert "with pp=2" in run_json("plan", *SMALL, "--pin", "pp=2", "--quiet")["space"]


def test_a_plan_ends_with_the_command_that_runs_it(run, run_json, pipeline, tmp_path):
    words = "run it with: torchrun --standalone --nproc-per-node 2 -m partita run "
    lines = run("plan", *SMALL, "--quiet", "--time-limit", "1").stdout.splitlines()
    assert any(line.startswith("-o plan.json keeps the plan; " + words) for line in lines[-3:])
    path = tmp_path / "kept.json"
    answer = run_json("plan", *SMALL, "--quiet", "--time-limit", "1", "-o", str(path))
    assert answer["run"] == words.removeprefix("run it with: ") + str(path)


def test_where_stages_begin_is_said_with_what_another_cut_would_cost(run, run_json):
    pins = ("--pin", "pp=3", "--pin", "schedule=1f1b", "--quiet")
    asked = ("plan", "gpt2@128", "-c", "3xA100", "-b", "6", *pins)
    anywhere = run_json(*asked, "--cut", "anywhere")
    assert anywhere["blocks_cut"]
    assert anywhere["cut_otherwise"] is None  # that was asked for, so nothing else was tried
    usual, text = run_json(*asked), run(*asked).stdout
    if usual["blocks_cut"]:
        assert usual["cut_otherwise"] > usual["objective"] * 1.005
        assert "blocks stay whole with --cut modules (these stages moved there are " in text
    else:
        assert usual["objective"] * 0.99 < usual["cut_otherwise"] <= usual["objective"]
        assert "faster, with --cut anywhere" in text


def test_two_cuts_contradict_each_other(run):
    result = run("plan", *SMALL, "--cut", "modules", "--pin", "cut=anywhere")
    assert result.exit_code == 2
    assert "cut=anywhere and cut=modules contradict each other" in result.stderr


def test_a_plan_that_cannot_be_run_has_no_command(run_json, run):
    assert run_json("plan", *SMALL, "--quiet", "--infer", "--time-limit", "1")["run"] is None


def test_the_sequence_length_is_part_of_the_model(run_json, run):
    answer = run_json("simulate", "gpt2", "--seq", "32", "-c", "2xA100", "-b", "4")
    assert answer["model"] == "gpt2@32"
    text = run("simulate", "gpt2", "--seq", "32", "-c", "2xA100", "-b", "4").stdout
    assert "global batch 4 of 32 tokens" in text
    assert "tokens/s/device" in text
    assert "151 ops (632 with backward and updates)" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("vgg16", "--seq", "32"), "--seq: vgg16 has no sequence; choose its"),
        (("gpt2@64", "--seq", "32"), "--seq: gpt2@64 says a size already; give it once"),
        (("model.py:make", "--seq", "32"), "--seq: is for models of the zoo and configurations"),
    ],
)
def test_a_sequence_length_is_refused_where_there_is_none(run, words, said):
    result = run("simulate", *words, "-c", "2xA100")
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_language_model_without_a_batch_says_which_is_assumed(run):
    said = "no --batch is given, so"
    assert said in run("simulate", "gpt2@16", "-c", "2xA100").stderr
    assert said not in run("simulate", "gpt2@16", "-c", "2xA100", "-q").stderr
    assert said not in run("simulate", "gpt2@16", "-c", "2xA100", "-b", "4").stderr
    assert said not in run("simulate", "alexnet", "-c", "2xA100").stderr


def test_a_configuration_says_which_length_and_batch_are_assumed(run, tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(tiny("llama") | {"max_position_embeddings": 8192}))
    batch, length = "so 1 sample per step is assumed", "8,192 positions, of which 4,096 are assumed"
    said = run("simulate", str(path), "-c", "2xA100").stderr
    assert batch in said
    assert length in said
    assert length not in run("simulate", str(path), "-c", "2xA100", "--seq", "8192").stderr
    assert length not in run("simulate", f"{path}@16", "-c", "2xA100").stderr
    assert batch not in run("simulate", f"{path}@16", "-c", "2xA100", "-b", "4").stderr


def test_every_step_of_a_table_has_its_interval(run, run_json):
    words = ("alexnet", "--cluster", "2xA100", "--batch", "8", "--quiet")
    for command in (["plan"], ["compare"], ["shard"], ["shard", "--compare"]):
        lines = run(*command, *words).stdout.splitlines()
        (first,) = (i for i, line in enumerate(lines) if "80 % interval  " in line + "  ")
        assert " ms to " in lines[first + 1], command
        assert "memory ±6 %" in lines[first]
    rows = run_json("compare", *words)["rows"]
    for row in rows:
        if row["step_s"] is not None:
            low, high = row["step_interval_s"]
            assert low < row["step_s"] < high


def test_prices_a_deadline_and_the_front_are_told_for_one_machine(run_json, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[per_hour]\nA100 = 1.5\n")
    words = ("--price", str(prices), "--deadline", "1d", "--steps", "10", "--time-limit", "1")
    told = run_json("plan", "alexnet", "-c", "2xA100", "-b", "4", "--quiet", *words)["what_if"]
    assert told["choice"]["price_per_hour"] == 1.5 * told["choice"]["num_devices"]
    assert any(point["on_front"] for point in told["points"])


def test_a_price_list_without_a_kind_is_refused_before_planning(run, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[per_hour]\nA100 = 1.5\n")
    result = run("plan", "alexnet", "-c", "2xV100", "--price", str(prices))
    assert result.exit_code == 2
    assert "has no price of V100" in result.stderr


def test_a_plan_given_to_start_from_is_not_lost(run_json, pipeline):
    given = run_json("simulate", str(pipeline))["step_s"]
    words = ("--start", str(pipeline), "--time-limit", "0.001", "--quiet")
    answer = run_json("plan", *SMALL, *words)
    assert answer["objective"] <= given * (1 + 1e-9)
