"""Is a plan for a machine with other figures never worse than the plan for the usual ones there?

    python benchmarks/plan_perturbed.py                       small cases
    python benchmarks/plan_perturbed.py --case gpt3-175b 128x8xA100 1536

Latency of all links times 3 and 6: the plan that is found there, the plan of the usual machine
simulated there, and the plan that is found when it is given to start from (`--start`). Links alone
change: what a collective costs whatever its links are stays.
"""

import argparse
from dataclasses import replace

from partita import units
from partita.cluster import Cluster, resolve
from partita.jobs.plan import plan
from partita.jobs.simulate import simulate_stages
from partita.jobs.workload import load
from partita.search.base import Stop

CASES = (
    ("gpt2", "8xA100", 32),
    ("gpt2-medium", "2x8xA100", 64),
    ("vit-b16", "4x4xV100", 128),
    ("t5-base", "2x8xA100", 64),
)
TIMES = (3, 6)


def slower(spec: str, times: float) -> Cluster:
    """A machine with so many times the latency on every link."""
    cluster = resolve(spec)
    links = tuple(replace(link, latency_s=link.latency_s * times) for link in cluster.links)
    return replace(cluster, name=f"{cluster.name} latency x{times}", links=links)


def rows(model: str, spec: str, batch: int, limit_s: float) -> list[tuple[str, ...]]:
    """One line for each latency."""
    stop = Stop(time_s=limit_s, gap=0.01)
    usual = plan(model, spec, batch=batch, stop=stop)
    assert usual.plan is not None, "something fits"
    lines = []
    for times in TIMES:
        cluster = slower(spec, times)
        workload = load(model, batch=batch)
        there = simulate_stages(workload, cluster, usual.plan.stages, usual.plan.schedule)
        anew = plan(model, cluster, batch=batch, stop=stop)
        started = plan(model, cluster, batch=batch, stop=stop, start=usual.plan)
        steps_there = [each.best.step_s for each in (anew, started) if each.best is not None]
        steps = [there.step_s, *steps_there]
        lines.append((
            model, spec, str(batch), f"x{times}", *map(units.seconds, steps),
            f"{steps[1] / steps[0] - 1:+.2%}", f"{steps[2] / steps[0] - 1:+.2%}",
        ))  # fmt: skip
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=3, metavar=("MODEL", "CLUSTER", "BATCH"))
    parser.add_argument("--time-limit", type=float, default=300.0)
    options = parser.parse_args()
    cases = [tuple(options.case)] if options.case else CASES
    header = (
        "model", "machine", "batch", "latency", "usual plan", "search", "start", "search", "start",
    )  # fmt: skip
    lines = [line for m, c, b in cases for line in rows(m, c, int(b), options.time_limit)]
    print(units.table(header, lines))


if __name__ == "__main__":
    main()
