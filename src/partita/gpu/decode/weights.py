"""The weights of a Llama-like model, packed as the kernels read them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.errors import InputError
from partita.gpu.decode.plain import rotary
from partita.gpu.decode.spec import DecoderSpec

T = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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


def decoder_weights(model: nn.Module, length: int) -> DecoderWeights:
    """Packed weights of a model built like `LlamaForCausalLM`, for a cache of `length` rows."""
    try:
        inner: Any = model.model
        spec = _spec(model, inner, length)
        layers = tuple(map(_layer, inner.layers))
        outer: Any = model
        head: T = outer.lm_head.weight.detach()
        weights = DecoderWeights(
            spec, inner.embed_tokens.weight.detach(), layers, inner.norm.weight.detach(), head,
            *rotary(spec, head.device),
        )  # fmt: skip
    except AttributeError as error:
        raise InputError(
            f"{type(model).__name__} is not built like a Llama: {error}",
            fix="give a LlamaForCausalLM, or partita.accelerate the module as it is",
        ) from error
    biased = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    if biased:
        raise InputError(f"{biased[0]} is a bias", fix="models without biases can be run")
    if head.dtype not in DTYPES:
        raise InputError(f"weights of {head.dtype}", fix="use float32, float16 or bfloat16")
    return weights


def _spec(model: Any, inner: Any, length: int) -> DecoderSpec:
    if isinstance(getattr(model, "spec", None), DecoderSpec):
        return DecoderSpec(**{**_fields(model.spec), "length": length})
    config = model.config
    scaling = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    if scaling.get("rope_type", "default") != "default":
        raise InputError(
            f"a rotary embedding of type {scaling['rope_type']!r}", fix="use the default one"
        )
    theta: Any = scaling.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderSpec(
        config.num_hidden_layers, config.hidden_size, config.num_attention_heads,
        config.num_key_value_heads, size, config.intermediate_size, config.vocab_size, length,
        config.rms_norm_eps, float(theta),
    )  # fmt: skip


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
