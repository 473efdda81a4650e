"""The contract of the zoo. A new model is tested by being listed in MODELS."""

import inspect
import json
import subprocess
import sys

import pytest
from zoo_graphs import SMALL_BATCH, graph_of, training_of

from partita.graph import training_graph
from partita.graph.files import check_graph
from partita.graph.shapes import unknown_kinds
from partita.zoo import ALIASES, MODELS, build
from partita.zoo.figures import contraction_flops, forward_flops
from tests.quickness import least_cpu_s

# The names that the design promises, families by their default.
PROMISED = [
    "alexnet", "vgg16", "resnet50", "resnet101", "inception_v3", "densenet121", "squeezenet",
    "nasnet_large", "randwire", "resnext", "rnnlm", "lstm", "seq2seq", "deepspeech2", "transformer",
    "bert", "gpt2", "gpt3-175b", "llama-7b", "t5", "mixtral", "moe", "unet", "vit",
]  # fmt: skip

# One model of each builder, for what does not depend on sizes.
ONE_EACH = sorted({model.builder: name for name, model in reversed(MODELS.items())}.values())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
class TestEveryModel:
    def test_parameters_are_the_published_ones(self, model):
        outcome = graph_of(model.name).num_parameters
        assert outcome == pytest.approx(model.parameters, rel=model.parameters_tolerance, abs=0)

    def test_what_papers_do_not_count_is_a_small_part(self, model):
        graph = graph_of(model.name)
        assert contraction_flops(graph) < forward_flops(graph) < 1.05 * contraction_flops(graph)

    def test_every_parameter_is_trained(self, model):
        trained = training_of(model.name)
        updated = {op.inputs[0] for op in trained.ops if op.phase == "update"}
        assert updated == {tensor.name for tensor in trained.parameters}

    def test_shapes_and_gradients_hold_together(self, model):
        check_graph(training_of(model.name))

    def test_all_kinds_are_known(self, model):
        assert unknown_kinds(graph_of(model.name)) == ()

    def test_it_ends_in_one_number_to_train_on(self, model):
        graph = graph_of(model.name)
        (output,) = graph.outputs
        assert graph.tensor(output).shape == ()
        assert "targets" in {tensor.name for tensor in graph.inputs}

    def test_without_loss_it_ends_in_outputs_per_item(self, model):
        graph = graph_of(model.name, loss=False)
        (output,) = graph.outputs
        assert graph.tensor(output).shape[0] == SMALL_BATCH[model.name]
        assert "targets" not in {tensor.name for tensor in graph.inputs}
        assert graph.num_parameters == graph_of(model.name).num_parameters
        assert not any(op.attr("fn") == "dropout" or op.attr("training") for op in graph.ops)

    def test_twice_the_batch_is_twice_the_work(self, model):
        one, two = graph_of(model.name), graph_of(model.name, times=2)
        assert forward_flops(two) == pytest.approx(2 * forward_flops(one), rel=1e-6)
        assert two.num_parameters == one.num_parameters

    def test_ops_belong_to_modules(self, model):
        ops = graph_of(model.name).ops
        assert sum(1 for op in ops if op.scope) >= 0.4 * len(ops)

    def test_parameters_and_ops_are_named_after_their_module(self, model):
        graph = graph_of(model.name)
        for op in graph.ops:
            assert op.name.startswith(op.scope)

    def test_its_graph_has_its_name(self, model):
        assert graph_of(model.name).name == model.name

    def test_the_function_has_the_defaults_of_the_catalogue(self, model):
        known = inspect.signature(model.function).parameters
        if not model.preset:  # one function may serve several variants
            assert known[model.option].default == model.default
            assert known["batch"].default == model.batch
        assert known["loss"].default is True
        assert {name for name, _ in model.preset} <= set(known)

    def test_it_says_where_its_figures_are_from(self, model):
        assert len(model.source) > 10
        assert model.summary


@pytest.mark.parametrize("model", [m for m in MODELS.values() if m.flops], ids=lambda m: m.name)
def test_operations_are_the_published_ones(model):
    assert contraction_flops(graph_of(model.name)) == pytest.approx(
        model.flops, rel=model.flops_tolerance, abs=0
    )


@pytest.mark.parametrize("name", ONE_EACH)
def test_the_element_type_can_be_chosen(name):
    floats = {tensor.dtype for tensor in build(name, batch=1, dtype="f16").tensors}
    assert floats <= {"f16", "i64"}


