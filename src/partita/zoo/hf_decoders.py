"""Decoder-only families of Hugging Face configurations: which fields they read, and what they mean.

Each family is a row of `DECODERS`: the fields that it reads with the defaults of its configuration
class, the names of those that change nothing, and a function from the fields to a `DecoderSizes`.
Names of parameters are those of the state dict of `transformers` 5.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from partita.errors import ModelError
from partita.zoo.decoder import DecoderSizes, Experts, LatentAttention, Names, Norm, Rope
from partita.zoo.fields import MAX_LAYERS, Fields
from partita.zoo.rotary import ROPE_FIELDS, RopeSettings, read_rope, yarn_length

USUAL_SEQ = 4096  # what is built where the model could take more
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
Defaults = dict[str, Any]
# Fields of which one value is built, that of the published models; others are refused.
ONE_VALUE = frozenset({
    "moe_layer_freq", "scoring_func", "use_bidirectional_attention", "alibi",
    "add_final_layer_norm", "normalize_before", "static_position_embeddings", "add_bias_logits",
    "extra_pos_embeddings", "normalize_embedding", "is_encoder_decoder",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of the configurations of one `model_type`."""

    read: Callable[[Fields, int | None], Any]
    fields: Defaults  # what is read, with the defaults
    neutral: frozenset[str] = field(
        default_factory=frozenset
    )  # what changes nothing, of this family


def usual_seq(fields: Fields, seq: int | None, name: str = "max_position_embeddings") -> int:
    """The length that was asked for, or the one that the model is meant for."""
    return seq or min(fields.whole(name), USUAL_SEQ)


def _sizes(
    fields: Fields, seq: int | None, *, eps: str = "rms_norm_eps", act: str = "hidden_act",
    rope: bool = True, partial: bool = False, interleaved: bool = False,
) -> tuple[DecoderSizes, int]:  # fmt: skip
    """What all decoders of the LLaMA kind have in common, and the length of the text."""
    length = usual_seq(fields, seq)
    heads, width = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    head_size = (fields.maybe("head_dim") or 0) if "head_dim" in fields.defaults else 0
    if not head_size:
        fields.divides("num_attention_heads", "hidden_size", heads, width)
    kv_heads = heads
    if "num_key_value_heads" in fields.defaults:
        kv_heads = fields.maybe("num_key_value_heads") or heads
        fields.divides("num_key_value_heads", "num_attention_heads", kv_heads, heads)
    sizes = DecoderSizes(
        layers=fields.whole("num_hidden_layers", most=MAX_LAYERS),
        width=width,
        inner=fields.whole("intermediate_size") if "intermediate_size" in fields.defaults else 1,
        heads=heads,
        kv_heads=0 if kv_heads == heads else kv_heads,
        vocab=fields.whole("vocab_size"),
        head_size=0 if head_size * heads == width else head_size,
        tied=fields.flag("tie_word_embeddings"),
        activation=fields.activation(act),
        norm=Norm(eps=fields.number(eps)),
    )
    if rope:
        settings = _settings(fields, sizes, length, partial=partial, interleaved=interleaved)
        sizes = replace(sizes, rope=read_rope(fields, settings))
    return sizes, length


def _settings(
    fields: Fields, sizes: DecoderSizes, length: int, *, partial: bool = False,
    interleaved: bool = False,
) -> RopeSettings:  # fmt: skip
    return RopeSettings(
        sizes.size_of_head, length, fields.whole("max_position_embeddings"),
        partial=partial, interleaved=interleaved,
    )  # fmt: skip


def _biased(fields: Fields, sizes: DecoderSizes) -> DecoderSizes:
    bias = fields.flag("attention_bias")
    return replace(sizes, qkv_bias=bias, output_bias=bias)


def _window(fields: Fields, layers: int) -> tuple[int, ...]:
    """A window in every layer, or none where the field says null."""
    if fields.switched_off("sliding_window"):
        return ()
    return (fields.whole("sliding_window"),) * layers


