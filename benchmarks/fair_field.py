"""Frameworks' strategies, tuned over their own degrees, beside published runs and beside the plan.

    python benchmarks/fair_field.py [--plans 6] [--plan] [--regret 60] [CASE ...]

For each case: the fastest that fits of every family in `jobs/frameworks.py`, simulated op by op,
with its 80 % interval and the CPU seconds of ranking and simulating. Published steps are scaled to
the devices and batch of the case by model FLOPs. `--plan` adds the joint search (60 s); `--regret
N` simulates N of each family, and says how far the best of the first few is behind the best of
them."""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from partita import units
from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.errors import PartitaError
from partita.jobs.frameworks import FIELD, FieldSettings, framework_plan, ranked_field
from partita.jobs.plan import plan
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.workload import Workload, load
from partita.lower import Memo
from partita.search.base import Stop

# Settings of GPT-3's successor: Megatron-Turing NLG, which the zoo has by its sizes only.
MT_530B = {
    "model_type": "gpt2", "n_layer": 105, "n_embd": 20480, "n_head": 128, "n_positions": 2048,
    "vocab_size": 51200, "activation_function": "gelu_new",
}  # fmt: skip


@dataclass(frozen=True)
class FieldCase:
    """A model on a machine, and what was published of it."""

    model: str
    machine: str
    batch: int
    published: str


CASES = {
    "gpt3-1024": FieldCase(
        "gpt3-175b", "128x8xA100", 1536,
        "Korthikanti et al. 2022, 64 A100, batch 64: 13.75 s, so 20.6 s here; Narayanan et al. "
        "2021, 1,536 A100, all recomputed: 20.8 s, so 31.2 s here",
    ),
    "gpt3-h100": FieldCase("gpt3-175b", "128x8xH100", 1536, ""),
    "530b-2240": FieldCase(
        "530b", "280x8xA100", 2240,
        "Korthikanti et al. 2022, this machine and batch: 39.15 s, 54.2 % MFU; Narayanan et al. "
        "2021: 55.4 s, all recomputed",
    ),
    "llama-405b": FieldCase(
        "llama-3-405b", "2048x8xH100", 2048,
        "Llama 3, 16,384 H100, 380 to 400 TFLOP/s a device: 6.5 s to 6.2 s",
    ),
    "llama-8b": FieldCase("llama-3-8b", "2x8xH100", 128, ""),
}  # fmt: skip


def workload_of(case: FieldCase) -> Workload:
    """The model of a case; that of 530B parameters is built from its configuration."""
    if case.model != "530b":
        return load(case.model, batch=case.batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(MT_530B))
        return load(str(path), batch=case.batch, dtype="bf16")


def best_of(name: str, work: Workload, machine: str, plans: int) -> tuple[str, float]:
    """A row for the best of a family, and its CPU seconds."""
    cluster, started = resolve(machine), time.process_time()
    memo = Memo(Collectives(cluster))
    settings = replace(FieldSettings(), plans=plans)
    ranked = ranked_field(FIELD[name], work.graph, cluster, work.batch, settings)
    best: Simulation | None = None
    for one in ranked[:plans]:
        stages, schedule = framework_plan(work.graph, one.strategy)
        try:
            simulation = simulate_stages(
                work, cluster, stages, schedule, memo, most_devices=1, quick=True
            )
        except PartitaError:
            continue
        if simulation.fits and (best is None or simulation.step_s < best.step_s):
            best = simulation
    spent = time.process_time() - started
    if best is None:
        return f"{name:11} none of {len(ranked)} fits", spent
    low, high = best.likely_step_s
    return (
        f"{name:11} {units.seconds(best.step_s):>8}  {units.seconds(low)} to {units.seconds(high)}"
        f"  MFU {best.mfu:.0%}  {units.size(best.fullest[0])}  {best.arrangement}"
        f"  ({len(ranked)} ranked)",
        spent,
    )


def regret_of(name: str, work: Workload, machine: str, plans: int, many: int) -> str:
    """What is lost by simulating only those that forecasts rank first."""
    cluster = resolve(machine)
    memo = Memo(Collectives(cluster))
    steps: list[float] = []
    for one in ranked_field(FIELD[name], work.graph, cluster, work.batch)[:many]:
        stages, schedule = framework_plan(work.graph, one.strategy)
        try:
            simulation = simulate_stages(
                work, cluster, stages, schedule, memo, most_devices=1, quick=True
            )
        except PartitaError:
            continue
        steps.append(simulation.step_s if simulation.fits else float("inf"))
    if not steps or min(steps) == float("inf"):
        return f"{name:11} nothing fits"
    lost = min(steps[:plans]) / min(steps) - 1
    place = steps.index(min(steps)) + 1
    return (
        f"{name:11} best of {plans} is {lost:.1%} behind the best of {len(steps)} (number {place})"
    )


def main() -> None:
    """Print the rows of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--plans", type=int, default=6)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--regret", type=int, default=0)
    given = parser.parse_args()
    for name in given.cases or CASES:
        case = CASES[name]
        work = workload_of(case)
        print(f"\n{name}: {case.model} on {case.machine}, batch {case.batch}")
        if case.published:
            print(f"published: {case.published}")
        for family in FIELD:
            row, spent = best_of(family, work, case.machine, given.plans)
            print(f"{row}  {spent:.1f} s CPU", flush=True)
            if given.regret:
                print(regret_of(family, work, case.machine, given.plans, given.regret), flush=True)
        if given.plan:
            started = time.process_time()
            model = case.model if case.model != "530b" else work.given
            assert model is not None
            answer = plan(model, case.machine, batch=case.batch, stop=Stop(60.0, 0.01))
            spent = time.process_time() - started
            if answer.best is not None:
                simulation = answer.best.simulation
                print(
                    f"{'plan':11} {units.seconds(simulation.step_s):>8}  gap {answer.gap or 0:.1%}"
                    f"  {simulation.arrangement}  found by {answer.best.name}  {spent:.1f} s CPU"
                )


if __name__ == "__main__":
    main()
