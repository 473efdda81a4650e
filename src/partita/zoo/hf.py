"""Hugging Face `config.json` files as graphs, without the transformers package.

`model_type` chooses the family; a field that is missing or null has the default of the family's
configuration class. Every field of a configuration changes the graph, is known to change nothing,
or is refused by name (`fields.py`). Parameters have the names of the state dict of `transformers`.
"""

from typing import Any

from partita.errors import ModelError
from partita.graph.record import Graph
from partita.zoo.bert import BertSizes, encoder
from partita.zoo.decoder import DecoderSizes, decoder
from partita.zoo.fields import Fields
from partita.zoo.hf_decoders import DECODERS, Family
from partita.zoo.hf_encoders import ENCODERS
from partita.zoo.mamba import MambaSizes, mamba
from partita.zoo.t5 import T5Sizes, encoder_decoder
from partita.zoo.towers import ClipSizes, Seq2SeqSizes, Towers, VitClassifier, towers

OPTIONS: dict[str, Any] = {"seq": 4096, "fused_attention": True, "cache": 0}
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}

FAMILIES: dict[str, Family] = {**DECODERS, **ENCODERS}
# Families of several towers, of which one is read by itself.
PARTS = {"llama4": "llama4_text", "gemma3": "gemma3_text"}

Sizes = BertSizes | DecoderSizes | T5Sizes | Towers | MambaSizes


def build_config(
    config: dict[str, Any], name: str = "", *, batch: int = 1, seq: int | None = None,
    dtype: str | None = None, loss: bool = True, fused_attention: bool = True, cache: int = 0,
) -> Graph:  # fmt: skip
    """The graph of a configuration; `seq` and `dtype` are the configuration's unless given.

    `cache` are tokens that were read or written before (see `decoder.py`); an encoder's text is
    then as long as these and the new ones together.
    """
    sizes, length = read_config(config, None if seq is None else seq + cache)
    length -= cache if seq is not None else 0
    if cache and isinstance(sizes, BertSizes | VitClassifier | ClipSizes):
        raise ModelError(
            f"is {config['model_type']!r}, which writes no text and has no cache",
            fix="plan without",
            field="model_type",
        )
    element = dtype or _dtype(config)
    label = name or str(config["model_type"])
    if isinstance(sizes, T5Sizes):
        read = length + cache
        return encoder_decoder(
            label, sizes, batch, read, length, element, loss, fused_attention, cache
        )
    if isinstance(sizes, MambaSizes):
        return mamba(label, sizes, batch, length, element, loss, cache)
    if isinstance(sizes, Seq2SeqSizes | VitClassifier | ClipSizes):
        return towers(label, sizes, batch, length, element, loss, fused_attention, cache)
    if isinstance(sizes, BertSizes):
        return encoder(label, sizes, batch, length, element, loss, fused_attention)
    return decoder(label, sizes, batch, length, element, loss, fused_attention, cache)


def read_config(config: dict[str, Any], seq: int | None = None) -> tuple[Sizes, int]:
    """The sizes that a configuration gives, and the sequence length: `seq`, or the usual one."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"is {str(kind)[:60]}", fix="text is needed", field="model_type")
    if kind in PARTS:
        raise ModelError(
            f"is {kind!r}, which has a tower for images",
            fix=f"give its text_config as a config.json of its own (model_type {PARTS[kind]})",
            field="model_type",
        )
    if kind not in FAMILIES:
        raise ModelError(
            f"{kind[:60]!r} is not read",
            fix=f"these are: {', '.join(FAMILIES)}",
            field="model_type",
        )
    family = FAMILIES[kind]
    fields = Fields(config, family.fields)
    fields.check_all_known(kind, family.neutral)
    sizes: tuple[Sizes, int] = family.read(fields, seq)
    return sizes


def lengths(config: dict[str, Any]) -> tuple[int, int] | None:
    """The usual length of a configuration's texts, and the longest; None of images."""
    sizes, usual = read_config(config)
    if isinstance(sizes, VitClassifier | ClipSizes):
        return None
    known = ("max_position_embeddings", "n_positions", "max_target_positions")
    told = [config[name] for name in known if type(config.get(name)) is int]
    return usual, max((usual, *told))


def _dtype(config: dict[str, Any]) -> str:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    text = Fields(config, {key: "bfloat16"}).text(key).removeprefix("torch.")
    if text not in DTYPES:
        raise ModelError(f"is {text[:60]!r}", fix=f"use one of {', '.join(DTYPES)}", field=key)
    return DTYPES[text]
