"""Every field of a configuration changes the graph, is known to change nothing, or is refused."""

import pytest

from partita.errors import ModelError
from partita.zoo.fields import FIXED, NEUTRAL
from partita.zoo.hf import FAMILIES, PARTS, build_config
from partita.zoo.hf_decoders import ONE_VALUE
from tests.zoo.hf_tiny import TINY, tiny

_LONG = {"rope_type": "longrope", "short_factor": [2.0, 2.0], "long_factor": [2.0, 2.0]}
_TYPES = ["sliding_attention", "sliding_attention"]
# Other values of fields, where the rules below give none that can be built.
OTHER = {
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "layer_types": _TYPES,
    "mlp_only_layers": [0],
    "moe_layers": [0, 1],
    "no_rope_layers": [0, 1],
    "feed_forward_proj": "gated-relu",
    "topk_method": "group_limited_greedy",
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "num_key_value_heads": 1,
    "num_kv_heads": 2,
    "num_attention_heads": 8,
    "n_head": 8,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "sliding_window": 3,
    "attention_chunk_size": 3,
    "image_size": 16,
    "patch_size": 2,
    "clip_qkv": 0.5,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.5,
    "floor_scale": 3,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "num_labels": 3,
    "qk_rope_head_dim": 2,
    "relative_attention_num_buckets": 16,
    "topk_group": 2,
    "n_group": 1,
    "max_window_layers": 1,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_ln_in_parallel_attn": 1,
    "scale_decoder_outputs": False,
    "dense_act_fn": "silu",
    "is_gated_act": True,
    "mscale": 2.0,
}  # fmt: skip
# What a field needs beside it to have a meaning.
BESIDE = {
    ("deepseek_v2", "topk_method"): {"n_group": 2, "topk_group": 1},
    ("deepseek_v2", "n_group"): {"topk_method": "group_limited_greedy", "topk_group": 1,
                                 "n_group": 2},
    ("deepseek_v2", "topk_group"): {"topk_method": "group_limited_greedy", "n_group": 4,
                                    "topk_group": 3},
    ("falcon", "num_kv_heads"): {"new_decoder_architecture": True},
    ("falcon", "num_ln_in_parallel_attn"): {"new_decoder_architecture": True},
    ("falcon", "new_decoder_architecture"): {"num_kv_heads": 2},
    ("phi3", "original_max_position_embeddings"): {
        "rope_scaling": {"type": "longrope", "short_factor": [1.5, 2.5], "long_factor": [3.0, 4.0]},
    },
    ("llama4_text", "floor_scale"): {"no_rope_layer_interval": 2},
    ("llama4_text", "attn_scale"): {"no_rope_layer_interval": 2, "floor_scale": 3},
    ("llama4_text", "attn_temperature_tuning"): {"no_rope_layer_interval": 2},
    ("gpt_oss", "rope_theta"): {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ("qwen2_moe", "intermediate_size"): {"mlp_only_layers": [0]},
    ("qwen3_moe", "intermediate_size"): {"mlp_only_layers": [0]},
    ("deepseek_v2", "num_attention_heads"): {"num_key_value_heads": None},
    ("deepseek_v3", "num_attention_heads"): {"num_key_value_heads": None},
    ("gemma3_text", "rope_theta"): {"layer_types": ["full_attention", "sliding_attention"]},
    ("gemma3_text", "rope_scaling"): {"layer_types": ["full_attention", "sliding_attention"]},
    ("olmo3", "rope_theta"): {"layer_types": ["full_attention", "sliding_attention"]},
    ("olmo3", "rope_scaling"): {"layer_types": ["full_attention", "sliding_attention"]},
}  # fmt: skip
# Values for one family only.
VALUES = {
    ("llama4_text", "no_rope_layer_interval"): 2,
    ("llama4_text", "layer_types"): ["full_attention", "full_attention"],
    ("mixtral", "num_experts"): 6,
    ("gpt_oss", "num_experts"): 6,
    ("qwen2", "max_window_layers"): 2,
    ("qwen3", "max_window_layers"): 2,
    ("qwen2_moe", "max_window_layers"): 0,
    ("gemma3_text", "layer_types"): ["full_attention", "full_attention"],
    ("gemma3_text", "sliding_window_pattern"): 1,
    ("gemma3_text", "rope_parameters"): {"sliding_attention": {"type": "linear", "factor": 2.0}},
    ("olmo3", "rope_parameters"): {"sliding_attention": {"type": "linear", "factor": 2.0}},
    ("olmo3", "layer_types"): ["full_attention", "full_attention"],
    ("deepseek_v2", "num_attention_heads"): 2,
    ("deepseek_v3", "num_attention_heads"): 2,
    ("deepseek_v3", "num_experts_per_tok"): 1,
    ("gpt_neox", "num_attention_heads"): 1,
    ("t5", "num_decoder_layers"): 1,
    ("phi3", "rope_scaling"): _LONG,
    ("phi3", "rope_parameters"): _LONG,
    **{("clip", f"text_config{end}"): {"hidden_size": 8} for end in ("", "_dict")},
    **{("clip", f"vision_config{end}"): {"hidden_size": 24} for end in ("", "_dict")},
    ("clip_vision_model", "num_attention_heads"): 8,
    ("mamba2", "time_step_limit"): [0.1, 0.2],
    ("mamba2", "n_groups"): 4,
}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
# Fields that round otherwise, or of which others are refused by their family.
SAME = {
    ("gpt2", "reorder_and_upcast_attn"), ("whisper", "scale_embedding"),
    ("deepseek_v2", "norm_topk_prob"), ("deepseek_v3", "topk_method"), ("gpt_oss", "hidden_act"),
    ("phi3", "original_max_position_embeddings"), ("bart", "num_hidden_layers"),
    ("whisper", "num_hidden_layers"),
}  # fmt: skip


def other_value(family, name, value):
    if (family, name) in VALUES:
        return VALUES[family, name]
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 2
    if isinstance(value, float):
        return value * 2 or 0.5
    if isinstance(value, str):
        return "relu" if value != "relu" else "tanh"
    return 2


def fields_of(family):
    return [(family, name) for name in FAMILIES[family].fields]


@pytest.mark.parametrize(
    ("family", "name"), [pair for family in FAMILIES for pair in fields_of(family)]
)
def test_every_field_that_is_read_changes_the_graph(family, name):
    base = {**tiny(family), **BESIDE.get((family, name), {})}
    if name in ("sliding_window", "max_window_layers") and family.startswith("qwen"):
        base |= _WINDOWED
    if name in ("use_sliding_window", "layer_types") and family.startswith("qwen"):
        first = 2 if family == "qwen2_moe" else 0
        base |= {**_WINDOWED, "use_sliding_window": name == "layer_types"}
        base |= {"max_window_layers": first} if family != "qwen3_moe" else {}
        base |= {"layer_types": ["full_attention"] * 2} if name == "layer_types" else {}
    if name == "num_experts" and "num_local_experts" in base:
        base.pop("num_local_experts")
    value = other_value(family, name, base.get(name, FAMILIES[family].fields[name]))
    changed = {**base, name: value}
    if name in ONE_VALUE or (family, name) in SAME:
        return  # tested below, or in comparison with transformers
    if name == "num_key_value_heads" and family.startswith("deepseek"):
        with pytest.raises(ModelError, match="latent attention has as many as queries"):
            build_config(changed)
        return
    if name == "head_dim" and family.startswith("deepseek"):
        with pytest.raises(ModelError, match="head_dim: is 2; the part that turns"):
            build_config(changed)
        return
    if family == "mamba2" and name in ("num_heads", "head_dim", "hidden_size", "expand"):
        with pytest.raises(ModelError, match=r"expand: .* these must agree"):
            build_config(changed)
        return
    seq = None if name in ("max_position_embeddings", "n_positions") else 12
    if name == "max_target_positions":
        seq = None
    assert build_config(changed, seq=seq) != build_config(base, seq=seq)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_not_known_is_refused_by_name(family):
    with pytest.raises(
        ModelError, match=rf"mystery_scale: is not a field of model_type '{family}'"
    ):
        build_config({**tiny(family), "mystery_scale": 2.0})
    assert build_config({**tiny(family), "mystery_scale": None}).ops  # null: not there


@pytest.mark.parametrize("family", FAMILIES)
def test_neutral_fields_change_nothing(family):
    read = FAMILIES[family].fields
    given = {n: 1 for n in (*NEUTRAL, *FAMILIES[family].neutral) if n not in read}
    assert build_config({**tiny(family), **given}) == build_config(tiny(family))


@pytest.mark.parametrize("name", FIXED)
def test_what_would_change_any_model_is_refused(name):
    built, fix = FIXED[name]
    family = "gpt_neox" if name == "tie_encoder_decoder" else "llama"
    build_config({**tiny(family), name: built})
    with pytest.raises(ModelError, match=f"{name}: is .*{fix[:20]}"):
        build_config({**tiny(family), name: {"x": 1}})


@pytest.mark.parametrize(
    ("family", "name"),
    [(f, n) for f in FAMILIES for n in FAMILIES[f].fields if n in ONE_VALUE],
)
def test_fields_of_one_value_refuse_others(family, name):
    value = not FAMILIES[family].fields[name]
    with pytest.raises(ModelError, match=rf"{name}: is .*\(built is"):
        build_config({**tiny(family), name: value})


@pytest.mark.parametrize("family", PARTS)
def test_models_with_a_tower_for_images_name_the_part_that_is_read(family):
    with pytest.raises(ModelError, match=f"give its text_config .*{PARTS[family]}"):
        build_config({"model_type": family, "text_config": TINY[PARTS[family]]})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "mystery"}, "rope_scaling.rope_type: is 'mystery'; known kinds are"),
        ({"rope_type": "linear"}, r"rope_scaling.factor: is None; a number of at least"),
        ({"type": "linear", "factor": "2"}, r"rope_scaling.factor: is '2'"),
        ({"type": "linear", "factor": 2, "beta_fast": 1},
         r"rope_scaling.beta_fast: is 1; rotary positions of the kind 'linear' do not have it"),
        ({"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1},
         "high_freq_factor: is 1; more than low_freq_factor 4 is needed"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 1.0]},
         r"short_factor: is \[1.0\]; 2 positive numbers are needed"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: is 0.5; heads of this family"),
        ([1], r"rope_scaling: is \[1\]; an object is needed"),
    ],
)  # fmt: skip
def test_scalings_that_cannot_be_are_refused_by_name(scaling, message):
    with pytest.raises(ModelError, match=message):
        build_config({**tiny("llama"), "rope_scaling": scaling})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": {"hidden_size": "8"}}, "hidden_size: is '8'"),
        ({"vision_config": {"mystery": 1}}, "vision_config.mystery: is not a field"),
        ({"text_config": 3}, "text_config: is 3; an object is needed"),
        ({"vision_config": {"patch_size": 300}}, "patch_size: 300 is more than image_size 224"),
    ],
)
def test_towers_of_clip_are_read_field_by_field(change, message):
    with pytest.raises(ModelError, match=message):
        build_config({"model_type": "clip", **change})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob: is None; true or false"),
        ("deepseek_v3", {"head_dim": 3}, "head_dim: is 3; the part that turns, qk_rope_head_dim 4"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}},
         "rope_scaling.type: is 'linear', which `transformers` does not read .*; write rope_type"),
        ("t5", {"dense_act_fn": "linear"}, "dense_act_fn: is 'linear'; a function is needed"),
        ("t5", {"is_gated_act": 1}, "is_gated_act: is 1; true or false is needed"),
        ("bart", {"num_hidden_layers": 3}, "num_hidden_layers: is 3; it is another name of enc"),
        ("vit", {"id2label": {}}, "id2label: is {}; at least one label is needed"),
        ("whisper", {"is_encoder_decoder": False}, "is_encoder_decoder: is False; give the config"),
    ],
)  # fmt: skip
def test_what_contradicts_other_fields_is_refused_by_name(family, change, message):
    with pytest.raises(ModelError, match=message):
        build_config({**tiny(family), **change})


@pytest.mark.parametrize("value", [3, [1], [-1, 2], [2, 1], ["a", "b"]])
def test_limits_of_time_steps_are_two_numbers(value):
    with pytest.raises(ModelError, match=r"time_step_limit: is .*a least and a larger number"):
        build_config({**tiny("mamba2"), "time_step_limit": value})
    assert build_config({**tiny("mamba2"), "time_step_limit": [0, "inf"]}) == build_config(
        tiny("mamba2")
    )
