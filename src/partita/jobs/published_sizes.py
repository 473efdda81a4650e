"""Model and machine of a published row: sizes that must be there, others by the model's name.

Sources often print a name alone ("DeepSeekV3"): its sizes come from the published configuration.
Whatever else is missing is said, never guessed. A number that cannot be one (text, a negative or
endless value) is refused with the field's name.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any

from partita.cluster import resolve
from partita.cluster.presets import catalogue
from partita.forecast import ExpertLayers, Latent, Machine, Transformer, machine_of

# Models that sources call by name alone; sizes from their published configurations.
KNOWN: dict[str, dict[str, Any]] = {
    "deepseekv3": {
        "layers": 61, "hidden": 7168, "heads": 128, "ffn": 18432, "vocab": 129280,
        "experts": 256, "topk": 8, "moe_ffn": 2048, "shared": 2048, "dense_layers": 3,
    },
    "deepseekv2": {
        "layers": 60, "hidden": 5120, "heads": 128, "ffn": 12288, "vocab": 102400,
        "experts": 160, "topk": 6, "moe_ffn": 1536, "shared": 3072, "dense_layers": 1,
    },
    "kimik2": {
        "layers": 61, "hidden": 7168, "heads": 64, "ffn": 18432, "vocab": 163840,
        "experts": 384, "topk": 8, "moe_ffn": 2048, "shared": 2048, "dense_layers": 1,
    },
    "qwen3235ba22b": {
        "layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4, "head_size": 128, "ffn": 12288,
        "vocab": 151936, "experts": 128, "topk": 8, "moe_ffn": 1536,
    },
    "qwen330ba3b": {
        "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_size": 128, "ffn": 6144,
        "vocab": 151936, "experts": 128, "topk": 8, "moe_ffn": 768,
    },
    "gptoss120b": {
        "layers": 36, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_size": 64, "ffn": 2880,
        "vocab": 201088, "experts": 128, "topk": 4, "moe_ffn": 2880, "window": 128,
        "windowed_share": 0.5,
    },
    "mixtral8x7b": {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000,
        "experts": 8, "topk": 2, "moe_ffn": 14336,
    },
    "mixtral8x22b": {
        "layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn": 16384, "vocab": 32768,
        "experts": 8, "topk": 2, "moe_ffn": 16384,
    },
}  # fmt: skip
LATENT = {
    "deepseekv3": Latent(1536, 512),
    "deepseekv2": Latent(1536, 512),
    "kimik2": Latent(1536, 512),
}
# Families without biases and learned positions, with gated feed-forward parts.
GATED = ("llama", "deepseek", "qwen", "mixtral", "mistral", "oss", "kimi")
STATE_SPACE = ("mamba", "nemotron3", "nemotronh", "ssm")
NO_DECODER = ("vit", "bert", "t5", "wan", "flux")
# Beginnings of what sources call a device, the longer before the shorter, and the preset's name.
DEVICES = {
    name: name
    for name in (
        "gb300", "gb200", "gh200", "b300", "b200", "h200", "h100", "a10040gb", "a100", "v10016gb",
        "v100", "mi300x", "mi250x", "l40s", "l4", "a10", "t4", "p100", "titanrtx", "rtx2080ti",
        "rtx3090", "rtx4090", "rtx",
    )
} | {"gh96": "gh200"}  # fmt: skip
VOCAB = 51200  # of GPT-2 as Megatron pads it, where a source gives none
MOST = 10**9  # of any count in a row
MOST_LAYERS = 100_000
MOST_IN_NODE = 256


class NotModelledError(Exception):
    """Why a row cannot be forecast."""


def plain(name: object) -> str:
    """A name as it is compared: small letters and digits."""
    return "".join(c for c in str(name).lower() if c.isalnum())


def shown(name: object) -> str:
    """A name as it can be printed anywhere: on one line, of a sensible length."""
    text = " ".join(str(name).split())[:120]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def whole(table: dict[str, Any], key: str, default: int | None = None, most: int = MOST) -> int:
    """A count of at least 1 (0 or nothing: the default); what is no number is refused by name."""
    value = table.get(key)
    if value is None or (value == 0 and default is not None):
        if default is None:
            raise NotModelledError(f"{key} is not given")
        return default
    number = positive(table, key)
    if number != int(number) or number > most:
        raise NotModelledError(f"{key} is {_quoted(value)}, a whole number up to {most} is needed")
    return int(number)


def positive(table: dict[str, Any], key: str) -> float:
    """A number above zero; what is none is refused by name."""
    value = table[key]
    number: float = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise NotModelledError(f"{key} is {_quoted(value)}, a number above 0 is needed")
    return number


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def model_of(table: dict[str, Any]) -> Transformer:
    """The transformer that a row's model is."""
    name = plain(table.get("name", ""))
    if any(word in name for word in STATE_SPACE):
        raise NotModelledError("the model has state-space layers")
    if any(name.startswith(word) for word in NO_DECODER) or "vl" in name:
        raise NotModelledError("the model is no decoder of equal layers")
    known = next((KNOWN[key] for key in KNOWN if name.startswith(key)), {})
    sizes = {**known, **{key: value for key, value in table.items() if value is not None}}
    for key, words in (("layers", "number of layers"), ("hidden", "hidden size"),
                       ("heads", "number of heads"), ("seq_len", "sequence length")):  # fmt: skip
        if key not in sizes:
            raise NotModelledError(f"the {words} is not given")
    layers = whole(sizes, "layers", most=MOST_LAYERS)
    hidden, heads = whole(sizes, "hidden"), whole(sizes, "heads")
    if heads > hidden:
        raise NotModelledError(f"{heads} heads are more than the hidden size of {hidden}")
    family = any(word in name for word in GATED)
    latent = next((LATENT[key] for key in LATENT if name.startswith(key)), None)
    return Transformer(
        shown(table.get("name") or "transformer"), layers, hidden, heads,
        whole(sizes, "ffn", 4 * hidden), whole(sizes, "vocab", VOCAB), whole(sizes, "seq_len"),
        whole(sizes, "kv_heads", 0), whole(sizes, "head_size", 0),
        gated=bool(sizes.get("gated_mlp", family)), biases=not family, tied=not family,
        positions=not family, experts=_experts(sizes, layers), latent=latent,
        window=whole(sizes, "window", 0),
        windowed_share=min(1.0, positive(sizes, "windowed_share"))
        if sizes.get("windowed_share") else 0.0,
    )  # fmt: skip


