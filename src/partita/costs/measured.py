"""Measured times of ops: what was timed, on what, and a database file to keep it in.

A measurement belongs to a *call* (what is computed: kind, attributes, shapes, element types) in an
*environment* (device, software versions): equal calls are measured once, whatever model they come
from. The database is a text file, one JSON object per line; a line is appended and forced to disk
as soon as it is known, so that a crash loses at most the measurement in progress, and two files
are merged by reading both. The last line for a call and environment counts.

    {"format": "partita/profile-database@1"}
    {"call": "linear f32[8,64] f32[32,64] -> f32[8,32]", "environment": {...}, "forward_s": ...}
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from partita.errors import FileError, InputError
from partita.files import (
    check_format,
    convert,
    decode_json,
    encode_json,
    read_bytes,
    write_atomically,
)
from partita.graph.record import Graph, Op

KIND = "profile-database"
LONGEST_LINE = 1 << 20
HEADER = {"format": f"partita/{KIND}@1"}


@dataclass(frozen=True, slots=True)
class Environment:
    """What times depend on besides the call: measurements of another one do not count."""

    device: str  # "cpu: model, 4 threads" or the GPU's name
    torch: str
    training: bool

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, {'training' if self.training else 'inference'}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians of repeated runs of one call alone, their spread, and the bytes it needs."""

    call: str
    environment: Environment
    forward_s: float
    backward_s: float  # 0 where there is none
    forward_spread_s: float  # between the quartiles
    backward_spread_s: float
    repeats: int
    peak_bytes: int  # allocated at the worst moment, inputs and parameters aside
    resident_bytes: int  # kept for the backward, parameters aside
    parameter_bytes: int
    input_bytes: int
    output_bytes: int

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "forward_spread_s", "backward_spread_s"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InputError(f"is {value}", fix="a time is a number of at least 0", field=name)
        for name in ("repeats", "peak_bytes", "resident_bytes", "parameter_bytes"):
            if getattr(self, name) < 0:
                raise InputError(f"is {getattr(self, name)}", fix="at least 0", field=name)

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


def call_text(graph: Graph, op: Op) -> str:
    """What a measurement is remembered by: `linear f32[8,64] f32[32,64] -> f32[8,32]`."""
    attrs = " ".join(f"{name}={_shown(value)}" for name, value in op.attrs)
    inputs = " ".join(_tensor_text(graph, name) for name in op.inputs)
    outputs = " ".join(_tensor_text(graph, name) for name in op.outputs)
    return " ".join(part for part in (op.kind, attrs, inputs, "->", outputs) if part)


def _tensor_text(graph: Graph, name: str) -> str:
    tensor = graph.tensor(name)
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Database:
    """Measurements by call and environment; `path` is where new ones are appended."""

    entries: Mapping[tuple[str, Environment], Measurement] = field(default_factory=dict)
    path: str = ""

    def find(self, call: str, environment: Environment) -> Measurement | None:
        """The measurement of a call in this environment."""
        return self.entries.get((call, environment))

    def environments(self) -> tuple[Environment, ...]:
        """The environments something was measured in, sorted."""
        return tuple(sorted({environment for _, environment in self.entries}, key=str))

    def changed(self, wanted: Environment) -> str:
        """How what was measured before differs, in words; empty if nothing was, or as wanted."""
        known = self.environments()
        if not known or wanted in known:
            return ""
        if any(e.device == wanted.device and e.torch == wanted.torch for e in known):
            return f"measured for {'inference' if wanted.training else 'training'} only"
        versions = sorted({e.torch for e in known if e.device == wanted.device})
        if versions:
            return f"measured with torch {', '.join(versions)}, this is {wanted.torch}"
        return f"measured on {known[-1].device}, this is {wanted.device}"


def read_database(path: str | Path) -> Database:
    """Read a database; a last line that was cut off by a crash is left out."""
    lines = read_bytes(path).split(b"\n")
    torn = lines.pop()  # what follows the last newline: nothing, or half a record
    if not lines:
        problem = "has no complete line" if torn else "is empty"
        raise FileError(problem, fix="give a file written by partita profile", file=str(path))
    check_format(decode_json(lines[0], f"{path} line 1"), KIND, file=str(path))
    entries = {}
    for number, line in enumerate(lines[1:], start=2):
        if line.strip():
            entry = _read_line(line, f"{path} line {number}")
            entries[(entry.call, entry.environment)] = entry
    return Database(entries, str(path))


def open_database(path: str | Path) -> Database:
    """The database at a path; an empty one if there is no file yet."""
    return read_database(path) if Path(path).exists() else Database(path=str(path))


def _read_line(line: bytes, where: str) -> Measurement:
    value = decode_json(line, where)
    try:
        return convert(value, Measurement, where)
    except InputError as error:
        raise FileError(error.found, fix=error.fix, field=error.field, file=where) from None


def append(path: str | Path, entry: Measurement) -> None:
    """Add one measurement to the file and wait until it is on disk."""
    target = Path(path)
    try:
        with target.open("ab+") as file:
            _drop_torn_line(file)
            start = b"" if file.tell() else _line(HEADER)
            file.write(start + _line(asdict(entry)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise FileError(
            f"cannot be written ({error.strerror})", fix="choose another place", file=str(path)
        ) from None


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut off a last line without its newline: a crash left it, and no reader counts it."""
    end = file.seek(0, os.SEEK_END)
    reach = min(end, LONGEST_LINE)
    file.seek(end - reach)
    kept = file.read(reach).rfind(b"\n") + 1
    if kept != reach:
        file.truncate(end - reach + kept)
    file.seek(0, os.SEEK_END)


def merge(paths: Iterable[str | Path], output: str | Path, *, overwrite: bool = False) -> Database:
    """One database of several; where two know the same call, the later file counts."""
    entries: dict[tuple[str, Environment], Measurement] = {}
    for path in paths:
        entries.update(read_database(path).entries)
    lines = [_line(HEADER), *(_line(asdict(entry)) for entry in _sorted(entries.values()))]
    write_atomically(output, b"".join(lines), overwrite=overwrite)
    return Database(entries, str(output))


def _sorted(entries: Iterable[Measurement]) -> Iterator[Measurement]:
    yield from sorted(entries, key=lambda entry: (str(entry.environment), entry.call))


def _line(value: Mapping[str, Any]) -> bytes:
    return encode_json(value, indent=0)
