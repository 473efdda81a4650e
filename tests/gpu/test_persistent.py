"""`partita.persistent`: what it takes, what it refuses, and that its programs are proven safe."""

import pytest

import partita
from partita.errors import InputError, ProblemError, VerificationError

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn  # noqa: E402

from partita.gpu.recurrent import api  # noqa: E402
from partita.problems.rprogram import check_rprogram  # noqa: E402


def decoder(eos=0):
    return partita.GreedyDecoder(nn.Embedding(12, 4), nn.LSTM(4, 5), nn.Linear(5, 12), eos)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_and_decoders_are_taken(kind):
    layers = partita.persistent(kind(4, 5, 2), batch=2)
    assert layers.spec.batch == 2
    assert layers.device.type == "cpu"
    assert partita.persistent(decoder()).vocabulary == 12


def test_the_program_that_is_proven_is_that_of_the_kernel():
    layers = partita.persistent(nn.LSTM(4, 9, 3))
    problem, program = layers.rprogram(4)
    assert len(program.veus) == layers.num_groups * layers.num_blocks
    assert check_rprogram(problem, program, len(program.veus)) == ()
    run = partita.persistent(decoder())
    assert len(run.rprogram(2)[1].veus) == run.shape.num_programs


def test_a_program_that_is_not_safe_is_not_handed_out(monkeypatch):
    monkeypatch.setattr(api, "check_rprogram", lambda *_: ("veu 0 waits for ever",))
    with pytest.raises(VerificationError, match="veu 0 waits for ever"):
        partita.persistent(nn.GRU(4, 5))


def test_any_other_module_is_refused():
    with pytest.raises(InputError, match="Linear has no persistent form"):
        partita.persistent(nn.Linear(3, 4))


def test_a_decoder_of_several_sequences_is_refused():
    with pytest.raises(InputError, match="a decoder takes one sequence at a time"):
        partita.persistent(decoder(), batch=2)


def test_layers_without_a_persistent_form_are_refused_with_the_reason():
    with pytest.raises(ProblemError, match="projection"):
        partita.persistent(nn.LSTM(4, 5, proj_size=2))
