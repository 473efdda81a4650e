"""Counts of operations against closed forms, for models whose papers publish none.

Each formula is written from the architecture's description, not from our code: `d` width, `s`
positions, `v` vocabulary, per item of the batch, two operations per multiply-add.
"""

import pytest
from zoo_graphs import SMALL_BATCH, graph_of

from partita.zoo import MODELS, build
from partita.zoo.figures import CONTRACTIONS, contraction_flops
from partita.zoo.gpt import GPT2, GPT3
from partita.zoo.llama import LLAMA, MIXTRAL
from partita.zoo.t5 import T5


def attention_flops(graph) -> float:
    """The part of the work that is in scores and mixing."""
    kinds = [op for op in graph.ops if op.kind == "attention"]
    return sum(CONTRACTIONS["attention"](graph.call(op)) for op in kinds)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(f"gpt2-{v}".removesuffix("-small"), s) for v, s in GPT2.items()]
    + [(f"gpt3-{v}", s) for v, s in GPT3.items()],
)
def test_gpt_works_as_kaplan_counts(name, sizes):
    # Kaplan et al. 2020 (arXiv:2001.08361), table 1, with its rows for attention and "de-embed"; a
    # causal mask leaves (s + 1) / 2 keys per query on average.
    s, d, layers = sizes.positions, sizes.width, sizes.layers
    per_token = 2 * 12 * layers * d * d + 2 * d * sizes.vocab + 4 * layers * d * (s + 1) / 2
    assert contraction_flops(graph_of(name)) == pytest.approx(s * per_token, rel=1e-9)
    parameters = 12 * layers * d * d + 13 * layers * d + (sizes.vocab + s) * d + 2 * d
    assert graph_of(name).num_parameters == parameters


@pytest.mark.parametrize("variant", LLAMA)
def test_llama_works_twice_per_parameter_besides_attention(variant):
    # Every matrix is used once per token; norms and the embedding are not matrices.
    name, sizes = f"llama-{variant}", LLAMA[variant]
    graph, s, d = graph_of(name), MODELS[f"llama-{variant}"].default, sizes.width
    matrices = graph.num_parameters - sizes.vocab * d - (2 * sizes.layers + 1) * d
    pairs = s * (s + 1) / 2
    expected = 2 * s * matrices + 4 * sizes.layers * d * pairs
    assert contraction_flops(graph) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("variant", "billions"), [("8x7b", 12.9), ("8x22b", 39)])
def test_mixtral_works_on_its_active_parameters(variant, billions):
    # Jiang et al. 2024: 13B of 47B (12.9B by the announcement); Mistral AI: 39B of 141B.
    name, sizes = f"mixtral-{variant}", MIXTRAL[variant]
    graph, s = graph_of(name), MODELS[name].default
    used = (contraction_flops(graph) - attention_flops(graph)) / (2 * s)
    active = used + sizes.vocab * sizes.width  # the embedding is looked up, not multiplied
    assert active == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize("variant", T5)
def test_t5_reads_and_writes_in_proportion(variant):
    sizes, s, t = T5[variant], 512, 114
    d, inner, layers = sizes.width, sizes.heads * sizes.head_size, sizes.layers
    encoder = layers * s * (4 * d * inner + 2 * d * sizes.inner)
    own = layers * t * (4 * d * inner + 2 * d * sizes.inner)
    cross = layers * (2 * t + 2 * s) * d * inner
    scores = layers * inner * 2 * (s * s + t * (t + 1) / 2 + t * s)
    expected = 2 * (encoder + own + cross + t * d * sizes.vocab + scores)
    assert contraction_flops(graph_of(f"t5-{variant}")) == pytest.approx(expected, rel=1e-9)


