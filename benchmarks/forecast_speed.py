"""How long one forecast takes after warm-up, through the public function.

    python benchmarks/forecast_speed.py [--json]

Medians of 200 calls each; the limit is 5 ms for one configuration.
"""

import json
import statistics
import sys
import time

import partita

CALLS = 200
LIMIT_S = 5e-3
CASES = {
    "gpt3-175b on 1,024 A100": (
        "gpt3",
        "128x8xA100",
        {"batch": 1536, "tp": 8, "pp": 8, "sp": True},
    ),
    "mixtral-8x22b on 64 H100": ("mixtral-8x22b", "8x8xH100", {"batch": 256, "pp": 4, "ep": 8}),
    "deepseek-v3 on 2,048 H100": ("deepseek-v3", "256x8xH100", {"batch": 8192, "pp": 16, "ep": 64}),
}


def median_s(model: str, cluster: str, keys: dict[str, object]) -> float:
    """Seconds of `partita.simulate` with the model and the machine read before."""
    machine = partita.cluster_from(cluster)
    forecast = partita.simulate(model, machine, micro_batch=1, **keys)  # type: ignore[call-overload]
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        partita.simulate(forecast.model, machine, strategy=forecast.strategy)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> int:
    """Measure, print, and fail if the limit is passed."""
    seconds = {name: median_s(*case) for name, case in CASES.items()}
    if "--json" in sys.argv[1:]:
        print(json.dumps({"calls": CALLS, "median_s": seconds, "limit_s": LIMIT_S}))
    else:
        for name, value in seconds.items():
            print(f"{name:28} {value * 1e3:6.2f} ms  (limit {LIMIT_S * 1e3:.0f} ms)")
    return 0 if max(seconds.values()) <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
