"""On a GPU: what is returned is right, fast enough to be kept, saved, loaded and emitted."""

import os
import runpy
import subprocess

import pytest
import torch
from streams_modules import MODULES, made
from torch import nn

from partita.gpu.reference_output import relative
from partita.gpu.step_times import StepTimes
from partita.gpu.streams import fuse
from partita.gpu.streams.api import Streamed, streams
from partita.gpu.streams.candidates import Options
from partita.gpu.streams.choose import Chooser
from partita.gpu.streams.emit import emit

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:::torch"),  # its compiler's own, about itself
]


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


def test_pieces_are_compiled_into_the_graph_saved_and_emitted(tmp_path, monkeypatch):
    monkeypatch.setattr(fuse, "MARGIN", -1e9)  # all that run are taken
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda().half().eval()
    tokens = torch.randn(1, 64, 256, device="cuda", dtype=torch.float16)
    chooser = Chooser(module, (tokens,), Options(time_s=30.0), StepTimes(), lambda text: None)
    _, schedule = chooser.choose()
    labels = {label.removesuffix(" (replay)") for label, _ in schedule.times_us}
    assert {"torch.compile", "compiled graph", "fold with pieces, sequential"} <= labels
    pieced = next(each for each in chooser.candidates if each.tuned and each.tuned.pieces)
    streamed = Streamed(module, (tokens,))
    streamed.add(chooser.schedule(pieced, ((pieced.label, 1.0),), 0.0), pieced.call)
    streamed.save(tmp_path / "schedule.json")
    again = streams(module, tokens, schedule=tmp_path / "schedule.json")
    weights = str(tmp_path / "weights.pt")
    (tmp_path / "fast.py").write_text(emit(streamed, weights))
    emitted = runpy.run_path(str(tmp_path / "fast.py"))["Model"](weights)
    with torch.no_grad():
        wanted = module(tokens)
    for outputs in (streamed(tokens), again(tokens), emitted(tokens)[0]):
        assert relative(outputs, wanted) < 3e-3


def test_a_kept_model_is_never_slower_than_torch_compile():
    module, image = made("branches")
    module, image = module.cuda().half(), image.cuda().half()
    fast = streams(module, image, time_s=20.0)
    times = dict(fast.schedules[0].times_us)
    assert fast.schedules[0].time_us <= min(times["torch.compile"], times["sequential graph"])


@pytest.mark.parametrize("channels", [96, 109])
def test_ours_is_as_far_from_float64_as_pytorch_is(channels):
    torch.manual_seed(0)
    units = [nn.Conv2d(channels, channels, 1) for _ in range(12)]
    module = nn.Sequential(nn.Conv2d(3, channels, 3), *units).cuda().eval()
    image = torch.randn(1, 3, 30, 30, device="cuda")
    chooser = Chooser(
        module, (image,), Options(time_s=5.0, compile=False), StepTimes(), lambda text: None
    )
    chooser.choose()
    sequential, *ours = (chooser.reference.error(each.call(image)) for each in chooser.candidates)
    assert ours
    assert max(ours) < 2 * max(sequential, 1e-6)
    assert not any("error" in note for note in chooser.notes)


def test_no_compiler_is_left_running():
    module, image = made("grouped")
    streams(module.cuda(), image.cuda(), time_s=5.0)
    children = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True
    ).stdout
    assert "compile_worker" not in children


def test_each_batch_has_its_own_schedule():
    module, image = made("branches")
    module, image = module.cuda(), image.cuda()
    fast = streams(module, image, batches=(1,), time_s=1.0, compile=False)
    assert [schedule.shapes[0][0] for schedule in fast.schedules] == [2, 1]
    with torch.no_grad():
        assert relative(fast(image[:1]), module(image[:1])) < 3e-3
