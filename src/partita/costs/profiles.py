"""A profile: what every op of one model costs, measured or gathered, saved as `partita/profile@1`.

Ops of a graph are looked up by name; modules at a chosen depth are sums over their ops.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from partita.costs.measured import Environment
from partita.errors import InputError
from partita.files import encode_json, read_record
from partita.graph.record import Graph, Op

KIND = "profile"


@dataclass(frozen=True, slots=True)
class OpTime:
    """One op: its medians, the spread between quartiles, and its bytes."""

    MEASURED: ClassVar[tuple[str, ...]] = (
        "forward_s", "backward_s", "forward_spread_s", "backward_spread_s", "peak_bytes",
        "resident_bytes", "parameter_bytes", "input_bytes", "output_bytes",
    )  # fmt: skip

    op: str
    kind: str
    scope: str
    forward_s: float
    backward_s: float
    forward_spread_s: float
    backward_spread_s: float
    peak_bytes: int
    resident_bytes: int
    parameter_bytes: int
    input_bytes: int
    output_bytes: int

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class ModuleTime:
    """The sum over the ops of a module; the peak is the worst moment of its ops in order."""

    scope: str
    num_ops: int
    forward_s: float
    backward_s: float
    peak_bytes: int
    resident_bytes: int
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What each op of a model costs in one environment."""

    model: str
    fingerprint: str
    environment: Environment
    ops: tuple[OpTime, ...]

    @property
    def forward_s(self) -> float:
        """All ops one after the other."""
        return sum(op.forward_s for op in self.ops)

    @property
    def backward_s(self) -> float:
        """All backward ops one after the other."""
        return sum(op.backward_s for op in self.ops)

    def modules(self, depth: int) -> tuple[ModuleTime, ...]:
        """Sums by module, `depth` names deep, in the order in which they first run."""
        groups: dict[str, list[OpTime]] = {}
        for op in self.ops:
            groups.setdefault(".".join(op.scope.split(".")[:depth]), []).append(op)
        return tuple(_module(scope, ops) for scope, ops in groups.items())

    def of(self, graph: Graph) -> dict[str, OpTime]:
        """The times by op name, if this is the profile of that graph."""
        if graph.fingerprint() != self.fingerprint:
            raise InputError(
                f"is the profile of another {self.model!r}, or of one captured by another version "
                f"(torch {self.environment.torch}): fingerprint {self.fingerprint}, "
                f"the model has {graph.fingerprint()}",
                fix="profile this model again",
                field="fingerprint",
            )
        return {op.op: op for op in self.ops}

    def by_op(self, graph: Graph, op_of: Mapping[str, str]) -> "ModelProfile":
        """The same for another graph of the model, whose op `op_of` says for each of ours."""
        times: dict[str, list[OpTime]] = {}
        for mine in self.ops:
            if mine.op in op_of:
                times.setdefault(op_of[mine.op], []).append(mine)
        forward = [op for op in graph.ops if op.phase == "forward"]
        ops = tuple(_summed(op, times.get(op.name, [])) for op in forward)
        return ModelProfile(graph.name, graph.fingerprint(), self.environment, ops)

    def to_json(self) -> bytes:
        """As a file that `read_profile` reads."""
        return encode_json({"format": f"partita/{KIND}@1", **asdict(self)})


def _summed(op: Op, parts: list[OpTime]) -> OpTime:
    """What an op costs that is run in parts; the peak is that of the worst part."""
    whole = {name: sum(getattr(part, name) for part in parts) for name in OpTime.MEASURED}
    whole["peak_bytes"] = max((part.peak_bytes for part in parts), default=0)
    return OpTime(op.name, op.kind, op.scope, **whole)


def _module(scope: str, ops: list[OpTime]) -> ModuleTime:
    held, peak = 0, 0
    for op in ops:
        peak = max(peak, held + op.peak_bytes)
        held += op.resident_bytes
    return ModuleTime(
        scope,
        len(ops),
        sum(op.forward_s for op in ops),
        sum(op.backward_s for op in ops),
        peak,
        held,
        sum(op.parameter_bytes for op in ops),
    )


def read_profile(path: str | Path) -> ModelProfile:
    """Read a saved profile."""
    return read_record(path, KIND, _ProfileWire).profile()


@dataclass(frozen=True, slots=True)
class _ProfileWire:
    format: str
    model: str
    fingerprint: str
    environment: Environment
    ops: tuple[OpTime, ...]

    def profile(self) -> ModelProfile:
        return ModelProfile(self.model, self.fingerprint, self.environment, self.ops)