def _experts(sizes: dict[str, Any], layers: int) -> ExpertLayers | None:
    if not sizes.get("experts"):
        return None
    dense = min(whole(sizes, "dense_layers", 0), max(0, layers - 1))
    return ExpertLayers(
        whole(sizes, "experts"), whole(sizes, "topk"), whole(sizes, "moe_ffn"),
        # A model cut down to a few layers for a test keeps one dense layer at the most.
        whole(sizes, "shared", 0), dense if layers > 8 else min(dense, 1),
    )  # fmt: skip


def machine_of_row(table: dict[str, Any]) -> Machine:
    """The machine that a row's hardware is; bandwidths are those of the kind's preset."""
    kinds = table.get("gpus_by_kind")
    kinds = kinds if isinstance(kinds, dict) else {}
    if len(kinds) > 1:
        raise NotModelledError("the devices are of several kinds")
    name = table.get("gpu") or next(iter(kinds), None)
    if not name:
        raise NotModelledError("the kind of device is not given")
    kind = _kind(str(name))
    if table.get("n_gpus") is not None:
        count = whole(table, "n_gpus")
    elif kinds:
        count = whole(kinds, next(iter(kinds)))
    else:
        raise NotModelledError("the number of devices is not given")
    preset = catalogue().kind(kind)
    assert preset is not None
    near = preset.node_size
    if near <= 8:  # a rack is one node whatever the row calls a node
        near = whole(table, "gpus_per_node", preset.node_size, MOST_IN_NODE)
    small = _two_nodes(near, kind)
    across = small.across_bytes_per_s
    if "4x infiniband" in str(table.get("inter_node", "")).lower():
        across = 100e9 / near  # 800 Gbit/s a node
    return replace(small, num_devices=count, node_size=near, across_bytes_per_s=across)


@cache
def _two_nodes(near: int, kind: str) -> Machine:
    """Two nodes tell the bandwidths; the number of devices is the row's."""
    return machine_of(resolve(f"2x{near}x{kind}"))


@cache
def _kind(text: str) -> str:
    name = text.split("(")[0].strip().replace("_", "-")
    preset = catalogue().kind(name)
    if preset is None:
        words = plain(name)
        near = next((DEVICES[start] for start in DEVICES if words.startswith(start)), "")
        preset = catalogue().kind(near) if near else None
    if preset is None:
        raise NotModelledError(f"no device kind is called {_quoted(text)}")
    return preset.kind.name
