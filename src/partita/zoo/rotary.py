"""Rotary positions of a configuration: `rope_theta` and the ways to stretch it to longer texts.

With n features that turn, pair i turns by theta^(-2 i / n) per position. The stretched kinds change
these frequencies f, for a factor s over an original length c:

    linear     f / s                                    (positions closer together)
    dynamic    theta grows once the text is longer than the model's positions (NTK-aware)
    llama3     f / s for wavelengths above c / low, f below c / high, between them a mix
    yarn       f / s and f mixed by a ramp over i (arXiv:2309.00071), and longer vectors
    longrope   f / (one factor per pair), short or long ones by the length (arXiv:2402.13753)

Dynamic and longrope depend on the length of the text, which a graph has.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from partita.errors import ModelError
from partita.zoo.decoder import Rope
from partita.zoo.fields import Fields

ROPE_FIELDS: dict[str, Any] = {
    "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None,
}  # fmt: skip
# What may stand in the object, by its kind; `rope_theta` and the kind itself always may.
KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    ),
    "longrope": (
        "short_factor", "long_factor", "original_max_position_embeddings", "attention_factor",
        "factor",
    ),
}  # fmt: skip
ALWAYS = ("type", "rope_type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """What a family says of its rotary positions: the size of a head, the text, its defaults."""

    size: int
    seq: int
    positions: int  # that the model is meant for
    theta: str = "rope_theta"  # the field that says it
    share: float = 1.0  # of a head that turns
    partial: bool = False  # may the configuration say another share?
    interleaved: bool = False
    kind: str = "default"
    renamed: tuple[tuple[str, str], ...] = (("su", "longrope"),)
    original: int | None = None  # the length that the model was trained with


class _Scaling:
    """The object of a configuration that says how rotary positions are stretched."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def number(self, name: str, default: float | None = None, least: float = 0.0) -> float:
        value: Any = self.values.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not least <= value <= 1e300:
            raise self.wrong(name, f"a number of at least {least:g} is needed")
        return float(value)

    def factors(self, name: str, count: int) -> tuple[float, ...]:
        value: Any = self.values.get(name)
        good = isinstance(value, list) and len(value) == count
        if not good or not all(type(v) in (int, float) and 0 < v <= 1e300 for v in value):
            raise self.wrong(name, f"{count} positive numbers are needed, one for each pair")
        return tuple(map(float, value))

    def wrong(self, name: str, needed: str) -> ModelError:
        text = repr(self.values.get(name))
        text = text if len(text) <= 60 else text[:57] + "..."
        return ModelError(f"is {text}", fix=needed, field=f"{self.where}.{name}"[:120])


