"""Tokens one after the other: the prompt by the model, then a captured step for each new token.

    partita.generate(model, tokens, max_new_tokens=100)                       # greedy
    partita.generate(model, tokens, do_sample=True, temperature=0.8, top_p=0.9)

What is drawn is what `model.generate` of `transformers` draws: the scores of the last token,
divided by the temperature, cut to the `top_k` largest, then to the fewest that hold `top_p` of the
probability, and one `torch.multinomial`. In float32 the tokens are the same as its tokens; in
narrower types two scores that are nearly equal may come in another order.

Rows of tokens (several samples) are prompts of one length; a row that has come to its end is filled
up with `eos_token_id` until all have. A model that `partita.decode_step` cannot run is left to
`model.generate`, with a warning.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.errors import InputError
from partita.gpu.decode.step import DecodeStep, decode_step

T = torch.Tensor
MakeStep = Callable[[nn.Module, int, int], DecodeStep]


def _step_of(model: nn.Module, length: int, batch: int) -> DecodeStep:
    return decode_step(model, length, batch=batch)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from the scores of all."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0

    def __post_init__(self) -> None:
        checks = (
            (self.temperature > 0, "temperature", "more than 0"),
            (self.top_k >= 0, "top_k", "0 (all) or more"),
            (0 < self.top_p <= 1, "top_p", "more than 0 and at most 1"),
        )
        for holds, field, wanted in checks:
            if not holds:
                raise InputError(f"found {getattr(self, field)}", fix=f"give {wanted}", field=field)

    def token(self, scores: T) -> T:
        """One token of each row of scores."""
        scores = scores.float()
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(self.kept(scores).softmax(-1), 1).squeeze(-1)

    def kept(self, scores: T) -> T:
        """Scores at this temperature; minus infinity for tokens that may not be drawn."""
        scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = scores.sort(descending=False)
            rest = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            rest[..., -1:] = False  # the likeliest stays
            scores = scores.masked_fill(rest.scatter(-1, order, rest), -torch.inf)
        return scores


def generate(
    model: nn.Module,
    tokens: T,
    *,
    max_new_tokens: int = 20,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | None = None,
    make_step: MakeStep = _step_of,
) -> T:
    """The tokens (samples, n) and those that follow, until `max_new_tokens` or `eos_token_id`.

    A captured step is made for prompt and answer at each call; `make_step` may hand out one that
    was made before (`lambda model, length, batch: step`) if its cache has enough rows.
    """
    sampling = Sampling(do_sample, temperature, top_k, top_p)
    if max_new_tokens < 1:
        raise InputError(f"found {max_new_tokens}", fix="give 1 or more", field="max_new_tokens")
    if tokens.dim() != 2 or 0 in tokens.shape or tokens.is_floating_point():
        raise InputError(
            f"tokens are {list(tokens.shape)} of {tokens.dtype}",
            fix="give integers, (samples, length)",
        )
    length = tokens.shape[1] + max_new_tokens
    try:
        step = make_step(model, length, tokens.shape[0])
    except InputError as error:
        return _by_transformers(model, tokens, sampling, max_new_tokens, eos_token_id, error)
    if step.spec.batch != tokens.shape[0]:
        raise InputError(
            f"the step is for {step.spec.batch} samples, the tokens have {tokens.shape[0]}",
            fix=f"make one for them: partita.decode_step(model, {length}, batch={len(tokens)})",
        )
    if step.spec.length < length - 1:  # the last token is never fed
        raise InputError(
            f"the cache of the step has {step.spec.length} rows",
            fix=f"make one of {length - 1}: partita.decode_step(model, {length - 1})",
        )
    return _by_steps(model, tokens, sampling, max_new_tokens, eos_token_id, step)


def _by_steps(
    model: Any, tokens: T, sampling: Sampling, count: int, end: int | None, step: DecodeStep
) -> T:
    """The prompt by the model, whose cache the step takes over; then step by step."""
    with torch.no_grad():
        outputs = model(tokens, use_cache=True, logits_to_keep=1)
        rows = tokens.shape[1]
        for number, (keys, values) in enumerate(_cached(outputs.past_key_values)):
            step.keys[number, :, :, :rows] = keys
            step.values[number, :, :, :rows] = values
        scores = outputs.logits[:, -1]
        made: list[T] = []
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for position in range(rows, rows + count):
            chosen = sampling.token(scores)
            if end is not None:
                chosen = chosen.masked_fill(ended, end)
                ended = ended | (chosen == end)
            made.append(chosen)
            if position + 1 == rows + count or (end is not None and bool(ended.all())):
                break
            scores = step(chosen, position)
    return torch.cat([tokens, torch.stack(made, 1).to(tokens.dtype)], 1)


def _cached(cache: Any) -> list[tuple[T, T]]:
    """Keys and values of every layer of a cache of `transformers`."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def _by_transformers(
    model: Any, tokens: T, sampling: Sampling, count: int, end: int | None, error: InputError
) -> T:
    """The same by `model.generate`, where there is no step for the model."""
    if not hasattr(model, "generate"):
        raise error
    warnings.warn(f"{error}; model.generate runs instead", stacklevel=3)
    chosen: dict[str, Any] = {"do_sample": sampling.do_sample}
    if sampling.do_sample:
        chosen |= {"temperature": sampling.temperature, "top_k": sampling.top_k}
        chosen |= {"top_p": sampling.top_p}
    result: T = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, eos_token_id=end,
        pad_token_id=0 if end is None else end, **chosen,
    )  # fmt: skip
    return result
