"""One way of choosing: of what can be built and gives the right output, the fastest is kept.

Whole models over streams, fused regions and recurrent layers are all candidates for something:
building one may fail (a compiler, memory), its output may be wrong, and what it takes is measured
in turns with the others. What is left out is said in words.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from partita.errors import VerificationError
from partita.gpu.flow.steps import T
from partita.gpu.measure import compare_us, raise_interrupt, wait
from partita.gpu.reference_output import ReferenceOutput

Candidate = TypeVar("Candidate")
LONGEST = 120  # characters of what an error says


def said(error: BaseException, most: int = LONGEST) -> str:
    """An error in one line: `RuntimeError: out of registers`."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:most]}"


def not_compiled(error: BaseException) -> str:
    """Why what Triton's compiler refused stays with PyTorch."""
    return f"cannot be compiled: {said(error, 200)}"


def attempt(build: Callable[[], object]) -> str:
    """Build something that may fail; why it is left out, or nothing."""
    try:
        build()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory, left out"
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise_interrupt(error)
        wait()
        return f"left out ({said(error)})"
    return ""


def wrong(outputs: tuple[T, ...], reference: ReferenceOutput) -> str:
    """How far outputs are off, if that is further than the model's own rounding explains."""
    if reference.holds(outputs):
        return ""
    return (
        f"error {reference.error(outputs):.1e} where the model itself has "
        f"{max(reference.errors):.1e}"
    )


def wrong_call(
    call: Callable[..., tuple[T, ...]], inputs: Sequence[T], reference: ReferenceOutput, seed: int
) -> str:
    """How far the outputs of a call are off; it draws what the reference drew at random."""
    torch.manual_seed(seed)
    outputs = call(*inputs)
    wait()
    return wrong(outputs, reference)


def check(outputs: tuple[T, ...], reference: ReferenceOutput, what: str) -> float:
    """The error of outputs that are right; wrong ones are refused."""
    error = reference.error(outputs)
    if not reference.holds(outputs):
        own = max(reference.errors)
        raise VerificationError((f"{what} is {error:.2e} off float64, the model itself {own:.2e}",))
    return error


def fastest(
    candidates: Sequence[Candidate], run: Callable[[Candidate], Callable[[], object]]
) -> tuple[Candidate, list[float]]:
    """The fastest candidate, and the microseconds of each, measured in turns."""
    times_us = compare_us([run(each) for each in candidates])
    return candidates[min(range(len(candidates)), key=times_us.__getitem__)], times_us
