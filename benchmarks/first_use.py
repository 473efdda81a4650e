"""The first answers on a fresh install: nothing is compiled yet, each command in a fresh process.

    python benchmarks/first_use.py [--json]

CPU seconds of the process and its children, with an empty folder for compiled code and then with
what the first run has kept; whether the first run compiled. The limit is for the first run.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 3.0
DATA = Path(__file__).parents[1] / "tests" / "data"
COMMANDS = {
    "solve": ["solve", str(DATA / "placement" / "alexnet-malvik.json")],
    "solve (schedule)": ["solve", str(DATA / "schedule" / "mshape.train.nd4.json")],
    "plan gpt2": ["plan", "gpt2", "--cluster", "4xA100", "--batch", "32"],
    "place alexnet": ["place", "alexnet", "--cluster", "malvik"],
    "shard alexnet": ["shard", "alexnet", "--cluster", "8xV100", "--batch", "128"],
}


def cpu_seconds(arguments: list[str], cache: str) -> tuple[float, bool]:
    """CPU seconds of one run, and whether it says that it compiles."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-m", "partita", *arguments],
        env={**os.environ, "NUMBA_CACHE_DIR": cache},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, "compiling for this machine" in run.stderr


def main() -> int:
    """Measure, print, and fail if a first run is past the limit."""
    rows = {}
    for name, arguments in COMMANDS.items():
        with tempfile.TemporaryDirectory() as cache:
            first_s, compiles = cpu_seconds(arguments, cache)
            rows[name] = {
                "first_s": first_s,
                "compiles": compiles,
                "second_s": cpu_seconds(arguments, cache)[0],
            }
    if "--json" in sys.argv[1:]:
        print(json.dumps({"limit_s": LIMIT_S, "cpu": rows}))
    else:
        for name, row in rows.items():
            how = "compiles" if row["compiles"] else "compiles nothing"
            print(f"{name:18} {row['first_s']:5.2f} s, then {row['second_s']:5.2f} s; {how}")
    return int(any(row["first_s"] > LIMIT_S for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
