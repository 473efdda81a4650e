"""How long it takes to start: `import partita` and `partita --help`, each in fresh processes.

    python benchmarks/startup.py [--json]

Medians of 10 processes. An empty interpreter is measured too, since it is part of every start.
"""

import json
import statistics
import subprocess
import sys
import time

PROCESSES = 10
LIMITS_S = {"import partita": 0.3, "partita --help": 0.5}
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import partita": ["-c", "import partita"],
    "partita --help": ["-m", "partita", "--help"],
}


def seconds_of(arguments: list[str]) -> float:
    """Median wall-clock seconds of a whole process, interpreter included."""
    times = []
    for _ in range(PROCESSES):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> int:
    """Measure, print, and fail if a limit is passed."""
    seconds = {name: seconds_of(arguments) for name, arguments in COMMANDS.items()}
    if "--json" in sys.argv[1:]:
        print(json.dumps({"processes": PROCESSES, "median_s": seconds, "limits_s": LIMITS_S}))
    else:
        for name, value in seconds.items():
            limit = f"  (limit {LIMITS_S[name] * 1e3:.0f} ms)" if name in LIMITS_S else ""
            print(f"{name:<16} {value * 1e3:6.1f} ms{limit}")
    return int(any(seconds[name] >= limit for name, limit in LIMITS_S.items()))


if __name__ == "__main__":
    sys.exit(main())
