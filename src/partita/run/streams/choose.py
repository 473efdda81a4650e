"""Chooses how a model runs: candidates are built, checked, timed against each other; one is kept.

    sequential graph   PyTorch's operators, norms folded, one stream, one CUDA graph
    torch.compile      the whole model, mode "reduce-overhead"
    fold, k streams    our steps, each in its fastest way, over k streams
    merge, k streams   the same with convolutions of one input merged
    ..., stages        IOS: stages with barriers, found with measured costs
    ..., improved      the best so far, changed step by step and measured as a whole

Inner rounds time replays; the last one times whole calls in turns, copies included. What fails the
check, does not fit into memory or cannot be captured is left out and noted. Whatever was built
before the time is over, or before Ctrl-C, takes part.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from partita.errors import VerificationError
from partita.run.streams import order
from partita.run.streams.bound import Bound
from partita.run.streams.export import evaluating, flow_of
from partita.run.streams.fold import fold, fold_norms
from partita.run.streams.improve import improve
from partita.run.streams.measure import compare_us, replay_us, wait
from partita.run.streams.merge import merge, reorder
from partita.run.streams.order import LaunchPlan
from partita.run.streams.place import place
from partita.run.streams.profile import Profile
from partita.run.streams.record import Schedule, fingerprint
from partita.run.streams.replay import Plain, Replay
from partita.run.streams.stages import staged_plan
from partita.run.streams.steps import Flow, T
from partita.run.streams.truth import Truth, as_tuple, truth_of
from partita.run.streams.tune import Timed, tune
from partita.run.streams.ways import Way

GAP_US = 1.0  # between dependent kernels of a graph: what list scheduling adds to every step
STAGES_S, IMPROVE_S = 6.0, 15.0  # at most, of the time allowed
FINALISTS = 3  # of ours; the baselines always take part
INTERRUPTED = "interrupted: the best so far was kept"
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What may be tried, and for how long."""

    time_s: float = 60.0
    streams: tuple[int, ...] = (2, 3, 4, 6, 8)
    compile: bool = True
    stages: bool = True
    improve: bool = True
    seed: int = 0


@dataclass(slots=True)
class Candidate:
    """One way to run the whole model."""

    label: str
    form: str
    call: Callable[..., tuple[T, ...]]
    replay_us: float
    variant: str = ""
    flow: Flow | None = None
    plan: LaunchPlan | None = None
    ways: dict[str, Way] | None = None


def variants(flow: Flow) -> dict[str, Flow]:
    """The same model after different passes."""
    folded = fold(flow)
    merged = merge(reorder(folded))
    found = {"fold": folded}
    if fingerprint(merged) != fingerprint(folded):
        found["merge"] = merged
    return found


