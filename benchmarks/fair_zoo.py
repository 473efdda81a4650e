"""Is the plan ever worse than the best named strategy? Models of the zoo on many machines.

python benchmarks/fair_zoo.py [--seconds 25]
"""

import argparse
import time

from partita.errors import PartitaError
from partita.jobs.compare import compare
from partita.search.base import Stop

CASES = (
    ("gpt2", "8xA100", 64),
    ("bert-large", "4xV100+8xP100", 96),
    ("mixtral-8x7b", "4x8xH100", 256),
    ("llama-7b", "2x8xA100", 64),
    ("t5-large", "8xV100", 64),
    ("vit-l16", "4xV100+8xP100", 96),
)


def main() -> None:
    """A line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0)
    seconds = parser.parse_args().seconds
    for model, machine, batch in CASES:
        started = time.process_time()
        try:
            comparison = compare(model, machine, batch=batch, stop=Stop(seconds, 0.01))
        except PartitaError as error:
            print(f"{model} on {machine}: {error}")
            continue
        *others, own = comparison.rows
        best = min((row for row in others if row.fits), key=lambda row: row.objective_s)
        print(
            f"{model} on {machine}, batch {batch}: plan {own.objective_s:.4f} s, best other "
            f"{best.name} {best.objective_s:.4f} s ({best.objective_s / own.objective_s:.3f}), "
            f"{time.process_time() - started:.0f} s CPU",
            flush=True,
        )


if __name__ == "__main__":
    main()
