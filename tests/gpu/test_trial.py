"""A trial in a child process: a crash, a hang or an error there is a sentence here."""

import signal

import pytest
import torch
from torch import nn

from partita.gpu import trial
from partita.gpu.trial import pack, run_trial, unpack


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3).eval(), (torch.randn(2, 4),)


@pytest.fixture
def parcel(tmp_path):
    return pack(*linear(), tmp_path)


def test_a_child_gives_an_answer(parcel):
    module, inputs = linear()
    with torch.no_grad():
        wanted = float(module(*inputs).sum())
    result = run_trial("trial_works:add_up", parcel, {"n": 3}, 60)
    assert result.failure == ""
    assert result.value["options"] == {"n": 3}
    assert result.value["sum"] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("fail", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("crash", "ended by SIGSEGV"),
    ],
)
def test_what_fails_in_a_child_is_a_sentence_here(parcel, work, said):
    result = run_trial(f"trial_works:{work}", parcel, {}, 60)
    assert result.value is None
    assert result.failure == said


def test_a_child_that_hangs_is_ended(parcel, monkeypatch):
    monkeypatch.setattr(trial, "GRACE_S", 0.2)
    result = run_trial("trial_works:hang", parcel, {}, 6)
    assert result.failure == "did not end within 6 s"
    assert result.seconds < 30


def test_a_child_that_is_asked_to_stop_may_give_what_it_has(parcel):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    try:
        result = run_trial("trial_works:best_so_far", parcel, {}, 8)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.value == "what there was"


def test_a_module_whose_class_no_child_can_import_travels_as_a_program(tmp_path):
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return torch.relu(self.inner(x))

    torch.manual_seed(1)
    module, x = Local().eval(), torch.randn(2, 4)
    parcel = pack(module, (x,), tmp_path)
    there, (given,) = unpack(parcel.path)
    assert torch.equal(given, x)
    with torch.no_grad():
        assert torch.equal(there(given), module(x))
        assert torch.equal(parcel.module(x), module(x))
    assert pack(*linear(), tmp_path).module is not parcel.module


def test_a_module_that_pickle_refuses_travels_as_a_program(tmp_path):
    module, inputs = linear()
    module.extra = lambda: None
    parcel = pack(module, inputs, tmp_path)
    assert parcel.module is not module
    there, given = unpack(parcel.path)
    with torch.no_grad():
        assert torch.equal(there(*given), module(*inputs))
