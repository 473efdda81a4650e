"""How good are plans, and what does the search take? Tables for docs/benchmarks.md.

    python benchmarks/plan_search.py              the models and machines of the table
    python benchmarks/plan_search.py --mixed      heterogeneous devices
    python benchmarks/plan_search.py --large      the largest machines; one process for each is best
    python benchmarks/plan_search.py --limits     are time limits kept?
    python benchmarks/plan_search.py --limits 2 5 --cpu   some, where other work is on the machine
    python benchmarks/plan_search.py --case gpt3-175b 128x8xA100 1536
    python benchmarks/plan_search.py --case gpt2-medium 4xV100+8xP100 96 --dtype f16

Seconds are of this process's CPU, so that other work on the machine does not count. Limits are by
the clock; with `--cpu` the planner's own clock counts this process's CPU instead.
"""

import argparse
import resource
import time
from dataclasses import replace

from partita import units
from partita.cluster import Cluster, resolve
from partita.graph.record import Graph
from partita.jobs.plan import Planned, plan
from partita.jobs.simulate import simulate_stages
from partita.jobs.workload import load
from partita.report.summary import arrangement
from partita.search.base import Improvement, Stop
from partita.zoo.gpt import GptSizes, gpt

CASES = (
    ("gpt3-175b", "128x8xA100", 1536),
    ("mixtral-8x7b", "8x8xA100", 128),
    ("t5-11b", "4x8xA100", 128),
    ("vit-l16", "8xA100", 256),
    ("unet", "8xA100", 32),
    ("inception_v3", "16xV100", 512),
)
MIXED = (
    ("vit-l16", "4xV100+8xP100", 96),
    ("gpt2-medium", "4xV100+8xP100", 96),
    ("gpt2-xl", "8xA100+8xH100", 128),
    ("vit-h14", "8xA100+8xH100", 256),
)
LARGE = (
    ("gpt3-175b", "128x8xA100", 1536),
    ("gpt3-175b", "128x8xH100", 1536),
    ("mt-nlg-530b", "280x8xA100", 2240),
    ("llama-3-405b", "2048x8xH100", 2048),
)
LIMITED = (
    ("gpt3-175b", "128x8xA100", 1536),
    ("mixtral-8x7b", "8x8xA100", 128),
    ("t5-11b", "4x8xA100", 128),
    ("inception_v3", "16xV100", 512),
)
LIMITS_S = (1.0, 2.0, 5.0, 10.0, 20.0)
# Smith et al. 2022 (arXiv:2201.11990); not in the zoo.
MT_NLG = GptSizes(layers=105, width=20480, heads=128, positions=2048)
MIXED_DTYPE = "f16"  # as such devices are used; V100 and P100 have no bf16


def model_of(name: str, batch: int) -> str | Graph:
    """A model of the zoo by its name, or one that it has not."""
    if name != "mt-nlg-530b":
        return name
    return gpt(
        name, MT_NLG, batch, 2048, "bf16", loss=True, fused_attention=True, cache=0
    )  # fmt: skip


def measured(
    model: str, cluster: str | Cluster, batch: int, limit_s: float, dtype: str | None = None
) -> tuple[Planned, float, float]:
    """(result, CPU seconds of the search, CPU seconds until its first plan)."""
    started = time.process_time()
    first: list[float] = []

    def progress(step: Improvement) -> None:
        if step.objective is not None and not first:
            first.append(time.process_time() - started)

    stop = Stop(time_s=limit_s, gap=0.01, progress=progress)
    known = model_of(model, batch)
    asked = batch if isinstance(known, str) else None
    planned = plan(known, cluster, batch=asked, dtype=dtype, stop=stop)
    return planned, time.process_time() - started, first[0] if first else float("nan")


