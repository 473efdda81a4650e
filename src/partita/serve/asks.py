"""What can be asked on the page: a record for each, and the command line that asks the same.

`ASKS` names them. A record is made from JSON; fields it does not have, and values of other types,
are refused. `words` are the words after `partita`; only what differs from the defaults of the
command stands there.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from partita import files
from partita.capture.onnx_file import is_onnx_spec
from partita.capture.python_file import is_python_spec
from partita.errors import InputError
from partita.suggest import suggest
from partita.zoo.spec import names_file

LONGEST_NAME = 200
LONGEST_SEARCH_S = 3600.0


def _flags(pairs: dict[str, object]) -> list[str]:
    """Options as they are typed; nothing for None and False."""
    words: list[str] = []
    for flag, value in pairs.items():
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, _plain(value)]
    return words


def _plain(value: object) -> str:
    """As people type it, and no digit less."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _machine(cluster: str, memory_gib: float | None, links: float) -> str:
    """The name of a machine with what was moved on the page."""
    changes = [] if memory_gib is None else [f"memory={_plain(memory_gib)}GiB"]
    changes += [] if links == 1 else [f"links={_plain(links)}"]
    return cluster + (f"@{','.join(changes)}" if changes else "")


def _differs(value: object, usual: object) -> object:
    return None if value == usual else value


@dataclass(frozen=True, slots=True)
class SimulateAsk:
    """A model, data parallel, op by op."""

    model: str
    cluster: str
    batch: int
    memory_gib: float | None = None
    links: float = 1.0
    dtype: str | None = None
    training: bool = True

    @property
    def machine(self) -> str:
        """The machine with its changes, as a command names it."""
        return _machine(self.cluster, self.memory_gib, self.links)

    def words(self) -> list[str]:
        """The command line after `partita`."""
        given = {"--cluster": self.machine, "--batch": self.batch, "--dtype": self.dtype,
                 "--infer": not self.training}  # fmt: skip
        return ["simulate", self.model, *_flags(given)]


@dataclass(frozen=True, slots=True)
class StrategyAsk:
    """A transformer under a strategy by name."""

    model: str
    cluster: str
    batch: int
    memory_gib: float | None = None
    links: float = 1.0
    dtype: str | None = None
    micro_batch: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    zero: int = 0
    recompute: str = "none"
    schedule: str | None = None
    execution: str | None = None

    @property
    def machine(self) -> str:
        """The machine with its changes, as a command names it."""
        return _machine(self.cluster, self.memory_gib, self.links)

    def keys(self) -> dict[str, Any]:
        """The strategy as `forecast_model` takes it."""
        names = ("batch", "dtype", "micro_batch", "tp", "pp", "vpp", "cp", "ep", "sp", "zero",
                 "recompute", "schedule", "execution")  # fmt: skip
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def words(self) -> list[str]:
        """The command line after `partita`."""
        given: dict[str, object] = {
            "--cluster": self.machine, "--batch": self.batch, "--dtype": self.dtype,
            "--micro-batch": self.micro_batch, "--sp": self.sp, "--schedule": self.schedule,
            "--zero": _differs(self.zero, 0), "--recompute": _differs(self.recompute, "none"),
            "--execution": self.execution,
        }  # fmt: skip
        for name in ("tp", "pp", "vpp", "cp", "ep"):
            given[f"--{name}"] = _differs(getattr(self, name), 1)
        return ["simulate", self.model, *_flags(given)]


@dataclass(frozen=True, slots=True)
class PlanAsk:
    """Everything at once: a search."""

    model: str
    cluster: str
    batch: int
    memory_gib: float | None = None
    links: float = 1.0
    dtype: str | None = None
    training: bool = True
    micro_batches: int | None = None
    pp: int | None = None
    time_limit: float = 20.0

    @property
    def machine(self) -> str:
        """The machine with its changes, as a command names it."""
        return _machine(self.cluster, self.memory_gib, self.links)

    def pins(self) -> tuple[str, ...]:
        """What is decided before the search."""
        pairs = (("pp", self.pp), ("micro-batches", self.micro_batches))
        return tuple(f"{name}={value}" for name, value in pairs if value is not None)

    def words(self) -> list[str]:
        """The command line after `partita`."""
        given = {"--cluster": self.machine, "--batch": self.batch, "--dtype": self.dtype,
                 "--infer": not self.training, "--time-limit": self.time_limit}  # fmt: skip
        pins = [word for pin in self.pins() for word in ("--pin", pin)]
        return ["plan", self.model, *_flags(given), *pins]


@dataclass(frozen=True, slots=True)
class ScheduleAsk:
    """The order of micro-batches on a shape, searched, or a published one by its name."""

    placement: str
    devices: int = 4
    microbatches: int | None = None
    memory: float | None = None
    forward_span: float = 1.0
    backward_span: float | None = None
    weight_span: float | None = None
    delay: float = 0.0
    chunks: int | None = None
    time_limit: float = 10.0

    def words(self) -> list[str]:
        """The command line after `partita`."""
        given = {
            "--devices": self.devices, "--microbatches": self.microbatches,
            "--memory": self.memory, "--forward-span": _differs(self.forward_span, 1.0),
            "--backward-span": self.backward_span, "--weight-span": self.weight_span,
            "--delay": _differs(self.delay, 0.0), "--chunks": self.chunks,
            "--time-limit": self.time_limit,
        }  # fmt: skip
        return ["schedule", self.placement, *_flags(given)]


Ask = SimulateAsk | StrategyAsk | PlanAsk | ScheduleAsk
ASKS: dict[str, type[Ask]] = {
    "simulate": SimulateAsk,
    "strategy": StrategyAsk,
    "plan": PlanAsk,
    "schedule": ScheduleAsk,
}


def read_ask(kind: str, value: dict[str, Any], files_allowed: Collection[str] = ()) -> Ask:
    """The question in a JSON object; `files_allowed` are the files that its user named at start."""
    if kind not in ASKS:
        raise InputError(f"found {kind[:60]!r}", fix=suggest(kind, ASKS), field="kind")
    known = {field.name for field in fields(ASKS[kind])}
    for name in value:
        if name not in known:
            raise InputError(f"found {name[:60]!r}", fix=suggest(name, known), field="question")
    ask = files.convert(value, ASKS[kind])
    limit = getattr(ask, "time_limit", 1.0)
    if not 0 < limit <= LONGEST_SEARCH_S:
        raise InputError(
            f"found {limit:g}", fix=f"give seconds up to {LONGEST_SEARCH_S:g}", field="time_limit"
        )
    for name in ("model", "cluster", "placement"):
        text = getattr(ask, name, "")
        if len(text) > LONGEST_NAME:
            raise InputError(f"has {len(text):,} characters", fix="give a name", field=name)
        _refuse_file(name, text, files_allowed)
    return ask


def _refuse_file(name: str, text: str, files_allowed: Collection[str]) -> None:
    """A page opens no file, and runs no code, that was not named when it was started."""
    plain = text.rpartition("@")[0] or text
    if text in files_allowed or plain in files_allowed:
        return
    if any(map(_looks_like_file, (text, *re.split("[@+]", text)))):
        raise InputError(
            f"{text[:60]!r} names a file that this page may not open",
            fix="name it when you start the page: partita serve FILE",
            field=name,
        )


def _looks_like_file(text: str) -> bool:
    if "/" in text or "\\" in text or text.lower().endswith((".toml", ".json", ".csv")):
        return True
    return is_python_spec(text) or is_onnx_spec(text) or names_file(text)
