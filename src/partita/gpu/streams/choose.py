"""Chooses how a model runs: candidates are built, checked, timed against each other; one is kept.

    sequential graph   PyTorch's operators, norms folded, one stream, one CUDA graph
    torch.compile      the whole model, mode "reduce-overhead"
    compiled graph     the operators of the sequential graph as torch.compile makes them, one graph
    fold, k streams    our steps, each in its fastest way, over k streams
    merge, k streams   the same with convolutions of one input merged
    ... with pieces    the better of them, with steps that torch.compile makes one launch of
    ..., stages        IOS: stages with barriers, found with measured costs
    ..., improved      the best so far, changed step by step and measured as a whole

Inner rounds time replays; the last one times whole calls in turns, copies included. What fails the
check, does not fit into memory or cannot be captured is left out and noted. Whatever was built
before the time is over, or before Ctrl-C, takes part. `prepare` does what needs the host rather
than the GPU; without it everything happens when it is needed, the safe candidates first.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import nn

from partita.errors import VerificationError
from partita.gpu.choose import attempt, fastest, wrong_call
from partita.gpu.flow.export import evaluating, flow_of
from partita.gpu.flow.fold import fold_norms
from partita.gpu.flow.place import place
from partita.gpu.flow.steps import Flow, T
from partita.gpu.measure import replay_us, wait
from partita.gpu.reference_output import ReferenceOutput, reference_output
from partita.gpu.sequential import SequentialGraph
from partita.gpu.step_times import StepTimes, in_words
from partita.gpu.streams import order
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.candidates import (
    Call,
    Options,
    StreamsCandidate,
    TunedCandidate,
    compiled_call,
    depth,
    different,
    variants,
)
from partita.gpu.streams.compiled import Compiler, stop_workers, warm_up
from partita.gpu.streams.fuse import compile_pieces, fuse
from partita.gpu.streams.improve import improve
from partita.gpu.streams.order import LaunchPlan
from partita.gpu.streams.record import StreamSchedule, fingerprint, label_of
from partita.gpu.streams.replay import Replay
from partita.gpu.streams.stages import staged_plan
from partita.gpu.streams.tune import compile_steps, tune
from partita.gpu.streams.ways import Way

GAP_US = 1.0  # between dependent kernels of a graph: what list scheduling adds to every step
PIECES_S, STAGES_S, IMPROVE_S = 10.0, 6.0, 15.0  # at most, of the time allowed
FINISH = 0.08  # of the time allowed, for the last round and what a step runs over
FINALISTS = 3  # of ours; the baselines always take part
INTERRUPTED = "interrupted: the best so far was kept"
Note = Callable[[str], None]


class Chooser:
    """One optimisation of one model for one shape of inputs."""

    def __init__(
        self, module: nn.Module, inputs: tuple[T, ...], options: Options, profile: StepTimes,
        note: Note,
    ) -> None:  # fmt: skip
        self.module, self.inputs, self.options = module, inputs, options
        self.profile, self.note = profile, note
        self.compiler = Compiler(options.backend)
        self.began = time.perf_counter()
        self.prepared_s = 0.0
        self.compile_s = 0.0  # what torch.compile took
        self.candidates: list[StreamsCandidate] = []
        self.notes: list[str] = []
        self.interrupted = False

    def left_s(self) -> float:
        """Seconds left of the time allowed, before the last round."""
        return self.options.time_s * (1 - FINISH) - (time.perf_counter() - self.began)

    @cached_property
    def flow(self) -> Flow:
        """The steps of the model as it was given."""
        self.note("exporting")
        return flow_of(self.module, self.inputs)

    @cached_property
    def reference(self) -> ReferenceOutput:
        """What the model gives in float64, and how far PyTorch is from it."""
        self.note("computing the reference output")
        return reference_output(self.module, self.inputs, depth(self.flow), self.options.seed)

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        """Variants of the steps that fit into memory."""
        bound_flows: dict[str, Bound] = {}
        for variant, flow in variants(self.flow).items():
            self.attempt(variant, partial(self.bind, variant, flow, bound_flows))
        return bound_flows

    def bind(self, variant: str, flow: Flow, bound_flows: dict[str, Bound]) -> None:
        """One variant in memory."""
        placed, placement = place(flow)
        bound_flows[variant] = Bound(placed, placement, self.inputs[0].device, self.compiler)
        bound_flows[variant].set_inputs(self.inputs)

    @cached_property
    def module_call(self) -> Call:
        """The whole model through torch.compile, called once."""
        self.note("torch.compile")
        began = time.perf_counter()
        with evaluating(self.module):
            call = compiled_call(self.module, self.options.backend)
            try:
                call(*self.inputs)
            finally:
                stop_workers()
        self.compile_s = time.perf_counter() - began
        return call

    @cached_property
    def compiled_plain(self) -> SequentialGraph:
        """The folded model through the compiler, in a graph of ours."""
        self.note("compiling the folded model")
        try:
            return SequentialGraph(fold_norms(self.flow), self.inputs, self.compiler.whole)
        finally:
            stop_workers()

    def prepare(self, limit_s: float = math.inf) -> None:
        """Read, bind and compile everything, and time nothing.

        Several models can do this side by side; `choose` starts its clock afterwards. What depends
        on times that cuDNN takes itself (`torch.backends.cudnn.benchmark`) is done again then.
        After `limit_s` nothing more is begun that can be left out.
        """
        with torch.no_grad():
            _ = self.reference
            if not self.flow.random_ops:
                for bound in self.bounds.values():
                    compile_steps(bound, self.profile, self.note)
            if self.options.compile:
                self.attempt("torch.compile", lambda: self.module_call)
                end = min(self.began + limit_s, time.perf_counter() + 3 * PIECES_S)
                for bound in () if self.flow.random_ops else self.bounds.values():
                    compile_pieces(bound, lambda: time.perf_counter() < end)
                if time.perf_counter() - self.began + self.compile_s < limit_s:
                    self.attempt("compiled graph", lambda: self.compiled_plain)
        wait()
        self.prepared_s = time.perf_counter() - self.began

    def choose(self) -> tuple[StreamsCandidate, StreamSchedule]:
        """Build, check, time, keep the best."""
        if self.prepared_s:
            self.began = time.perf_counter()
            for bound in self.bounds.values():
                bound.exact.clear()
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
        random = self.flow.random_ops
        if random:
            self.notes.append(
                f"draws random numbers ({', '.join(random)}): seeded with "
                f"{self.options.seed} for the check, different in every call after it"
            )
        _ = self.reference  # or the refusal of a model that gives no numbers
        self.attempt("sequential graph", self.sequential)
        if not random:
            for variant, bound in self.bounds.items():
                self.attempt(variant, partial(self.streams, variant, bound))
        if self.options.compile:
            best = self.best()
            if best is not None:
                self.attempt("pieces", partial(self.pieced, best))
            self.attempt("torch.compile", self.compiled)
            self.attempt("compiled graph", self.compiled_graph)
        for change in (self.staged, self.improved):
            best = self.best()
            if best is not None:
                self.attempt(f"{best.label}, {change.__name__}", partial(change, best))

    def best(self) -> StreamsCandidate | None:
        """The fastest of ours so far."""
        ours = [each for each in self.candidates if each.form == "streams"]
        return min(ours, key=lambda each: each.replay_us, default=None)

    def attempt(self, label: str, build: Callable[[], object]) -> None:
        """Build something that may fail; the rest goes on without it."""
        left_out = attempt(build)
        if left_out:
            self.notes.append(f"{label}: {left_out}")

    def sequential(self) -> None:
        """The baseline."""
        self.note("capturing the sequential graph")
        plain = SequentialGraph(fold_norms(self.flow), self.inputs)
        time_us = replay_us(plain.replay, 20)
        right = self.admit(StreamsCandidate("sequential graph", "sequential", plain, time_us))
        if right and not self.flow.random_ops:
            self.reference = self.reference.beside(plain(*self.inputs))

    def compiled(self) -> None:
        """The whole model through torch.compile."""
        call = self.module_call
        with evaluating(self.module):
            if self.prepared_s:
                warm_up(call, self.inputs)
            for _ in range(3):
                call(*self.inputs)
            time_us = replay_us(lambda: call(*self.inputs), 20)
        self.admit(StreamsCandidate("torch.compile", "compile", call, time_us))

    def compiled_graph(self) -> None:
        """The folded model compiled, if there is time: it takes about as long as torch.compile."""
        if "compiled_plain" not in self.__dict__ and self.left_s() < self.compile_s:
            self.notes.append("compiled graph: left out (no time)")
            return
        plain = self.compiled_plain
        if self.prepared_s:
            plain.capture()
        self.admit(
            StreamsCandidate("compiled graph", "compiled", plain, replay_us(plain.replay, 20))
        )

    def streams(self, variant: str, bound: Bound) -> None:
        """Our steps over streams."""
        timed = tune(bound, self.profile, lambda: self.left_s() > 0, self.note)
        self.over_streams(TunedCandidate(variant, bound, timed))

    def over_streams(self, tuned: TunedCandidate) -> None:
        """Plans over one and more streams."""
        times = {index: each.times_us[0] + GAP_US for index, each in tuned.timed.items()}
        plans = [order.sequential(tuned.bound.flow)]
        plans += [order.listed(tuned.bound.flow, k, times) for k in self.options.streams]
        for plan in different(plans):
            self.note(f"{tuned.name}: capturing {plan.name}")
            self.replayed(tuned, plan, tuned.ways())

    def pieced(self, best: StreamsCandidate) -> None:
        """The steps of the best so far, some of them together."""
        limit_s = min(PIECES_S, 0.4 * self.left_s())
        if self.prepared_s:
            limit_s = max(1.0, limit_s)  # they are compiled
        if best.tuned is None or limit_s <= 0:
            return
        end = time.perf_counter() + limit_s
        self.note(f"{best.tuned.name}: compiling pieces")
        fused_flow = fuse(
            best.tuned.bound, best.tuned.timed, self.profile, lambda: time.perf_counter() < end
        )
        self.notes += fused_flow.notes
        if fused_flow.pieces:
            self.over_streams(replace(
                best.tuned, bound=fused_flow.bound, timed=fused_flow.timed, pieces=fused_flow.pieces
            ))  # fmt: skip

    def staged(self, best: StreamsCandidate) -> None:
        """Stages of the steps of the best so far."""
        limit_s = min(STAGES_S, 0.4 * self.left_s())
        if limit_s <= 0 or not self.options.stages or best.tuned is None:
            return
        self.note(f"{best.tuned.name}: searching stages")
        plan = staged_plan(best.tuned.bound, best.tuned.timed, self.profile, limit_s)
        self.replayed(best.tuned, plan, best.ways)

    def improved(self, best: StreamsCandidate) -> None:
        """The best plan and ways, changed and measured for a while."""
        limit_s = min(IMPROVE_S, self.left_s())
        if limit_s <= 0 or not self.options.improve or best.tuned is None or best.plan is None:
            return
        self.note(f"{best.tuned.name}: improving")
        improved = improve(
            best.tuned.bound, best.plan, best.ways, best.tuned.timed, limit_s, self.options.seed
        )
        better = order.renamed(improved.plan, f"{improved.plan.name}, improved")
        self.replayed(best.tuned, better, improved.ways)
        if improved.interrupted:
            raise KeyboardInterrupt

    def replayed(self, tuned: TunedCandidate, plan: LaunchPlan, ways: dict[str, Way]) -> None:
        """Capture a plan, time it, let it take part if it is right."""
        wrong = order.uncovered(plan, order.depends(tuned.bound.flow))
        assert not wrong, f"{plan.name} does not keep {wrong[:3]}"
        replay = Replay(tuned.bound, plan, ways)
        time_us = replay_us(replay.replay, 20)
        label = label_of(tuned.variant, tuned.pieces, plan)
        self.admit(
            StreamsCandidate(label, "streams", replay, time_us, tuned, plan, dict(replay.ways))
        )

    def admit(self, candidate: StreamsCandidate) -> bool:
        """Into the list, unless its outputs are wrong."""
        off = wrong_call(candidate.call, self.inputs, self.reference, self.options.seed)
        if off:
            self.notes.append(f"{candidate.label}: {off}, left out")
            return False
        self.candidates.append(candidate)
        return True

    def finish(self) -> tuple[StreamsCandidate, StreamSchedule]:
        """The last round, whole calls in turns."""
        if not self.candidates:
            raise VerificationError(tuple(self.notes) or ("no candidate could be built",))
        ours = [each for each in self.candidates if each.form == "streams"]
        ours = sorted(ours, key=lambda each: each.replay_us)[:FINALISTS]
        last = [each for each in self.candidates if each.form != "streams"] + ours
        self.note("comparing")
        best, times = fastest(last, lambda each: partial(each.call, *self.inputs))
        outputs = best.call(*self.inputs)
        rest = [each for each in self.candidates if each not in last]
        every = [(each.label, time) for each, time in zip(last, times, strict=True)]
        every += [(f"{each.label} (replay)", each.replay_us) for each in rest]
        return best, self.schedule(best, tuple(every), self.reference.error(outputs))

    def schedule(
        self, best: StreamsCandidate, times: tuple[tuple[str, float], ...], error: float
    ) -> StreamSchedule:
        """What was decided."""
        tuned = best.tuned
        return StreamSchedule(
            shapes=tuple(tuple(each.shape) for each in self.inputs),
            dtype=str(self.inputs[0].dtype).removeprefix("torch."),
            on=in_words(self.profile.on),
            form=best.form,
            variant=tuned.variant if tuned is not None else "",
            pieces=tuned.pieces if tuned is not None else (),
            fingerprint=fingerprint(tuned.bound.flow) if tuned is not None else "",
            plan=best.plan or LaunchPlan(best.label, ()),
            ways=tuple(sorted((step, str(way)) for step, way in best.ways.items())),
            times_us=times,
            error=error,
            model_error=max(self.reference.errors),
            seconds=self.prepared_s + time.perf_counter() - self.began,
            notes=tuple(dict.fromkeys(self.notes)),
        )
