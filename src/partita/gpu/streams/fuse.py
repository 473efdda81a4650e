"""Which pieces are worth it: each is timed as one launch against its steps one by one.

Equal pieces are compiled and timed once. What the compiler does not take, or what is not reached in
time, stays as it is.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from partita.gpu.flow.steps import Step
from partita.gpu.measure import raise_interrupt, run_us
from partita.gpu.step_times import StepTimes
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.compiled import NotCompiledError
from partita.gpu.streams.order import launched
from partita.gpu.streams.pieces import Group, contracted, groups
from partita.gpu.streams.tune import Timed, structure
from partita.gpu.streams.ways import COMPILED, EAGER

MARGIN = 0.02  # by this fraction a piece must be faster
NEVER = -1.0  # of a piece that does not run


@dataclass(frozen=True, slots=True)
class Fused:
    """The pieces that won, the flow with them in memory, and the ways of its steps."""

    pieces: tuple[Group, ...]
    bound: Bound
    timed: dict[int, Timed]
    notes: tuple[str, ...]


def fuse(
    bound: Bound, timed: Mapping[int, Timed], profile: StepTimes, go_on: Callable[[], bool]
) -> Fused:
    """The groups that are faster as one launch; others stay apart."""
    op_groups = groups(bound.flow)
    trial = bound.with_flow(contracted(bound.flow, op_groups))
    pieces = {step.members[-1].name: step for step in trial.flow.steps if step.kind == "piece"}
    by_name = {bound.flow.steps[index].name: each for index, each in timed.items()}
    judge = _Judge(trial, by_name, profile)
    won: list[Group] = []
    times_us: dict[str, float] = {}
    for group in op_groups:
        piece = pieces[group[-1]]
        if not judge.knows(piece) and not go_on():
            judge.notes.append("pieces: no time left for some")
            break
        alone_us, together_us = judge.times(piece)
        if 0 < together_us < (1 - MARGIN) * alone_us:
            won.append(group)
            times_us[piece.name] = together_us
    flow = contracted(bound.flow, won)
    mine = bound.with_flow(flow)
    ways = {
        index: Timed((COMPILED,), (times_us[flow.steps[index].name],))
        if flow.steps[index].kind == "piece"
        else by_name[flow.steps[index].name]
        for index in launched(flow)
    }
    return Fused(tuple(won), mine, ways, tuple(dict.fromkeys(judge.notes)))


def compile_pieces(bound: Bound, go_on: Callable[[], bool]) -> None:
    """Compile pieces while there is time; what fails, fails again when it is timed."""
    trial = bound.with_flow(contracted(bound.flow, groups(bound.flow)))
    for step in trial.flow.steps:
        if step.kind == "piece" and go_on():
            with suppress(RuntimeError):
                trial.run(step, COMPILED)


class _Judge:
    """Times of pieces, as one launch and step by step."""

    def __init__(self, bound: Bound, timed: Mapping[str, Timed], profile: StepTimes) -> None:
        self.bound, self.timed, self.profile = bound, timed, profile
        self.notes: list[str] = []

    def knows(self, piece: Step) -> bool:
        return self.profile.get(structure(self.bound, piece), COMPILED) is not None

    def times(self, piece: Step) -> tuple[float, float]:
        """Microseconds step by step, and as one; negative if it does not run."""
        key = structure(self.bound, piece)
        if self.profile.get(key, COMPILED) is None:
            self.profile.put(key, COMPILED, self.together(piece))
        if self.profile.get(key, EAGER) is None:
            self.profile.put(key, EAGER, run_us(lambda: self.one_by_one(piece)))
        alone, one = self.profile.get(key, EAGER), self.profile.get(key, COMPILED)
        assert alone is not None
        assert one is not None
        return alone, one

    def together(self, piece: Step) -> float:
        try:
            return run_us(lambda: self.bound.run(piece, COMPILED))
        except NotCompiledError as error:
            self.notes.append(f"a piece of {len(piece.members)} steps: left out ({error})")
        except RuntimeError as error:  # it cannot be captured, or does not fit into memory
            raise_interrupt(error)
            said = (str(error).splitlines() or [""])[0][:120]
            self.notes.append(f"a piece of {len(piece.members)} steps: left out ({said})")
        return NEVER

    def one_by_one(self, piece: Step) -> None:
        for step in piece.members:
            self.bound.run(step, self.timed[step.name].ways[0])
