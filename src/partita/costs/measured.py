"""Measured times: what was timed, on what, and the database file to keep it in.

A measurement belongs to a *call* (what is computed: kind, attributes, shapes, element types), run
in a *way* (empty: PyTorch's own operator; else which kernel, with which tiles), in an *environment*
(device, software versions): equal calls are measured once, whatever model they come from. Ops that
`partita profile` times and steps that `partita.streams` times may lie in one file. It is text, one
JSON object per line; lines are appended and forced to disk as soon as they are known, so that a
crash loses at most the measurement in progress, and two files are merged by reading both. The last
line for a call, way and environment counts.

    {"format": "partita/profile-database@2"}
    {"call": "linear f32[8,64] f32[32,64] -> f32[8,32]", "environment": {...}, "forward_s": ...}

Files of version 1 know no ways. Older files of `partita.streams` have no first line that says what
they are, and lines of {"key", "way", "us", "on"}; they are read, and written anew when something is
added.
"""

import contextlib
import json
import os
import re
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

KIND, VERSION = "profile-database", 2
LONGEST_LINE = 1 << 20
HEADER = {"format": f"partita/{KIND}@{VERSION}"}
UNVERSIONED = {"on", "key", "way", "us"}  # fields of a line of the oldest files of streams


@dataclass(frozen=True, slots=True)
class Environment:
    """What times depend on besides the call: measurements of another one do not count."""

    device: str  # "cpu: model, 4 threads" or the GPU's name
    torch: str
    training: bool
    kernels: str = ""  # what times of kernels depend on besides: "triton 3.6 cudnn 91002 tf32 True"

    def __str__(self) -> str:
        kernels = f", {self.kernels}" if self.kernels else ""
        mode = "training" if self.training else "inference"
        return f"{self.device}, torch {self.torch}{kernels}, {mode}"


Key = tuple[str, str, Environment]  # call, way, environment


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians of repeated runs of one call alone, their spread, and the bytes it needs."""

    call: str
    environment: Environment
    forward_s: float
    backward_s: float = 0.0  # 0 where there is none
    forward_spread_s: float = 0.0  # between the quartiles
    backward_spread_s: float = 0.0
    repeats: int = 1
    peak_bytes: int = 0  # allocated at the worst moment, inputs and parameters aside
    resident_bytes: int = 0  # kept for the backward, parameters aside
    parameter_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    way: str = ""  # how the call is run; empty: by PyTorch's operator
    runs: bool = True  # False: it does not fit into memory, or into the processors

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

    @property
    def key(self) -> Key:
        """What it is filed under."""
        return self.call, self.way, self.environment


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
    """Measurements by call, way and environment; `path` is where new ones are appended."""

    entries: Mapping[Key, Measurement] = field(default_factory=dict)
    path: str = ""

    def find(self, call: str, environment: Environment, way: str = "") -> Measurement | None:
        """The measurement of a call in this environment."""
        return self.entries.get((call, way, environment))

    def environments(self) -> tuple[Environment, ...]:
        """The environments something was measured in, sorted."""
        return tuple(sorted({environment for _, _, environment in self.entries}, key=str))

    def changed(self, wanted: Environment) -> str:
        """How what was measured before differs, in words; empty if nothing was, or as wanted."""
        of_kernels = bool(wanted.kernels)  # they are filed apart from ops
        known = [e for e in self.environments() if bool(e.kernels) == of_kernels]
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
    if _is_unversioned(lines[0]):
        return Database({each.key: each for each in _unversioned(lines)}, str(path))
    check_format(decode_json(lines[0], f"{path} line 1"), KIND, VERSION, file=str(path))
    entries = {}
    for number, line in enumerate(lines[1:], start=2):
        if line.strip():
            entry = _read_line(line, f"{path} line {number}")
            entries[entry.key] = entry
    return Database(entries, str(path))


def open_database(path: str | Path) -> Database:
    """The database at a path; an empty one if there is no file yet, or nothing in it."""
    there = Path(path).exists() and Path(path).stat().st_size > 0
    return read_database(path) if there else Database(path=str(path))


def _read_line(line: bytes, where: str) -> Measurement:
    value = decode_json(line, where)
    try:
        return convert(value, Measurement, where)
    except InputError as error:
        raise FileError(error.found, fix=error.fix, field=error.field, file=where) from None


def _is_unversioned(line: bytes) -> bool:
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        return isinstance(value, dict) and value.keys() >= UNVERSIONED
    return False


def _unversioned(lines: Iterable[bytes]) -> Iterator[Measurement]:
    """Times in microseconds, negative for what does not run; other lines were cut by a crash."""
    for line in filter(_is_unversioned, lines):
        value = json.loads(line)
        time_us, runs = float(value["us"]), float(value["us"]) >= 0
        yield Measurement(
            str(value["key"]), environment_in(str(value["on"])), time_us / 1e6 if runs else 0.0,
            way=str(value["way"]), runs=runs,
        )  # fmt: skip


def environment_in(words: str) -> Environment:
    """The environment that times of kernels were filed under in words: `H200 torch 2.11 triton`."""
    match = re.fullmatch(r"(?P<device>.*?) torch (?P<torch>\S+)(?: (?P<kernels>.+))?", words)
    if match is None:
        return Environment(words, "", False, "unknown")
    return Environment(match["device"], match["torch"], False, match["kernels"] or "none")


def append(path: str | Path, *entries: Measurement) -> None:
    """Add measurements to the file and wait until they are on disk."""
    target = Path(path)
    try:
        _renew(target)
        with target.open("ab+") as file, _alone(file):
            _drop_torn_line(file)
            start = b"" if file.tell() else _line(HEADER)
            file.write(start + b"".join(_line(asdict(entry)) for entry in entries))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise FileError(
            f"cannot be written ({error.strerror})", fix="choose another place", file=str(path)
        ) from None


def _renew(path: Path) -> None:
    """Write a file without a version anew, so that lines of now can be added."""
    if path.exists():
        with path.open("rb") as file:
            first = file.readline(LONGEST_LINE)
        if _is_unversioned(first):
            write_atomically(path, _text(read_database(path).entries.values()), overwrite=True)


@contextlib.contextmanager
def _alone(file: BinaryIO) -> Iterator[None]:
    """No other process adds to the file meanwhile, where the system can promise that."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
    yield


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
    entries: dict[Key, Measurement] = {}
    for path in paths:
        entries.update(read_database(path).entries)
    write_atomically(output, _text(entries.values()), overwrite=overwrite)
    return Database(entries, str(output))


def _text(entries: Iterable[Measurement]) -> bytes:
    """A whole file, sorted."""
    ordered = sorted(entries, key=lambda entry: (str(entry.environment), entry.call, entry.way))
    return b"".join([_line(HEADER), *(_line(asdict(entry)) for entry in ordered)])


def _line(value: Mapping[str, Any]) -> bytes:
    return encode_json(value, indent=0)
