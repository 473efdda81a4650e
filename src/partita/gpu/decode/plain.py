"""A Llama-like decoder in plain PyTorch, a token at a time: what the kernels compute.

Parts are named as in `transformers`, so that weights are read from either in the same way.
"""

from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as nnf

from partita.gpu.decode.spec import DecoderSpec

T = torch.Tensor


def rotary(spec: DecoderSpec, device: torch.device | str = "cpu") -> tuple[T, T]:
    """Cosines and sines of the rotary embedding: a row for every position of the cache."""
    half = torch.arange(0, spec.head_size, 2, device=device, dtype=torch.float64)
    steps = spec.theta ** (-half / spec.head_size)
    angles = torch.outer(torch.arange(spec.length, device=device, dtype=torch.float64), steps)
    both = torch.cat([angles, angles], 1)
    return both.cos().float(), both.sin().float()


class RmsNorm(nn.Module):
    """x / rms(x), times a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: T) -> T:
        """In float32, then back."""
        wide = x.float() if x.dtype != torch.float64 else x
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    """One token of every sample over its cache; heads share keys."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        size = spec.head_size
        self.q_proj = nn.Linear(spec.width, spec.heads * size, bias=False)
        self.k_proj = nn.Linear(spec.width, spec.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(spec.width, spec.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(spec.heads * size, spec.width, bias=False)

    def forward(self, x: T, keys: T, values: T, position: T, mask: T, turn: tuple[T, T]) -> T:
        """`keys` and `values` (sample, key head, row, size) get the new row."""
        spec, batch = self.spec, len(x)
        q = self.q_proj(x).view(batch, spec.heads, 1, spec.head_size)
        k = self.k_proj(x).view(batch, spec.kv_heads, 1, spec.head_size)
        v = self.v_proj(x).view(batch, spec.kv_heads, 1, spec.head_size)
        keys.index_copy_(2, position, _turned(k, turn))
        values.index_copy_(2, position, v)
        y = nnf.scaled_dot_product_attention(
            _turned(q, turn), keys, values, attn_mask=mask, enable_gqa=spec.group > 1
        )
        result: T = self.o_proj(y.reshape(batch, -1))
        return result


def _turned(x: T, turn: tuple[T, T]) -> T:
    first, second = x.chunk(2, -1)
    cosines, sines = (each.to(x.dtype) for each in turn)
    return x * cosines + torch.cat([-second, first], -1) * sines


class Mlp(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.width, spec.hidden, bias=False)
        self.up_proj = nn.Linear(spec.width, spec.hidden, bias=False)
        self.down_proj = nn.Linear(spec.hidden, spec.width, bias=False)

    def forward(self, x: T) -> T:
        """Of one token."""
        result: T = self.down_proj(nnf.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """Attention and MLP, a norm before each, both added to what came in."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(spec), Mlp(spec)
        self.input_layernorm = RmsNorm(spec.width, spec.eps)
        self.post_attention_layernorm = RmsNorm(spec.width, spec.eps)

    def forward(self, x: T, keys: T, values: T, position: T, mask: T, turn: tuple[T, T]) -> T:
        """One token."""
        x = x + self.self_attn(self.input_layernorm(x), keys, values, position, mask, turn)
        result: T = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Layers(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab, spec.width)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = RmsNorm(spec.width, spec.eps)


class PlainDecoder(nn.Module):
    """The logits of one token of every sample; caches are changed in place."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec, self.model = spec, Layers(spec)
        self.lm_head = nn.Linear(spec.width, spec.vocab, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight  # tied
        self.cosines, self.sines = rotary(spec, self.lm_head.weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """To another device or type; angles stay float32, as in `transformers`."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.cosines, self.sines = rotary(self.spec, self.lm_head.weight.device)
        return self

    def forward(self, token: T, position: T, keys: T, values: T) -> T:
        """A token of every sample, all at one position; caches (layer, sample, head, row, size)."""
        x = self.model.embed_tokens(token)
        mask = (torch.arange(self.spec.length, device=token.device) <= position).view(1, -1)
        turn = (self.cosines[position], self.sines[position])
        for number, layer in enumerate(self.model.layers):
            x = layer(x, keys[number], values[number], position, mask, turn)
        logits: T = self.lm_head(self.model.norm(x))
        return logits
