"""The choice among candidates, with the host's clock where there is no GPU."""

from functools import cache

import pytest
import torch
from streams_modules import Branches, made
from torch import nn

from partita.costs.measured import Environment
from partita.errors import VerificationError
from partita.gpu import measure
from partita.gpu.flow.export import flow_of
from partita.gpu.graphs import GraphReplay
from partita.gpu.reference_output import relative
from partita.gpu.sequential import SequentialGraph
from partita.gpu.step_times import StepTimes
from partita.gpu.streams import choose, improve, tune
from partita.gpu.streams.candidates import Options
from partita.gpu.streams.choose import INTERRUPTED, Chooser
from partita.run import clock

HERE = Environment("here", "2.11.0", False, "none")
QUICK = Options(time_s=0.0, streams=(2, 4), compile=False)


@cache
def branches():
    module, image = made("branches")
    return flow_of(module, (image,))


@pytest.fixture(autouse=True)
def exported_once(monkeypatch):
    """The same model is exported once for all tests."""

    def known(module, inputs):
        return branches() if type(module) is Branches else flow_of(module, inputs)

    monkeypatch.setattr(choose, "flow_of", known)


def chooser(name="branches", options=QUICK, profile=None, note=lambda text: None):
    module, image = made(name)
    return Chooser(module, (image,), options, profile or StepTimes(on=HERE), note), module, image


def test_the_fastest_right_candidate_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "STAGES_S", 60.0)
    monkeypatch.setattr(choose, "IMPROVE_S", 0.3)
    words = []
    profile = StepTimes(tmp_path / "times.jsonl", on=HERE)
    patient = Options(time_s=300.0, streams=(2, 4), compile=False)
    mine, module, image = chooser(options=patient, profile=profile, note=words.append)
    best, schedule = mine.choose()
    with torch.no_grad():
        assert relative(best.call(image)[0], module(image)) < 1e-5
    times = dict(schedule.times_us)
    whole = {label: time for label, time in times.items() if "(" not in label}
    assert schedule.time_us == min(whole.values())
    assert "sequential graph" in whole
    assert {"exporting", "comparing"} <= set(words)
    assert any("stages" in label for label in times)
    assert any("improved" in label for label in times)
    assert StepTimes(tmp_path / "times.jsonl", on=HERE).times.keys() == profile.times.keys()


def test_drift_is_taken_out_of_what_is_timed(monkeypatch):
    now = [0.0]
    slow = [1.0]

    def work(seconds):
        def run():
            now[0] += seconds * slow[0]

        return run

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: False)
    reference = measure.DriftGauge(GraphReplay(work(2e-6)))
    assert reference.timed_us(work(5e-6)) == pytest.approx(5.0)
    slow[0] = 1.5  # the clock of the GPU has gone down
    assert reference.timed_us(work(5e-6)) == pytest.approx(5.0)


def test_ctrl_c_keeps_the_best_so_far_and_the_profile(tmp_path):
    def interrupt(text):
        if text.startswith("fold: capturing 2 streams"):
            raise KeyboardInterrupt

    profile = StepTimes(tmp_path / "times.jsonl", on=HERE)
    mine, _, _ = chooser(profile=profile, note=interrupt)
    _, schedule = mine.choose()
    assert INTERRUPTED in schedule.notes
    assert mine.interrupted
    assert {label.split(" (")[0] for label, _ in schedule.times_us} == {
        "sequential graph",
        "fold, sequential",
    }
    assert (tmp_path / "times.jsonl").exists()


def test_ctrl_c_while_improving_keeps_what_was_found(monkeypatch):
    calls = []

    def compared(runs, **settings):
        calls.append(runs)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return [2.0, 1.0]  # every change is better

    monkeypatch.setattr(improve, "compare_us", compared)
    monkeypatch.setattr(choose, "STAGES_S", 0.0)
    mine, _, _ = chooser(options=Options(time_s=300.0, streams=(2,), compile=False))
    _, schedule = mine.choose()
    assert INTERRUPTED in schedule.notes
    assert any("improved" in label for label, _ in schedule.times_us)


def test_ctrl_c_before_anything_is_built_is_one():
    def interrupt(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chooser(note=interrupt)[0].choose()


def test_ctrl_c_while_a_graph_is_captured_is_not_taken_for_an_error(monkeypatch):
    class Interrupted(SequentialGraph):
        def __init__(self, *args):
            super().__init__(*args)
            try:
                raise KeyboardInterrupt
            finally:  # as the end of a capture does
                raise RuntimeError("the capture was not ended")

    monkeypatch.setattr(choose, "SequentialGraph", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        chooser()[0].choose()


def test_a_candidate_without_memory_is_left_out(monkeypatch):
    def no_room(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(choose, "Bound", no_room)
    _, schedule = chooser()[0].choose()
    assert schedule.form == "sequential"
    assert "fold: out of memory, left out" in schedule.notes


def test_a_way_without_memory_is_skipped_and_the_others_are_measured(monkeypatch):
    def measured(bound, step, way):
        if step.kind == "maxpool":
            raise torch.OutOfMemoryError("out of memory")
        return 1.0

    monkeypatch.setattr(tune, "step_us", measured)
    profile = StepTimes(on=HERE)
    mine, module, image = chooser(options=Options(10.0, (2,), False, False, False), profile=profile)
    best, _ = mine.choose()
    with torch.no_grad():
        assert relative(best.call(image)[0], module(image)) < 1e-5
    assert sorted(set(profile.times.values())) == [-1.0, 1.0]


def test_a_wrong_candidate_is_left_out(monkeypatch):
    class Wrong(SequentialGraph):
        def __call__(self, *inputs):
            return tuple(each * 1.01 for each in super().__call__(*inputs))

    monkeypatch.setattr(choose, "SequentialGraph", Wrong)
    _, schedule = chooser()[0].choose()
    assert schedule.form == "streams"
    assert any(note.startswith("sequential graph: error 1.0e-02") for note in schedule.notes)


def test_if_everything_is_wrong_nothing_is_returned(monkeypatch):
    monkeypatch.setattr(choose.ReferenceOutput, "holds", lambda self, outputs: False)
    with pytest.raises(VerificationError, match="sequential graph: error"):
        chooser()[0].choose()


def test_models_with_random_numbers_stay_in_order_and_it_is_said():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    mine = Chooser(Noisy(), (torch.randn(4),), QUICK, StepTimes(on=HERE), lambda text: None)
    _, schedule = mine.choose()
    assert schedule.form == "sequential"
    assert "draws random numbers (aten.rand_like.default)" in schedule.notes[0]


def test_time_that_is_over_still_gives_an_answer():
    mine, module, image = chooser(options=Options(time_s=0.0, streams=(2,), compile=False))
    best, schedule = mine.choose()
    with torch.no_grad():
        assert relative(best.call(image)[0], module(image)) < 1e-5
    assert not any("improved" in label for label, _ in schedule.times_us)
