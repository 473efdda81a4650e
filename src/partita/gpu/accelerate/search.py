"""Finds what to call: candidates are tried apart, built here, checked, timed as whole calls.

    module             as it is, operator by operator
    sequential graph   PyTorch's operators, norms folded, one CUDA graph
    torch.compile      mode "reduce-overhead"
    streams            what `partita.streams` decides in a child process
    rtasks             what `partita.rtasks` decides in a child process

Ours run for the first time in a child, where a fault or an endless wait costs that candidate alone
(`gpu/trial.py`). The module itself is always among the candidates, so there is always an answer.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.errors import PartitaError
from partita.gpu.accelerate.report import AcceleratedReport
from partita.gpu.accelerate.work import RTASKS, STREAMS
from partita.gpu.choose import attempt, fastest, said, wrong_call
from partita.gpu.flow.export import evaluating, flow_of
from partita.gpu.flow.fold import fold_norms
from partita.gpu.flow.steps import Flow
from partita.gpu.measure import raise_interrupt
from partita.gpu.reference_output import ReferenceOutput, as_tuple, reference_output
from partita.gpu.rtasks.api import rtasks
from partita.gpu.sequential import SequentialGraph
from partita.gpu.streams.api import built
from partita.gpu.streams.candidates import compiled_call, depth
from partita.gpu.streams.record import FORMS, StreamSchedule, schedule_of
from partita.gpu.trial import Parcel, pack, run_trial

T = torch.Tensor
Call = Callable[..., tuple[T, ...]]
MODULE = "module as it is"
STREAMS_SHARE, RTASKS_SHARE = 0.5, 0.25  # of the time allowed, for each child
STARTING_S = 10.0  # of a child, before it searches: imports, the device, the module
LEAST_S = 5.0  # that a search is given


@dataclass(frozen=True, slots=True)
class AccelerateSettings:
    """What may be tried, and for how long."""

    time_s: float = 60.0
    compile: bool = True
    isolate: bool = True  # in child processes first
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Acceleration:
    """One way to run the module, ready to call; `schedule` if it is one of streams."""

    label: str
    form: str
    call: Call
    schedule: StreamSchedule | None = None


class AccelerateSearch:
    """One search for one module and the shapes of its example."""

    def __init__(
        self, module: nn.Module, inputs: tuple[T, ...], settings: AccelerateSettings,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.module, self.inputs, self.settings, self.note = module, inputs, settings, note
        self.began = time.perf_counter()
        self.notes: list[str] = []
        self.candidates: list[Acceleration] = [Acceleration(MODULE, "module", self.as_it_is)]

    def as_it_is(self, *inputs: T) -> tuple[T, ...]:
        """The module itself."""
        with torch.no_grad():
            return as_tuple(self.module(*inputs))

    def left_s(self) -> float:
        """Seconds left of the time allowed."""
        return self.settings.time_s - (time.perf_counter() - self.began)

    @cached_property
    def flow(self) -> Flow | None:
        """The steps of the module, or nothing where it cannot be captured, which is noted."""
        self.note("exporting")
        try:
            return flow_of(self.module, self.inputs)
        except PartitaError as error:
            self.notes.append(f"streams and rtasks left out: {error}")
            return None

    @cached_property
    def reference(self) -> ReferenceOutput:
        """What the module gives in float64, and how far PyTorch is from it."""
        deep = 1 if self.flow is None else depth(self.flow)
        return reference_output(self.module, self.inputs, deep, self.settings.seed)

    def run(self) -> tuple[Acceleration, AcceleratedReport]:
        """Try, build, check, time; keep the fastest that is right."""
        with torch.no_grad(), evaluating(self.module):
            if self.flow is not None:
                _ = self.reference  # or the refusal of a module that gives no numbers
                self.attempt("sequential graph", self.sequential)
                with tempfile.TemporaryDirectory() as folder:
                    self.attempt("ours", partial(self.ours, Path(folder)))
            if self.settings.compile:
                self.attempt("torch.compile", self.compiled)
            return self.finish()

    def decided(
        self, form: str, schedule: StreamSchedule | None
    ) -> tuple[Acceleration, AcceleratedReport]:
        """Build what an earlier search kept, and the module beside it; nothing else is tried."""
        builds: dict[str, Callable[[], object]] = {
            "sequential": self.sequential, "compile": self.compiled, "rtasks": self.fused,
        }  # fmt: skip
        with torch.no_grad(), evaluating(self.module):
            if self.flow is not None and schedule is not None:
                self.scheduled(Parcel(Path(), self.module), schedule)
            elif form in builds and (self.flow is not None or form == "compile"):
                builds[form]()
            return self.finish()

    def finish(self) -> tuple[Acceleration, AcceleratedReport]:
        """Whole calls in turns; the fastest is kept."""
        self.note("comparing")
        best, times = fastest(self.candidates, lambda each: partial(each.call, *self.inputs))
        error = self.reference.error(best.call(*self.inputs))
        labels = [each.label for each in self.candidates]
        return best, AcceleratedReport(
            type(self.module).__name__, _device_name(self.inputs[0].device), best.label, best.form,
            tuple(zip(labels, times, strict=True)), error, max(self.reference.errors),
            time.perf_counter() - self.began, tuple(dict.fromkeys(self.notes)),
        )  # fmt: skip

    def attempt(self, label: str, build: Callable[[], object]) -> None:
        """Build something that may fail; the rest goes on without it."""
        try:
            left_out = attempt(build)
        except PartitaError as error:
            left_out = f"left out ({error})"
        if left_out:
            self.notes.append(f"{label}: {left_out}")

    def admit(self, candidate: Acceleration) -> bool:
        """Into the list, unless its outputs are wrong."""
        off = wrong_call(candidate.call, self.inputs, self.reference, self.settings.seed)
        if off:
            self.notes.append(f"{candidate.label}: {off}, left out")
            return False
        self.candidates.append(candidate)
        return True

    def sequential(self) -> None:
        """The baseline, which is a yardstick for what rounding may do as well."""
        assert self.flow is not None
        plain = SequentialGraph(fold_norms(self.flow), self.inputs)
        right = self.admit(Acceleration(FORMS["sequential"], "sequential", plain))
        if right and not self.flow.random_ops:
            self.reference = self.reference.beside(plain(*self.inputs))

    def compiled(self) -> None:
        """The module through torch.compile; it may have graph breaks."""
        self.note("torch.compile")
        call = compiled_call(self.module)
        for _ in range(3):
            call(*self.inputs)
        self.admit(Acceleration(FORMS["compile"], "compile", call))

    def ours(self, folder: Path) -> None:
        """What streams and rtasks decide, each in a child; then built here."""
        try:
            parcel = pack(self.module, self.inputs, folder)
        except Exception as error:  # pickle and export fail in many ways, none of them ours to mend
            raise_interrupt(error)
            self.notes.append(
                f"streams and rtasks left out: the module cannot be sent to another process "
                f"({said(error)}); isolate=False tries them here"
            )
            return
        seed = self.settings.seed
        time_s = max(LEAST_S, STREAMS_SHARE * self.settings.time_s - STARTING_S)
        streams = {"time_s": time_s, "compile": self.settings.compile, "seed": seed}
        decided = self.tried("streams", STREAMS, parcel, streams, STREAMS_SHARE)
        if decided is not None:
            self.attempt("streams", partial(self.scheduled, parcel, schedule_of(decided)))
        if self.flow is not None and self.flow.random_ops:
            return
        decided = self.tried("rtasks", RTASKS, parcel, {"seed": seed}, RTASKS_SHARE)
        if decided is not None and decided["kept"] == "fused":
            self.attempt("rtasks", self.fused)

    def tried(
        self, label: str, work: str, parcel: Parcel, options: dict[str, Any], share: float
    ) -> Any:
        """What a search decides; nothing where it failed, which is noted."""
        if self.left_s() <= 0:
            self.notes.append(f"{label}: left out (no time)")
            return None
        if not self.settings.isolate:
            return self.tried_here(label, work, options)
        self.note(f"trying {label} in a process of its own")
        limit_s = max(LEAST_S + STARTING_S, share * self.settings.time_s)
        result = run_trial(work, parcel, options, limit_s)
        if result.failure:
            self.notes.append(f"{label}: left out, its trial {result.failure}")
        return result.value

    def tried_here(self, label: str, work: str, options: dict[str, Any]) -> Any:
        """The same without a child."""
        from partita.gpu.accelerate import work as works

        self.note(f"trying {label}")
        answers: list[Any] = []
        search = getattr(works, work.partition(":")[2])
        self.attempt(label, lambda: answers.append(search(self.module, self.inputs, options)))
        return answers[0] if answers else None

    def scheduled(self, parcel: Parcel, schedule: StreamSchedule) -> None:
        """A schedule of streams, if it is one of ours."""
        self.notes += [f"streams: {note}" for note in schedule.notes]
        if schedule.form in ("streams", "compiled"):
            call = built(parcel.module, self.inputs, schedule)
            form = "streams" if schedule.form == "streams" else "compiled"
            self.admit(Acceleration(f"streams: {schedule.label}", form, call, schedule))

    def fused(self) -> None:
        """Fused regions, if they are faster here too."""
        model = rtasks(self.module, self.inputs, seed=self.settings.seed)
        outcome = model.report()
        if outcome.kept == "fused":
            regions = sum(each.kept for each in outcome.regions)
            self.admit(Acceleration(f"rtasks: {regions} fused regions", "rtasks", model.call))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
