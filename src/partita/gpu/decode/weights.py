"""The weights of a Llama-like model, packed as the kernels read them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from partita.errors import InputError
from partita.gpu.decode.plain import rotary
from partita.gpu.decode.spec import DecoderSpec

T = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("llama", "mistral")  # others with the same parts scale or mask them otherwise
ROTARY = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length so far
PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "input_layernorm": (), "post_attention_layernorm": (),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Of one layer: products that read the same vector lie one behind the other."""

    norm1: T
    qkv: T
    out: T
    norm2: T
    gate: T  # gate, then up
    down: T


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """Of a whole decoder."""

    spec: DecoderSpec
    embedding: T
    layers: tuple[LayerWeights, ...]
    norm: T
    head: T
    cosines: T
    sines: T


def decoder_weights(model: nn.Module, length: int, batch: int = 1) -> DecoderWeights:
    """Packed weights of a model built like `LlamaForCausalLM`, for caches of `length` rows."""
    try:
        inner: Any = model.model
        spec = replace(_spec(model, inner, length), batch=batch)
        layers = tuple(map(_layer, inner.layers))
        outer: Any = model
        head: T = outer.lm_head.weight.detach()
        weights = DecoderWeights(
            spec, inner.embed_tokens.weight.detach(), layers, inner.norm.weight.detach(), head,
            *_angles(inner, spec, head.device),
        )  # fmt: skip
    except AttributeError as error:
        raise InputError(
            f"{type(model).__name__} is not built like a Llama: {error}",
            fix="give a LlamaForCausalLM, or partita.accelerate the module as it is",
        ) from error
    biased = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    if biased:
        raise InputError(f"{biased[0]} is a bias", fix="models without biases can be run")
    for name in _other_parts(inner):
        raise InputError(
            f"{type(model).__name__} has {name}, which no Llama has",
            fix="give a LlamaForCausalLM, or partita.accelerate the module as it is",
        )
    if head.dtype not in DTYPES:
        raise InputError(f"weights of {head.dtype}", fix="use float32, float16 or bfloat16")
    return weights


def _spec(model: Any, inner: Any, length: int) -> DecoderSpec:
    if isinstance(getattr(model, "spec", None), DecoderSpec):
        return DecoderSpec(**{**_fields(model.spec), "length": length})
    config = model.config
    _check_config(config)
    scaling = _scaling(config)
    theta: Any = scaling.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderSpec(
        config.num_hidden_layers, config.hidden_size, config.num_attention_heads,
        config.num_key_value_heads, size, config.intermediate_size, config.vocab_size, length,
        config.rms_norm_eps, float(theta),
    )  # fmt: skip


def _scaling(config: Any) -> dict[str, Any]:
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return scaling or {}


def _check_config(config: Any) -> None:
    """What a step computes is what the configuration asks for, or it is refused."""
    kind, act = getattr(config, "model_type", "?"), getattr(config, "hidden_act", "silu")
    rotary_kind = _scaling(config).get("rope_type", "default")
    window = getattr(config, "sliding_window", None)
    if kind not in KINDS:
        raise InputError(f"a model of type {kind!r}", fix=f"one of {', '.join(KINDS)} can be run")
    if act not in ("silu", "swish"):
        raise InputError(f"the activation {act!r}", fix="silu can be run", field="hidden_act")
    if rotary_kind not in ROTARY:
        raise InputError(
            f"a rotary embedding of type {rotary_kind!r}", fix=f"use one of {', '.join(ROTARY)}"
        )
    if window is not None:
        raise InputError(
            f"attention over a window of {window}", fix="a model without one can be run",
            field="sliding_window",
        )  # fmt: skip


def _angles(inner: Any, spec: DecoderSpec, device: torch.device) -> tuple[T, T]:
    """Cosines and sines of every row of the cache, as the model itself makes them."""
    if not hasattr(inner, "rotary_emb"):
        return rotary(spec, device)
    rows = torch.arange(spec.length, device=device)[None]
    with torch.no_grad():
        cosines, sines = inner.rotary_emb(torch.zeros(1, device=device), rows)
    return cosines[0].float().contiguous(), sines[0].float().contiguous()


def _other_parts(inner: Any) -> list[str]:
    """Weights of the layers that a step does not read."""
    known = {
        ".".join(filter(None, (place, part, "weight")))
        for place, parts in PARTS.items()
        for part in parts or ("",)
    }
    names = (name for layer in inner.layers for name, _ in layer.named_parameters())
    return [name for name in names if name not in known]


def _fields(spec: DecoderSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__slots__}


def _layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return LayerWeights(
        layer.input_layernorm.weight.detach(),
        torch.cat([each.weight.detach() for each in qkv]),
        attention.o_proj.weight.detach().contiguous(),
        layer.post_attention_layernorm.weight.detach(),
        torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        mlp.down_proj.weight.detach().contiguous(),
    )
