"""Hugging Face configurations, read without the transformers package."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import InputError, ModelError
from partita.graph import training_graph
from partita.graph.files import check_graph
from partita.zoo import build
from partita.zoo.figures import contraction_flops
from partita.zoo.hf import FAMILIES, build_config
from tests.zoo.hf_tiny import TINY, VARIANTS, tiny

DATA = Path(__file__).parents[1] / "data" / "hf"

# Parameters of the checkpoint with these sizes, as its model card (safetensors) or, for the older
# ones, its Hugging Face model class counts them.
PUBLISHED = {
    "bert-base": 109_514_298,  # BertForMaskedLM of bert-base-uncased
    "gpt2-medium": 354_823_168,  # openai-community/gpt2-medium
    "llama-2-7b": 6_738_415_616,  # meta-llama/Llama-2-7b-hf
    "llama-3-8b": 8_030_261_248,  # meta-llama/Meta-Llama-3-8B
    "mistral-7b": 7_241_732_096,  # mistralai/Mistral-7B-v0.1
    "mixtral-8x7b": 46_702_792_704,  # mistralai/Mixtral-8x7B-v0.1
    "qwen1.5-moe-a2.7b": 14_315_784_192,  # Qwen/Qwen1.5-MoE-A2.7B
    "qwen2.5-0.5b": 494_032_768,  # Qwen/Qwen2.5-0.5B
    "qwen2.5-7b": 7_615_616_512,  # Qwen/Qwen2.5-7B
    "qwen3-8b": 8_190_735_360,  # Qwen/Qwen3-8B
    "t5-small": 60_506_624,  # google-t5/t5-small
    "t5-v1_1-small": 76_961_152,  # google/t5-v1_1-small
}


def small(family: str) -> dict[str, object]:
    """A tiny configuration with the last of its variants."""
    return tiny(family, len(VARIANTS.get(family, ())) - 1)


def test_every_family_has_a_tiny_configuration_here():
    assert set(TINY) == set(FAMILIES)
    assert {path.stem for path in DATA.glob("*.json")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    graph = build(str(DATA / f"{name}.json"))
    assert graph.name == name
    assert graph.num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "mixtral-8x7b"])
def test_a_configuration_gives_the_same_graph_as_the_zoo(name):
    seq = 128
    read = build(f"{DATA / name}.json@{seq}", batch=2, dtype="bf16")
    assert read == build(f"{name}@{seq}", batch=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_trained(family):
    for fused in (True, False):
        check_graph(training_graph(build_config(small(family), fused_attention=fused)))


def test_missing_keys_have_the_documented_defaults():
    # The defaults of each configuration class are a released model's sizes.
    defaults = {
        "gpt2": 124_439_808,  # gpt2
        "bert": 109_514_298,  # bert-base-uncased
        "t5": 60_506_624,  # t5-small
        "llama": 6_738_415_616,  # LLaMA 7B
        "mistral": 7_241_732_096,  # Mistral 7B
        "mixtral": 46_702_792_704,  # Mixtral 8x7B
        "qwen2_moe": 14_315_784_192,  # Qwen1.5-MoE-A2.7B
    }
    for family, parameters in defaults.items():
        assert build_config({"model_type": family}).num_parameters == parameters
        nulls = dict.fromkeys(TINY[family])
        assert build_config({**nulls, "model_type": family}).num_parameters == parameters


def test_the_length_is_the_configurations_but_not_endless():
    path = DATA / "qwen2.5-7b.json"  # 131,072 positions
    assert build(str(path)).tensor("input_ids").shape == (1, 4096)
    assert build(f"{path}@100").tensor("input_ids").shape == (1, 100)
    assert build(str(DATA / "bert-base.json"), batch=3).tensor("input_ids").shape == (3, 512)


def test_the_element_type_is_the_configurations():
    assert build(str(DATA / "llama-2-7b.json")).parameters[0].dtype == "f16"
    assert build(str(DATA / "llama-2-7b.json"), dtype="f32").parameters[0].dtype == "f32"
    assert build_config({**small("gpt2"), "dtype": "float32"}).parameters[0].dtype == "f32"


def test_a_config_json_is_named_after_its_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small("llama")))
    assert build(str(folder / "config.json")).name == "my-model"
    assert build(str(folder)).name == "my-model"
    assert build(f"{folder}@4").tensor("input_ids").shape == (1, 4)


def test_a_sliding_window_saves_work():
    windowed = build_config({**small("mistral"), "sliding_window": 2})
    whole = build_config({**small("mistral"), "sliding_window": None})
    assert contraction_flops(windowed) < contraction_flops(whole)


def test_windows_begin_after_the_first_layers():
    attentions = [op for op in build_config(tiny("qwen2", 0)).ops if op.kind == "attention"]
    assert [op.attr("window") for op in attentions] == [None, 3]


def test_dense_layers_of_a_sparse_model():
    graph = build_config(tiny("qwen2_moe", 0))  # every second layer is sparse
    assert {op.scope for op in graph.ops if op.kind == "moe_router"} == {"model.layers.1.mlp"}


def test_query_norms_have_the_size_of_a_head():
    graph = build_config(tiny("qwen3"))
    assert graph.tensor("model.layers.0.self_attn.q_norm.weight").shape == (4,)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"model_type": "bloom"}, r"model_type: 'bloom' is not read; "
                                          r"these are: llama, llama4_text, mistral"),
        ("gpt2", {"model_type": 3}, "model_type: is 3; text is needed"),
        ("gpt2", {"n_layer": -2}, "n_layer: is -2; a whole number from 1 to 1024 is needed"),
        ("gpt2", {"n_layer": 10**6}, "n_layer: is 1000000"),
        ("gpt2", {"n_embd": "768"}, "n_embd: is '768'; a whole number"),
        ("gpt2", {"n_embd": True}, "n_embd: is True"),
        ("gpt2", {"n_head": 5}, "n_head: 5 does not divide n_embd 16; choose a divisor"),
        ("gpt2", {"n_inner": 0}, "n_inner: is 0"),
        ("gpt2", {"tie_word_embeddings": "no"}, "tie_word_embeddings: is 'no'; true or false"),
        ("gpt2", {"torch_dtype": "int8"}, "torch_dtype: is 'int8'; use one of float32"),
        ("bert", {"num_attention_heads": 3}, "num_attention_heads: 3 does not divide hidden_size"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ("llama", {"hidden_size": 1.5}, "hidden_size: is 1.5"),
        ("llama", {"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 2},
         "num_attention_heads: 6 does not divide hidden_size 16"),
        ("llama", {"hidden_act": "mystery"}, "hidden_act: is 'mystery'; known are gelu"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok: is 9, more than there are"),
        ("qwen2_moe", {"mlp_only_layers": "all"}, "mlp_only_layers: is 'all'; a list"),
        ("t5", {"feed_forward_proj": "gated-mystery"}, "feed_forward_proj: is 'mystery'"),
        ("t5", {"vocab_size": 2**40}, "vocab_size: is 1099511627776"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(tmp_path, family, change, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**small(family), **change}))
    with pytest.raises(ModelError, match=message) as caught:
        build(str(path))
    assert str(path) in str(caught.value)


def test_options_of_a_configuration_are_checked():
    path = str(DATA / "gpt2-medium.json")
    with pytest.raises(ModelError, match="has no option 'size'; it has seq, fused_attention"):
        build(path, size=3)
    with pytest.raises(ModelError, match="2000 positions, and the model has learned 1024"):
        build(f"{path}@2000")
    with pytest.raises(ModelError, match="seq 'x' after the @"):
        build(f"{path}@x")
    with pytest.raises(ModelError, match="gives seq twice"):
        build(f"{path}@5", seq=5)


def test_sizes_beyond_any_memory_are_refused():
    config = {**small("llama"), "hidden_size": 2**30, "intermediate_size": 2**31, "head_dim": 2**20}
    with pytest.raises(InputError, match="beyond any memory"):
        build_config({**config, "vocab_size": 2**31, "num_attention_heads": 2**20})


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(data=st.data())
def test_any_value_in_any_field_is_read_or_refused(family, data):
    config = small(family)
    field = data.draw(st.sampled_from(sorted(config)))
    config[field] = data.draw(anything | st.integers(0, 40))
    with contextlib.suppress(InputError):
        assert build_config(config).ops


@given(config=st.dictionaries(st.sampled_from(["model_type", "x", "n_layer"]), anything))
def test_any_object_is_read_or_refused(config):
    with contextlib.suppress(InputError):
        assert build_config(config).ops
