"""`partita simulate` with a strategy by name, as a user would call it."""

import pytest

import partita
from partita.errors import InputError, PlanError
from partita.forecast import Forecast, Strategy

GPT3 = ("simulate", "gpt3", "-c", "128x8xA100", "-b", "1536", "--tp", "8")
FULL = (*GPT3, "--pp", "8", "--sp", "--recompute", "selective")


def test_people_read_the_step_its_interval_and_what_bounds_it(run):
    text = run(*FULL).stdout
    for words in (
        "tp=8 pp=8 dp=16 sp, 1F1B, 96 micro-batches of 1, selective recompute", "predicted",
        "with 80%", "tokens/s", "TFLOP/s a device", "MFU", "HFU", "bound by   matrix products",
        "bubble", "exposed    tp", "parameters", "gradients", "optimizer", "activations", "logits",
    ):  # fmt: skip
        assert words in text


def test_programs_get_every_figure(run_json):
    answer = run_json(*FULL)
    assert answer["format"] == "partita/forecast@1"
    assert answer["predicted"] is True
    assert answer["interval_s"]["low"] < answer["step_s"] < answer["interval_s"]["high"]
    assert answer["strategy"]["dp"] == 16
    assert answer["strategy"]["num_microbatches"] == 96
    assert answer["tokens_per_s"] == pytest.approx(1536 * 2048 / answer["step_s"])
    assert set(answer["exposed_s"]) == {"tp", "pp", "dp", "cp", "ep"}
    assert answer["bound"] == "products"
    assert [rank["stage"] for rank in answer["memory_bytes"]] == list(range(8))
    for rank in answer["memory_bytes"]:
        parts = ("parameters", "gradients", "optimizer", "activations", "output", "workspace")
        assert rank["total"] == pytest.approx(sum(rank[part] for part in parts))
    assert answer["capacity_bytes"] > 70e9
    products = answer["physics"]["parameters"]["products"]
    assert set(products) == {"value", "sure", "source"}
    assert answer["fits"] is True
    assert answer["would_fit"] == []


def test_what_does_not_fit_says_where_by_how_much_and_what_would(run, run_json):
    result = run(*GPT3)
    assert result.exit_code == 1
    for words in ("DOES NOT FIT", "stage 0 (ranks 0-1023) lacks", "bytes", "would fit with"):
        assert words in result.stdout
    answer = run_json(*GPT3, code=1)
    assert answer["fits"] is False
    assert answer["shortages"][0]["missing_bytes"] > 0
    assert answer["would_fit"][0]["step_s"] > 0
    assert run_json("simulate", "gpt3", "-c", "1xA100", "-b", "1", "--pp", "1", code=1)


def test_without_any_way_to_fit_more_devices_are_asked_for(run):
    text = run("simulate", "gpt3", "-c", "1xA100", "-b", "1", "--micro-batch", "1").stdout
    assert "none of the strategies that differ in one or two decisions fits" in text


def test_sensitivity_says_what_the_answer_hangs_on(run, run_json):
    text = run(*FULL, "--sensitivity").stdout
    for words in ("if worse", "interference:", "latency:", "host:", "fastest near it"):
        assert words in text
    answer = run_json(*FULL, "--sensitivity")["sensitivity"]
    names = ["interference", "latency", "links", "host", "products", "attention", "memory"]
    assert [shift["name"] for shift in answer["shifts"]] == names
    assert len(answer["compared"]) > 1


def test_all_that_a_strategy_has_can_be_said(run_json):
    words = (
        "simulate", "mixtral", "-c", "8x8xH100", "-b", "256", "--micro-batch", "1", "--tp", "2",
        "--pp", "4", "--vpp", "2", "--dp", "4", "--cp", "2", "--ep", "8", "--sp", "--zero", "1",
        "--recompute", "full", "--schedule", "interleaved", "--dtype", "bf16", "--matmul-dtype",
        "fp8", "--grad-dtype", "bf16", "--execution", "compiled", "--attention", "flash-2",
    )  # fmt: skip
    chosen = run_json(*words)["strategy"]
    assert chosen["matmul_dtype"] == "f8"
    assert (chosen["vpp"], chosen["cp"], chosen["ep"], chosen["sp"]) == (2, 2, 8, True)
    assert (chosen["zero"], chosen["grad_dtype"], chosen["execution"]) == (1, "bf16", "compiled")


def test_hybrid_sharding_takes_a_number_or_a_node(run_json):
    words = ("simulate", "llama-2-7b", "-c", "4x8xA100", "-b", "32")
    assert run_json(*words, "--hsdp", "4")["strategy"]["hsdp"] == 4
    node = run_json(*words, "--hsdp")["strategy"]
    assert (node["hsdp"], node["zero"]) == (8, 3)


def test_uneven_layers_are_given_by_stage(run, run_json):
    words = ("simulate", "gpt2", "-c", "4xA100", "-b", "16", "--pp", "4", "--layers", "2,4,4,2")
    assert run_json(*words)["strategy"]["layers"] == [2, 4, 4, 2]
    assert "2 e" in run(*words).stdout


