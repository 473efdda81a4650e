"""Whatever is asked for: a forecast of finite, sensible numbers, or a refusal in words."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import PartitaError
from partita.forecast.compare import sensitivity, shortages, ways_to_fit
from partita.forecast.inputs import ATTENTION, RECOMPUTE, SCHEDULES
from partita.jobs.forecast import forecast_model
from partita.plans import EXECUTIONS
from partita.report.forecast import (
    forecast_json,
    forecast_text,
    sensitivity_json,
    sensitivity_text,
)

MODELS = ("gpt2", "gpt3-13b", "llama-3-8b", "mixtral", "deepseek-v2-lite", "bert-large", "vit-l16")
CLUSTERS = ("1xA100", "8xA100", "2x8xH100", "4x8xH200", "8x8xB200", "4xV100")
degrees = st.sampled_from((1, 1, 1, 2, 3, 4, 8))


@st.composite
def asked(draw):
    """Keys of a strategy, some of them nonsense together."""
    given_keys = {
        name: draw(degrees) for name in ("tp", "pp", "vpp", "cp", "ep") if draw(st.booleans())
    }
    optional = {
        "sp": st.booleans(), "zero": st.integers(0, 3), "hsdp": st.sampled_from((0, 2, 4)),
        "recompute": st.sampled_from(RECOMPUTE), "schedule": st.sampled_from(SCHEDULES),
        "execution": st.sampled_from(EXECUTIONS), "attention": st.sampled_from(ATTENTION),
        "matmul_dtype": st.sampled_from(("bf16", "fp8", "fp4", "tf32")),
        "grad_dtype": st.sampled_from(("f32", "bf16")), "dropout": st.booleans(),
        "dtype": st.sampled_from(("bf16", "f16", "f32")), "micro_batch": st.sampled_from((1, 2)),
    }  # fmt: skip
    for name, values in optional.items():
        if draw(st.booleans()):
            given_keys[name] = draw(values)
    return {"batch": draw(st.sampled_from((1, 16, 64, 96, 512))), **given_keys}


@settings(max_examples=300)
@given(model=st.sampled_from(MODELS), cluster=st.sampled_from(CLUSTERS), keys=asked())
def test_forecasts_are_finite_or_refused(model, cluster, keys):
    try:
        forecast = forecast_model(model, cluster, **keys)
    except PartitaError as refusal:
        assert ";" in str(refusal), "a refusal says what to do"
        return
    low, high = forecast.interval_s
    assert 0 < low < forecast.step_s < high < math.inf
    assert 0 < forecast.mfu <= forecast.hfu * (1 + 1e-9) < 1.5
    assert 0 <= forecast.bubble_s < forecast.step_s
    assert all(0 <= s < math.inf for _, s in (*forecast.exposed_s, *forecast.parts_s))
    told = sum(s for _, s in (*forecast.exposed_s, *forecast.parts_s)) + forecast.bubble_s
    assert told == pytest.approx(forecast.step_s), "every second is told once"
    for parts in forecast.memory_of_stages:
        assert min(parts.parameters, parts.gradients, parts.optimizer) >= 0
        assert min(parts.activations, parts.output) >= 0
        assert parts.total <= forecast.memory.total * (1 + 1e-9), "the fullest is the fullest"
    assert bool(shortages(forecast)) != forecast.fits


@settings(max_examples=15)
@given(model=st.sampled_from(MODELS), cluster=st.sampled_from(CLUSTERS), keys=asked())
def test_every_forecast_can_be_told(model, cluster, keys):
    try:
        forecast = forecast_model(model, cluster, **keys)
    except PartitaError:
        return
    ways = () if forecast.fits else ways_to_fit(forecast)
    assert forecast_text(forecast, cluster, ways)
    assert forecast_json(forecast, cluster, ways)["step_s"] == forecast.step_s
    examined = sensitivity(forecast)
    assert sensitivity_text(examined)
    assert sensitivity_json(examined)["shifts"]
