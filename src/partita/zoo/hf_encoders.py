"""Families of Hugging Face configurations that are not decoders alone: which fields they read.

See `hf_decoders.py`. BERT, RoBERTa, T5, BART and Whisper have the heads that they are trained with,
ViT the one that tells classes apart; CLIP is both towers with how well they agree, or one of them
with its projection. Mamba-2 is a language model.
"""

from dataclasses import replace
from typing import Any

from partita.errors import ModelError
from partita.zoo.bert import BertSizes
from partita.zoo.decoder import DecoderSizes, Names, Norm
from partita.zoo.fields import MAX_LAYERS, Fields
from partita.zoo.hf_decoders import USUAL_SEQ, Defaults, Family
from partita.zoo.mamba import MambaSizes
from partita.zoo.t5 import T5Sizes
from partita.zoo.towers import (
    ClipImages,
    ClipSizes,
    ClipText,
    ImageSizes,
    Seq2SeqSizes,
    VitClassifier,
)

ENCODER_DECODER = "give the configuration of the model with both stacks"


def _bert(fields: Fields, seq: int | None) -> tuple[BertSizes, int]:
    activation = fields.activation("hidden_act")
    sizes = BertSizes(
        layers=fields.whole("num_hidden_layers", most=MAX_LAYERS),
        width=fields.whole("hidden_size"),
        heads=fields.whole("num_attention_heads"),
        inner=fields.whole("intermediate_size"),
        positions=fields.whole("max_position_embeddings"),
        vocab=fields.whole("vocab_size"),
        token_types=fields.whole("type_vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        eps=fields.number("layer_norm_eps"),
        activation=activation,
        head_activation=activation,
    )
    fields.divides("num_attention_heads", "hidden_size", sizes.heads, sizes.width)
    return sizes, seq or min(sizes.positions, USUAL_SEQ)


def _roberta(fields: Fields, seq: int | None) -> tuple[BertSizes, int]:
    sizes, _ = _bert(fields, seq)
    # Positions are counted from behind the id of the padding, which has a row of its own.
    offset = fields.whole("pad_token_id", least=0) + 1
    if offset >= sizes.positions:
        raise fields.wrong("pad_token_id", "fewer than max_position_embeddings are needed")
    sizes = replace(
        sizes, model="roberta", head=("lm_head", "dense", "layer_norm"), head_activation="gelu",
        offset=offset,
    )  # fmt: skip
    return sizes, seq or min(sizes.positions - offset, USUAL_SEQ)


def _t5(fields: Fields, seq: int | None) -> tuple[T5Sizes, int]:
    fields.fixed("is_encoder_decoder", ENCODER_DECODER)
    gated, activation = _t5_feed_forward(fields)
    layers = fields.whole("num_layers", most=MAX_LAYERS)
    tied = fields.flag("tie_word_embeddings")
    buckets = fields.whole("relative_attention_num_buckets", least=4)
    if buckets % 4:
        raise fields.wrong("relative_attention_num_buckets", "a multiple of 4 is needed")
    sizes = T5Sizes(
        layers=layers,
        width=fields.whole("d_model"),
        inner=fields.whole("d_ff"),
        heads=fields.whole("num_heads"),
        head_size=fields.whole("d_kv"),
        decoder_layers=fields.maybe("num_decoder_layers") or layers,
        vocab=fields.whole("vocab_size"),
        buckets=buckets,
        gated=gated,
        activation=activation,
        tied=tied,
        scaled=_said(fields, "scale_decoder_outputs", tied),
        eps=fields.number("layer_norm_epsilon"),
        farthest=fields.whole("relative_attention_max_distance", least=buckets // 2 + 1),
    )
    return sizes, seq or fields.whole("n_positions")


def _t5_feed_forward(fields: Fields) -> tuple[bool, str]:
    """Is it gated, and by which function?

    Files that were written by the configuration class say both once more; that counts.
    """
    text, name = fields.text("feed_forward_proj"), "feed_forward_proj"
    function = text.removeprefix("gated-")
    fields.function(function, name)
    if text == "gated-gelu":  # the published models were trained with the approximation by tanh
        function = "gelu_new"
    if fields.has("dense_act_fn"):
        function, name = fields.text("dense_act_fn"), "dense_act_fn"
    activation = fields.function(function, name)
    if not activation:
        raise fields.wrong(name, "a function is needed")
    return _said(fields, "is_gated_act", text.startswith("gated-")), activation


def _said(fields: Fields, name: str, otherwise: bool) -> bool:
    """What a file says of something that else follows from other fields; null is a no."""
    if fields.has(name):
        return fields.flag(name)
    return otherwise and name not in fields.values


def _stack(fields: Fields, side: str, positions: int, offset: int, **more: Any) -> DecoderSizes:
    """The encoder or the decoder of BART or Whisper."""
    width, heads = fields.whole("d_model"), fields.whole(f"{side}_attention_heads")
    fields.divides(f"{side}_attention_heads", "d_model", heads, width)
    names = Names(
        positions="embed_positions", head=more.pop("head", "lm_head"),
        norms=("self_attn_layer_norm", "final_layer_norm", "", ""), output="out_proj", mlp="",
        gate_up="fc1", down="fc2",
    )  # fmt: skip
    return DecoderSizes(
        _num_layers(fields, side), width, fields.whole(f"{side}_ffn_dim"),
        heads, vocab=fields.whole("vocab_size"), tied=fields.flag("tie_word_embeddings"),
        qkv_bias=True, output_bias=True, mlp_bias=True, norm=Norm("layer_norm"), gated=False,
        rope=None, activation=fields.activation("activation_function"), positions=positions,
        position_offset=offset, causal=side == "decoder", names=names, **more,
    )  # fmt: skip


def _num_layers(fields: Fields, side: str) -> int:
    """Of the encoder there are two names, of which `transformers` takes the one that it writes."""
    layers = fields.whole(f"{side}_layers", most=MAX_LAYERS)
    if side == "decoder" or not fields.has("num_hidden_layers"):
        return layers
    other = fields.whole("num_hidden_layers", most=MAX_LAYERS)
    if fields.values.get("encoder_layers") not in (None, other):
        raise fields.wrong("num_hidden_layers", f"it is another name of encoder_layers {layers}")
    return other


def _bart(fields: Fields, seq: int | None) -> tuple[Seq2SeqSizes, int]:
    positions = fields.whole("max_position_embeddings")
    fields.fixed("is_encoder_decoder", ENCODER_DECODER)
    for name in ("add_final_layer_norm", "normalize_before", "static_position_embeddings"):
        fields.fixed(name, "give the configuration of a BART model")
    for name in ("add_bias_logits", "extra_pos_embeddings", "normalize_embedding"):
        fields.fixed(name, "give the configuration of a BART model")
    scale = fields.whole("d_model") ** 0.5 if fields.flag("scale_embedding") else 1.0
    encoder, decoder = (
        _stack(fields, side, positions, 2, place="after_add", final_norm=False, embed_scale=scale)
        for side in ("encoder", "decoder")
    )
    return Seq2SeqSizes(encoder, decoder), seq or min(positions, USUAL_SEQ)


def _whisper(fields: Fields, seq: int | None) -> tuple[Seq2SeqSizes, int]:
    fields.fixed("is_encoder_decoder", ENCODER_DECODER)
    fields.flag("scale_embedding")  # read by the model, and used nowhere in it
    source, target = fields.whole("max_source_positions"), fields.whole("max_target_positions")
    encoder, decoder = (
        _stack(fields, side, positions, 0, head="proj_out", key_bias=False)
        for side, positions in (("encoder", source), ("decoder", target))
    )
    sizes = Seq2SeqSizes(encoder, decoder, fields.whole("num_mel_bins"), False, False)
    return sizes, seq or min(target, USUAL_SEQ)


def _classes(fields: Fields) -> int:
    """How many classes there are: as many as have labels."""
    if fields.has("num_labels"):
        return fields.whole("num_labels")
    if not fields.has("id2label"):
        return 2
    labels = fields.mapping("id2label")
    if not labels:
        raise fields.wrong("id2label", "at least one label is needed")
    return len(labels)


def _vit(fields: Fields, seq: int | None) -> tuple[VitClassifier, int]:
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.divides("num_attention_heads", "hidden_size", heads, width)
    image = ImageSizes(
        fields.whole("image_size"), fields.whole("patch_size"), fields.whole("num_channels")
    )
    if image.size % image.patch:
        raise ModelError(
            f"{image.patch} does not divide image_size {image.size}", fix="choose a divisor",
            field="patch_size",
        )  # fmt: skip
    bias = fields.flag("qkv_bias")
    names = Names(
        norms=("layernorm_before", "layernorm_after", "", ""), attention="attention",
        gate_up="fc1", down="fc2",
    )  # fmt: skip
    stack = DecoderSizes(
        fields.whole("num_hidden_layers", most=MAX_LAYERS), width,
        fields.whole("intermediate_size"), heads, qkv_bias=bias, output_bias=True, mlp_bias=True,
        norm=Norm("layer_norm", fields.number("layer_norm_eps")), gated=False, rope=None,
        activation=fields.activation("hidden_act"), causal=False, names=names,
    )  # fmt: skip
    return VitClassifier(stack, image, _classes(fields)), image.positions


def _clip_stack(fields: Fields, **more: Any) -> DecoderSizes:
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.divides("num_attention_heads", "hidden_size", heads, width)
    names = Names(
        embed="token_embedding", positions="position_embedding", layers="layers",
        norms=("layer_norm1", "layer_norm2", "", ""), output="out_proj", gate_up="fc1", down="fc2",
    )  # fmt: skip
    return DecoderSizes(
        fields.whole("num_hidden_layers", most=MAX_LAYERS), width,
        fields.whole("intermediate_size"), heads, qkv_bias=True, output_bias=True, mlp_bias=True,
        norm=Norm("layer_norm", fields.number("layer_norm_eps")), gated=False, rope=None,
        activation=fields.activation("hidden_act"), names=names, **more,
    )  # fmt: skip


def _clip_text_tower(fields: Fields) -> ClipText:
    positions = fields.whole("max_position_embeddings")
    stack = _clip_stack(fields, vocab=fields.whole("vocab_size"), positions=positions)
    ending = fields.whole("eos_token_id", least=0)
    # Models with the id 2 are of before it was said: their texts end at the largest id.
    return ClipText(stack, None if ending == 2 else ending)


def _clip_image_tower(fields: Fields) -> ClipImages:
    image = ImageSizes(
        fields.whole("image_size"), fields.whole("patch_size"), fields.whole("num_channels")
    )
    if image.patch > image.size:
        raise ModelError(
            f"{image.patch} is more than image_size {image.size}", fix="choose a smaller patch",
            field="patch_size",
        )  # fmt: skip
    return ClipImages(_clip_stack(fields, causal=False), image)


def _clip_text(fields: Fields, seq: int | None) -> tuple[ClipSizes, int]:
    tower = _clip_text_tower(fields)
    sizes = ClipSizes(tower, None, fields.whole("projection_dim"))
    return sizes, seq or tower.stack.positions


def _clip_images(fields: Fields, seq: int | None) -> tuple[ClipSizes, int]:
    tower = _clip_image_tower(fields)
    return ClipSizes(None, tower, fields.whole("projection_dim")), tower.image.positions


def _part(fields: Fields, name: str, kind: str) -> Fields:
    """The fields of a tower: of its own configuration, or of the older one that counts instead."""
    older = fields.mapping(f"{name}_dict")
    family = ENCODERS[kind]
    part = Fields(older or fields.mapping(name), family.fields)
    try:
        part.check_all_known(kind, family.neutral)
    except ModelError as error:
        raise ModelError(error.found, fix=error.fix, field=f"{name}.{error.field}") from None
    return part


def _clip(fields: Fields, seq: int | None) -> tuple[ClipSizes, int]:
    text = _clip_text_tower(_part(fields, "text_config", "clip_text_model"))
    images = _clip_image_tower(_part(fields, "vision_config", "clip_vision_model"))
    sizes = ClipSizes(text, images, fields.whole("projection_dim"))
    return sizes, seq or text.stack.positions


def _mamba2(fields: Fields, seq: int | None) -> tuple[MambaSizes, int]:
    width, heads = fields.whole("hidden_size"), fields.whole("num_heads")
    size, groups = fields.whole("head_dim"), fields.whole("n_groups")
    if int(fields.number("expand") * width) != heads * size:
        raise ModelError(
            f"{fields.number('expand'):g} times hidden_size {width} is not num_heads {heads} times "
            f"head_dim {size}", fix="these must agree", field="expand",
        )  # fmt: skip
    fields.divides("n_groups", "num_heads", groups, heads)
    sizes = MambaSizes(
        fields.whole("num_hidden_layers", most=MAX_LAYERS), width, heads, size,
        fields.whole("state_size"), groups, fields.whole("conv_kernel"),
        fields.whole("vocab_size"), chunk=fields.whole("chunk_size"),
        eps=fields.number("layer_norm_epsilon"), bias=fields.flag("use_bias"),
        conv_bias=fields.flag("use_conv_bias"), activation=fields.activation("hidden_act"),
        tied=fields.flag("tie_word_embeddings"), limits=_time_steps(fields),
    )  # fmt: skip
    return sizes, seq or USUAL_SEQ


def _time_steps(fields: Fields) -> tuple[float, float | None]:
    """Least and largest; JSON has no word for infinity, writers use several."""
    value = fields.values.get("time_step_limit") or fields.defaults["time_step_limit"]
    if isinstance(value, list) and len(value) == 2:
        low, high = value
        unbounded = high in (None, "inf", "Infinity", float("inf"))
        fine = type(low) in (int, float) and low >= 0
        if fine and (unbounded or (type(high) in (int, float) and high > low)):
            return float(low), None if unbounded else float(high)
    raise fields.wrong("time_step_limit", "a least and a larger number are needed")


_BERT: Defaults = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2,
    "tie_word_embeddings": True, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip
_SEQ2SEQ: Defaults = {
    "encoder_layers": 12, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16,
    "decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16,
    "activation_function": "gelu", "d_model": 1024, "scale_embedding": False,
    "tie_word_embeddings": True, "is_encoder_decoder": True, "num_hidden_layers": None,
}  # fmt: skip

_CLIP_TEXT: Defaults = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "projection_dim": 512,
    "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "eos_token_id": 49407,
}  # fmt: skip
_CLIP_IMAGES: Defaults = {
    "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 512, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 32,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip

ENCODERS: dict[str, Family] = {
    "bert": Family(_bert, _BERT, frozenset({"position_embedding_type", "gradient_checkpointing"})),
    "roberta": Family(
        _roberta, {**_BERT, "vocab_size": 50265, "pad_token_id": 1},
        frozenset({"position_embedding_type", "gradient_checkpointing"}),
    ),
    "t5": Family(
        _t5,
        {
            "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
            "num_decoder_layers": None, "num_heads": 8, "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
            "feed_forward_proj": "relu", "n_positions": 512, "tie_word_embeddings": True,
            "scale_decoder_outputs": None, "dense_act_fn": None, "is_gated_act": None,
            "is_encoder_decoder": True,
        },
    ),
    "bart": Family(
        _bart,
        {
            **_SEQ2SEQ, "vocab_size": 50265, "max_position_embeddings": 1024,
            "add_final_layer_norm": False, "normalize_before": False,
            "static_position_embeddings": False, "add_bias_logits": False,
            "extra_pos_embeddings": 2, "normalize_embedding": True,
        },
        frozenset({"classif_dropout", "gradient_checkpointing",
                   "force_bos_token_to_be_generated"}),
    ),
    "whisper": Family(
        _whisper,
        {
            **_SEQ2SEQ, "vocab_size": 51865, "num_mel_bins": 80, "encoder_layers": 4,
            "encoder_attention_heads": 6, "decoder_layers": 4, "decoder_attention_heads": 6,
            "decoder_ffn_dim": 1536, "encoder_ffn_dim": 1536, "d_model": 384,
            "max_source_positions": 1500, "max_target_positions": 448,
        },
        frozenset({
            "use_weighted_layer_sum", "classifier_proj_size",
            "apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks",
            "mask_feature_prob", "mask_feature_length", "mask_feature_min_masks",
            "median_filter_width", "forced_decoder_ids", "alignment_heads",
        }),
    ),
    "vit": Family(
        _vit,
        {
            "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "intermediate_size": 3072, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
            "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True,
            "num_labels": None, "id2label": None,
        },
        frozenset({"encoder_stride", "pooler_output_size", "pooler_act"}),
    ),
    "clip_text_model": Family(_clip_text, _CLIP_TEXT, frozenset()),
    "clip_vision_model": Family(_clip_images, _CLIP_IMAGES, frozenset()),
    "clip": Family(
        _clip,
        {
            "text_config": None, "vision_config": None, "text_config_dict": None,
            "vision_config_dict": None, "projection_dim": 512,
        },
        frozenset({"logit_scale_init_value"}),
    ),
    "mamba2": Family(
        _mamba2,
        {
            "num_heads": 128, "head_dim": 64, "vocab_size": 32768, "hidden_size": 4096,
            "state_size": 128, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5, "expand": 2,
            "conv_kernel": 4, "n_groups": 8, "use_bias": False, "use_conv_bias": True,
            "hidden_act": "silu", "chunk_size": 256, "tie_word_embeddings": False,
            "time_step_limit": [0.0, None],
        },
        # How time steps are drawn when training begins, and in which type sums are kept.
        frozenset({
            "time_step_rank", "time_step_min", "time_step_max", "time_step_floor",
            "rescale_prenorm_residual", "residual_in_fp32",
        }),
    ),
}  # fmt: skip
