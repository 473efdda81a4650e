"""Fit the parameter set of one kind of device to what was measured on it; needs no GPU.

    python benchmarks/fit_device.py --kind H200.json --models models.json

`--kind` is what `device_kind.py` wrote: products, attention and memory are compared with the
roofline's terms, and the value of each parameter that makes the median case right is printed.
`--models` is what `h200_models.py` wrote: of the half that is marked `calibrate` the speed of the
host is fitted, once for eager and once for compiled execution; then every model is predicted by the
parameters that lie in `costs/physics.toml`, and errors of both halves are printed. The other half
fits nothing.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from h200_models import MODES, errors_of, row_of, shown
from model_steps import DTYPE, graph_of, predicted

from partita.cluster import DeviceKind, resolve
from partita.costs.roofline import (
    BEST_TILE,
    MAX_K_SPLITS,
    WGRAD_K_SPLITS,
    Product,
    op_cost,
    product_seconds,
    rates_of,
)
from partita.graph import GraphBuilder, training_graph

Record = dict[str, Any]
LARGE_BYTES = 100e6  # beyond any cache


class Case(NamedTuple):
    """One measured step: seconds of its ops on the device and on the host, and of the step."""

    device_s: tuple[float, ...]
    host_s: tuple[float, ...]
    step_s: float

    def predicted(self, host: float) -> float:
        """The step if the host takes `host` times as long: an op begins when it is started."""
        ended = started = 0.0
        for device_s, host_s in zip(self.device_s, self.host_s, strict=True):
            started += host * host_s
            ended = max(ended, started) + device_s
        return ended


def fitted_host(cases: list[Case]) -> float:
    """The factor on the host's times that makes the mean error least."""
    factors = [0.5 * 1.02**step for step in range(90)]
    return min(factors, key=lambda factor: _error(case.predicted(factor) / case.step_s
                                                  for case in cases))  # fmt: skip


def _error(ratios: Iterable[float]) -> float:
    return statistics.fmean(abs(ratio - 1) for ratio in ratios)


def product_ratios(records: list[Record], kind: DeviceKind) -> list[float]:
    """Predicted over measured of every aligned bf16 product."""
    ratios = []
    rates = rates_of(kind.name)
    peak = kind.peak(DTYPE) * rates.products / BEST_TILE
    for record in records:
        aligned = not any(record.get(size, 0) % 8 for size in ("m", "n", "k"))
        if "m" not in record or record.get("dtype") != DTYPE or not aligned:
            continue
        product = Product(record.get("batch", 1), record["m"], record["n"], record["k"])
        splits = WGRAD_K_SPLITS if "wgrad" in record["kind"] else MAX_K_SPLITS
        compute_s = product_seconds(product, peak, kind.num_units, splits, fine=rates.fine_tiles)
        memory_s = record["bytes"] / (kind.memory_bytes_per_s * rates.memory)
        if compute_s > memory_s:
            ratios.append((compute_s + kind.launch_s) / record["seconds"])
    return ratios


def attention_ratios(records: list[Record], kind: DeviceKind, phase: str) -> list[float]:
    """Predicted over measured of fused attention, of the backend that PyTorch chooses."""
    ratios = []
    for record in records:
        if (
            record["kind"] != "attention"
            or record["backend"] != "default"
            or "seconds" not in record
        ):
            continue
        graph = _attention(record)
        cost = op_cost(graph, graph.op("a" if phase == "forward" else "a.dgrad"), kind)
        ratios.append(cost.seconds / record["seconds" if phase == "forward" else "backward_s"])
    return ratios


def _attention(record: Record) -> Any:
    g = GraphBuilder("attention", DTYPE)
    lengths = [record["batch"], record["heads"], record["length"], record["size"]]
    keys = [record["batch"], record["kv_heads"], record["length"], record["size"]]
    q, k, v = (
        g.linear(g.input(name, shape), record["size"], f"{name}_proj", bias=False)
        for name, shape in (("q", lengths), ("k", keys), ("v", keys))
    )
    (out,) = g.op("attention", q, k, v, name="a", causal=record["causal"])
    return training_graph(g.finish(out), optimizer=None)


