"""What a kind of device reaches in practice: one parameter set per kind, each with its source.

A datasheet gives peaks. A step of training reaches a part of them, launches its kernels from a host
that may be slower than the device, pays a fixed price per collective, and slows down where
communication runs beside computing:

    product          2 m n k / (peak products) (1 + half/m) (1 + half/n) (1 + half/k)
    attention        flops / (peak attention)                 fused
    elementwise      bytes eager_traffic / (bandwidth memory) eager; fused graphs move fewer bytes
    block            max(kernels host, device time + kernels gap)
    collective       fixed + volume / (bandwidth share)       by span: inside a node, across nodes
    side by side     max(a, b) + interference min(a, b)

The sets lie in `physics.toml`: for every number its value, how sure it is (the relative standard
error) and where it comes from. A kind without a set of its own takes that of the kind most like it,
and every forecast for it says so by a wider interval.

A prediction has an 80 % interval by what the parameters of its devices are known from. The spread
of a kind is the standard deviation of log(measured / predicted) over the runs that its parameters
were fitted to. It is wider where exposed communication is a large part of the step, on more devices
than anyone compared, and for kinds that nobody measured.
"""

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

DATA = Path(__file__).with_name("physics.toml")
QUANTILE = 1.2816  # of the normal distribution: 80 % lie within it on both sides
EXPOSED_SPREAD = 0.45  # spread per share of exposed communication
BEYOND_SPREAD = 0.03  # spread per doubling of devices beyond those compared
MEMORY_SPREAD = 0.045  # of bytes: 4.1 % mean error over the 74 published peaks
UNMEASURED_SPREAD = 0.2  # of kinds without any parameter set, such as a user's own


@dataclass(frozen=True, slots=True)
class Physics:
    """The parameters of one kind of device; shares are of what its datasheet promises."""

    products: float = 0.78
    products_f8: float = 0.60
    products_f4: float = 0.45
    half: float = 68.0  # size of a product's dim at which half of the rate is reached
    attention_forward: float = 0.45
    attention_backward: float = 0.35
    flash_2: float = 1.0  # rate of the attention kernel of 2023 over one tuned for the kind
    memory: float = 0.85
    eager_traffic: float = 2.0  # bytes of eager elementwise ops over those of a fused graph
    host_s: float = 40e-6  # per kernel, eager
    host_compiled_s: float = 8e-6
    gap_s: float = 2e-6  # per kernel on the device
    inside: float = 0.8
    inside_s: float = 60e-6
    across: float = 0.8
    across_s: float = 60e-6
    hop_s: float = 2e-6  # per rank that a collective across nodes passes
    interference: float = 0.7
    action_s: float = 50e-6  # per micro-batch and stage, on the host
    optimizer: float = 1.0  # passes of the optimizer over the least it must move
    step_s: float = 5e-3  # once a step
    workspace_bytes: float = 0.8e9
    conv: float = 0.85  # op by op: rate of a convolution over that of a product of its size
    attention_narrow: float = 0.6  # op by op: rate of heads of d is (d / 128) to this power
    fine_tiles: float = 0.0  # op by op: 1 where libraries have tiles of many shapes
    attention_start: float = 0.0  # op by op: keys that a block of queries costs before the first
    spread: float = 0.08  # standard deviation of log(measured / forecast)
    most_devices: float = 1.0  # beyond this many nobody compared
    best_mfu: float = 1.0  # the highest that anyone published, products in 16 bits
    best_mfu_nodes: float = 1.0  # the same on several nodes

    def host(self, execution: str) -> float:
        """Seconds of the host per kernel: nothing inside a CUDA graph."""
        return {"eager": self.host_s, "compiled": self.host_compiled_s, "graph": 0.0}[execution]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of a set: how sure it is (relative standard error), and its source."""

    value: float
    sure: float
    source: str


@dataclass(frozen=True, slots=True)
class PhysicsSet:
    """The parameter set of a kind, and whether it is the kind's own."""

    kind: str
    physics: Physics
    parameters: tuple[tuple[str, Parameter], ...]
    own: bool = True

    @property
    def spread(self) -> float:
        """Of forecasts, as a standard deviation of logarithms; wider for a borrowed set."""
        return self.physics.spread if self.own else math.hypot(self.physics.spread, 0.15)


@cache
def physics_sets() -> dict[str, PhysicsSet]:
    """All parameter sets of the data file by the name of their kind."""
    document = tomllib.loads(DATA.read_text(encoding="utf-8"))
    names = {field.name for field in fields(Physics)}
    sets: dict[str, PhysicsSet] = {}
    for table in document["kinds"]:
        own = {name: Parameter(**entry) for name, entry in table.items() if name in names}
        parent = sets.get(table.get("like", ""))
        inherited = dict(parent.parameters) if parent else {}
        both = {**inherited, **own}
        values = {name: parameter.value for name, parameter in both.items()}
        record = PhysicsSet(table["name"], Physics(**values), tuple(sorted(both.items())))
        for name in (table["name"], *table.get("kinds", ())):
            sets[name] = record
    return sets


@cache
def physics_of(kind: str) -> PhysicsSet:
    """The set of a kind by its preset's name; a like one, marked as borrowed, where it has none."""
    sets = physics_sets()
    if kind in sets:
        return sets[kind]
    family = next((sets[name] for name in sets if kind.upper().startswith(name.upper())), None)
    chosen = family or sets["generic"]
    return PhysicsSet(kind, chosen.physics, chosen.parameters, own=False)


def spread_of(sets: Iterable[PhysicsSet], num_devices: int, exposed: float) -> float:
    """The standard deviation of log(measured / predicted) for a step on devices of some kinds."""
    widest = 0.0
    for record in sets:
        beyond = max(0.0, math.log2(num_devices / max(1.0, record.physics.most_devices)))
        widest = max(
            widest, math.hypot(record.spread, EXPOSED_SPREAD * exposed, BEYOND_SPREAD * beyond)
        )
    return widest or UNMEASURED_SPREAD


def sets_of(kinds: Iterable[str]) -> list[PhysicsSet]:
    """The parameter sets of kinds by their names, each once."""
    return [physics_of(kind) for kind in sorted(set(kinds))]


def around(value: float, spread: float) -> tuple[float, float]:
    """The 80 % interval around a predicted value."""
    wide = math.exp(QUANTILE * spread)
    return value / wide, value * wide


def alike(first: float, second: float, spread: float) -> bool:
    """Does each of two predictions lie in the other's interval?"""
    return abs(math.log(first / second)) <= QUANTILE * spread if first > 0 < second else False