class Chooser:
    """One optimisation of one model for one shape of inputs."""

    def __init__(
        self, module: nn.Module, inputs: tuple[T, ...], options: Options, profile: Profile,
        note: Note,
    ) -> None:  # fmt: skip
        self.module, self.inputs, self.options = module, inputs, options
        self.profile, self.note = profile, note
        self.began = time.perf_counter()
        self.candidates: list[Candidate] = []
        self.notes: list[str] = []
        self.interrupted = False
        self.truth: Truth | None = None
        self.tuned: dict[str, tuple[Bound, dict[int, Timed]]] = {}

    def left_s(self) -> float:
        """Seconds left of the time allowed."""
        return self.options.time_s - (time.perf_counter() - self.began)

    def choose(self) -> tuple[Candidate, Schedule]:
        """Build, check, time, keep the best."""
        try:
            with torch.no_grad():
                self.build()
        except KeyboardInterrupt:
            if not self.candidates:
                raise
            self.interrupted = True
            self.notes.append(INTERRUPTED)
        finally:
            self.profile.save()
        with torch.no_grad():
            return self.finish()

    def build(self) -> None:
        """All candidates, the safe ones first."""
        self.note("exporting")
        flow = flow_of(self.module, self.inputs)
        if flow.random_ops:
            self.notes.append(
                f"draws random numbers ({', '.join(flow.random_ops)}): seeded with "
                f"{self.options.seed} for the check, different in every call after it"
            )
        self.note("computing the truth")
        self.truth = truth_of(self.module, self.inputs, _depth(flow), self.options.seed)
        self.attempt("sequential graph", lambda: self.sequential(fold_norms(flow)))
        if not flow.random_ops:
            for variant, each in variants(flow).items():
                self.attempt(variant, partial(self.streams, variant, each))
        if self.options.compile:
            self.attempt("torch.compile", self.compiled)
        ours = [each for each in self.candidates if each.form == "streams"]
        if ours:
            best = min(ours, key=lambda each: each.replay_us)
            self.attempt(f"{best.variant}, stages", partial(self.staged, best))
            self.attempt(f"{best.variant}, improved", partial(self.improved, best))

    def attempt(self, label: str, build: Callable[[], None]) -> None:
        """Build something that may fail; the rest goes on without it."""
        try:
            build()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.notes.append(f"{label}: out of memory, left out")
        except (RuntimeError, NotImplementedError, TypeError) as error:
            first = (str(error).splitlines() or [""])[0][:120]
            self.notes.append(f"{label}: left out ({type(error).__name__}: {first})")
            wait()

    def sequential(self, flow: Flow) -> None:
        """The baseline."""
        self.note("capturing the sequential graph")
        plain = Plain(flow, self.inputs)
        self.admit(Candidate("sequential graph", "sequential", plain, replay_us(plain.replay, 20)))

    def compiled(self) -> None:
        """The whole model through torch.compile."""
        self.note("torch.compile")
        with evaluating(self.module):
            call = compiled_call(self.module)
            for _ in range(3):
                call(*self.inputs)
            time_us = replay_us(lambda: call(*self.inputs), 20)
        self.admit(Candidate("torch.compile", "compile", call, time_us))

    def streams(self, variant: str, flow: Flow) -> None:
        """Our steps over streams."""
        placed, placement = place(flow)
        bound = Bound(placed, placement, self.inputs[0].device)
        bound.set_inputs(self.inputs)
        timed = tune(bound, self.profile, lambda: self.left_s() > 0, self.note)
        ways = {placed.steps[index].name: each.ways[0] for index, each in timed.items()}
        times = {index: each.times_us[0] + GAP_US for index, each in timed.items()}
        plans = [order.sequential(placed)]
        plans += [order.listed(placed, k, times) for k in self.options.streams]
        self.tuned[variant] = (bound, timed)
        for plan in _different(plans):
            self.note(f"{variant}: capturing {plan.name}")
            self.replayed(variant, bound, plan, ways)

    def staged(self, best: Candidate) -> None:
        """Stages of the steps of the best so far."""
        limit_s = min(STAGES_S, 0.4 * self.left_s())
        if limit_s <= 0 or not self.options.stages or best.ways is None:
            return
        self.note(f"{best.variant}: searching stages")
        bound, timed = self.tuned[best.variant]
        plan = staged_plan(bound, timed, self.profile, limit_s)
        self.replayed(best.variant, bound, plan, best.ways)

    def improved(self, best: Candidate) -> None:
        """The best plan and ways, changed and measured for a while."""
        limit_s = min(IMPROVE_S, self.left_s())
        if limit_s <= 0 or not self.options.improve or best.plan is None or best.ways is None:
            return
        self.note(f"{best.variant}: improving")
        bound, timed = self.tuned[best.variant]
        plan, ways = improve(bound, best.plan, best.ways, timed, limit_s, self.options.seed)
        better = order.renamed(plan, f"{plan.name}, improved")
        self.replayed(best.variant, bound, better, ways)

    def replayed(
        self, variant: str, bound: Bound, plan: LaunchPlan, ways: dict[str, Way]
    ) -> Candidate:
        """Capture a plan, time it, let it take part if it is right."""
        wrong = order.uncovered(plan, order.depends(bound.flow))
        assert not wrong, f"{plan.name} does not keep {wrong[:3]}"
        replay = Replay(bound, plan, ways)
        found = Candidate(
            f"{variant}, {plan.name}", "streams", replay, replay_us(replay.replay, 20), variant,
            bound.flow, plan, dict(replay.ways),
        )  # fmt: skip
        self.admit(found)
        return found

    def admit(self, candidate: Candidate) -> None:
        """Into the list, unless its outputs are wrong."""
        assert self.truth is not None
        torch.manual_seed(self.options.seed)
        outputs = candidate.call(*self.inputs)
        wait()
        if self.truth.holds(outputs):
            self.candidates.append(candidate)
        else:
            self.notes.append(
                f"{candidate.label}: error {self.truth.error(outputs):.1e} where the model itself "
                f"has {max(self.truth.errors):.1e}, left out"
            )

    def finish(self) -> tuple[Candidate, Schedule]:
        """The last round, whole calls in turns."""
        assert self.truth is not None
        if not self.candidates:
            raise VerificationError(tuple(self.notes) or ("no candidate could be built",))
        ours = [each for each in self.candidates if each.form == "streams"]
        ours = sorted(ours, key=lambda each: each.replay_us)[:FINALISTS]
        last = [each for each in self.candidates if each.form != "streams"] + ours
        self.note("comparing")
        times = compare_us([_call(each, self.inputs) for each in last])
        best = last[min(range(len(last)), key=times.__getitem__)]
        outputs = best.call(*self.inputs)
        rest = [each for each in self.candidates if each not in last]
        every = [(each.label, time) for each, time in zip(last, times, strict=True)]
        every += [(f"{each.label} (replay)", each.replay_us) for each in rest]
        return best, self.schedule(best, tuple(every), self.truth.error(outputs))

    def schedule(
        self, best: Candidate, times: tuple[tuple[str, float], ...], error: float
    ) -> Schedule:
        """What was decided."""
        assert self.truth is not None
        plan = best.plan or LaunchPlan(best.label, ())
        ways = tuple(sorted((step, str(way)) for step, way in (best.ways or {}).items()))
        return Schedule(
            shapes=tuple(tuple(each.shape) for each in self.inputs),
            dtype=str(self.inputs[0].dtype).removeprefix("torch."),
            on=self.profile.on,
            form=best.form,
            variant=best.variant,
            fingerprint=fingerprint(best.flow) if best.flow is not None else "",
            plan=plan,
            ways=ways,
            times_us=times,
            error=error,
            model_error=max(self.truth.errors),
            seconds=time.perf_counter() - self.began,
            notes=tuple(self.notes),
        )


def compiled_call(module: nn.Module) -> Callable[..., tuple[T, ...]]:
    """The module through torch.compile; outputs are copied out of its buffers."""
    compiled: Any = torch.compile(module, mode="reduce-overhead", dynamic=False)

    def call(*inputs: T) -> tuple[T, ...]:
        with torch.no_grad(), evaluating(module) if module.training else nullcontext():
            return tuple(each.clone() for each in as_tuple(compiled(*inputs)))

    return call


def _depth(flow: Flow) -> int:
    """Operators on the longest way from input to output that may round."""
    deep: dict[str, int] = {}
    for step in flow.steps:
        here = 0 if step.is_view else 1
        deep[step.name] = here + max((deep.get(name, 0) for name in step.uses), default=0)
    return max(deep.values(), default=1)


def _call(candidate: Candidate, inputs: tuple[T, ...]) -> Callable[[], object]:
    return lambda: candidate.call(*inputs)


def _different(plans: Sequence[LaunchPlan]) -> list[LaunchPlan]:
    """Without plans that launch the same as an earlier one."""
    return list({plan.launches: plan for plan in reversed(plans)}.values())[::-1]
