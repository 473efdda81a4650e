"""Rows of published measurements: each rule for what is not printed, and what is skipped."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import FileError
from partita.forecast import Latent
from partita.jobs.published import PublishedRun, left_out, parse_rows, read_rows
from partita.jobs.validate import validate
from tests.problems.json_mutations import mutated

FILE = Path(__file__).parents[1] / "data" / "validate" / "rows.json"
RAW = {row["id"]: row for row in json.loads(FILE.read_text())["rows"] if isinstance(row, dict)}
GPT: dict[str, Any] = {
    "id": "a",
    "group": "g",
    "model": {"name": "GPT", "layers": 24, "hidden": 2048, "heads": 16, "seq_len": 2048},
    "hardware": {"gpu": "A100", "n_gpus": 64},
    "parallelism": {"tp": 2, "pp": 4, "dp": 8},
    "batch": {"global": 512, "micro": 2},
    "options": {"precision": "bf16"},
    "measured": {"iter_time_s": 1.5},
    "source": "somebody",
}


def changed(**parts: Any) -> dict[str, Any]:
    """The GPT row with fields of its tables replaced; None leaves a field out."""
    raw = copy.deepcopy(GPT)
    for part, fields in parts.items():
        if not isinstance(fields, dict):
            raw[part] = fields
            continue
        for key, value in fields.items():
            if value is None:
                raw[part].pop(key, None)
            else:
                raw[part][key] = value
    return raw


def row_of(raw: dict[str, Any]) -> PublishedRun:
    rows, skipped = parse_rows([raw])
    assert not skipped, skipped
    return rows[0]


def reason_of(raw: Any) -> str:
    rows, skipped = parse_rows([raw])
    assert not rows
    return skipped[0].reason


def published(name: str) -> PublishedRun:
    return row_of(RAW[name])


def test_a_row_gives_model_machine_strategy_and_time():
    row = row_of(GPT)
    assert (row.model.layers, row.model.hidden, row.model.inner) == (24, 2048, 8192)
    assert (row.machine.kind.name, row.machine.num_devices) == ("A100-80GB-SXM", 64)
    s = row.strategy
    assert (s.tp, s.pp, s.dp, s.batch, s.micro_batch) == (2, 4, 8, 512, 2)
    assert row.measured_s == 1.5


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        ({"iter_time_s": 2.0, "tokens_per_s": 1.0}, 2.0),
        ({"iter_time_s": None, "iter_time_s_derived": 3.0}, 3.0),
        ({"iter_time_s": None, "iter_time_ms": 250}, 0.25),
        ({"iter_time_s": None, "tokens_per_s_per_gpu": 8192}, 512 * 2048 / 8192 / 64),
        ({"iter_time_s": None, "tokens_per_s": 524288}, 2.0),
        ({"iter_time_s": None, "samples_per_s_per_gpu": 4}, 2.0),
        ({"iter_time_s": None, "samples_per_s": 128}, 4.0),
    ],
)
def test_the_time_of_a_step_is_read_or_follows_from_throughput(measured, seconds):
    assert row_of(changed(measured=measured)).measured_s == pytest.approx(seconds)


def test_one_layer_that_was_timed_is_no_step():
    row = published("megatron-seqsel-t4-layer-000")
    assert row.layer_only
    assert row.measured_s == pytest.approx(19.6e-3)


def test_memory_of_a_framework_is_without_that_of_drivers_and_of_a_device_with_it():
    framework, device = published("simumax-b200-000"), published("sailor-opt-350-n1_n1_d1_m4_g1")
    assert framework.memory_bytes == pytest.approx(66.55 * 2**30)
    assert not framework.with_workspace
    assert device.memory_bytes == 9551478784
    assert device.with_workspace


@pytest.mark.parametrize("measured", [{"oom": True}, {"status": "OOM"}])
def test_a_run_out_of_memory_needs_no_time(measured):
    row = row_of(changed(measured={"iter_time_s": None, **measured}))
    assert row.out_of_memory
    assert row.measured_s is None


def test_a_third_of_the_rows_is_left_out_of_the_fit():
    rows = [row_of({**GPT, "id": f"row-{i}"}) for i in range(300)]
    assert 80 < sum(map(left_out, rows)) < 120


# what sources call things


def test_models_known_by_name_need_no_sizes():
    model = row_of(
        changed(model={"name": "DeepSeekV3 (w/ MTP)", "layers": None, "hidden": None,
                       "heads": None}, options={"precision": "MXFP8"},
                parallelism={"tp": 1, "pp": 1, "dp": 64, "ep": 64})
    ).model  # fmt: skip
    assert (model.layers, model.hidden, model.heads) == (61, 7168, 128)
    assert model.experts is not None
    assert (model.experts.count, model.experts.top_k, model.experts.dense_layers) == (256, 8, 3)
    assert model.latent == Latent(1536, 512)
    assert not model.biases


def test_sizes_that_are_printed_come_before_those_of_the_name():
    model = published("simumax-b200-000").model
    assert (model.name, model.layers, model.groups) == ("llama3-70b", 12, 8)
    assert model.gated


def test_gpts_have_biases_positions_and_plain_feed_forward():
    model = row_of(GPT).model
    assert model.biases
    assert model.positions
    assert model.tied
    assert not model.gated
    assert model.vocab == 51200


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("A100-SXM-80GB", "A100-80GB-SXM"),
        ("a100_40gb", "A100-40GB-SXM"),
        ("h100_80gb", "H100-SXM"),
        ("B200-SXM", "B200"),
        ("GH200-96GB", "GH200"),
        ("V100-32GB (DGX-2)", "V100-32GB-SXM2"),
    ],
)
def test_devices_are_known_by_what_sources_call_them(name, kind):
    assert row_of(changed(hardware={"gpu": name})).machine.kind.name == kind


def test_the_network_that_a_row_names_is_narrower():
    named = changed(hardware={"inter_node": "4x InfiniBand per node (800 in config)"})
    assert row_of(named).machine.across_bytes_per_s == 100e9 / 8
    assert row_of(GPT).machine.across_bytes_per_s > 20e9


def test_a_rack_of_72_is_one_node_whatever_the_row_calls_a_node():
    assert row_of(changed(hardware={"gpu": "GB200", "gpus_per_node": 4})).machine.node_size == 72
    assert row_of(changed(hardware={"gpus_per_node": 4})).machine.node_size == 4


# what training code does without saying


def test_megatron_has_fused_softmax_dropout_and_blocking_reduction():
    row = row_of(GPT)
    s = row.strategy
    assert row.framework == "megatron"
    assert (s.attention, s.dropout, s.overlap_dp, s.grad_dtype) == (
        "fused-softmax", True, False, "f32",
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "micro", "attention"), [
    (16, 2, "fused-softmax"), (12, 2, "fused-softmax"), (12, 1, "eager"), (2, 1, "eager"),
])  # fmt: skip
def test_the_fused_softmax_of_megatron_needs_a_multiple_of_four_heads_times_micro_batch(
    heads, micro, attention
):
    raw = changed(model={"heads": heads}, batch={"micro": micro}, options={"precision": "fp16"})
    assert row_of(raw).strategy.attention == attention


def test_zero_3_beside_megatron_is_gathered_in_pieces_and_sums_in_16_bits():
    s = published("megatron-sc21-t2-003").strategy
    assert (s.zero, s.gathers, s.grad_dtype) == (3, 12, "f16")


def test_megatron_deepspeed_sums_gradients_in_16_bits():
    row = published("vtrain-single-000")
    assert row.framework == "megatron-deepspeed"
    assert row.strategy.grad_dtype == "f16"


def test_zero_bubble_sends_beside_computing_and_has_smaller_ends():
    row = published("zero-bubble-t4-000")
    assert row.framework == "zero-bubble"
    assert row.strategy.overlap_pp
    assert row.strategy.ends == 1
    assert row.strategy.schedule == "zb-h2"


def test_megatron_core_has_sequence_parallelism_with_tensor_parallelism_and_zero_1():
    row = row_of(changed(options={"framework": "Megatron-LM 0.14"}))
    assert row.framework == "megatron-core"
    assert row.strategy.sp
    assert row.strategy.zero == 1
    assert row.strategy.fused_loss


def test_megatron_bridge_computes_in_f8_where_nothing_is_said():
    silent = row_of(changed(source="NVIDIA-NeMo/Megatron-Bridge", options={"precision": None}))
    assert silent.strategy.product_dtype == "f8"
    stated = row_of(changed(source="NVIDIA-NeMo/Megatron-Bridge"))
    assert stated.strategy.product_dtype == "bf16"
    assert stated.strategy.execution == "compiled"


@pytest.mark.parametrize(("container", "execution"), [
    ("26.08 NeMo Container", "graph"), ("26.06.01 NeMo", "graph"), ("26.04 NeMo", "compiled"),
    ("nightly", "compiled"), ("", "compiled"),
])  # fmt: skip
def test_bridge_runs_experts_in_graphs_from_2606_on(container, execution):
    raw = copy.deepcopy(RAW["nvidia-megatron-bridge-001"])
    raw["options"]["container"] = container
    assert row_of(raw).strategy.execution == execution


def test_bridge_does_not_print_what_is_recomputed():
    assert row_of(changed(source="Megatron-Bridge")).assumed == ("recompute",)
    stated = changed(source="Megatron-Bridge", options={"recompute": "full"})
    assert row_of(stated).assumed == ()
    assert row_of(stated).strategy.recompute == "full"


def test_llm_foundry_has_fsdp_a_fused_loss_and_the_attention_of_2023():
    pure, amp = published("mosaic-mpt-200").strategy, published("mosaic-mpt-001").strategy
    assert (amp.zero, amp.attention, amp.fused_loss) == (3, "flash-2", True)
    assert (amp.grad_dtype, amp.master) == ("f32", True)
    assert (pure.grad_dtype, pure.master) == ("bf16", False)


@pytest.mark.parametrize(("fsdp", "zero"), [
    ("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), (0, 0), (1, 0),
])  # fmt: skip
def test_fsdp_says_the_stage_of_zero(fsdp, zero):
    raw = changed(parallelism={"tp": 1, "pp": 1, "dp": 64, "fsdp": fsdp})
    assert row_of(raw).strategy.zero == zero


def test_sailor_computes_attention_op_by_op_in_f16():
    s = published("sailor-opt-350-n1_n1_d1_m4_g1").strategy
    assert (s.attention, s.dtype, s.overlap_dp) == ("eager", "f16", False)


# what follows from other fields


def test_data_parallel_ranks_follow_from_the_others():
    assert row_of(changed(parallelism={"dp": None})).strategy.dp == 8


def test_ranks_of_context_parallelism_may_be_counted_as_data_parallel():
    s = row_of(changed(parallelism={"cp": 2, "dp": 8})).strategy
    assert (s.dp, s.cp) == (4, 2)


def test_without_a_pipeline_the_micro_batch_is_all_of_a_rank_and_that_is_said():
    row = row_of(changed(parallelism={"pp": 1, "dp": 32}, batch={"micro": None}))
    assert row.strategy.micro_batch == 16
    assert row.assumed == ("micro-batch",)


@pytest.mark.parametrize(("degrees", "vpp", "schedule"), [
    ({"vpp": 3}, 3, "interleaved"),
    ({"layers_per_virtual_stage": 2}, 3, "interleaved"),
    ({"schedule": "1F1B-I", "vpp": 2}, 2, "interleaved"),
    ({"schedule": "1f1b (January 2021 code)"}, 1, "1f1b"),
    ({"schedule": "ZB-1p"}, 1, "zb-h1"),
    ({"schedule": "interleaved_1f1b", "vpp": 2}, 2, "interleaved"),
])  # fmt: skip
def test_schedules_by_the_names_of_sources(degrees, vpp, schedule):
    s = row_of(changed(parallelism=degrees, batch={"micro": 2})).strategy
    assert (s.vpp, s.schedule) == (vpp, schedule)


def test_interleaving_is_taken_from_another_run_of_the_same_pipeline():
    stated, silent = changed(id="b", parallelism={"vpp": 3}), changed(id="c")
    rows, _ = parse_rows([stated, silent])
    assert [row.strategy.vpp for row in rows] == [3, 3]
    said = changed(id="d", parallelism={"schedule": "1f1b"})
    rows, _ = parse_rows([stated, said])
    assert [row.strategy.vpp for row in rows] == [3, 1]


@pytest.mark.parametrize(("options", "recompute"), [
    ({"recompute": "full (uniform)"}, "full"),
    ({"recompute": "none in case name"}, "none"),
    ({"recompute": "baseline no recompute"}, "none"),
    ({"recompute": "selective + sequence parallel"}, "selective"),
    ({}, "none"),
])  # fmt: skip
def test_recompute_by_the_words_of_sources(options, recompute):
    assert row_of(changed(options=options)).strategy.recompute == recompute


def test_sequence_parallelism_is_as_stated():
    assert row_of(changed(options={"sequence_parallel": True})).strategy.sp
    assert not row_of(changed(parallelism={"sp": False}, source="simumax")).strategy.sp
    assert row_of(changed(options={"recompute": "selective, sequence parallel"})).strategy.sp
    assert not row_of(changed(options={"recompute": "full recompute, no SP"})).strategy.sp


@pytest.mark.parametrize(("precision", "dtype", "products"), [
    ("fp16 mixed", "f16", "f16"), ("amp_bf16", "bf16", "bf16"), ("MXFP8", "bf16", "f8"),
    ("NVFP4", "bf16", "f4"), ("fp32", "f32", "f32"), (" ", "bf16", "bf16"),
])  # fmt: skip
def test_precisions_by_the_names_of_sources(precision, dtype, products):
    s = row_of(changed(options={"precision": precision})).strategy
    assert (s.dtype, s.product_dtype) == (dtype, products)


# what is skipped, with its reason


@pytest.mark.parametrize(("raw", "reason"), [
    ("text", "is not a table"),
    ({"id": "x"}, "has no model"),
    (changed(hardware=7), "has no hardware"),
    (changed(measured=None), "has no measured"),
    (changed(measured={"iter_time_s": None}), "has no time and no memory that is compared"),
    (changed(measured={"iter_time_s": "fast"}),
     "iter_time_s is 'fast', a number above 0 is needed"),
    (changed(measured={"iter_time_s": float("nan")}),
     "iter_time_s is nan, a number above 0 is needed"),
    (changed(model={"layers": None}), "the number of layers is not given"),
    (changed(model={"seq_len": None}), "the sequence length is not given"),
    (changed(model={"hidden": 2048.5}),
     "hidden is 2048.5, a whole number up to 1000000000 is needed"),
    (changed(model={"heads": 4096}), "4096 heads are more than the hidden size of 2048"),
    (changed(model={"name": "Nemotron-H 8B"}), "the model has state-space layers"),
    (changed(model={"name": "BERT-large"}), "the model is no decoder of equal layers"),
    (changed(hardware={"gpu": "Cerebras"}), "no device kind is called 'Cerebras'"),
    (changed(hardware={"gpu": None}), "the kind of device is not given"),
    (changed(hardware={"n_gpus": None}), "the number of devices is not given"),
    (changed(hardware={"gpus_by_kind": {"A100": 4, "V100": 4}}),
     "the devices are of several kinds"),
    (changed(hardware={"gpus_per_node": 10**6}),
     "gpus_per_node is 1000000, a whole number up to 256 is needed"),
    (changed(batch={"global": None}), "the global batch is not given"),
    (changed(batch={"micro": None}), "the micro-batch is not given"),
    (changed(batch={"global": 100}), "batch: a batch of 100 is not a whole number"),
    (changed(parallelism={"tp": 3}), "dp: tp=3 x cp=1 x dp=8 x pp=4 are 96 devices"),
    (changed(parallelism={"schedule": "chimera"}), "no schedule is called 'chimera'"),
    (changed(parallelism={"zero": 4}), "zero is 4, a whole number up to 3 is needed"),
    (changed(options={"task": "LoRA fine-tuning"}), "low-rank adapters are not modelled"),
])  # fmt: skip
def test_what_cannot_be_compared_is_skipped_with_the_reason(raw, reason):
    assert reason_of(raw).startswith(reason)


def test_names_of_rows_can_be_printed_anywhere():
    row = row_of(changed(id="a\nb\x1b[31m\ud800", group="g\t1", model={"name": "m" * 500}))
    assert (row.id, row.group) == ("a b?[31m?", "g 1")
    assert len(row.model.name) == 120
    assert row_of(changed(id=None, group=None)).id == "row 0"
    assert row_of(changed(id=None, group=None)).group == "(no group)"


@settings(max_examples=300)
@given(data=st.data())
def test_a_malformed_row_is_skipped_or_compared_and_never_an_error(data):
    name = data.draw(st.sampled_from([key for key in RAW if "own" not in key]))
    raw = data.draw(mutated(RAW[name]))
    rows, skipped = parse_rows([raw])
    assert len(rows) + len(skipped) == 1
    assert all(one.reason for one in skipped)
    validation = validate(rows, skipped)
    assert len(validation.checked) + len(validation.skipped) == 1


# the file


def test_a_file_may_be_a_list_of_rows(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GPT, {}]))
    rows, skipped = read_rows(path)
    assert (len(rows), len(skipped)) == (1, 1)


@pytest.mark.parametrize(("text", "message"), [
    ("{", "is not JSON"), ("\xff", "is not JSON"), ("[" * 100_000, "is not JSON"),
    ('{"rows": 3}', "has no list of rows; give a file of partita/measured-runs@1"),
    ("7", "has no list of rows"),
])  # fmt: skip
def test_a_file_without_rows_is_refused(tmp_path, text, message):
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(FileError, match=message) as error:
        read_rows(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileError, match="cannot be read"):
        read_rows(tmp_path / "none.json")