def memory_ratios(records: list[Record], kind: DeviceKind) -> list[float]:
    """Predicted over measured of kernels that only move many bytes."""
    bandwidth = kind.memory_bytes_per_s * rates_of(kind.name).memory
    plain = ("relu", "add", "scale")
    return [
        record["bytes_per_s"] / bandwidth
        for record in records
        if (record["kind"] in plain or record.get("name") == "triad")
        and record["seconds"] * record["bytes_per_s"] > LARGE_BYTES
    ]


def show_kind(path: Path, kind: DeviceKind) -> None:
    """The parameters that the microbenchmarks ask for, beside those that lie there."""
    records = [r for r in json.loads(path.read_text())["records"] if "error" not in r]
    rates = rates_of(kind.name)
    tables: tuple[tuple[str, float, list[float]], ...] = (
        ("products", rates.products, product_ratios(records, kind)),
        ("attention_forward", rates.attention_forward,
         attention_ratios(records, kind, "forward")),
        ("attention_backward", rates.attention_backward,
         attention_ratios(records, kind, "backward")),
        ("memory", rates.memory, memory_ratios(records, kind)),
    )  # fmt: skip
    for name, value, ratios in tables:
        median = statistics.median(ratios)
        spread = statistics.pstdev([math.log(ratio) for ratio in ratios])
        print(
            f"{name:20} lies at {value:.3f}; {len(ratios)} cases ask for {value * median:.3f}, "
            f"spread {spread:.1%}, mean error {_error(ratios):.1%}"
        )


def case_of(record: Record, kind: DeviceKind) -> Case:
    """A measured step as the ops that partita prices."""
    training = record["kind"] == "train"
    forward = graph_of(record["model"], record["batch"], training)
    graph = training_graph(forward, "adamw", DTYPE) if training else forward
    costs = [op_cost(graph, op, kind, (), record["mode"]) for op in graph.ops]
    return Case(
        tuple(cost.seconds for cost in costs), tuple(cost.host_s for cost in costs),
        record["step_s"],
    )  # fmt: skip


def show_models(path: Path, cluster: str, kind: DeviceKind) -> None:
    """The host's speed that the calibrating half asks for; errors of both halves."""
    records = [r for r in json.loads(path.read_text())["records"] if "step_s" in r]
    for mode in MODES:
        halves = {
            half: [case_of(r, kind) for r in records if r["mode"] == mode and r["half"] == half]
            for half in ("calibrate", "report")
        }
        if halves["calibrate"]:
            factor = fitted_host(halves["calibrate"])
            count = len(halves["calibrate"])
            print(f"host, {mode}: {count} steps ask for {factor:.2f} times what lies there")
            for half, cases in halves.items():
                if cases:
                    error = _error(case.predicted(factor) / case.step_s for case in cases)
                    print(f"  with a host as slow as that, {half}: {error:.1%} of the step")
    table = []
    for record in records:
        training = record["kind"] == "train"
        said = predicted(record["model"], record["batch"], training, cluster, record["mode"])
        table.append(row_of(record, said))
        print(shown(table[-1]), flush=True)
    for name, error in errors_of(table).items():
        print(
            f"{name:24} {error['pairs']:3.0f} pairs: step {error['time']:.1%}, "
            f"memory {error['memory']:.1%}"
        )


def main(arguments: list[str] | None = None) -> None:
    """What is given is looked at."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", type=Path, help="what device_kind.py wrote")
    parser.add_argument("--models", type=Path, help="what h200_models.py wrote")
    parser.add_argument("--cluster", default="1xH200", help="the kind that was measured")
    args = parser.parse_args(arguments)
    kind = resolve(args.cluster).kind_of(0)
    if args.kind:
        show_kind(args.kind, kind)
    if args.models:
        show_models(args.models, args.cluster, kind)


if __name__ == "__main__":
    main()
