"""`partita.accelerate` without a GPU: what is chosen, bad input, changed weights."""

import json

import pytest
import torch
from decoder_modules import decoder
from torch import nn

from partita.errors import FileError, InputError, PlanError
from partita.gpu.accelerate import api, search
from partita.gpu.accelerate.api import accelerate, checked_inputs
from partita.gpu.accelerate.search import MODULE
from partita.gpu.accelerate.weights import WeightWatch
from partita.gpu.trial import TrialResult

LINEAR = nn.Linear(4, 4)


@pytest.fixture
def on_cpu(monkeypatch):
    """The CPU stands for the GPU; torch.compile costs too much here."""
    if torch.cuda.is_available():
        pytest.skip("the clock of the host is read without a GPU")
    monkeypatch.setattr(api, "checked_inputs", lambda module, example: tuple(example))


def fastest_is(monkeypatch, label):
    """Let one candidate be the fastest."""

    def fastest(candidates, run):
        for each in candidates:
            run(each)()
        times = [1.0 if each.label.startswith(label) else 2.0 for each in candidates]
        return candidates[times.index(min(times))], times

    monkeypatch.setattr(search, "fastest", fastest)


def quick(module, inputs, **options):
    return accelerate(module, inputs, compile=False, isolate=False, time_s=1.0, **options)


def no_trials(monkeypatch):
    monkeypatch.setattr(search, "run_trial", lambda *args: TrialResult(failure="ended by SIGSEGV"))


def test_a_child_that_crashes_costs_its_candidate_alone(on_cpu, monkeypatch):
    no_trials(monkeypatch)
    module, inputs = decoder(layers=1)
    fastest_is(monkeypatch, "sequential graph")
    fast = accelerate(module, inputs, compile=False)
    report = fast.report()
    assert [name for name, _ in report.times_us] == [MODULE, "sequential graph"]
    assert "streams: left out, its trial ended by SIGSEGV" in report.notes
    assert "rtasks: left out, its trial ended by SIGSEGV" in report.notes
    assert "nothing of ours was faster: what is called is PyTorch's own" in str(report)
    with torch.no_grad():
        assert all(map(torch.allclose, fast(*inputs), module(*inputs)))


def test_streams_are_kept_saved_and_built_again(on_cpu, monkeypatch, tmp_path):
    module, inputs = decoder(layers=1)
    monkeypatch.setattr(search, "RTASKS", "partita.gpu.accelerate.work:missing")
    monkeypatch.setattr(search.AccelerateSearch, "fused", lambda self: None)
    monkeypatch.setattr(
        search.AccelerateSearch, "tried", _streams_only(search.AccelerateSearch.tried)
    )
    monkeypatch.setattr("partita.gpu.streams.choose.fastest", _ours_first)
    monkeypatch.setattr(search.AccelerateSearch, "left_s", lambda self: 1.0)  # however slow
    fastest_is(monkeypatch, "streams")
    fast = quick(module, inputs)
    assert fast.report().form == "streams"
    assert "nothing of ours" not in str(fast.report())
    assert len(fast.inputs) == len(inputs)
    other = tuple(torch.randn_like(each) for each in inputs)
    with torch.no_grad():
        for got, wanted in zip(fast(*other), module(*other), strict=True):
            assert torch.allclose(got, wanted, atol=1e-5)
    fast.save(tmp_path / "fast.json")
    again = quick(module, inputs, decided=tmp_path / "fast.json")
    assert again.report().kept == fast.report().kept
    assert [name for name, _ in again.report().times_us] == [MODULE, fast.report().kept]
    with pytest.raises(PlanError, match="the schedule is for other steps"):
        quick(*decoder(layers=2), decided=tmp_path / "fast.json")
    (tmp_path / "bad.json").write_text(json.dumps({"format": "partita/plan@1"}))
    with pytest.raises(FileError, match="partita/plan@1"):
        quick(module, inputs, decided=tmp_path / "bad.json")


def _streams_only(tried):
    def only(self, label, *rest):
        return tried(self, label, *rest) if label == "streams" else None

    return only


def _ours_first(candidates, run):
    times = [1.0 if each.form == "streams" else 2.0 for each in candidates]
    return candidates[times.index(min(times))], times


