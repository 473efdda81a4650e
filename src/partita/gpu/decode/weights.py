"""The weights of a decoder, packed as the kernels read them.

What the classes of `transformers` call their parts stands in one function a family: `_llama` reads
those built like `LlamaForCausalLM` (Mistral, Qwen2 with biases, Qwen3 with norms of heads), `_gpt2`
those built like `GPT2LMHeadModel`. A configuration or a part that a step would get wrong is
refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from partita.errors import InputError
from partita.gpu.decode.plain import rotary
from partita.gpu.decode.spec import ACTIVATIONS, DecoderSpec

T = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LLAMAS = ("llama", "mistral", "qwen2", "qwen3")  # others with these parts scale or mask otherwise
ROTARY = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length so far
PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "input_layernorm": (), "post_attention_layernorm": (),
}  # fmt: skip
GPT2_PARTS = {"ln_1": (), "attn": ("c_attn", "c_proj"), "ln_2": (), "mlp": ("c_fc", "c_proj")}


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """What a norm multiplies by, and what a layer norm adds."""

    weight: T
    shift: T | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ProductWeights:
    """Rows of weights, and a bias of each row where there are biases."""

    weight: T
    bias: T | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Of one layer: products that read the same vector lie one behind the other."""

    norm1: NormWeights
    qkv: ProductWeights
    out: ProductWeights
    norm2: NormWeights
    gate: ProductWeights  # gate, then up; or the one product before the activation
    down: ProductWeights
    q_norm: T | None = None  # norms of heads before the rotary embedding
    k_norm: T | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """Of a whole decoder."""

    spec: DecoderSpec
    embedding: T
    layers: tuple[LayerWeights, ...]
    norm: NormWeights
    head: T
    cosines: T
    sines: T
    places: T | None = None  # learned vectors of positions