def _layer_types(fields: Fields, layers: int, usual: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers have a window: those that `layer_types` names, else as is usual."""
    types = fields.texts("layer_types", (SLIDING, FULL), layers)
    return tuple(t == SLIDING for t in types) or tuple(map(usual, range(layers)))


def _windows(fields: Fields, sliding: tuple[bool, ...]) -> tuple[int, ...]:
    if not any(sliding):
        return ()
    if fields.switched_off("sliding_window"):
        raise ModelError(
            "is null, and layers have a window", fix="give one, or full_attention in layer_types",
            field="sliding_window",
        )  # fmt: skip
    window = fields.whole("sliding_window")
    return tuple(window if has else 0 for has in sliding)


def _llama(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq)
    return replace(_biased(fields, sizes), mlp_bias=fields.flag("mlp_bias")), length


def _mistral(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq)
    return replace(sizes, windows=_window(fields, sizes.layers)), length


def _mixtral(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _mistral(fields, seq)
    return replace(sizes, experts=_experts(fields, _count(fields), sizes.inner)), length


def _count(fields: Fields) -> str:
    """The field with the number of experts: some go by two names."""
    return "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"


def _experts(fields: Fields, key: str, inner: int, **more: Any) -> Experts:
    number, each = fields.whole(key), fields.whole("num_experts_per_tok")
    if each > number:
        raise ModelError(
            f"is {each}, more than there are experts ({key} {number})",
            fix="choose at most that many",
            field="num_experts_per_tok",
        )
    return Experts(number, each, inner, **more)


def _qwen2(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq)
    return replace(sizes, qkv_bias=True, windows=_qwen_windows(fields, sizes.layers)), length


def _qwen_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Where sliding windows are used at all, the first `max_window_layers` layers have none."""
    first = fields.whole("max_window_layers", least=0)
    used = fields.flag("use_sliding_window") and not fields.switched_off("sliding_window")
    sliding = _layer_types(fields, layers, lambda layer: used and layer >= first)
    if not fields.flag("use_sliding_window"):
        if any(sliding):
            raise ModelError(
                "has layers with a window, and use_sliding_window is false",
                fix="let the two agree",
                field="layer_types",
            )
        return ()
    return _windows(fields, sliding)


def _qwen3(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq)
    windows = _qwen_windows(fields, sizes.layers)
    return replace(_biased(fields, sizes), query_norm="head", windows=windows), length


def _sparse_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    step = fields.whole("decoder_sparse_step")
    dense = {layer for layer in range(layers) if (layer + 1) % step}
    dense |= {layer for layer in fields.numbers("mlp_only_layers") if 0 <= layer < layers}
    return tuple(sorted(dense))


def _qwen2_moe(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq)
    experts = _experts(
        fields, "num_experts", fields.whole("moe_intermediate_size"),
        shared=fields.whole("shared_expert_intermediate_size"),
        normalize=fields.flag("norm_topk_prob"),
    )  # fmt: skip
    used, first = fields.flag("use_sliding_window"), fields.whole("max_window_layers", least=0)
    sliding = _layer_types(
        fields, sizes.layers, lambda layer: used and layer % 2 == 0 and layer < first
    )
    if any(sliding) and not used:
        raise ModelError(
            "has layers with a window, and use_sliding_window is false",
            fix="let the two agree",
            field="layer_types",
        )
    return replace(
        sizes, qkv_bias=fields.flag("qkv_bias"), experts=experts,
        dense_layers=_sparse_layers(fields, sizes.layers), windows=_windows(fields, sliding),
    ), length  # fmt: skip


def _qwen3_moe(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq)
    key = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    experts = _experts(
        fields, key, fields.whole("moe_intermediate_size"), normalize=fields.flag("norm_topk_prob")
    )
    windows = _window(fields, sizes.layers) if fields.flag("use_sliding_window") else ()
    return replace(
        _biased(fields, sizes), query_norm="head", experts=experts, windows=windows,
        dense_layers=_sparse_layers(fields, sizes.layers),
    ), length  # fmt: skip


def _gemma(fields: Fields, seq: int | None, act: str = "hidden_act") -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq, act=act)
    fields.fixed("use_bidirectional_attention", "attention that looks ahead is not built")
    if act == "hidden_act" and fields.text(act) == "gelu":
        sizes = replace(sizes, activation="gelu_tanh")  # what the released models mean by it
    return replace(
        _biased(fields, sizes), norm=replace(sizes.norm, shift=1.0), embed_scale=sizes.width**0.5
    ), length


