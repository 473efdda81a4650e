"""The fastest way of every step by itself, measured; equal steps are measured once."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from partita.gpu.flow.precision import needs_exact
from partita.gpu.flow.steps import Step
from partita.gpu.measure import raise_interrupt, run_us, wait
from partita.gpu.step_times import StepTimes
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.order import launched
from partita.gpu.streams.pieces import alike
from partita.gpu.streams.ways import EAGER, Way, ways

NOTED = 16  # steps between two words of progress
UNKNOWN_US = 6.0  # of a step that could not be measured in time
COMPILERS = 12  # threads; the compiler lets go of Python's lock


@dataclass(frozen=True, slots=True)
class Timed:
    """The ways of a step with their times, the fastest first."""

    ways: tuple[Way, ...]
    times_us: tuple[float, ...]


def tune(
    bound: Bound, profile: StepTimes, go_on: Callable[[], bool], note: Callable[[str], None]
) -> dict[int, Timed]:
    """Per launched step its ways by time; steps not reached in time have their first way."""
    flow = bound.flow
    jobs, keys, first, missing = _jobs(bound, profile)
    compile_steps(bound, profile, note)
    for number, (key, open_ways) in enumerate(missing.items()):
        if not go_on():
            break
        if number % NOTED == 0:
            note(f"measuring steps: {number} of {len(missing)}")
        for way in open_ways:
            profile.put(key, way, _time(bound, flow.steps[first[key]], way))
    profile.save()
    timings = {index: _timed(profile, keys[index], jobs[index]) for index in jobs}
    compile_all(bound, [(flow.steps[index], each.ways[0]) for index, each in timings.items()])
    return timings


def compile_steps(bound: Bound, profile: StepTimes, note: Callable[[str], None]) -> None:
    """Compile what has to be measured."""
    _, _, first, missing = _jobs(bound, profile)
    note(f"compiling kernels of {len(first)} different steps")
    steps = bound.flow.steps
    compile_all(bound, [(steps[first[key]], way) for key in missing for way in missing[key]])


def _jobs(
    bound: Bound, profile: StepTimes
) -> tuple[dict[int, tuple[Way, ...]], dict[int, str], dict[str, int], dict[str, list[Way]]]:
    """Per step its ways and its structure; per structure its first step and what is not known."""
    flow = bound.flow
    own = bound.device.type == "cuda" and find_spec("triton") is not None
    keys = {index: structure(bound, flow.steps[index]) for index in launched(flow)}
    first = {key: index for index, key in reversed(keys.items())}
    for key, index in first.items() if own else ():
        if key not in bound.exact:
            bound.exact[key] = needs_exact(flow, flow.steps[index], bound.device)
    jobs = {
        index: ways(flow, flow.steps[index], exact=bound.exact[key]) if own else (EAGER,)
        for index, key in keys.items()
    }
    missing = {
        key: [way for way in jobs[index] if profile.get(key, way) is None]
        for key, index in first.items()
    }
    return jobs, keys, first, missing


def _timed(profile: StepTimes, key: str, candidates: tuple[Way, ...]) -> Timed:
    known = [(profile.get(key, way), way) for way in candidates]
    good = sorted(
        ((time, number, way) for number, (time, way) in enumerate(known) if time and time > 0)
    )
    if not good:
        return Timed(candidates[:1], (UNKNOWN_US,))
    return Timed(tuple(way for _, _, way in good), tuple(time for time, _, _ in good))


def structure(bound: Bound, step: Step) -> str:
    """Equal for steps that take the same time: kind, sizes, strides, what is fused."""
    flow = bound.flow
    if step.kind == "piece":
        memory = [tuple(bound.logical(name).stride()) for name in (*step.inputs, *step.makes)]
        sizes = [flow.shapes[name] for name in (*step.inputs, *step.makes)]
        dtypes = [flow.dtypes[name] for name in (*step.inputs, *step.makes)]
        return f"piece {alike(step)} {sizes} {memory} {dtypes}"
    shapes = [
        (flow.shapes[name], bound.pitch8(name) if name in bound.placement.places else 0)
        for name in (*step.uses, step.name)
        if name in flow.shapes
    ]
    blank = replace(
        step, name="", inputs=(), residual="", weight="w" if step.weight else "",
        bias="b" if step.bias else "", scale="s" if step.scale else "",
        shift="s" if step.shift else "", pre_scale="s" if step.pre_scale else "",
        pre_shift="s" if step.pre_shift else "", factors=(0.0,) * len(step.factors), arguments=(),
        keywords=(),
    )  # fmt: skip
    used = tuple(
        (name, value)
        for name, value in ((each, getattr(blank, each)) for each in blank.__slots__)
        if value not in ("", (), None, False)
    )
    dtype = str(flow.dtypes.get(step.name, "")).removeprefix("torch.")
    return f"{used} {shapes} {dtype} {bool(step.residual)}"


def compile_all(bound: Bound, jobs: Iterable[tuple[Step, Way]]) -> None:
    """Compile what the jobs need, side by side; what cannot be compiled fails again when run."""
    if bound.device.type != "cuda":
        return
    seen = set()
    some = []
    for step, way in jobs:
        key = (
            way.kernel, way.block, way.warps, way.stages, step.pre, len(step.inputs), step.kind,
            bool(step.scale), step.include_pad, bound.flow.dtypes.get(step.name),
            step.window and (step.window.is_pixel or step.window.kernel),
        )  # fmt: skip
        if way.block and key not in seen:
            seen.add(key)
            some.append((step, way))

    def work(job: tuple[Step, Way]) -> None:
        try:
            with torch.cuda.device(bound.device):
                bound.run(*job)
        except Exception:  # a kernel that needs too much; timing skips it
            return

    if some:
        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(work, some))
        torch.cuda.synchronize()


def step_us(bound: Bound, step: Step, way: Way) -> float:
    """One step by itself, run over and over in one graph."""
    return run_us(lambda: bound.run(step, way))


def _time(bound: Bound, step: Step, way: Way) -> float:
    """The time, or a negative number for a way that does not run."""
    try:
        return step_us(bound, step, way)
    except Exception as error:  # out of memory or out of resources: another way will do
        raise_interrupt(error)
        wait()
        return -1.0
