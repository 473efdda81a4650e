"""Transformers by name have the parameters and FLOPs of the zoo's graphs; others are refused."""

import json

import pytest

from partita.errors import ModelError
from partita.forecast.models import KNOWN, STACKS, from_config, transformer_names, transformer_of
from partita.zoo import MODELS, build
from partita.zoo.figures import contraction_flops

STACKED = [name for name, model in MODELS.items() if model.builder in STACKS]
# Of each family the smallest and the largest, and what has something of its own.
SOME = [
    "vit-b16", "vit-h14", "bert-base", "gpt2", "gpt2-xl", "gpt3-175b", "llama-7b", "llama-2-70b",
    "llama-3-8b", "llama-3-405b", "mixtral-8x7b", "mixtral-8x22b",
]  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_parameters_and_flops_are_those_of_the_graph(name):
    graph, model = build(name, batch=1), transformer_of(name)
    assert model.parameters == pytest.approx(graph.num_parameters, rel=1e-3)
    assert model.forward_flops * model.seq == pytest.approx(contraction_flops(graph), rel=1e-2)


@pytest.mark.parametrize("name", STACKED)
def test_parameters_of_all_are_the_published_ones(name):
    published = MODELS[name]
    tolerance = max(published.parameters_tolerance, 1e-3)
    assert transformer_of(name).parameters == pytest.approx(published.parameters, rel=tolerance)


def test_gpt3_175b_by_hand():
    layers, d, vocab, positions = 96, 12288, 50257, 2048
    layer = 12 * d * d + 13 * d
    assert transformer_of("gpt3").parameters == layers * layer + (vocab + positions) * d + 2 * d


def test_a_shorter_sequence_has_the_same_table_of_positions():
    short, usual = transformer_of("gpt2@512"), transformer_of("gpt2")
    assert short.parameters == usual.parameters
    assert short.seq == 512
    graph = build("gpt2@512", batch=1)
    assert short.forward_flops * 512 == pytest.approx(contraction_flops(graph), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v3", 671_026_419_200),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
    ],
)
def test_models_without_a_graph_have_their_published_parameters(name, parameters):
    assert transformer_of(name).parameters == pytest.approx(parameters, rel=1e-4)


def test_every_name_that_is_offered_can_be_forecast():
    assert {transformer_of(name).name for name in transformer_names()} == set(transformer_names())


CONFIGS = [
    {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_inner": 96},
    {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 512, "head_dim": 32},
    {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 1024},
    {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 512},
    {"model_type": "qwen2", "num_hidden_layers": 2, "tie_word_embeddings": True},
    {"model_type": "qwen3", "num_hidden_layers": 2},
    {"model_type": "qwen2_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2},
    {"model_type": "bert", "num_hidden_layers": 2},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_a_configuration_gives_the_same_as_its_graph(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    graph = build(str(path), batch=1)
    model = transformer_of(str(path))
    # Small models: biases and norms that the record does not have weigh more.
    assert model.parameters == pytest.approx(graph.num_parameters, rel=2e-3)
    assert model.forward_flops * model.seq == pytest.approx(contraction_flops(graph), rel=1e-2)


def test_a_configuration_takes_a_sequence_length(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    assert transformer_of(f"{path}@16384").seq == 16384


def test_latent_attention_is_read_from_a_configuration():
    model = from_config(KNOWN["deepseek-v3"])
    assert model.latent is not None
    assert (model.latent.query_rank, model.latent.key_rank) == (1536, 512)
    assert model.experts is not None
    assert (model.experts.count, model.experts.dense_layers, model.sparse_layers) == (256, 3, 58)
    assert from_config({**KNOWN["deepseek-v3"], "n_routed_experts": None}) == from_config(
        KNOWN["deepseek-v3"]
    )  # a field that is null has the default of the family, which is V3's


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("t5", "t5: is not a stack of equal transformer layers; strategies by name are for"),
        ("resnet50", "`partita plan`, and `partita simulate` without a strategy, take any graph"),
        ("net.onnx", "is a model of your own, whose layers are not known by name"),
        ("net.py:model", "is a model of your own"),
        ("deepseek-v4", "did you mean deepseek-v3"),
        ("llama-8b", "did you mean llama-"),
        ("gpt2@5000", "5000 positions, and the model has learned 1024; choose at most 1024"),
        ("gpt2@x", "seq 'x' after the @"),
        ("deepseek-v3@x", "seq 'x' after the @; give a number"),
        ("vit@225", "size 225, which patches of 16 do not divide; choose a multiple of 16"),
    ],
)
def test_what_cannot_be_forecast_is_refused(spec, words):
    with pytest.raises(ModelError) as refusal:
        transformer_of(spec)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba' is not read; these are:"),
        ({"model_type": "t5"}, "has an encoder and a decoder"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": "a"}, "kv_lora_rank: is 'a'"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 8},
            "num_experts_per_tok: is 8, more than there are experts (num_experts 4)",
        ),
        ({"format": "partita/graph@1"}, "is a graph, not a name or a Hugging Face config.json"),
    ],
)
def test_a_bad_configuration_is_refused_with_its_file(config, words, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError) as refusal:
        transformer_of(str(path))
    assert words in str(refusal.value)
    assert str(path) in str(refusal.value)