def test_switch_works_as_much_as_the_t5_it_is_made_from():
    # Fedus et al. 2021: FLOP-matched to T5-Base; only the routers come on top.
    routers = 12 * 128 * 768 * (512 + 114) * 2 / 2
    outcome = contraction_flops(graph_of("moe")) / SMALL_BATCH["moe"]
    base = contraction_flops(graph_of("t5-base"))
    assert outcome == pytest.approx(base + routers, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "layers", "d"), [("bert-base", 12, 768), ("bert-large", 24, 1024)]
)
def test_bert_attends_in_both_directions(name, layers, d):
    s, v = 512, 30522
    per_token = 2 * 12 * layers * d * d + 4 * layers * d * s + 2 * (d * d + d * v)
    assert contraction_flops(graph_of(name)) == pytest.approx(s * per_token, rel=1e-9)


@pytest.mark.parametrize(("name", "d"), [("transformer-base", 512), ("transformer-big", 1024)])
def test_the_transformer_has_six_layers_on_either_side(name, d):
    s, v, layers = 256, 37000, 6
    weights = layers * (4 + 8) * d * d + layers * (8 + 8) * d * d + v * d
    scores = 4 * layers * d * (s * s + s * s + s * (s + 1) / 2)
    assert contraction_flops(graph_of(name)) == pytest.approx(2 * s * weights + scores, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "cells", "hidden"), [("lstm", 10 * 100, 256), ("seq2seq", 8 * 100 + 4 * 30, 128)]
)
def test_a_cell_is_two_products_with_four_gates(name, cells, hidden):
    graph = graph_of(name)
    assert sum(1 for op in graph.ops if op.kind == "lstm_cell") == cells
    assert contraction_flops(graph) == cells * 2 * 8 * hidden * hidden


def test_the_language_model_is_two_layers_and_a_vocabulary():
    s, d, v = 256, 2048, 100_000
    assert contraction_flops(graph_of("rnnlm")) == 2 * s * (2 * 8 * d * d + d * v)
    assert graph_of("rnnlm").num_parameters == 2 * v * d + v + 2 * 4 * d * (2 * d + 2)


def test_unet_as_in_figure_1():
    # Image side and channels (in, out) of every 3x3 convolution's output, left to right.
    convolutions = [
        (570, 1, 64), (568, 64, 64), (282, 64, 128), (280, 128, 128), (138, 128, 256),
        (136, 256, 256), (66, 256, 512), (64, 512, 512), (30, 512, 1024), (28, 1024, 1024),
        (54, 1024, 512), (52, 512, 512), (102, 512, 256), (100, 256, 256), (198, 256, 128),
        (196, 128, 128), (390, 128, 64), (388, 64, 64),
    ]  # fmt: skip
    upward = [(28, 1024, 512), (52, 512, 256), (100, 256, 128), (196, 128, 64)]
    total = sum(9 * side**2 * a * b for side, a, b in convolutions)
    total += sum(4 * side**2 * a * b for side, a, b in upward) + 388**2 * 64 * 2
    assert contraction_flops(graph_of("unet")) == 2 * total
    assert graph_of("unet", loss=False).tensor("channels_last").shape == (1, 388, 388, 2)


def test_deep_speech_has_the_published_shapes():
    # PLoS Biology 21(12) e3002366, table 5: 32 x 41 features per second frame, 101 of 201 frames.
    graph = graph_of("deepspeech2", loss=False)
    assert graph.tensor("conv.0").shape == (1, 32, 81, 101)
    assert graph.tensor("conv.3").shape == (1, 32, 41, 101)
    assert graph.tensor("time_first").shape == (1, 101, 1312)
    assert graph.tensor("fc.linear").shape == (1, 101, 29)


def test_nasnet_has_the_published_image_sizes():
    graph = graph_of("nasnet_large", loss=False)
    assert graph.tensor("cell_stem_0.concat").shape == (1, 168, 83, 83)
    assert graph.tensor("cell_5.concat").shape == (1, 1008, 42, 42)
    assert graph.tensor("cell_17.concat").shape == (1, 4032, 11, 11)


def test_work_grows_with_the_square_of_the_image():
    small, large = build("vgg16@224", batch=1), build("vgg16@448", batch=1)

    def convolutions(graph) -> float:
        return sum(CONTRACTIONS["conv"](graph.call(op)) for op in graph.ops if op.kind == "conv")

    assert convolutions(large) == 4 * convolutions(small)
