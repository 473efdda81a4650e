"""Is a plan ever slower than one of the same space with something pinned? It should not be.

    python benchmarks/plan_pinned.py                        # all cases
    python benchmarks/plan_pinned.py --case gpt2 2xV100@links=0.01 8

Every case is planned freely and with `pp` pinned to each number of stages that divides the devices;
seconds are CPU.
"""

import argparse
import time

import partita
from partita.cluster import resolve
from partita.errors import PartitaError

CASES = [
    ("resnet50", "4xA100@links=0.005", 32),
    ("gpt2", "2xV100@links=0.01", 8),
    ("gpt2", "4xA100@links=0.02", 16),
    ("gpt2", "8xA100", 64),
    ("vgg16", "4xP100@links=0.05", 32),
    ("bert-large", "8xV100@links=0.1", 32),
    ("vit-b16", "4xV100@links=0.02", 32),
    ("unet", "4xA100@links=0.01", 8),
    ("t5-base", "4xV100@links=0.05", 16),
    ("inception_v3", "4xV100@links=0.02", 64),
    ("densenet121", "2xA100@links=0.01", 32),
    ("gpt2-medium", "8xA100@links=0.02", 32),
]


def planned(model: str, machine: str, batch: int, *pins: str) -> tuple[float, str, float]:
    """Step, words and CPU seconds of a plan; an infinite step where there is none."""
    began = time.process_time()
    try:
        answer = partita.plan(model, machine, batch=batch, pin=pins)
    except PartitaError as error:
        return float("inf"), str(error), time.process_time() - began
    step = float("inf") if answer.best is None else answer.best.step_s
    return step, str(answer.plan), time.process_time() - began


def main() -> None:
    """One line for each case, and for each pin that is faster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs=3, metavar=("MODEL", "MACHINE", "BATCH"))
    case = parser.parse_args().case
    worse = 0
    for model, machine, batch in [(case[0], case[1], int(case[2]))] if case else CASES:
        size = resolve(machine).num_devices
        free = planned(model, machine, batch)
        pinned = {
            pp: planned(model, machine, batch, f"pp={pp}")
            for pp in range(1, size + 1)
            if size % pp == 0
        }
        steps = ", ".join(f"pp={pp} {step * 1e3:.4g}" for pp, (step, _, _) in pinned.items())
        best = min(step for step, _, _ in pinned.values())
        print(f"{model}, {machine}, {batch}: {free[0] * 1e3:.4g} ms ({free[2]:.1f} s); {steps}")
        for step, words, _ in pinned.values():
            if step < free[0] * (1 - 1e-3) and step == best:
                worse += 1
                print(f"  slower than {words} by {free[0] / step - 1:.1%}: {free[1]}")
    print(f"{worse} slower than a pinned plan")


if __name__ == "__main__":
    main()
