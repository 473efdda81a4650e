"""Tiny configurations of every family that is read, and variants of their fields."""

from typing import Any

Config = dict[str, Any]

_LLAMA: Config = {
    "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "vocab_size": 40,
}  # fmt: skip
_DEEPSEEK: Config = {
    **_LLAMA, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 8,
    "kv_lora_rank": 6, "q_lora_rank": 5, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_SPARSE: Config = {
    **_LLAMA, "num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2,
}  # fmt: skip

_BERT: Config = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32, "vocab_size": 40,
}  # fmt: skip
_SEQ2SEQ: Config = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip

_CLIP_TEXT: Config = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 40, "max_position_embeddings": 16, "projection_dim": 6, "eos_token_id": 7,
}  # fmt: skip
_CLIP_IMAGES: Config = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 8, "patch_size": 4, "projection_dim": 6,
}  # fmt: skip

TINY: dict[str, Config] = {
    "llama": _LLAMA,
    "llama4_text": {
        **_LLAMA, "head_dim": 4, "num_local_experts": 4, "intermediate_size_mlp": 20,
        "interleave_moe_layer_step": 2,
    },
    "mistral": _LLAMA,
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "qwen2": _LLAMA,
    "qwen2_moe": {**_SPARSE, "shared_expert_intermediate_size": 12},
    "qwen3": {**_LLAMA, "head_dim": 4},
    "qwen3_moe": _SPARSE,
    "gemma": {**_LLAMA, "head_dim": 4},
    "gemma2": {**_LLAMA, "head_dim": 4},
    "gemma3_text": {**_LLAMA, "head_dim": 4},
    "phi3": {**_LLAMA, "pad_token_id": 0},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": {**_DEEPSEEK, "n_group": 2, "topk_group": 1},
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 32, "vocab_size": 40},
    "gpt_neox": {
        "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 2, "max_position_embeddings": 32, "vocab_size": 40,
    },
    "opt": {
        "hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": 24, "num_attention_heads": 4,
        "vocab_size": 40, "max_position_embeddings": 32, "word_embed_proj_dim": 16,
    },
    "falcon": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40,
        "max_position_embeddings": 32,
    },
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": _LLAMA,
    "olmoe": {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**_LLAMA, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bert": _BERT,
    "roberta": _BERT,
    "t5": {
        "num_layers": 2, "d_model": 16, "d_kv": 6, "num_heads": 4, "d_ff": 24, "vocab_size": 40,
    },
    "bart": {**_SEQ2SEQ, "max_position_embeddings": 32},
    "whisper": {
        **_SEQ2SEQ, "num_mel_bins": 5, "max_source_positions": 10, "max_target_positions": 16,
    },
    "vit": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 24, "image_size": 8, "patch_size": 4,
    },
    "clip_text_model": _CLIP_TEXT,
    "clip_vision_model": _CLIP_IMAGES,
    "clip": {"text_config": _CLIP_TEXT, "vision_config": _CLIP_IMAGES, "projection_dim": 6},
    "mamba2": {
        "num_hidden_layers": 2, "hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 6,
        "n_groups": 2, "vocab_size": 40, "chunk_size": 5,
    },
}  # fmt: skip

_YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_YARN_MORE: Config = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5}
_LONG: Config = {"rope_type": "longrope", "short_factor": [1.5, 2.5], "long_factor": [3.0, 4.0]}
_TURNED = ["full_attention", "sliding_attention"]

