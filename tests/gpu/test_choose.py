"""Choosing: what cannot be built, is wrong or is slower is left out, and it is said why."""

import pytest

torch = pytest.importorskip("torch")

from partita.errors import VerificationError  # noqa: E402
from partita.gpu import choose  # noqa: E402
from partita.gpu.reference_output import ReferenceOutput, reference_output  # noqa: E402

REFERENCE = ReferenceOutput((torch.tensor([1.0, 2.0], dtype=torch.float64),), (1e-7,), 1e-6)
RIGHT = (torch.tensor([1.0, 2.0]),)
WRONG = (torch.tensor([1.0, 2.1]),)


def raised(error):
    def build():
        raise error

    return build


def test_what_can_be_built_is_not_left_out():
    assert choose.attempt(lambda: None) == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no kernel\nand a long story"), "left out (RuntimeError: no kernel)"),
        (NotImplementedError(), "left out (NotImplementedError: )"),
        (torch.OutOfMemoryError("10 GiB"), "out of memory, left out"),
    ],
)
def test_what_cannot_be_built_is_left_out_with_the_reason_in_one_line(error, said):
    assert choose.attempt(raised(error)) == said


def test_ctrl_c_and_our_own_mistakes_are_not_taken_for_a_candidate_that_fails():
    with pytest.raises(AssertionError):
        choose.attempt(raised(AssertionError("ours")))

    def interrupted():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("capture was cut short") from None

    with pytest.raises(KeyboardInterrupt):
        choose.attempt(interrupted)


def test_what_the_compiler_says_is_cut_to_a_line():
    assert (
        choose.not_compiled(ValueError("x" * 300)) == f"cannot be compiled: ValueError: {'x' * 200}"
    )


def test_a_wrong_output_is_named_with_its_error_beside_the_models_own():
    assert choose.wrong(RIGHT, REFERENCE) == ""
    assert choose.wrong(WRONG, REFERENCE) == "error 4.5e-02 where the model itself has 1.0e-07"


def test_a_wrong_output_is_refused_where_nothing_else_can_be_called():
    assert choose.check(RIGHT, REFERENCE, "the fused model") == 0.0
    with pytest.raises(VerificationError, match=r"the fused model is 4\.47e-02 off float64"):
        choose.check(WRONG, REFERENCE, "the fused model")


def test_the_fastest_is_kept_and_of_equals_the_first(monkeypatch):
    monkeypatch.setattr(choose, "compare_us", lambda runs: [run() for run in runs])
    times = {"slow": 3.0, "fast": 1.0, "as fast": 1.0}
    best, measured = choose.fastest(tuple(times), lambda name: lambda: times[name])
    assert best == "fast"
    assert measured == [3.0, 1.0, 1.0]


def test_where_float64_cannot_be_had_rounding_over_the_depth_is_what_is_allowed():
    class Narrow(torch.nn.Module):
        def forward(self, x):
            if x.dtype == torch.float64:
                raise RuntimeError("no kernel for it")
            return x * 3

    x = torch.linspace(1, 2, 64).half()
    reference = reference_output(Narrow(), (x,), depth=100)
    assert not reference.exact
    assert reference.errors == (0.0,)
    beside = reference.beside(
        (x * 3,)
    )  # the same numbers again say nothing of how far both are off
    rounded = (x.float() * 3 * (1 + 3 * 2**-11)).half()
    assert beside.holds((rounded,))
    assert not beside.holds((rounded * 1.05,))