def row(
    model: str, cluster: str, batch: int, limit_s: float, dtype: str | None = None
) -> tuple[str, ...]:
    """One line of the table."""
    planned, seconds, first = measured(model, cluster, batch, limit_s, dtype)
    if planned.best is None:
        return model, cluster, str(batch), planned.why, "", "", "", "", ""
    best = planned.best
    return (
        model,
        cluster,
        str(batch),
        arrangement(best.simulation),
        units.seconds(best.step_s),
        f"{best.simulation.mfu:.0%}",
        f"{planned.gap:.1%}",
        f"{seconds:.1f} s",
        f"{first:.1f} s",
    )


def alike(cluster: Cluster) -> Cluster:
    """The same machine with every device as slow, and as small, as the slowest kind."""
    slowest = min(cluster.kinds, key=lambda kind: kind.peak("f16"))
    devices = tuple(replace(device, kind=slowest.name) for device in cluster.devices)
    return replace(cluster, name=f"{cluster.name} alike", kinds=(slowest,), devices=devices)


def mixed_row(model: str, spec: str, batch: int, limit_s: float) -> tuple[str, ...]:
    """Our plan against the best plan made for equal devices, run on the real ones."""
    cluster = resolve(spec)
    planned, seconds, _ = measured(model, cluster, batch, limit_s, MIXED_DTYPE)
    blind, _, _ = measured(model, alike(cluster), batch, limit_s, MIXED_DTYPE)
    work = load(model, batch=batch, dtype=MIXED_DTYPE)
    steps = []
    for candidate in (blind.best, *blind.others):
        if candidate is not None:
            told = candidate.simulation
            real = simulate_stages(work, cluster, told.stages, told.schedule)
            if real.fits:
                steps.append(real.step_s)
    assert planned.best is not None
    return (
        model,
        spec,
        str(batch),
        arrangement(planned.best.simulation),
        units.seconds(planned.best.step_s),
        units.seconds(min(steps)),
        f"{1 - planned.best.step_s / min(steps):.1%}",
        f"{seconds:.1f} s",
    )


def limited_row(
    model: str, cluster: str, batch: int, limit_s: float, dtype: str | None = None
) -> tuple[str, ...]:
    """What is there when the time is up, and how long that took."""
    began = time.perf_counter()
    planned, _, first = measured(model, cluster, batch, limit_s, dtype)
    seconds = time.perf_counter() - began
    step = "nothing" if planned.best is None else units.seconds(planned.best.step_s)
    gap = "" if planned.gap is None else f"{planned.gap:.1%}"
    used = f"{seconds / limit_s:.0%}"
    return model, cluster, f"{limit_s:g} s", step, gap, f"{seconds:.1f} s", used, f"{first:.1f} s"


def main() -> None:
    """Print the table that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--limits", nargs="*", type=float, metavar="SECONDS")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--case", nargs=3, metavar=("MODEL", "CLUSTER", "BATCH"))
    parser.add_argument("--dtype", help="of the models of the table, where not their own")
    parser.add_argument("--time-limit", type=float, default=300.0)
    options = parser.parse_args()
    if options.cpu:
        time.perf_counter = time.process_time
    if options.mixed:
        cases = [tuple(options.case)] if options.case else MIXED
        header = ("model", "machine", "batch", "plan", "step", "alike", "better", "search")
        rows = [mixed_row(m, c, int(b), options.time_limit) for m, c, b in cases]
    elif options.limits is not None:
        cases = [tuple(options.case)] if options.case else LIMITED
        header = ("model", "machine", "limit", "step", "gap", "took", "of it", "first")
        rows = [
            limited_row(m, c, int(b), s, options.dtype)
            for m, c, b in cases
            for s in options.limits or LIMITS_S
        ]
    else:
        cases = [tuple(options.case)] if options.case else LARGE if options.large else CASES
        header = (
            "model", "machine", "batch", "plan", "step", "MFU", "gap", "search", "first",
        )  # fmt: skip
        rows = [row(m, c, int(b), options.time_limit, options.dtype) for m, c, b in cases]
    print(units.table(header, rows))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"largest memory of the planner: {peak:.2f} GB")


if __name__ == "__main__":
    main()