# What each family is compared with `transformers` on, besides its tiny configuration as it is.
VARIANTS: dict[str, list[Config]] = {
    "llama": [
        {"rope_theta": 500.0, "rms_norm_eps": 0.01, "attention_bias": True, "mlp_bias": True,
         "tie_word_embeddings": True, "hidden_act": "gelu"},
        {"head_dim": 6, "hidden_act": "quick_gelu"},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "hidden_act": "relu2"},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 8},
        {"rope_scaling": _YARN},
        {"rope_scaling": {**_YARN_MORE, "truncate": False, "beta_fast": 8, "beta_slow": 2}},
        {"rope_scaling": {**_YARN, "attention_factor": 1.3}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
        {"rope_scaling": {**_LONG, "original_max_position_embeddings": 8}},
        {"rope_scaling": {**_LONG, "original_max_position_embeddings": 20}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 99.0}},
    ],
    "llama4_text": [
        {"no_rope_layer_interval": 2, "attention_chunk_size": 5, "floor_scale": 3,
         "attn_scale": 0.7, "num_experts_per_tok": 2},
        {"use_qk_norm": False, "attn_temperature_tuning": False, "no_rope_layers": [0, 1],
         "moe_layers": [0], "attention_bias": True, "attention_chunk_size": 4},
    ],
    "mistral": [{"sliding_window": 3}, {"sliding_window": None, "head_dim": 8}],
    "mixtral": [{"num_experts_per_tok": 3, "sliding_window": 4}, {"rope_theta": 100.0}],
    "qwen2": [
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        {"tie_word_embeddings": True, "head_dim": 6},
    ],
    "qwen2_moe": [
        {"norm_topk_prob": True, "decoder_sparse_step": 2},
        {"mlp_only_layers": [1], "qkv_bias": False, "use_sliding_window": True,
         "sliding_window": 3},
    ],
    "qwen3": [
        {"head_dim": 6, "attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": _TURNED},
    ],
    "qwen3_moe": [
        {"norm_topk_prob": True, "decoder_sparse_step": 2},
        {"mlp_only_layers": [1], "attention_bias": True, "use_sliding_window": True,
         "sliding_window": 3, "head_dim": 6},
    ],
    "gemma": [
        {"attention_bias": True, "hidden_act": "relu"}, {"head_dim": 6, "hidden_act": "gelu"},
    ],
    "gemma2": [
        {"sliding_window": 3, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 0.5,
         "final_logit_softcapping": 0.7},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 4,
         "layer_types": _TURNED, "hidden_activation": "silu"},
    ],
    "gemma3_text": [
        {"sliding_window": 3, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 0.5,
         "final_logit_softcapping": 0.7, "layer_types": _TURNED},
        {"sliding_window_pattern": 2, "rope_theta": 500.0, "rope_local_base_freq": 20.0,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 5},
    ],
    "phi3": [
        {"partial_rotary_factor": 0.5, "sliding_window": 3, "hidden_act": "gelu"},
        {"rope_scaling": _LONG, "original_max_position_embeddings": 8},
        {"rope_scaling": {"type": "su", "short_factor": [1.5, 2.5], "long_factor": [3.0, 4.0],
                          "original_max_position_embeddings": 20},
         "original_max_position_embeddings": 20},
    ],
    "deepseek_v2": [
        {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1,
         "routed_scaling_factor": 1.7},
        {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0,
         "n_shared_experts": 2, "num_experts_per_tok": 1, "rope_scaling": _YARN_MORE},
    ],
    "deepseek_v3": [
        {"norm_topk_prob": False, "routed_scaling_factor": 1.3, "rope_interleave": False},
        {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0, "n_group": 1,
         "topk_group": 1, "rope_scaling": _YARN_MORE},
    ],
    "gpt2": [
        {"n_inner": 20, "activation_function": "relu", "layer_norm_epsilon": 0.01,
         "scale_attn_weights": False, "tie_word_embeddings": False},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ],
    "gpt_neox": [
        {"rotary_pct": 0.5, "rotary_emb_base": 300, "use_parallel_residual": False,
         "hidden_act": "gelu_new"},
        {"attention_bias": False, "rotary_pct": 1.0, "layer_norm_eps": 0.01,
         "tie_word_embeddings": True},
    ],
    "opt": [
        {"do_layer_norm_before": False, "word_embed_proj_dim": 12, "activation_function": "gelu"},
        {"enable_bias": False, "layer_norm_elementwise_affine": False,
         "_remove_final_layer_norm": True, "tie_word_embeddings": False},
    ],
    "falcon": [
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 20,
         "activation": "relu", "rope_theta": 77.0, "layer_norm_epsilon": 0.01},
    ],
    "olmo": [{"clip_qkv": 0.02, "attention_bias": True, "rope_theta": 50.0}],
    "olmo2": [{"rms_norm_eps": 0.01, "attention_bias": True}],
    "olmo3": [
        {"sliding_window": 3, "rope_theta": 60.0, "layer_types": _TURNED},
        {"rope_scaling": _YARN, "layer_types": _TURNED},
    ],
    "olmoe": [{"clip_qkv": 0.02, "norm_topk_prob": True, "num_experts_per_tok": 3}],
    "gpt_oss": [
        {"sliding_window": 3, "swiglu_limit": 0.5, "swiglu_alpha": 1.1, "attention_bias": False},
        {"rope_scaling": {"rope_type": "default"}, "layer_types": _TURNED, "sliding_window": 2},
    ],
    "bert": [
        {"hidden_act": "relu", "layer_norm_eps": 0.01, "type_vocab_size": 3},
        {"tie_word_embeddings": False},
    ],
    "roberta": [
        {"hidden_act": "silu", "pad_token_id": 2},
        {"tie_word_embeddings": False, "pad_token_id": 4},
    ],
    "t5": [
        {"feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 0.01, "num_decoder_layers": 1,
         "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10},
        {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu", "is_gated_act": False},
        {"dense_act_fn": "silu", "is_gated_act": True, "scale_decoder_outputs": False},
        {"feed_forward_proj": "gated-gelu", "is_gated_act": None, "scale_decoder_outputs": None},
    ],
    "bart": [
        {"scale_embedding": True, "activation_function": "relu"},
        {"tie_word_embeddings": False, "scale_embedding": True},
    ],
    "whisper": [{"activation_function": "relu", "scale_embedding": True}],
    "vit": [
        {"qkv_bias": False, "hidden_act": "gelu_new", "layer_norm_eps": 0.01, "num_labels": 5,
         "num_channels": 1},
    ],
    "clip_text_model": [{"eos_token_id": 2, "hidden_act": "gelu", "layer_norm_eps": 0.01}],
    "clip_vision_model": [{"image_size": 9, "hidden_act": "gelu", "num_channels": 1}],
    "clip": [
        {"text_config_dict": {**_CLIP_TEXT, "eos_token_id": 2}, "vision_config_dict": _CLIP_IMAGES,
         "logit_scale_init_value": 1.0},
    ],
    "mamba2": [
        {"n_groups": 1, "use_bias": True, "conv_kernel": 3, "chunk_size": 64, "hidden_act": "relu",
         "tie_word_embeddings": True},
        {"use_conv_bias": False, "chunk_size": 1, "time_step_limit": [0.5, 0.6], "n_groups": 4,
         "layer_norm_epsilon": 0.01},
    ],
}  # fmt: skip


def tiny(family: str, variant: int = -1) -> Config:
    """A tiny configuration of a family, or a variant of it."""
    change = VARIANTS.get(family, [])[variant] if variant >= 0 else {}
    return {"model_type": family, **TINY[family], **change}


CASES = [
    (family, variant)
    for family in TINY
    for variant in range(-1, len(VARIANTS.get(family, [])))
]  # fmt: skip