@pytest.mark.parametrize("name", [n for n in ONE_EACH if "fused_attention" in MODELS[n].options()])
class TestEveryModelWithAttention:
    def test_attention_can_be_spelled_out(self, name):
        fused, spelled = graph_of(name), graph_of(name, fused_attention=False)
        assert "attention" not in {op.kind for op in spelled.ops}
        assert spelled.num_parameters == fused.num_parameters
        attentions = sum(1 for op in fused.ops if op.kind == "attention")
        assert sum(1 for op in spelled.ops if op.kind == "matmul") == 2 * attentions

    def test_spelled_out_it_computes_what_a_mask_throws_away(self, name):
        fused, spelled = graph_of(name), graph_of(name, fused_attention=False)
        masked = any(op.attr("causal") for op in fused.ops)
        ratio = contraction_flops(spelled) / contraction_flops(fused)
        assert (1 < ratio < 1.2) if masked else ratio == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "t5-small", "transformer-base", "vit-b16"])
def test_spelled_out_attention_can_be_trained(name):
    check_graph(training_graph(graph_of(name, fused_attention=False)))


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_name_builds(name):
    assert build(name, batch=1).ops


def test_aliases_lead_to_models_and_hide_none():
    assert set(ALIASES.values()) <= set(MODELS)
    assert not set(ALIASES) & set(MODELS)


def test_images_are_f32_and_language_models_bf16():
    assert graph_of("resnet50").parameters[0].dtype == "f32"
    assert graph_of("llama-7b").parameters[0].dtype == "bf16"


def test_a_tied_weight_is_one_tensor_with_two_readers():
    graph = graph_of("gpt2")
    assert [op.kind for op in graph.consumers("wte.weight")] == ["embedding", "linear"]
    assert "lm_head.weight" not in {tensor.name for tensor in graph.tensors}


def test_grouped_queries_have_fewer_key_heads():
    attention = graph_of("llama-2-70b").op("model.layers.0.self_attn.attention")
    assert (attention.attr("heads"), attention.attr("kv_heads")) == (64, 8)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("resnet50", ["layer1.0.conv1.weight", "layer2.0.downsample.1.weight", "fc.bias"]),
        ("inception_v3", ["Mixed_5b.branch1x1.conv.weight", "Mixed_7c.branch_pool.bn.bias"]),
        ("densenet121", ["features.denseblock3.denselayer24.conv2.weight", "features.norm5.bias"]),
        ("squeezenet1_0", ["features.12.expand3x3.bias", "classifier.1.weight"]),
        ("bert-base", ["bert.encoder.layer.11.attention.self.query.bias", "cls.predictions.bias"]),
        ("llama-2-7b", ["model.layers.31.mlp.down_proj.weight", "lm_head.weight"]),
        ("t5-small", ["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                      "decoder.block.5.layer.2.DenseReluDense.wo.weight"]),
        ("vit-b16", ["class_token", "encoder.pos_embedding",
                     "encoder.layers.encoder_layer_11.mlp.3.weight"]),
    ],
)  # fmt: skip
def test_parameters_have_their_usual_names(model, names):
    assert set(names) <= {tensor.name for tensor in graph_of(model).parameters}


def test_the_auxiliary_classifier_has_its_published_parameters():
    graph = build("inception_v3", batch=2, aux=True)
    assert graph.num_parameters == 27_161_264  # torchvision's Inception_V3_Weights, num_params
    check_graph(training_graph(graph))


def test_layers_instead_of_cells_are_the_same_work():
    for name in ("lstm", "seq2seq"):
        cells, layers = graph_of(name), build(name, batch=1, unrolled=False)
        assert len(layers.ops) < 20 < len(cells.ops)
        assert layers.num_parameters == cells.num_parameters
        assert contraction_flops(layers) == contraction_flops(cells)
        check_graph(training_graph(layers))


def test_a_decoder_starts_from_the_states_of_the_upper_encoder_layers():
    graph = graph_of("seq2seq")
    first = graph.op("decoder.0.step0")
    assert first.inputs[1:3] == ("encoder.4.step99:0", "encoder.4.step99:1")


def test_gpt3_of_175_billion_parameters_builds_in_a_fifth_of_a_second():
    assert least_cpu_s(lambda: build("gpt3-175b"), 0.2) < 0.2


def test_the_whole_zoo_builds_in_a_few_seconds():
    assert least_cpu_s(lambda: [build(name) for name in MODELS], 5) < 5


def test_listing_the_zoo_loads_no_model_and_is_fast():
    code = (
        "import dataclasses, importlib, inspect, json, sys, time\n"
        "t = time.perf_counter()\nimport partita.zoo\nt = time.perf_counter() - t\n"
        "print(json.dumps([t, [m for m in sys.modules if m.startswith('partita')]]))"
    )
    runs = [
        json.loads(
            subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        )
        for _ in range(3)
    ]
    assert min(seconds for seconds, _ in runs) < 0.05
    assert set(runs[0][1]) == {
        "partita", "partita.zoo", "partita.zoo.catalogue", "partita.zoo.model",
    }  # fmt: skip
