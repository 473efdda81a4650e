"""Families of Hugging Face configurations that are not decoders alone: BERT, T5."""

from partita.zoo.bert import BertSizes
from partita.zoo.fields import MAX_LAYERS, Fields
from partita.zoo.hf_decoders import USUAL_SEQ, Family
from partita.zoo.t5 import T5Sizes


def _bert(fields: Fields, seq: int | None) -> tuple[BertSizes, int]:
    sizes = BertSizes(
        layers=fields.whole("num_hidden_layers", most=MAX_LAYERS),
        width=fields.whole("hidden_size"),
        heads=fields.whole("num_attention_heads"),
        inner=fields.whole("intermediate_size"),
        positions=fields.whole("max_position_embeddings"),
        vocab=fields.whole("vocab_size"),
        token_types=fields.whole("type_vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
    )
    fields.divides("num_attention_heads", "hidden_size", sizes.heads, sizes.width)
    return sizes, seq or min(sizes.positions, USUAL_SEQ)


def _t5(fields: Fields, seq: int | None) -> tuple[T5Sizes, int]:
    activation = fields.text("feed_forward_proj")
    gated = activation.startswith("gated-")
    layers = fields.whole("num_layers", most=MAX_LAYERS)
    sizes = T5Sizes(
        layers=layers,
        width=fields.whole("d_model"),
        inner=fields.whole("d_ff"),
        heads=fields.whole("num_heads"),
        head_size=fields.whole("d_kv"),
        decoder_layers=fields.maybe("num_decoder_layers") or layers,
        vocab=fields.whole("vocab_size"),
        buckets=fields.whole("relative_attention_num_buckets"),
        gated=gated,
        activation=fields.function(activation.removeprefix("gated-"), "feed_forward_proj"),
        tied=fields.flag("tie_word_embeddings"),
    )
    return sizes, seq or fields.whole("n_positions")


ENCODERS: dict[str, Family] = {
    "bert": Family(
        _bert,
        {
            "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
            "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512,
            "type_vocab_size": 2, "tie_word_embeddings": True,
        },
    ),
    "t5": Family(
        _t5,
        {
            "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
            "num_decoder_layers": None, "num_heads": 8, "relative_attention_num_buckets": 32,
            "feed_forward_proj": "relu", "n_positions": 512, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
