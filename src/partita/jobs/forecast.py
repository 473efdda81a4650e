"""A model under a strategy given by name: read what the user says, refuse what cannot be, forecast.

What is not said is filled in as frameworks do: dp is what tp, cp and pp leave of the devices, a
micro-batch is 1, several chunks on a rank mean the interleaved schedule, hybrid sharding (HSDP)
means ZeRO 3.
"""

from dataclasses import fields
from typing import Any

from partita.cluster import Cluster, resolve
from partita.errors import InputError, PlanError
from partita.forecast import (
    Forecast,
    Machine,
    Strategy,
    Transformer,
    check_divisions,
    check_strategy,
    machine_of,
)
from partita.forecast import forecast as predict
from partita.forecast.models import transformer_of
from partita.suggest import suggest

KEYS = tuple(field.name for field in fields(Strategy))
# Element types as people write them.
DTYPES = {
    "fp32": "f32", "float32": "f32", "fp16": "f16", "float16": "f16", "half": "f16",
    "bfloat16": "bf16", "fp8": "f8", "float8": "f8", "mxfp8": "f8", "e4m3": "f8", "fp4": "f4",
    "nvfp4": "f4", "float4": "f4",
}  # fmt: skip
# Kinds with 8-bit products and none of 4 bits; datasheets here do not list the latter.
WITHOUT_F4 = ("H100", "H200", "H800", "GH200", "L4", "RTX-4090", "MI300")
NODE = -1  # as hsdp: shares within each node, copies across nodes


def forecast_model(
    model: str | Transformer,
    cluster: str | Cluster,
    strategy: Strategy | None = None,
    **keys: Any,
) -> Forecast:
    """Predict a training step; `keys` are those of a `Strategy`, used where none is given."""
    transformer = model if isinstance(model, Transformer) else transformer_of(model)
    machine = machine_of(resolve(cluster) if isinstance(cluster, str) else cluster)
    if strategy is not None and keys:
        raise InputError(
            f"both a strategy and {', '.join(keys)} are given", fix="give one", field="strategy"
        )
    chosen = strategy if strategy is not None else strategy_of(machine, **keys)
    check_strategy(transformer, chosen, machine.num_devices)
    check_divisions(transformer, chosen)
    _check_products(machine, chosen)
    return predict(transformer, machine, chosen)


def strategy_of(machine: Machine, **keys: Any) -> Strategy:
    """The strategy that keys say, with dp, schedule and ZeRO filled in where they are not given."""
    given = {name: value for name, value in keys.items() if value is not None}
    for name in given:
        if name not in KEYS:
            raise InputError(f"found {name!r}", fix=suggest(name, KEYS), field="strategy")
    if "batch" not in given:
        raise InputError(
            "no batch is given", fix="say how many sequences a step has: --batch 512", field="batch"
        )
    for name in ("dtype", "matmul_dtype", "grad_dtype"):
        if name in given:
            given[name] = DTYPES.get(str(given[name]).lower(), given[name])
    for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "batch", "micro_batch"):
        if given.get(name, 1) < 1:
            raise PlanError(f"is {given[name]}", fix="use at least 1", field=name)
    if "dp" not in given:
        given["dp"] = _left(machine, given)
    if given.get("vpp", 1) > 1:
        given.setdefault("schedule", "interleaved")
    if given.get("hsdp"):
        given.setdefault("zero", 3)
        if given["hsdp"] == NODE:
            inside = machine.node_size // (given.get("tp", 1) * given.get("cp", 1))
            given["hsdp"] = max(1, min(inside, given["dp"]))
    return Strategy(**given)


def _check_products(machine: Machine, strategy: Strategy) -> None:
    """Refuse products in a type that the devices do not have."""
    kind, dtype = machine.kind, strategy.product_dtype
    narrow = dtype in ("f8", "f4") and "f8" not in dict(kind.flops_per_s)
    if narrow or (dtype == "f4" and kind.name.startswith(WITHOUT_F4)):
        raise PlanError(
            f"{kind.name} has no products in {dtype}",
            fix="use bf16" if narrow else "use fp8 or bf16",
            field="matmul-dtype",
        )


def _left(machine: Machine, given: dict[str, Any]) -> int:
    """The devices that the other degrees leave for data parallelism."""
    others: int = given.get("tp", 1) * given.get("cp", 1) * given.get("pp", 1)
    if machine.num_devices % others:
        named = " x ".join(f"{k}={given[k]}" for k in ("tp", "cp", "pp") if given.get(k, 1) > 1)
        raise PlanError(
            f"{named} = {others} does not divide the {machine.num_devices} devices of the cluster",
            fix=f"choose degrees whose product divides {machine.num_devices}",
            field="dp",
        )
    return machine.num_devices // others