def read_rope(fields: Fields, settings: RopeSettings, values: dict[str, Any] | None = None) -> Rope:
    """The rotary positions that a configuration asks for; `values` if not its usual object."""
    if values is None:
        where = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
        values = fields.mapping(where)
        theta = fields.number(settings.theta, least=1e-9)
    else:
        where, theta = "rope_parameters", fields.number(settings.theta, least=1e-9)
    scaling = _Scaling(values, where)
    theta = scaling.number("rope_theta", theta, least=1e-9)
    kind = _kind(scaling, settings)
    share = settings.share
    if settings.partial or "partial_rotary_factor" in values:
        share = scaling.number("partial_rotary_factor", share)
        if share > 1.0 or (share != 1.0 and not settings.partial):
            raise scaling.wrong("partial_rotary_factor", "heads of this family turn as a whole")
    size = int(settings.size * share)
    if size % 2 or size < 2:
        raise ModelError(
            f"{size} of the {settings.size} features of a head turn",
            fix="an even number is needed",
            field=f"{where}.partial_rotary_factor",
        )
    rope = Rope(theta, size=0 if size == settings.size else size, interleaved=settings.interleaved)
    plain = [theta ** (-2 * i / size) for i in range(size // 2)]
    return KINDS[kind](rope, plain, size, scaling, settings)


def _kind(scaling: _Scaling, settings: RopeSettings) -> str:
    name = "rope_type" if scaling.values.get("rope_type") is not None else "type"
    kind = scaling.values.get(name) or settings.kind
    kind = dict(settings.renamed).get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in KEYS:
        raise scaling.wrong(name, f"known kinds are {', '.join(KEYS)}")
    for key, value in scaling.values.items():
        if value is not None and key not in (*KEYS[kind], *ALWAYS):
            raise scaling.wrong(key, f"rotary positions of the kind {kind!r} do not have it")
    return kind


def _original(scaling: _Scaling, settings: RopeSettings) -> float:
    """The length that the model was trained with before it was stretched."""
    if settings.original is not None:
        return float(settings.original)
    name = "original_max_position_embeddings"
    return scaling.number(name, float(settings.positions), least=1)


def _replaced(rope: Rope, frequencies: list[float], factor: float = 1.0) -> Rope:
    return Rope(rope.theta, tuple(frequencies), factor, rope.size, rope.interleaved)


def _default(
    rope: Rope, plain: list[float], size: int, scaling: _Scaling, settings: RopeSettings
) -> Rope:
    return rope


def _linear(
    rope: Rope, plain: list[float], size: int, scaling: _Scaling, settings: RopeSettings
) -> Rope:
    factor = scaling.number("factor", least=1e-9)
    return _replaced(rope, [f / factor for f in plain])


def _dynamic(
    rope: Rope, plain: list[float], size: int, scaling: _Scaling, settings: RopeSettings
) -> Rope:
    factor = scaling.number("factor", least=1e-9)
    if settings.seq <= settings.positions or size <= 2:
        return rope
    longer = factor * settings.seq / settings.positions - (factor - 1)
    theta = rope.theta * longer ** (size / (size - 2))
    return Rope(theta, (), 1.0, rope.size, rope.interleaved)


def _llama3(
    rope: Rope, plain: list[float], size: int, scaling: _Scaling, settings: RopeSettings
) -> Rope:
    factor = scaling.number("factor", least=1e-9)
    low = scaling.number("low_freq_factor", least=1e-9)
    high = scaling.number("high_freq_factor", least=1e-9)
    if high <= low:
        raise scaling.wrong("high_freq_factor", f"more than low_freq_factor {low:g} is needed")
    original = _original(scaling, settings)

    def stretched(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            return frequency
        if wavelength > original / low:
            return frequency / factor
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency

    return _replaced(rope, [stretched(frequency) for frequency in plain])


def yarn_length(factor: float, scale: float = 1.0) -> float:
    """How much longer vectors become under YaRN."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(
    rope: Rope, plain: list[float], size: int, scaling: _Scaling, settings: RopeSettings
) -> Rope:
    original = _original(scaling, settings)
    factor = scaling.number("factor", settings.positions / original, least=1e-9)
    if rope.theta <= 1.0:
        raise scaling.wrong("rope_theta", "more than 1 is needed")
    fast = scaling.number("beta_fast") if scaling.values.get("beta_fast") else 32.0
    slow = scaling.number("beta_slow") if scaling.values.get("beta_slow") else 1.0

    def pair(turns: float) -> float:
        """The pair that makes so many turns over the original length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(fast), pair(slow)
    if scaling.values.get("truncate", True) is not False:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, size - 1.0)
    last = last + 0.001 if first == last else last
    ramp = [min(max((i - first) / (last - first), 0.0), 1.0) for i in range(size // 2)]
    mixed = [f / factor * share + f * (1 - share) for f, share in zip(plain, ramp, strict=True)]
    if scaling.values.get("attention_factor") is not None:
        return _replaced(rope, mixed, scaling.number("attention_factor"))
    scale, all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if scale and all_dim:
        longer = yarn_length(factor, scale) / yarn_length(factor, all_dim)
    else:
        longer = yarn_length(factor)
    return _replaced(rope, mixed, longer)


def _longrope(
    rope: Rope, plain: list[float], size: int, scaling: _Scaling, settings: RopeSettings
) -> Rope:
    original = _original(scaling, settings)
    factor = scaling.number("factor", settings.positions / original, least=1e-9)
    usual = 1.0
    if factor > 1 and original > 1:
        usual = math.sqrt(1 + math.log(factor) / math.log(original))
    longer = scaling.number("attention_factor", usual)
    short, long = (scaling.factors(name, size // 2) for name in ("short_factor", "long_factor"))
    chosen = long if settings.seq > original else short
    return _replaced(rope, [f / s for f, s in zip(plain, chosen, strict=True)], longer)


KINDS: dict[str, Callable[[Rope, list[float], int, _Scaling, RopeSettings], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
