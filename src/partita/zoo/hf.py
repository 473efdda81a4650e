"""Hugging Face `config.json` files as graphs, without the transformers package.

`model_type` chooses the family; a key that is missing or null has the family's documented default.
Keys that do not change shapes or work (dropout, rope scaling, token ids) are not looked at.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from partita.errors import ModelError
from partita.graph.record import Graph
from partita.zoo.bert import BertSizes, encoder
from partita.zoo.gpt import GptSizes, gpt
from partita.zoo.llama import DecoderSizes, Experts, decoder
from partita.zoo.t5 import T5Sizes, encoder_decoder

OPTIONS: dict[str, Any] = {"seq": 4096, "fused_attention": True}
USUAL_SEQ = 4096  # what is built where the model could take more
MAX_SIZE = 2**31
MAX_LAYERS = 1024
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh",
}  # fmt: skip


class Fields:
    """The keys of a configuration, each checked as it is asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def whole(self, name: str, default: int, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number within bounds."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, f"a whole number from {least} to {most} is needed")
        return value

    def maybe(self, name: str, default: int | None = None) -> int | None:
        """A positive whole number, or None."""
        value = self._get(name, default)
        return None if value is None else self.whole(name, default or 0)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false is needed")
        return value

    def text(self, name: str, default: str) -> str:
        """Text."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "text is needed")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty by default."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(name, "a list of whole numbers is needed")
        return tuple(value)

    def divides(self, part: str, whole: str, a: int, b: int) -> None:
        """Refuse a `part` that does not divide the `whole`."""
        if b % a:
            raise ModelError(f"{a} does not divide {whole} {b}", fix="choose a divisor", field=part)

    def _get(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def _wrong(self, name: str, needed: str) -> ModelError:
        text = repr(self.values.get(name))
        return ModelError(
            f"is {text if len(text) <= 60 else text[:57] + '...'}", fix=needed, field=name
        )


def build_config(
    config: dict[str, Any], name: str = "", *, batch: int = 1, seq: int | None = None,
    dtype: str | None = None, loss: bool = True, fused_attention: bool = True,
) -> Graph:  # fmt: skip
    """The graph of a configuration; `seq` and `dtype` are the configuration's unless given."""
    sizes, usual_seq = read_config(config)
    length = seq or usual_seq
    element = dtype or _dtype(Fields(config))
    label = name or str(config["model_type"])
    if isinstance(sizes, T5Sizes):
        return encoder_decoder(label, sizes, batch, length, length, element, loss, fused_attention)
    if isinstance(sizes, GptSizes):
        return gpt(label, sizes, batch, length, element, loss, fused_attention)
    if isinstance(sizes, BertSizes):
        return encoder(label, sizes, batch, length, element, loss, fused_attention)
    return decoder(label, sizes, batch, length, element, loss, fused_attention)


Sizes = GptSizes | BertSizes | DecoderSizes | T5Sizes
Read = tuple[Sizes, int]  # and the sequence length that is meant where none is given


def read_config(config: dict[str, Any]) -> Read:
    """The sizes that a configuration gives, and its usual sequence length."""
    fields = Fields(config)
    kind = fields.text("model_type", "")
    if kind not in FAMILIES:
        raise ModelError(
            f"is {kind[:60]!r}, a family that is not read",
            fix=f"read are {', '.join(FAMILIES)}",
            field="model_type",
        )
    return FAMILIES[kind](fields)


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    text = fields.text(key, "bfloat16").removeprefix("torch.")
    if text not in DTYPES:
        raise ModelError(f"is {text[:60]!r}", fix=f"use one of {', '.join(DTYPES)}", field=key)
    return DTYPES[text]


def _gpt2(fields: Fields) -> Read:
    sizes = GptSizes(
        layers=fields.whole("n_layer", 12, most=MAX_LAYERS),
        width=fields.whole("n_embd", 768),
        heads=fields.whole("n_head", 12),
        positions=fields.whole("n_positions", 1024),
        vocab=fields.whole("vocab_size", 50257),
        inner=fields.maybe("n_inner") or 0,
        tied=fields.flag("tie_word_embeddings", True),
    )
    fields.divides("n_head", "n_embd", sizes.heads, sizes.width)

    return sizes, min(sizes.positions, USUAL_SEQ)


def _bert(fields: Fields) -> Read:
    sizes = BertSizes(
        layers=fields.whole("num_hidden_layers", 12, most=MAX_LAYERS),
        width=fields.whole("hidden_size", 768),
        heads=fields.whole("num_attention_heads", 12),
        inner=fields.whole("intermediate_size", 3072),
        positions=fields.whole("max_position_embeddings", 512),
        vocab=fields.whole("vocab_size", 30522),
        token_types=fields.whole("type_vocab_size", 2),
        tied=fields.flag("tie_word_embeddings", True),
    )
    fields.divides("num_attention_heads", "hidden_size", sizes.heads, sizes.width)

    return sizes, min(sizes.positions, USUAL_SEQ)


def _t5(fields: Fields) -> Read:
    activation = fields.text("feed_forward_proj", "relu")
    gated = activation.startswith("gated-")
    layers = fields.whole("num_layers", 6, most=MAX_LAYERS)
    sizes = T5Sizes(
        layers=layers,
        width=fields.whole("d_model", 512),
        inner=fields.whole("d_ff", 2048),
        heads=fields.whole("num_heads", 8),
        head_size=fields.whole("d_kv", 64),
        decoder_layers=fields.whole("num_decoder_layers", layers, most=MAX_LAYERS),
        vocab=fields.whole("vocab_size", 32128),
        buckets=fields.whole("relative_attention_num_buckets", 32),
        gated=gated,
        activation=_activation(activation.removeprefix("gated-"), "feed_forward_proj"),
        tied=fields.flag("tie_word_embeddings", True),
    )

    return sizes, fields.whole("n_positions", 512)


def _activation(name: str, field: str) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(
            f"is {name[:60]!r}", fix=f"known are {', '.join(ACTIVATIONS)}", field=field
        )
    return ACTIVATIONS[name]


def _decoder(
    fields: Fields, vocab: int = 32000, inner: int = 11008, kv_heads: int = 0, layers: int = 32,
    width: int = 4096, heads: int = 32,
) -> DecoderSizes:  # fmt: skip
    """What all decoders of the LLaMA kind have in common, with the defaults of one family."""
    sizes = DecoderSizes(
        layers=fields.whole("num_hidden_layers", layers, most=MAX_LAYERS),
        width=fields.whole("hidden_size", width),
        inner=fields.whole("intermediate_size", inner),
        heads=fields.whole("num_attention_heads", heads),
        kv_heads=fields.maybe("num_key_value_heads", kv_heads or None) or 0,
        vocab=fields.whole("vocab_size", vocab),
        head_size=fields.maybe("head_dim") or 0,
        tied=fields.flag("tie_word_embeddings", False),
    )
    _activation(fields.text("hidden_act", "silu"), "hidden_act")
    if not sizes.head_size:
        fields.divides("num_attention_heads", "hidden_size", sizes.heads, sizes.width)
    if sizes.kv_heads:
        fields.divides("num_key_value_heads", "num_attention_heads", sizes.kv_heads, sizes.heads)
    return sizes


def _read(fields: Fields, sizes: DecoderSizes, positions: int) -> Read:
    return sizes, min(fields.whole("max_position_embeddings", positions), USUAL_SEQ)


def _llama(fields: Fields) -> Read:
    bias = fields.flag("attention_bias", False)
    sizes = replace(
        _decoder(fields), qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False)
    )
    return _read(fields, sizes, 2048)