def decoder_weights(model: nn.Module, length: int, batch: int = 1) -> DecoderWeights:
    """Packed weights of a model of a known family, for caches of `length` rows."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    is_gpt2 = kind == "gpt2"
    if kind is not None and not is_gpt2 and kind not in LLAMAS:
        raise InputError(
            f"a model of type {kind!r}", fix=f"one of {', '.join((*LLAMAS, 'gpt2'))} can be run"
        )
    read: Callable[[Any, int], DecoderWeights] = _gpt2 if is_gpt2 else _llama
    try:
        weights = read(model, length)
    except AttributeError as error:
        likely = "a GPT-2" if is_gpt2 else "a Llama"
        raise InputError(
            f"{type(model).__name__} is not built like {likely}: {error}",
            fix="give a LlamaForCausalLM or a GPT2LMHeadModel, or partita.accelerate the module",
        ) from error
    _check_parts(model, GPT2_PARTS if is_gpt2 else PARTS)
    if weights.head.dtype not in DTYPES:
        raise InputError(f"weights of {weights.head.dtype}", fix="use float32, float16 or bfloat16")
    return replace(weights, spec=replace(weights.spec, batch=batch))


def _check_parts(model: Any, parts: dict[str, tuple[str, ...]]) -> None:
    """Refuse weights that a step would not read."""
    known = {
        ".".join(filter(None, (place, part, last)))
        for place, some in parts.items()
        for part in some or ("",)
        for last in ("weight", "bias")
    }
    inner = model.transformer.h if parts is GPT2_PARTS else model.model.layers
    for name in (name for layer in inner for name, _ in layer.named_parameters()):
        if name not in known:
            raise InputError(
                f"{type(model).__name__} has {name}, which a step does not read",
                fix="give a model without it, or partita.accelerate the module",
            )
    if getattr(model.lm_head, "bias", None) is not None:
        raise InputError("lm_head.bias is a bias", fix="a head without a bias can be run")


def _activation(config: Any, field: str) -> str:
    name: str = getattr(config, field, "silu")
    if name not in ACTIVATIONS:
        raise InputError(
            f"the activation {name!r}", fix=f"one of {', '.join(ACTIVATIONS)} can be run",
            field=field,
        )  # fmt: skip
    return name


def _llama(model: Any, length: int) -> DecoderWeights:
    inner = model.model
    spec = _llama_spec(model, length)
    head: T = model.lm_head.weight.detach()
    return DecoderWeights(
        spec, inner.embed_tokens.weight.detach(), tuple(map(_llama_layer, inner.layers)),
        NormWeights(inner.norm.weight.detach()), head, *_angles(inner, spec, head.device),
    )  # fmt: skip


def _llama_spec(model: Any, length: int) -> DecoderSpec:
    spec = getattr(model, "spec", None)
    if isinstance(spec, DecoderSpec):
        return replace(spec, length=length)
    config = model.config
    _check_llama(config)
    scaling = _scaling(config)
    theta: Any = scaling.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderSpec(
        config.num_hidden_layers, config.hidden_size, config.num_attention_heads,
        config.num_key_value_heads, size, config.intermediate_size, config.vocab_size, length,
        config.rms_norm_eps, float(theta), activation=_activation(config, "hidden_act"),
    )  # fmt: skip


def _scaling(config: Any) -> dict[str, Any]:
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return scaling or {}


def _check_llama(config: Any) -> None:
    """What a step computes is what the configuration asks for, or it is refused."""
    rotary_kind = _scaling(config).get("rope_type", "default")
    if rotary_kind not in ROTARY:
        raise InputError(
            f"a rotary embedding of type {rotary_kind!r}", fix=f"use one of {', '.join(ROTARY)}"
        )
    window = getattr(config, "sliding_window", None)
    layers = set(getattr(config, "layer_types", None) or ())
    if window is not None or layers - {"full_attention"}:
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


def _llama_layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return LayerWeights(
        NormWeights(layer.input_layernorm.weight.detach()),
        _together(attention.q_proj, attention.k_proj, attention.v_proj),
        _together(attention.o_proj),
        NormWeights(layer.post_attention_layernorm.weight.detach()),
        _together(mlp.gate_proj, mlp.up_proj),
        _together(mlp.down_proj),
        None if q_norm is None else q_norm.weight.detach(),
        None if k_norm is None else k_norm.weight.detach(),
    )


def _together(*linears: Any) -> ProductWeights:
    """Linear layers one behind the other; one without a bias adds nothing where others have one."""
    weight = torch.cat([each.weight.detach() for each in linears]).contiguous()
    if all(each.bias is None for each in linears):
        return ProductWeights(weight)
    biases = [
        weight.new_zeros(len(each.weight)) if each.bias is None else each.bias.detach()
        for each in linears
    ]
    return ProductWeights(weight, torch.cat(biases))


def _gpt2(model: Any, length: int) -> DecoderWeights:
    config, inner = model.config, model.transformer
    spec = _gpt2_spec(config, length)
    head: T = model.lm_head.weight.detach()
    flat = torch.ones(length, spec.head_size, device=head.device)  # no rotary embedding: not turned
    return DecoderWeights(
        spec, inner.wte.weight.detach(), tuple(map(_gpt2_layer, inner.h)),
        NormWeights(inner.ln_f.weight.detach(), inner.ln_f.bias.detach()), head, flat,
        torch.zeros_like(flat), inner.wpe.weight.detach(),
    )  # fmt: skip


def _gpt2_spec(config: Any, length: int) -> DecoderSpec:
    if length > config.n_positions:
        raise InputError(
            f"a cache of {length} rows, and positions up to {config.n_positions}",
            fix=f"give a length of at most {config.n_positions}", field="length",
        )  # fmt: skip
    for field, computed in (
        ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):  # fmt: skip
        if getattr(config, field, computed) != computed:
            raise InputError(
                f"found {not computed}", fix=f"models with {computed} can be run", field=field
            )
    return DecoderSpec(
        config.n_layer, config.n_embd, config.n_head, config.n_head,
        config.n_embd // config.n_head, config.n_inner or 4 * config.n_embd, config.vocab_size,
        length, config.layer_norm_epsilon, centered=True, gated=False,
        activation=_activation(config, "activation_function"),
    )  # fmt: skip


def _gpt2_layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.attn, layer.mlp
    norm1, norm2 = (
        NormWeights(n.weight.detach(), n.bias.detach()) for n in (layer.ln_1, layer.ln_2)
    )
    return LayerWeights(
        norm1, _turned(attention.c_attn), _turned(attention.c_proj), norm2, _turned(mlp.c_fc),
        _turned(mlp.c_proj),
    )  # fmt: skip


def _turned(conv: Any) -> ProductWeights:
    """GPT-2 keeps the weights of a product by columns."""
    return ProductWeights(conv.weight.detach().T.contiguous(), conv.bias.detach())
