"""From modules to something to call: lowered, planned, compiled, checked, timed; step by step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from partita.cluster import DeviceKind
from partita.gpu.choose import check, fastest
from partita.gpu.flow.fold import fold, fold_norms
from partita.gpu.reference_output import ReferenceOutput, reference_output
from partita.gpu.rtasks.arena import LoweredModel
from partita.gpu.rtasks.execute import RegionPipeline, StepKernel
from partita.gpu.rtasks.fused import FusedCall, FusedModel
from partita.gpu.rtasks.improve import without_slow
from partita.gpu.rtasks.launches import Launched, compiled, interpreted
from partita.gpu.rtasks.lower import captured, lower_flow, side_by_side
from partita.gpu.rtasks.outcome import Outcome, RegionOutcome
from partita.gpu.rtasks.piece_times import PieceTimes, PipelineGraph, kernel_times, piece_times
from partita.gpu.rtasks.planned import PlannedRegion, plan_region, plan_regions
from partita.gpu.rtasks.recurrent_steps import recurrent_kernels
from partita.gpu.rtasks.regroup import (
    MOST_BRANCHES,
    branches,
    split_by_branches,
    split_piece,
)
from partita.gpu.sequential import SequentialGraph

T = torch.Tensor


class Job:
    """From modules to something to call, step by step."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        examples: Sequence[tuple[T, ...]],
        device: torch.device,
        note: Callable[[str], None],
    ) -> None:
        self.modules, self.examples, self.device, self.note = modules, examples, device, note
        self.inputs = tuple(each for example in examples for each in example)
        self.name = " + ".join(type(each).__name__ for each in modules)
        self.notes: list[str] = []
        self.persistent: dict[str, str] = {}  # fallbacks with a kernel of ours, for the report

    def lower(self) -> None:
        """Capture the modules; give their values places."""
        began = time.perf_counter()
        pairs = list(zip(self.modules, self.examples, strict=True))
        with torch.no_grad():
            flows = [captured(*pair) for pair in pairs]
            folded = side_by_side([fold(flow) for flow in flows])
            self.lowered: LoweredModel = lower_flow(folded, self.device)
            plain = side_by_side([fold_norms(flow) for flow in flows])
            references = [reference_output(*pair, depth=len(plain.steps)) for pair in pairs]
        self.plain_flow = plain
        self.reference = ReferenceOutput(
            tuple(each for reference in references for each in reference.outputs),
            tuple(each for reference in references for each in reference.errors),
            max(reference.floor for reference in references),
            all(reference.exact for reference in references),
        )
        self.lower_s = time.perf_counter() - began

    def plan(self, kind: DeviceKind, method: str, time_s: float, per_unit: int, seed: int) -> None:
        """A program for every region; one with too many kinds of tasks becomes several."""
        began = time.perf_counter()
        for index in reversed(range(len(self.lowered.pieces))):
            region = self.lowered.regions[index]
            if region is not None and branches(region.ops) > MOST_BRANCHES:
                runs = split_by_branches(region.ops)
                self.lowered = split_piece(self.lowered, index, runs)
        options: dict[str, Any] = {"method": method, "seed": seed, "time_s": time_s}
        options["keep"] = self.device.type == "cuda"  # together with the kernels
        self.kind = kind
        self.plans = plan_regions(self.lowered, kind, per_unit=per_unit, **options)
        self.options, self.per_unit = options, per_unit
        self.plan_s = time.perf_counter() - began
        self.note(f"{sum(plan is not None for plan in self.plans)} regions planned")

    def plan_one(self, index: int, per_unit: int) -> PlannedRegion:
        """A program for the region of one piece."""
        return plan_region(self.lowered, index, self.kind, per_unit=per_unit, **self.options)

    def interpret(self, seed: int) -> FusedModel:
        """Tile by tile, without a GPU."""
        launched = interpreted(self.lowered, self.plans, seed)
        pipeline = RegionPipeline(self.lowered, launched.launches)
        with torch.no_grad():
            error = self.check(pipeline(*self.inputs))
        outcome = self.outcome("interpreted", launched, {}, error)
        return FusedModel(self.modules, self.examples, pipeline, self.plans, outcome)

    def compile(self, num_warps: int) -> Launched:
        """A kernel for every region."""
        self.num_warps = num_warps
        self.note("compiling")
        return self.compiled(self.plans)

    def compiled(self, plans: Sequence[PlannedRegion | None]) -> Launched:
        """Kernels for some plans; one that does not fit is planned for one program per unit."""
        return compiled(
            self.lowered,
            plans,
            num_warps=self.num_warps,
            replan=lambda index: self.plan_one(index, 1),
        )

    def measure(self, launched: Launched) -> FusedModel:
        """Timed piece by piece and as a whole, in CUDA graphs; what is slower is not used."""
        began = time.perf_counter()
        kernels, refused = recurrent_kernels(self.lowered, self.device)
        self.notes += [f"{name} stays with PyTorch: {text}" for name, text in refused.items()]
        with torch.no_grad():
            sequential = SequentialGraph(self.plain_flow, self.inputs)
            self.reference = self.reference.beside(sequential(*self.inputs))
            self.check(RegionPipeline(self.lowered, launched.launches, kernels)(*self.inputs))
            compile_s = time.perf_counter() - began + sum(launched.seconds.values())
            self.note("measuring")
            times = piece_times(self.lowered, launched.launches, self.inputs, kernels)
            launched, times = without_slow(self, launched, times, kernels)
            kept = [
                launch if index not in times or times[index].is_faster else None
                for index, launch in enumerate(launched.launches)
            ]
            kernels = self.faster_kernels(kept, kernels)
            fused = PipelineGraph(RegionPipeline(self.lowered, kept, kernels), self.inputs)
            error = self.check(fused(*self.inputs))
            calls: dict[str, FusedCall] = {"fused": fused, "sequential": sequential}
            # whole calls, copies of all inputs and outputs included: that is what is promised
            used, times_us = fastest(tuple(calls), lambda name: partial(calls[name], *self.inputs))
        self.notes += [f"{self.region_name(i)} {text}" for i, text in launched.refused.items()]
        outcome = replace(
            self.outcome(used, launched, times, error),
            compile_s=compile_s, fused_us=times_us[0], sequential_us=times_us[1],
        )  # fmt: skip
        return FusedModel(self.modules, self.examples, calls[used], launched.plans, outcome)

    def faster_kernels(
        self, kept: Sequence[Any], kernels: dict[str, StepKernel]
    ) -> dict[str, StepKernel]:
        """Persistent kernels for layers that are faster by themselves, if the model is too."""
        times = kernel_times(self.lowered, kept, self.inputs, kernels)
        self.notes += [
            f"{name} stays with PyTorch: {each.fused_us:.1f} us as a persistent kernel, "
            f"{each.unfused_us:.1f} us as it is"
            for name, each in times.items()
            if not each.is_faster
        ]
        kernels = {name: kernel for name, kernel in kernels.items() if times[name].is_faster}
        if not kernels:
            return kernels
        graphs = [
            PipelineGraph(RegionPipeline(self.lowered, kept, each), self.inputs)
            for each in (kernels, {})
        ]
        best, (mine, theirs) = fastest(graphs, lambda each: each.replay)
        names = ", ".join(kernels)
        self.notes.append(
            f"{names} as persistent kernels: {mine:.1f} us for the model, "
            f"{theirs:.1f} us with PyTorch's own"
        )
        if best is not graphs[0]:
            return {}
        self.persistent = dict.fromkeys(kernels, "a persistent kernel of its own")
        return kernels

    def check(self, outputs: tuple[T, ...]) -> float:
        """Refuse outputs that are not the model's."""
        return check(outputs, self.reference, "the fused model")

    def region_name(self, index: int) -> str:
        """Regions are numbered as they run."""
        number = sum(plan is not None for plan in self.plans[:index])
        return f"region {number}"

    def outcome(
        self, used: str, launched: Launched, times: dict[int, PieceTimes], error: float
    ) -> Outcome:
        """Everything there is to say."""
        regions = []
        for index, plan in enumerate(launched.plans):
            if plan is None:
                continue
            timed = times.get(index)
            regions.append(
                RegionOutcome(
                    self.region_name(index),
                    len(plan.region.ops),
                    sum(plan.program.num_tiles),
                    len(plan.program.veus),
                    plan.fused_us,
                    plan.result.lower_bound or 0.0,
                    plan.unfused_us,
                    plan.seconds,
                    launched.seconds.get(index, 0.0),
                    None if timed is None else timed.fused_us,
                    None if timed is None else timed.unfused_us,
                    index not in launched.refused and (timed is None or timed.is_faster),
                    launched.about.get(index, launched.refused.get(index, "")),
                )
            )
        fallbacks = tuple(
            (draft.name, self.persistent.get(draft.name, draft.reason))
            for piece in self.lowered.pieces
            for draft in piece.fallbacks
        )
        name = self.kind.name if self.device.type == "cpu" else torch.cuda.get_device_name()
        dtype = str(self.lowered.arena.data.dtype).removeprefix("torch.")
        return Outcome(
            self.name, name, dtype, used, tuple(regions), fallbacks, self.lower_s, self.plan_s,
            sum(launched.seconds.values()), error, max(self.reference.errors),
            notes=tuple(self.notes),
        )  # fmt: skip
