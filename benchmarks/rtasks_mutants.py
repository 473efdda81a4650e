"""Is every unsafe table of a persistent kernel refused before its launch, and no right one?

    python benchmarks/rtasks_mutants.py [--mutants 10000] [--seed 0] [--tries 24] [--json]

Tables of regions of every kind of op, with small and large tiles, and of small models must pass
(`gpu/rtasks/check_table.py`). Then one number, row or place of such a table is made wrong: a wait
dropped, another counter, a value over another, an index past the end. What passes all the same is
run by a machine of its own (`tests/gpu/table_mutants.py`: element by element, programs in turns
drawn at random, two launches) and must do what the right table does. Of what is refused a part is
run too, to know how much of it was really unsafe. No GPU is needed; run it from the root of the
repository, whose tests it shares regions and mutants with.
"""

import argparse
import collections
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))

from rtasks_modules import examples
from table_mutants import CHANGES, Launch, does_wrong
from test_check_table import launches, model_launches, unsafe

RUN_OF_REFUSED = 0.1  # the part of refused tables that is run


def right_tables() -> dict[str, Launch]:
    """Every region that a right table is made of."""
    tables = dict(launches())
    for name in examples():
        tables |= {f"{name} {at}": each for at, each in enumerate(model_launches(name))}
    return tables


def main() -> None:
    """Print a table: by kind of change, what was refused and what passed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=24, help="runs of a table that passes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.process_time()
    tables = right_tables()
    refused_right = [name for name, launch in tables.items() if unsafe(launch)]
    counts = {change.__name__: collections.Counter[str]() for change in CHANGES}
    findings = []
    rng, done = random.Random(options.seed), 0
    while done < options.mutants:
        name = rng.choice(list(tables))
        change = rng.choice(CHANGES)
        mutant = change(tables[name], rng)
        if mutant is None or mutant == tables[name]:
            continue
        done += 1
        count = counts[change.__name__]
        count["tried"] += 1
        if unsafe(mutant):
            count["refused"] += 1
            if rng.random() < RUN_OF_REFUSED:
                count["run"] += 1
                count["wrong"] += does_wrong(mutant, tables[name], options.tries, done) is not None
            continue
        wrong = does_wrong(mutant, tables[name], options.tries, done)
        count["passed"] += 1
        if wrong is not None:
            findings.append(f"{change.__name__} of {name}, mutant {done}: {wrong}")
    seconds = time.process_time() - began
    if options.json:
        answer = {"tables": len(tables), "refused_right": refused_right, "changes": counts}
        print(json.dumps(answer | {"unsafe_passed": findings, "seconds": seconds}))
        return
    print(f"{len(tables)} right tables, refused: {refused_right or 0}")
    print("| change | tried | refused | of them run | did wrong | passed | unsafe among them |")
    print("|---|---|---|---|---|---|---|")
    total = collections.Counter[str]()
    for name, count in [*counts.items(), ("all", total)]:
        passed = sum(name == "all" or finding.startswith(f"{name} ") for finding in findings)
        cells = (*(count[each] for each in ("tried", "refused", "run", "wrong", "passed")), passed)
        print(f"| {name.replace('_', ' ')} | {' | '.join(map(str, cells))} |")
        total.update(count)
    print("\n".join(findings[:20]))
    print(f"{seconds:.0f} s of CPU")


if __name__ == "__main__":
    main()