def test_a_deep_pipeline_shows_the_first_stages_and_the_last(run):
    words = ("simulate", "gpt3", "-c", "4x8xA100", "-b", "64", "--pp", "32")
    assert " more " in run(*words).stdout


def test_without_a_strategy_ops_are_simulated_as_before(run_json):
    answer = run_json("simulate", "squeezenet1_1", "-c", "1xA100", "-b", "1")
    assert answer["format"] == "partita/simulation@1"


def test_latent_attention_and_configurations_have_strategies(run_json, tmp_path):
    answer = run_json(
        "simulate", "deepseek-v3", "-c", "32x8xH100", "-b", "1024", "--pp", "16", "--ep", "16",
        "--zero", "1", "--matmul-dtype", "fp8", "--recompute", "full",
    )  # fmt: skip
    assert answer["parameters"] == pytest.approx(671e9, rel=0.01)
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "num_hidden_layers": 4}')
    assert run_json("simulate", str(path), "-c", "2xA100", "-b", "4", "--zero", "3")["step_s"] > 0


SMALL = ("simulate", "gpt2", "-c", "8xA100")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*SMALL, "--tp", "2"), "batch: no batch is given; say how many sequences"),
        ((*SMALL, "-b", "8", "--tp", "3"), "tp=3 = 3 does not divide the 8 devices"),
        ((*SMALL, "-b", "8", "--tp", "2", "--dp", "2"), "are 4 devices, the cluster has 8"),
        ((*SMALL, "-b", "8", "--micro-batch", "4"), "micro-batch: 4 x dp=8 is more than the batch"),
        ((*SMALL, "-b", "9", "--micro-batch", "1"), "is not a whole number of micro-batches"),
        ((*SMALL, "-b", "64", "--pp", "2", "--vpp", "5"), "12 layers are not divided by pp=2"),
        ((*SMALL, "-b", "8", "--tp", "2", "--gantt"), "--gantt: a forecast by strategy has no ops"),
        ((*SMALL, "-b", "8", "--tp", "2", "--infer"), "--infer: a forecast by strategy is of a"),
        ((*SMALL, "-b", "8", "--tp", "2", "--optimizer", "sgd"), "--optimizer: a forecast by"),
        ((*SMALL, "-b", "8", "--hsdp", "many"), "--hsdp: found 'many'; give the number of ranks"),
        ((*SMALL, "-b", "8", "--pp", "2", "--layers", "6;6"), "--layers: found '6;6'; give a"),
        ((*SMALL, "-b", "8", "--matmul-dtype", "int8"), "matmul-dtype: is 'int8'; use one of"),
        ((*SMALL, "-b", "8", "--matmul-dtype", "fp8"), "A100-80GB-SXM has no products in f8; use"),
        (
            ("simulate", "gpt2", "-c", "8xH100", "-b", "8", "--matmul-dtype", "fp4"),
            "matmul-dtype: H100-SXM has no products in f4; use fp8 or bf16",
        ),
        ((*SMALL, "-b", "8", "--schedule", "fast"), "--schedule: found 'fast'; known are"),
        (("simulate", "resnet50", "-c", "8xA100", "-b", "8", "--tp", "2"), "is not a stack"),
        (("simulate", "gpt2", "--tp", "2", "-b", "8"), "no cluster is given"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_code_2(run, words, message):
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_devices_of_several_kinds_are_refused(run):
    result = run("simulate", "gpt2", "-c", "2xA100+2xH100", "-b", "8", "--tp", "2")
    assert result.exit_code == 2


def test_python_takes_a_strategy_or_its_keys():
    strategy = Strategy(batch=32, tp=2, dp=4)
    forecast = partita.simulate("gpt2", "8xA100", strategy=strategy)
    assert isinstance(forecast, Forecast)
    by_keys = partita.simulate("gpt2", "8xA100", batch=32, micro_batch=1, tp=2)
    assert by_keys.step_s == forecast.step_s
    assert by_keys.strategy == strategy
    assert partita.simulate(forecast.model, "8xA100", strategy=strategy) == forecast


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"strategy": Strategy(batch=8, dp=8), "tp": 2}, "both a strategy and tp are given"),
        ({"batch": 8, "tpp": 2}, "found 'tpp'; did you mean"),
        ({"batch": 8, "tp": 0}, "tp: is 0; use at least 1"),
        ({"batch": 8, "tp": 2, "training": False}, "is of a training step with Adam"),
    ],
)
def test_python_refuses_what_cannot_be(keys, message):
    with pytest.raises(InputError, match=message):
        partita.simulate("gpt2", "8xA100", **keys)


def test_a_graph_has_no_strategy_by_name():
    with pytest.raises(PlanError, match="a Graph cannot be forecast by strategy"):
        partita.simulate(partita.model("gpt2", batch=1), "8xA100", strategy=Strategy(batch=8, dp=8))
    with pytest.raises(PlanError, match="no cluster is given"):
        partita.simulate("gpt2", strategy=Strategy(batch=8, dp=8))
