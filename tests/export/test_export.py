"""Exports: written, read back to the same strategy, simulated to the same step; what cannot be."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from partita.errors import FileError, InputError, PlanError
from partita.export import megatron, torchtitan
from partita.export.job import export, fitting_targets, read_export
from partita.export.read_off import read_off
from partita.export.scope import ExportScope
from partita.export.targets import TARGETS
from partita.jobs.frameworks import FrameworkStrategy, even_layers, framework_plan, layer_stack
from partita.plans import Schedule
from tests.export.planned import DECODER, LLAMA, exported, plan_of, workload

S = FrameworkStrategy
HERE = Path(__file__).parent

# For 8 devices and four layers.
THREE_D = S(tp=2, sp=True, pp=2, dp=2, zero=1, num_microbatches=4, layers=(2, 2))
UNEVEN = replace(THREE_D, layers=(1, 3), recompute="norms")
INTERLEAVED = replace(THREE_D, vpp=2, layers=(1,) * 4, schedule="interleaved")
TITAN = replace(THREE_D, recompute="selective", schedule="gpipe")
BACK = replace(THREE_D, vpp=2, layers=(1,) * 4, schedule="zb-v")
ALONE = S(pp=4, tp=2, num_microbatches=4, layers=(1,) * 4)
SHARDED = S(dp=8, zero=3, micro_batch=2, recompute="full")
PIPELINED = S(pp=2, dp=4, zero=1, num_microbatches=4, layers=(2, 2), recompute="full")
GROUPS = S(dp=8, zero=3, hsdp=4, micro_batch=2, recompute="full")
CONTEXT = S(tp=2, sp=True, cp=2, dp=2, zero=1, num_microbatches=2)
LONG = S(cp=2, pp=2, dp=2, zero=1, num_microbatches=4, layers=(2, 2), recompute="full")
EXACT = {
    "megatron": (
        THREE_D, UNEVEN, INTERLEAVED, ALONE, replace(ALONE, recompute="attention"), CONTEXT, LONG,
        S(tp=2, sp=True, dp=4, zero=1, hsdp=2),
    ),
    "torchtitan": (
        TITAN, BACK, SHARDED, S(dp=8, recompute="selective"), replace(CONTEXT, zero=3), LONG,
        GROUPS,
    ),
    "deepspeed": (SHARDED, PIPELINED, S(dp=4, tp=2, zero=2, num_microbatches=2)),
    "fsdp2": (SHARDED, GROUPS, S(dp=4, tp=2, zero=1), S(dp=8, num_microbatches=2)),
}  # fmt: skip
CASES = [(target, strategy) for target, several in EXACT.items() for strategy in several]


@pytest.mark.parametrize(("target", "strategy"), CASES, ids=lambda value: str(value)[:60])
def test_what_is_written_is_the_plan_and_takes_its_step(target, strategy):
    answer = exported(strategy, target)
    assert answer.is_exact, (answer.differences, answer.why)
    assert answer.told == str(strategy)
    assert answer.step_s == answer.plan_step_s


@pytest.mark.parametrize("target", ["deepspeed", "fsdp2"])
def test_a_framework_without_context_parallelism_is_told_of_the_nearest_plan(target):
    answer = exported(CONTEXT, target)
    assert answer.why
    assert "cp=" not in answer.told
    assert answer.step_s != answer.plan_step_s


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_that_cannot_be_said_is_named_with_what_the_nearest_costs(target):
    own = {"megatron": BACK, "torchtitan": UNEVEN, "deepspeed": THREE_D, "fsdp2": PIPELINED}[target]
    answer = exported(own, target)
    assert answer.why
    assert answer.differences
    assert answer.step_s != answer.plan_step_s
    again = read_export(plan_of(own), target, answer.text)
    assert again.step_s == answer.step_s


def test_refusals_say_what_a_target_cannot_be_told():
    work = workload(LLAMA, THREE_D.batch)
    told = fitting_targets(plan_of(THREE_D), work)
    assert told["megatron"] == ""
    assert told["torchtitan"] == ""
    assert "AutoTP" in told["deepspeed"]
    assert "no pipeline" in told["fsdp2"]
    assert told["torch-schedule"] == ""
    assert "no pipeline" in fitting_targets(plan_of(SHARDED), work)["torch-schedule"]


def test_an_order_that_was_searched_is_a_schedule_of_torch_and_not_of_megatron():
    plan = plan_of(replace(THREE_D, num_microbatches=2, micro_batch=2))
    order = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    searched = replace(plan, schedule=Schedule("searched", 2, order))
    assert export(searched, "torch-schedule").text == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    told = export(searched, "megatron").differences
    assert "its order of micro-batches (searched)" in told


def test_replicas_without_samples_are_refused():
    plan = plan_of(S(dp=8))
    small = replace(plan, model=replace(plan.model, batch=4))
    told = fitting_targets(small, workload(LLAMA, 8))
    assert "8 replicas share a batch of 4" in told["megatron"]
    with pytest.raises(PlanError, match="a batch that 8 divides"):
        read_off(small, workload(LLAMA, 8).graph)


def test_a_schedule_needs_a_pipeline():
    with pytest.raises(PlanError, match="one stage, and nothing to order"):
        exported(SHARDED, "torch-schedule")


def test_an_unknown_target_is_refused():
    with pytest.raises(InputError, match="torchtitan"):
        exported(SHARDED, "torchtitn")


def test_a_model_that_is_no_stack_of_layers_has_replicas_for_deepspeed_alone():
    plan = plan_of(S(dp=8, zero=1), "squeezenet1_1")
    assert export(plan, "deepspeed").is_exact
    with pytest.raises(PlanError, match="one stack of equal layers, which the model is not"):
        export(plan, "megatron")


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((3, *(2,) * 29, 1, 0), "Ettt|(tt|)*29,t|L"),
        ((6, 6), "Et*6|t*6L"),
        ((0, 5, 7), "E|t*5|t*7L"),
        ((1, 1, 2, 0), "Et|t|,tt|L"),
    ],
)
def test_layouts_of_pipelines_go_both_ways(layers, text):
    assert megatron.layout(layers) == text
    assert megatron.layers_of(text) == layers


def test_arguments_by_hand_are_read_without_a_layout():
    text = "--tensor-model-parallel-size=2 --pipeline-model-parallel-size 2 --micro-batch-size 1 "
    text += "--global-batch-size 8 --num-layers-per-virtual-pipeline-stage 1"
    answer = read_export(plan_of(THREE_D), "megatron", text)
    assert answer.told == "pp=2 vpp=2 dp=2 tp=2, interleaved, 4 micro-batches of 1"
    assert "split otherwise" in "; ".join(answer.differences)


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        ("megatron", "--micro-batch-size two", "found 'two'"),
        ("megatron", "gpt --micro-batch-size 2", "found 'gpt'"),
        ("megatron", "--global-batch-size 7", "choose degrees that divide"),
        (
            "megatron",
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout x",
            "use E",
        ),
        ("torchtitan", "[training", "is no TOML"),
        ("torchtitan", "training = 3", "make it a table"),
        ("torchtitan", "[parallelism]\ntensor_parallel_degree = 0", "found 0"),
        (
            "torchtitan",
            "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 3",
            "cp=1 x pp=1 x dp=6 on 8 devices",
        ),
        (
            "megatron",
            "--use-distributed-optimizer --num-distributed-optimizer-instances 3",
            "found 3 with dp=8; give a divisor",
        ),
        ("torchtitan", "[parallelism]\npipeline_parallel_degree = 2", "list the modules"),
        ("deepspeed", "[]", "is no object"),
        ("deepspeed", "{", "is no JSON"),
        ("deepspeed", '{"train_batch_size": 9}', "is not 1 x 1 x dp=8"),
        ("fsdp2", "STRATEGY = {'tp': 1}", "other keys"),
        ("fsdp2", "STRATEGY = open('x')", "plain values"),
        ("fsdp2", "import os", "has no table"),
    ],
)
def test_files_that_say_nothing_are_refused(target, text, message):
    with pytest.raises(FileError, match=message):
        read_export(plan_of(SHARDED), target, text)


def test_shard_groups_are_what_each_framework_calls_them():
    text = exported(GROUPS, "torchtitan").text
    assert "data_parallel_replicate_degree = 2" in text
    assert "data_parallel_shard_degree = 4" in text
    text = exported(replace(GROUPS, zero=1, recompute="none"), "megatron").text
    assert "--num-distributed-optimizer-instances 2" in text
    text = exported(GROUPS, "fsdp2").text
    assert '(2, 4), mesh_dim_names=("dp_replicate", "dp_shard")' in text
    assert '"mesh": mesh["dp_replicate", "dp_shard"]' in text
    assert "model.set_requires_all_reduce(last)" in text
    assert "shards over all replicas" in exported(GROUPS, "deepspeed").why


def test_a_plan_for_inference_is_not_exported_to_what_trains():
    plan = plan_of(SHARDED)
    with pytest.raises(PlanError, match="is for inference"):
        export(replace(plan, model=replace(plan.model, training=False)), "fsdp2")


def test_strategies_that_cannot_be_are_refused():
    with pytest.raises(PlanError, match="tp of at least 2"):
        S(sp=True)
    with pytest.raises(PlanError, match="give 2"):
        S(pp=2)
    graph = workload(LLAMA, 8).graph
    with pytest.raises(PlanError, match="the model has 4"):
        framework_plan(graph, S(pp=2, dp=4, layers=(2, 3)))
    with pytest.raises(PlanError, match="one stack of equal layers"):
        framework_plan(workload("squeezenet1_1", 8).graph, S(pp=2, dp=4, layers=(1, 1)))


def test_a_stack_has_units_before_and_after_its_layers():
    stack = layer_stack(workload("bert-base", 16).graph)
    assert (stack.name, stack.num_layers) == ("bert.encoder.layer.", 12)
    units = dict(stack.units)
    assert units["bert.embeddings.LayerNorm"] == 0
    assert units["bert.encoder.layer.11.output.LayerNorm"] == 12
    assert units["loss"] == 13
    assert even_layers(14, 4) == (3, 4, 4, 3)
    assert torchtitan.model_parts((1, 0)) == [["tok_embeddings", "layers.0"], ["norm", "output"]]


def test_fsdp2_code_trains_as_the_model_alone(tmp_path):
    cases = {
        "sequence.py": S(tp=2, sp=True, dp=2, zero=3, micro_batch=4, recompute="selective"),
        "sharded.py": S(dp=4, zero=1, num_microbatches=2, recompute="full"),
        "groups.py": S(dp=4, zero=3, hsdp=2, num_microbatches=2),
    }
    for name, strategy in cases.items():
        answer = export(plan_of(strategy, DECODER, "4xA100"), "fsdp2")
        assert answer.is_exact, answer.differences
        (tmp_path / name).write_text(answer.text)
    ruff = shutil.which("ruff") or str(Path(sys.executable).parent / "ruff")
    if Path(ruff).exists():
        subprocess.run(
            [ruff, "check", "--isolated", "--line-length", "100", str(tmp_path)], check=True
        )
    root = str(HERE.parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / "fsdp2_ranks.py"), str(tmp_path)]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    losses = json.loads((tmp_path / "losses.json").read_text())
    for name in cases:
        assert losses[name] == pytest.approx(losses["alone"], rel=1e-5)


def test_buckets_of_another_size_are_named():
    plan = plan_of(S(dp=8, zero=3))
    other = replace(plan, stages=tuple(replace(one, bucket_bytes=1) for one in plan.stages))
    assert "other buckets" in "; ".join(export(other, "fsdp2").differences)


def test_a_tied_output_layer_is_not_split_by_fsdp2_code():
    work = workload("gpt2@16", 8)
    scope = ExportScope("gpt2", work.graph, 8, "bf16", "adamw", 8, 1)
    assert "untie" in TARGETS["fsdp2"].refusal(S(dp=4, tp=2, zero=3), scope)
    assert TARGETS["fsdp2"].refusal(S(dp=8, zero=3), scope) == ""


def test_fsdp2_code_names_modules_as_the_model_does():
    text = exported(S(dp=4, tp=2, zero=1), "fsdp2").text
    assert '"*.self_attn.q_proj": "columns",' in text
    assert '"*.mlp.down_proj": "rows",' in text
    assert '"model.embed_tokens": "vocabulary",' in text
    assert '"lm_head": "logits",' in text
    assert 'LAYERS = "model.layers"' in text


# What the owners' own parsers take the files for; they are installed by hand (docs/export.md).


def test_megatron_reads_the_layout_as_we_do():
    module = pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout", exc_type=ImportError
    )
    layers = (3, *(2,) * 29, 1, 0)
    theirs = module.PipelineParallelLayerLayout(megatron.layout(layers), 16)
    theirs.validate_layer_layout(sum(layers), 0)
    parsed = theirs.parse_str_to_list(megatron.layout(layers))
    decoder = module.LayerType.decoder
    assert tuple(sum(one == decoder for one in stage) for stage in parsed) == layers


def test_deepspeed_reads_the_configuration_as_we_do():
    module = pytest.importorskip("deepspeed.runtime.config", exc_type=ImportError)
    value = json.loads(exported(PIPELINED, "deepspeed").text)
    value["train_batch_size"] //= PIPELINED.dp  # its world is one process here
    config = module.DeepSpeedConfig(value)
    assert config.zero_optimization_stage == PIPELINED.zero
    assert config.gradient_accumulation_steps == PIPELINED.num_microbatches
    assert config.pipeline["stages"] == PIPELINED.pp


def test_torchtitan_reads_the_configuration_as_we_do(tmp_path):
    module = pytest.importorskip("torchtitan.config", exc_type=ImportError)
    file = tmp_path / "job.toml"
    file.write_text(exported(TITAN, "torchtitan").text)
    config = module.ConfigManager().parse_args([f"--job.config_file={file}"])
    parallel = config.parallelism
    assert (parallel.tensor_parallel_degree, parallel.pipeline_parallel_degree) == (2, 2)
    assert parallel.data_parallel_shard_degree == 2
    assert parallel.fsdp_reshard_after_forward == "never"
    assert config.activation_checkpoint.mode == "selective"