def test_a_wrong_candidate_is_left_out_with_its_error(on_cpu, monkeypatch):
    no_trials(monkeypatch)
    right = search.SequentialGraph.__call__
    monkeypatch.setattr(
        search.SequentialGraph,
        "__call__",
        lambda self, *inputs: tuple(each + 1 for each in right(self, *inputs)),
    )
    module, inputs = decoder(layers=1)
    report = accelerate(module, inputs, compile=False).report()
    assert report.kept == MODULE
    assert any("sequential graph: error" in note and "left out" in note for note in report.notes)


def test_a_module_that_cannot_be_captured_still_runs(on_cpu, monkeypatch):
    class Branching(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x - 1

    no_trials(monkeypatch)
    fast = accelerate(Branching().eval(), (torch.ones(3),), compile=False)
    assert torch.equal(fast(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(fast(-torch.ones(3)), torch.full((3,), -2.0))
    (note,) = fast.report().notes
    assert note.startswith("streams and rtasks left out:")
    assert "cannot be captured" in note


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: torch.randn(3, 1, 64), r"input 0 is \[3, 1, 64\] float32 on cpu, the example"),
        (lambda x: x.double(), r"input 0 is \[1, 1, 64\] float64 on cpu"),
    ],
)
def test_other_inputs_run_the_module_and_it_is_said_once(on_cpu, monkeypatch, change, said):
    no_trials(monkeypatch)
    fastest_is(monkeypatch, "sequential graph")
    module, inputs = decoder(layers=1)
    fast = accelerate(module, inputs, compile=False)
    seen = []
    monkeypatch.setattr(module, "forward", lambda *args: seen.append(args) or args[0])
    other = (change(inputs[0]), *inputs[1:])
    with pytest.warns(UserWarning, match=said + ".*the module runs as it is"):
        fast(*other)
    fast(*other)
    assert len(seen) == 2
    with pytest.warns(UserWarning, match="2 inputs were given, the example has 3"):
        fast(*inputs[:2])


def changes():
    def in_place(module):
        with torch.no_grad():
            module.weight.add_(1)

    def replaced(module):
        module.weight = nn.Parameter(torch.zeros(4, 4))

    def new_memory(module):
        module.weight.data = torch.zeros(4, 4)

    def loaded(module):
        module.load_state_dict(nn.Linear(4, 4).state_dict())

    def taken(module):
        del module.weight

    return (in_place, replaced, new_memory, loaded, taken)


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_changed_weights_are_noticed(change):
    module = nn.Linear(4, 4)
    watch = WeightWatch(module)
    with torch.no_grad():
        module(torch.randn(2, 4))
    assert not watch.changed()
    change(module)
    assert watch.changed()


def test_after_the_weights_have_changed_the_module_runs(on_cpu, monkeypatch):
    no_trials(monkeypatch)
    fastest_is(monkeypatch, "sequential graph")
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    fast = accelerate(module, (x,), compile=False)
    with torch.no_grad():
        module[0].weight.mul_(3)  # the graph has a folded copy
    with pytest.warns(UserWarning, match="the weights have changed since: accelerate again"):
        result = fast(x)
    with torch.no_grad():
        assert torch.equal(result, module(x))


@pytest.mark.parametrize(
    ("module", "example", "said"),
    [
        (nn.Linear(4, 4).eval(), (), "the example has no tensors; give what the module is called"),
        (nn.Linear(4, 4).eval(), ("x",), "the example has no tensors"),
        (nn.Linear(4, 4), torch.ones(4), r"the module is in training mode.*call module.eval\(\)"),
        (nn.Linear(4, 4).eval(), torch.ones(4), r"example are on cpu; put both on one GPU"),
        (nn.Linear(4, 4).eval(), torch.ones(4, device="meta"), "example are on cpu, meta; put"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(module, example, said):
    with pytest.raises(InputError, match=said):
        checked_inputs(module, example)


def test_a_module_that_cannot_travel_is_left_to_pytorch_with_the_reason(on_cpu, monkeypatch):
    def refuse(*args):
        raise ValueError("no way\nto write this")

    monkeypatch.setattr(search, "pack", refuse)
    module, inputs = decoder(layers=1)
    report = accelerate(module, inputs, compile=False).report()
    (note,) = report.notes
    assert "the module cannot be sent to another process (ValueError: no way)" in note
    assert "isolate=False" in note
