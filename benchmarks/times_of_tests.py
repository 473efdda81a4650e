"""What tests cost in processor time, in one tree or in several taken in turns.

    python benchmarks/times_of_tests.py tests/search tests/gpu
    python benchmarks/times_of_tests.py --tree ../before --tree . tests/search/test_schedule_search.py

Seconds of all processes that the tests start and wait for, not by the clock: these hardly hang on
what else the machine does. Servers that tests share end with them and count as well.
"""

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path


def cpu_s(tree: Path, path: str) -> tuple[float, str]:
    """Processor time of the tests under a path, in one process; what pytest says of them."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree / "src")}, text=True,
        stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.stdout.strip().splitlines()[-1]


def main() -> None:
    """Print one row for each path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", help="folders or files of tests")
    parser.add_argument("--tree", action="append", type=Path, help="a checkout; several in turns")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree or [Path(__file__).parents[1]]]
    for path in options.paths:
        rows = [cpu_s(tree, path) for tree in trees]
        seconds = ", ".join(f"{each:.1f} s" for each, _ in rows)
        ratio = f" ({rows[-1][0] / rows[0][0]:.2f})" if len(rows) > 1 else ""
        print(f"{path}: {seconds}{ratio}; {rows[-1][1]}", flush=True)


if __name__ == "__main__":
    main()