def _mistral(fields: Fields) -> Read:
    sizes = _decoder(fields, inner=14336, kv_heads=8)
    # Here null means no window, and only a missing key the default.
    default = None if "sliding_window" in fields.values else 4096
    window = fields.maybe("sliding_window", default) or 0
    return _read(fields, replace(sizes, windows=(window,) * sizes.layers), 131072)


def _mixtral(fields: Fields) -> Read:
    sizes = _decoder(fields, inner=14336, kv_heads=8)
    experts = _experts(fields, "num_local_experts", 8, 2, sizes.inner, 0)
    window = fields.maybe("sliding_window") or 0
    return _read(fields, replace(sizes, experts=experts, windows=(window,) * sizes.layers), 131072)


def _qwen2(fields: Fields) -> Read:
    sizes = _decoder(fields, vocab=151936, inner=22016, kv_heads=32)
    sizes = replace(sizes, qkv_bias=True, windows=_qwen_windows(fields, sizes.layers))
    return _read(fields, sizes, 32768)


def _qwen3(fields: Fields) -> Read:
    sizes = _decoder(fields, vocab=151936, inner=22016, kv_heads=32)
    bias = fields.flag("attention_bias", False)
    sizes = replace(
        sizes, head_size=sizes.head_size or 128, qkv_bias=bias, output_bias=bias, query_norm=True,
        windows=_qwen_windows(fields, sizes.layers),
    )  # fmt: skip
    return _read(fields, sizes, 32768)


def _qwen2_moe(fields: Fields) -> Read:
    sizes = _decoder(fields, vocab=151936, inner=5632, kv_heads=16, layers=24, width=2048, heads=16)
    inner = fields.whole("moe_intermediate_size", 1408)
    shared = fields.whole("shared_expert_intermediate_size", 5632)
    experts = _experts(fields, "num_experts", 60, 4, inner, shared)
    step = fields.whole("decoder_sparse_step", 1)
    dense = {layer for layer in range(sizes.layers) if (layer + 1) % step}
    dense |= set(fields.numbers("mlp_only_layers"))
    sizes = replace(
        sizes, qkv_bias=fields.flag("qkv_bias", True), experts=experts,
        dense_layers=tuple(sorted(dense)), windows=_qwen_windows(fields, sizes.layers),
    )  # fmt: skip
    return _read(fields, sizes, 32768)


def _qwen_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Where sliding windows are used at all, the first `max_window_layers` layers have none."""
    if not fields.flag("use_sliding_window", False):
        return ()
    window = fields.whole("sliding_window", 4096)
    first = fields.whole("max_window_layers", 28, least=0)
    return tuple(0 if layer < first else window for layer in range(layers))


def _experts(fields: Fields, key: str, count: int, top_k: int, inner: int, shared: int) -> Experts:
    number = fields.whole(key, count)
    each = fields.whole("num_experts_per_tok", top_k)
    if each > number:
        raise ModelError(
            f"is {each}, more than there are experts ({key} {number})",
            fix="choose at most that many",
            field="num_experts_per_tok",
        )
    return Experts(number, each, inner, shared)


FAMILIES: dict[str, Callable[[Fields], Read]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "bert": _bert,
    "t5": _t5,
}