def _gemma2(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _gemma(fields, seq, "hidden_activation")
    sliding = _layer_types(fields, sizes.layers, lambda layer: layer % 2 == 0)
    return replace(
        sizes, place="both", windows=_windows(fields, sliding),
        attention_scale=fields.number("query_pre_attn_scalar", least=1e-9) ** -0.5,
        softcap=_cap(fields, "attn_logit_softcapping"),
        final_softcap=_cap(fields, "final_logit_softcapping"),
    ), length  # fmt: skip


def _cap(fields: Fields, name: str) -> float:
    return 0.0 if fields.switched_off(name) else fields.number(name, least=1e-9)


def _gemma3(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq, act="hidden_activation", rope=False)
    fields.fixed("use_bidirectional_attention", "attention that looks ahead is not built")
    pattern = fields.whole("sliding_window_pattern")
    sliding = _layer_types(fields, sizes.layers, lambda layer: (layer + 1) % pattern != 0)
    sizes = replace(
        _biased(fields, sizes), norm=replace(sizes.norm, shift=1.0), embed_scale=sizes.width**0.5,
        query_norm="head", place="both", windows=_windows(fields, sliding),
        attention_scale=fields.number("query_pre_attn_scalar", least=1e-9) ** -0.5,
        final_softcap=_cap(fields, "final_logit_softcapping"),
    )  # fmt: skip
    return replace(
        sizes, ropes=_two_ropes(fields, sizes, sliding, length, "rope_local_base_freq")
    ), length


def _two_ropes(
    fields: Fields, sizes: DecoderSizes, sliding: tuple[bool, ...], length: int, local: str
) -> tuple[Rope, ...]:
    """Layers with a window turn at a speed of their own; only the others are stretched."""
    given = fields.mapping("rope_parameters")
    for name in given:
        if name not in (SLIDING, FULL):
            raise ModelError(
                "stands among the kinds of layers", fix=f"give {SLIDING} and {FULL}",
                field=f"rope_parameters.{name}"[:80],
            )  # fmt: skip
    for name in (SLIDING, FULL):
        if not isinstance(given.get(name) or {}, dict):
            raise ModelError("is no object", fix="give one", field=f"rope_parameters.{name}")
    settings = _settings(fields, sizes, length)
    scaling = fields.mapping("rope_scaling")
    if scaling.get("type") is not None and scaling.get("rope_type") is None:
        raise ModelError(
            f"is {str(scaling['type'])[:60]!r}, which `transformers` does not read for this family",
            fix="write rope_type", field="rope_scaling.type",
        )  # fmt: skip
    far = {**(given.get(FULL) or {}), **scaling}
    full = read_rope(fields, settings, far)
    near = read_rope(fields, replace(settings, theta=local), given.get(SLIDING) or {})
    return tuple(near if has else full for has in sliding)


def _phi3(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq, rope=False)
    settings = replace(
        _settings(fields, sizes, length, partial=True),
        share=fields.number("partial_rotary_factor"),
        original=fields.whole("original_max_position_embeddings"),
        renamed=(("su", "longrope"), ("yarn", "longrope")),
    )
    names = Names(qkv="qkv_proj", gate_up="gate_up_proj")
    return replace(
        sizes, rope=read_rope(fields, settings), windows=_window(fields, sizes.layers), names=names
    ), length


def _llama4(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq, interleaved=True)
    layers = sizes.layers
    every = fields.whole("no_rope_layer_interval")
    turned = fields.numbers("no_rope_layers") or tuple(
        int((layer + 1) % every != 0) for layer in range(layers)
    )
    if len(turned) != layers or any(value not in (0, 1) for value in turned):
        raise fields.wrong("no_rope_layers", f"{layers} of 0 and 1 are needed")
    types = fields.texts("layer_types", (CHUNKED, FULL), layers) or tuple(
        CHUNKED if has else FULL for has in turned
    )
    step = fields.whole("interleave_moe_layer_step")
    sparse = (
        fields.numbers("moe_layers") if fields.has("moe_layers") else range(step - 1, layers, step)
    )
    experts = _experts(
        fields, "num_local_experts", sizes.inner, score="sigmoid", normalize=False,
        shared=sizes.inner, shared_gate=False, weigh_inputs=True,
    )  # fmt: skip
    tuned = fields.flag("attn_temperature_tuning")
    temperature = fields.number("floor_scale", least=1e-9), fields.number("attn_scale")
    return replace(
        _biased(fields, sizes), experts=experts,
        dense_layers=tuple(sorted(set(range(layers)) - set(sparse))),
        dense_inner=fields.whole("intermediate_size_mlp"),
        ropes=tuple(sizes.rope if has else None for has in turned),
        chunks=tuple(fields.whole("attention_chunk_size") if t == CHUNKED else 0 for t in types),
        query_norm="l2" if fields.flag("use_qk_norm") else "",
        temperature=temperature if tuned else None,
        names=Names(mlp="feed_forward", sparse="feed_forward", router="router", experts="in_first"),
    ), length  # fmt: skip


def _deepseek(
    fields: Fields, seq: int | None, interleaved: bool, experts: Callable[[Fields], Experts]
) -> tuple[DecoderSizes, int]:
    usual = {name: value for name, value in fields.defaults.items() if name != "head_dim"}
    sizes, length = _sizes(Fields(fields.values, usual), seq, rope=False)
    heads = fields.maybe("num_key_value_heads") or sizes.heads
    if heads != sizes.heads:
        raise fields.wrong("num_key_value_heads", "latent attention has as many as queries")
    latent = LatentAttention(
        0 if fields.switched_off("q_lora_rank") else fields.whole("q_lora_rank"),
        fields.whole("kv_lora_rank"),
        fields.whole("qk_rope_head_dim"),
        fields.whole("qk_nope_head_dim"),
        fields.whole("v_head_dim"),
        fields.flag("attention_bias"),
    )
    settings = RopeSettings(
        latent.rope, length, fields.whole("max_position_embeddings"), interleaved=interleaved
    )
    if (fields.maybe("head_dim") or latent.rope) != latent.rope:
        raise fields.wrong("head_dim", f"the part that turns, qk_rope_head_dim {latent.rope}")
    rope = read_rope(fields, settings)
    given = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    scale = (latent.nope + latent.rope) ** -0.5
    if rope.frequencies and given.get("mscale_all_dim"):
        scale *= yarn_length(given["factor"], given["mscale_all_dim"]) ** 2
    dense = fields.whole("first_k_dense_replace", least=0, most=MAX_LAYERS)
    return replace(
        sizes, latent=latent, rope=rope, attention_scale=scale, kv_heads=0,
        head_size=latent.value, experts=experts(fields),
        dense_layers=tuple(range(min(dense, sizes.layers))), names=Names(shared="shared_experts"),
    ), length  # fmt: skip


def _routed(fields: Fields, **more: Any) -> Experts:
    inner = fields.whole("moe_intermediate_size")
    return _experts(
        fields, "n_routed_experts", inner, shared=inner * fields.whole("n_shared_experts"),
        shared_gate=False, scale=fields.number("routed_scaling_factor"), **more,
    )  # fmt: skip


def _groups(fields: Fields, experts: Experts, group_top: int) -> Experts:
    groups, chosen = fields.whole("n_group"), fields.whole("topk_group")
    fields.divides("n_group", "n_routed_experts", groups, experts.count)
    each = experts.count // groups
    if chosen > groups or chosen * each < experts.top_k or each < group_top:
        raise fields.wrong(
            "topk_group", f"at most n_group {groups}, with room for {experts.top_k} experts"
        )
    if groups == 1:
        return experts
    return replace(experts, groups=groups, top_groups=chosen, group_top=group_top)


def _deepseek_v2(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    def experts(fields: Fields) -> Experts:
        fields.fixed("norm_topk_prob", "gates that sum to 1 are not computed by this family")
        fields.fixed("scoring_func", "give the configuration of the published model")
        fields.fixed("moe_layer_freq", "experts stand in every layer after the first dense ones")
        method = fields.text("topk_method")
        routed = _routed(fields, normalize=False)
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.wrong("topk_method", "known are greedy and group_limited_greedy")
        return routed if method == "greedy" else _groups(fields, routed, 1)

    sizes, length = _deepseek(fields, seq, True, experts)
    return replace(sizes, mlp_bias=fields.flag("mlp_bias")), length


def _deepseek_v3(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    def experts(fields: Fields) -> Experts:
        fields.fixed("scoring_func", "give the configuration of the published model")
        fields.fixed("moe_layer_freq", "experts stand in every layer after the first dense ones")
        fields.fixed("topk_method", "give the configuration of the published model")
        routed = _routed(
            fields, score="sigmoid", normalize=fields.flag("norm_topk_prob"), normalize_eps=1e-20,
            correction=True,
        )  # fmt: skip
        return _groups(fields, routed, 2)

    return _deepseek(fields, seq, fields.flag("rope_interleave"), experts)


def _gpt_oss(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    given = fields.values.get("rope_scaling") or fields.values.get("rope_parameters")
    if given is None:  # the default of the family, which a missing field means
        theta = fields.values.get("rope_theta")
        usual = {**GPT_OSS_ROPE, **({} if theta is None else {"rope_theta": theta})}
        fields = Fields({**fields.values, "rope_parameters": usual}, fields.defaults)
    sizes, length = _sizes(fields, seq)
    fields.fixed("hidden_act", "the experts of this family have an activation of their own")
    sliding = _layer_types(fields, sizes.layers, lambda layer: layer % 2 == 0)
    clamp = fields.number("swiglu_alpha"), fields.number("swiglu_limit", least=1e-9)
    experts = _experts(fields, _count(fields), sizes.inner, bias=True, clamp=clamp)
    return replace(
        _biased(fields, sizes), sinks=True, windows=_windows(fields, sliding), experts=experts,
        names=Names(router="router", experts="interleaved"),
    ), length  # fmt: skip


def _gpt2(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    width, heads, positions = (fields.whole(n) for n in ("n_embd", "n_head", "n_positions"))
    fields.divides("n_head", "n_embd", heads, width)
    fields.flag("reorder_and_upcast_attn")  # the same numbers, rounded later
    names = Names(
        model="transformer", embed="wte", positions="wpe", layers="h", final="ln_f",
        norms=("ln_1", "ln_2", "", ""), attention="attn", qkv="c_attn", output="c_proj",
        gate_up="c_fc", down="c_proj", transposed=True,
    )  # fmt: skip
    sizes = DecoderSizes(
        fields.whole("n_layer", most=MAX_LAYERS), width, fields.maybe("n_inner") or 4 * width,
        heads, vocab=fields.whole("vocab_size"), tied=fields.flag("tie_word_embeddings"),
        qkv_bias=True, output_bias=True, mlp_bias=True, gated=False, rope=None,
        activation=fields.activation("activation_function"), positions=positions,
        norm=Norm("layer_norm", fields.number("layer_norm_epsilon")), names=names,
        attention_scale=None if fields.flag("scale_attn_weights") else 1.0,
        layer_scaled=fields.flag("scale_attn_by_inverse_layer_idx"),
    )  # fmt: skip
    return sizes, seq or min(positions, USUAL_SEQ)


def _gpt_neox(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq, eps="layer_norm_eps", rope=False)
    settings = replace(
        _settings(fields, sizes, length, partial=True),
        share=fields.number("rotary_pct"), theta="rotary_emb_base",
    )  # fmt: skip
    names = Names(
        model="gpt_neox", embed="embed_in", final="final_layer_norm", attention="attention",
        qkv="query_key_value", output="dense", gate_up="dense_h_to_4h", down="dense_4h_to_h",
        packing="heads",
    )  # fmt: skip
    return replace(
        _biased(fields, sizes), rope=read_rope(fields, settings), gated=False, mlp_bias=True,
        norm=replace(sizes.norm, kind="layer_norm"), names=names,
        place="parallel_two" if fields.flag("use_parallel_residual") else "pre",
    ), length  # fmt: skip


def _opt(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.divides("num_attention_heads", "hidden_size", heads, width)
    positions, bias = fields.whole("max_position_embeddings"), fields.flag("enable_bias")
    before = fields.flag("do_layer_norm_before")
    embed_width = fields.maybe("word_embed_proj_dim") or width
    names = Names(
        model="model.decoder", positions="embed_positions", final="final_layer_norm",
        norms=("self_attn_layer_norm", "final_layer_norm", "", ""), output="out_proj", mlp="",
        gate_up="fc1", down="fc2",
    )  # fmt: skip
    sizes = DecoderSizes(
        fields.whole("num_hidden_layers", most=MAX_LAYERS), width, fields.whole("ffn_dim"), heads,
        vocab=fields.whole("vocab_size"), tied=fields.flag("tie_word_embeddings"), qkv_bias=bias,
        output_bias=bias, mlp_bias=bias, gated=False, rope=None, positions=positions,
        position_offset=2, activation=fields.activation("activation_function"),
        norm=Norm("layer_norm", affine=fields.flag("layer_norm_elementwise_affine")),
        place="pre" if before else "after_add",
        final_norm=before and not fields.flag("_remove_final_layer_norm"),
        embed_width=0 if embed_width == width else embed_width, names=names,
    )  # fmt: skip
    return sizes, seq or min(positions, USUAL_SEQ)


def _falcon(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    fields.fixed("alibi", "biases by distance are not built; rotary positions are")
    sizes, length = _sizes(fields, seq, eps="layer_norm_epsilon", act="activation")
    heads, newer = sizes.heads, fields.flag("new_decoder_architecture")
    one_key = fields.flag("multi_query") and not newer
    kv_heads = 1 if one_key else fields.maybe("num_kv_heads") or heads
    if not newer and not one_key and kv_heads != heads:
        raise fields.wrong("num_kv_heads", "this architecture has one, or as many as queries")
    fields.divides("num_kv_heads", "num_attention_heads", kv_heads, heads)
    parallel = fields.flag("parallel_attn")
    norms = fields.maybe("num_ln_in_parallel_attn") or (2 if newer else 1)
    two = newer and norms == 2
    if (newer and not parallel) or norms > 2 or (norms == 2 and not newer):
        raise fields.wrong(
            "parallel_attn" if not parallel else "num_ln_in_parallel_attn",
            "the new architecture has parallel attention and one or two norms, the old one norm",
        )
    names = Names(
        model="transformer", embed="word_embeddings", layers="h", final="ln_f",
        norms=("ln_attn", "ln_mlp", "", "") if two else Names().norms,
        attention="self_attention", qkv="query_key_value", output="dense",
        gate_up="dense_h_to_4h", down="dense_4h_to_h", packing="rows" if one_key else "heads",
    )  # fmt: skip
    bias = fields.flag("bias")
    return replace(
        sizes, kv_heads=0 if kv_heads == heads else kv_heads, qkv_bias=bias, output_bias=bias,
        mlp_bias=bias, gated=False, norm=replace(sizes.norm, kind="layer_norm"), names=names,
        inner=fields.maybe("ffn_hidden_size") or 4 * sizes.width,
        place="parallel_two" if two else "parallel" if parallel else "pre",
    ), length  # fmt: skip


def _olmo(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(Fields(fields.values, {**fields.defaults, "eps": 1e-5}), seq, eps="eps")
    norm = Norm("layer_norm", affine=False)
    return replace(_biased(fields, sizes), norm=norm, clip=_cap(fields, "clip_qkv")), length


def _olmo2(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq)
    return replace(_biased(fields, sizes), query_norm="whole", place="post"), length


def _olmo3(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq, rope=False)
    sliding = _layer_types(fields, sizes.layers, lambda layer: (layer + 1) % 4 != 0)
    # Without rope_parameters the windowed layers keep the default speed, whatever rope_theta says.
    local = Fields({**fields.values, "local": None}, {**fields.defaults, "local": 500000.0})
    return replace(
        _biased(fields, sizes), query_norm="whole", place="post", windows=_windows(fields, sliding),
        ropes=_two_ropes(local, sizes, sliding, length, "local"),
    ), length  # fmt: skip


def _olmoe(fields: Fields, seq: int | None) -> tuple[DecoderSizes, int]:
    sizes, length = _sizes(fields, seq)
    experts = _experts(fields, "num_experts", sizes.inner, normalize=fields.flag("norm_topk_prob"))
    return replace(
        _biased(fields, sizes), query_norm="whole", clip=_cap(fields, "clip_qkv"), experts=experts
    ), length


_CORE: Defaults = {
    "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, **ROPE_FIELDS,
}  # fmt: skip
_LLAMA: Defaults = {
    **_CORE, "intermediate_size": 11008, "num_key_value_heads": None, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "head_dim": None,
}  # fmt: skip
_MISTRAL: Defaults = {
    **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
_QWEN2: Defaults = {
    **_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_SPARSE: Defaults = {
    "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False, "num_experts": None,
    "num_experts_per_tok": None, "moe_intermediate_size": None,
}  # fmt: skip
_GEMMA: Defaults = {
    **_LLAMA, "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "attention_bias": False,
    "tie_word_embeddings": True, "use_bidirectional_attention": None,
}  # fmt: skip
_GEMMA2: Defaults = {
    **{name: value for name, value in _GEMMA.items() if name != "hidden_act"},
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
_GEMMA3: Defaults = {
    **{name: value for name, value in _GEMMA2.items() if name != "attn_logit_softcapping"},
    "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6, "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}  # fmt: skip
_DEEPSEEK: Defaults = {
    **_LLAMA,
    "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": None,
    "topk_group": None, "first_k_dense_replace": 0, "moe_layer_freq": 1,
    "num_experts_per_tok": None,
}  # fmt: skip
_OLMO: Defaults = {**_LLAMA, "vocab_size": 50304, "attention_bias": False, "rms_norm_eps": 1e-5}
GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
}  # fmt: skip
# Another name of what is read, filled in by `transformers`, or of the training only.
_DERIVED = frozenset({"qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers",
                      "ep_size"})  # fmt: skip

DECODERS: dict[str, Family] = {
    "llama": Family(
        _llama, {**_LLAMA, "attention_bias": False, "mlp_bias": False}
    ),
    "llama4_text": Family(
        _llama4,
        {
            **_LLAMA, "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_experts_per_tok": 1,
            "num_local_experts": 16, "moe_layers": None, "interleave_moe_layer_step": 1,
            "use_qk_norm": True, "no_rope_layers": None, "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192, "layer_types": None, "attn_temperature_tuning": True,
            "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False,
        },
        frozenset({"for_llm_compressor"}),
    ),
    "mistral": Family(_mistral, _MISTRAL),
    "mixtral": Family(
        _mixtral,
        {
            **_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
            "num_local_experts": 8, "num_experts": None, "num_experts_per_tok": 2,
        },
    ),
    "qwen2": Family(_qwen2, _QWEN2),
    "qwen2_moe": Family(
        _qwen2_moe,
        {
            **_QWEN2, **_SPARSE, "hidden_size": 2048, "intermediate_size": 5632,
            "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
            "num_experts": 60, "num_experts_per_tok": 4, "qkv_bias": True,
        },
    ),
    "qwen3": Family(_qwen3, {**_QWEN2, "head_dim": 128, "attention_bias": False}),
    "qwen3_moe": Family(
        _qwen3_moe,
        {
            **{n: v for n, v in _QWEN2.items() if n not in ("max_window_layers", "layer_types")},
            **_SPARSE, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
            "num_key_value_heads": 4, "attention_bias": False,
            "moe_intermediate_size": 768, "num_experts": 128, "num_local_experts": None,
            "num_experts_per_tok": 8,
        },
        frozenset({"max_window_layers"}),
    ),
    "gemma": Family(_gemma, _GEMMA, frozenset({"hidden_activation"})),
    "gemma2": Family(_gemma2, _GEMMA2, frozenset({"hidden_act"})),
    "gemma3_text": Family(
        _gemma3, _GEMMA3,
        frozenset({"hidden_act", "attn_logit_softcapping", "_sliding_window_pattern"}),
    ),
    "phi3": Family(
        _phi3,
        {
            **_LLAMA, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None,
            "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0,
        },
    ),
    "deepseek_v2": Family(
        _deepseek_v2,
        {
            **_DEEPSEEK, "vocab_size": 102400, "mlp_bias": False, "n_routed_experts": 64,
            "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy",
            "norm_topk_prob": False, "moe_intermediate_size": 1407, "scoring_func": "softmax",
        },
        _DERIVED,
    ),
    "deepseek_v3": Family(
        _deepseek_v3,
        {
            **_DEEPSEEK, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
            "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 4096,
            "n_routed_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
            "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
            "norm_topk_prob": True, "moe_intermediate_size": 2048, "rope_interleave": True,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        },
        _DERIVED,
    ),
    "gpt2": Family(
        _gpt2,
        {
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False, "tie_word_embeddings": True,
        },
        frozenset({"n_ctx", "summary_type", "summary_use_proj", "summary_activation",
                   "summary_proj_to_labels", "summary_first_dropout"}),
    ),
    "gpt_neox": Family(
        _gpt_neox,
        {
            **{name: value for name, value in _CORE.items() if name != "rope_theta"},
            "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44,
            "num_attention_heads": 64, "intermediate_size": 24576, "hidden_act": "gelu",
            "layer_norm_eps": 1e-5, "use_parallel_residual": True, "attention_bias": True,
            "rotary_pct": 0.25, "rotary_emb_base": 10000.0,
        },
        frozenset({"is_decoder"}),
    ),
    "opt": Family(
        _opt,
        {
            "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
            "max_position_embeddings": 2048, "do_layer_norm_before": True,
            "_remove_final_layer_norm": False, "word_embed_proj_dim": None,
            "num_attention_heads": 12, "activation_function": "relu", "enable_bias": True,
            "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
        },
    ),
    "falcon": Family(
        _falcon,
        {
            **_CORE, "vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71,
            "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5, "num_kv_heads": None,
            "alibi": False, "new_decoder_architecture": False, "multi_query": True,
            "parallel_attn": True, "bias": False, "ffn_hidden_size": None, "activation": "gelu",
            "tie_word_embeddings": True,
        },
    ),
    "olmo": Family(
        _olmo,
        {**{n: v for n, v in _OLMO.items() if n != "rms_norm_eps"}, "clip_qkv": None},
    ),
    "olmo2": Family(_olmo2, _OLMO),
    "olmo3": Family(
        _olmo3, {**_OLMO, "rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None}
    ),
    "olmoe": Family(
        _olmoe,
        {
            **{name: value for name, value in _OLMO.items() if name != "head_dim"},
            "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
            "num_attention_heads": 16, "max_position_embeddings": 4096, "clip_qkv": None,
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        },
    ),
    "gpt_oss": Family(
        _gpt_oss,
        {
            **_LLAMA, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "num_local_experts": 128,
            "num_experts": None, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0, "layer_types": None, "attention_bias": True,
        },
        frozenset({"experts_per_token", "initial_context_length"}),
    ),
}  # fmt: skip
