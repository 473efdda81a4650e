"""On a GPU: what is returned is right, fast enough to be kept, saved, loaded and emitted."""

import runpy

import pytest
import torch
from streams_modules import MODULES, made

from partita.run.streams.api import streams
from partita.run.streams.emit import emit
from partita.run.streams.truth import relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_fast_model_computes_the_model(name, dtype):
    module, image = made(name)
    module, image = module.cuda().to(dtype), image.cuda().to(dtype)
    fast = streams(module, image, time_s=2.0, compile=False)
    with torch.no_grad():
        assert relative(fast(image), module(image)) < 3e-3
    times = dict(fast.schedules[0].times_us)
    assert fast.schedules[0].time_us <= times["sequential graph"]


def test_a_schedule_is_saved_loaded_and_emitted(tmp_path):
    module, image = made("branches")
    module, image = module.cuda(), image.cuda()
    fast = streams(module, image, time_s=2.0, compile=False, profile=tmp_path / "times.jsonl")
    fast.save(tmp_path / "schedule.json")
    again = streams(module, image, schedule=tmp_path / "schedule.json")
    assert relative(again(image), fast(image)) == 0.0
    weights = str(tmp_path / "weights.pt")
    (tmp_path / "fast.py").write_text(emit(fast, weights))
    emitted = runpy.run_path(str(tmp_path / "fast.py"))["Model"](weights)
    assert relative(emitted(image)[0], fast(image)) < 1e-3


def test_each_batch_has_its_own_schedule():
    module, image = made("branches")
    module, image = module.cuda(), image.cuda()
    fast = streams(module, image, batches=(1,), time_s=1.0, compile=False)
    assert [schedule.shapes[0][0] for schedule in fast.schedules] == [2, 1]
    with torch.no_grad():
        assert relative(fast(image[:1]), module(image[:1])) < 3e-3
