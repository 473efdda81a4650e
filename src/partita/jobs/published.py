"""Rows of published measurements: what was run, on what, how, and what it took.

A row file is `partita/measured-runs@1`: model, hardware, parallelism, batch, options, measured. A
row that lacks something, or says something that no strategy here can express, is skipped with the
reason; a malformed one is, too. What a source does not print is filled in by what its training
code does, never by row: `published_sizes.py`, `published_strategy.py`.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.errors import FileError, PartitaError
from partita.forecast import Machine, Strategy, Transformer, check_strategy
from partita.jobs.published_sizes import NotModelledError, machine_of_row, model_of, positive, shown
from partita.jobs.published_strategy import strategy_of, table_of

FORMAT = "partita/measured-runs@1"
MOST_BYTES = 200_000_000  # of a row file
NO_GROUP = "(no group)"


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One measured run that can be forecast."""

    id: str
    group: str
    model: Transformer
    machine: Machine
    strategy: Strategy
    measured_s: float | None
    memory_bytes: float | None = None  # of the fullest rank
    with_workspace: bool = False  # is what drivers and libraries keep a part of that?
    out_of_memory: bool = False
    layer_only: bool = False  # one layer was timed, not a step
    framework: str = "megatron"
    assumed: tuple[str, ...] = ()  # what bears on memory and was not printed


@dataclass(frozen=True, slots=True)
class Skipped:
    """One that cannot, and why."""

    id: str
    group: str
    reason: str


def left_out(row: PublishedRun) -> bool:
    """Is the row kept from the fit of the parameter sets? A third is, by its id."""
    return zlib.crc32(row.id.encode()) % 3 == 0


def read_rows(path: Path | str) -> tuple[tuple[PublishedRun, ...], tuple[Skipped, ...]]:
    """The rows of a file."""
    file = str(path)
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise FileError("is too large for a row file", fix="give fewer rows", file=file)
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        fix = f"give a row file ({FORMAT})"
        raise FileError(f"cannot be read ({error.strerror})", fix=fix, file=file) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"is not JSON ({error})", fix="give a row file", file=file) from None
    rows = document.get("rows") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise FileError("has no list of rows", fix=f"give a file of {FORMAT}", file=file)
    return parse_rows(rows)


def parse_rows(rows: Iterable[Any]) -> tuple[tuple[PublishedRun, ...], tuple[Skipped, ...]]:
    """Rows as records; what cannot be forecast beside them with its reason."""
    kept: list[PublishedRun] = []
    skipped: list[Skipped] = []
    rows = list(rows)
    chunks = _stated_chunks(rows)
    for index, raw in enumerate(rows):
        if not isinstance(raw, dict):
            skipped.append(Skipped(f"row {index}", NO_GROUP, "is not a table"))
            continue
        name, group = shown(raw.get("id") or f"row {index}"), shown(raw.get("group") or NO_GROUP)
        try:
            kept.append(_row(raw, name, group, chunks))
        except (NotModelledError, PartitaError) as error:
            skipped.append(Skipped(name, group, str(error)))
        except RecursionError:
            skipped.append(Skipped(name, group, "is nested too deeply"))
    return tuple(kept), tuple(skipped)


def _row(raw: dict[str, Any], name: str, group: str, chunks: dict[str, int]) -> PublishedRun:
    stated = raw.get("options")
    options: dict[str, Any] = stated if isinstance(stated, dict) else {}
    model = model_of(table_of(raw, "model"))
    machine = machine_of_row(table_of(raw, "hardware"))
    measured = table_of(raw, "measured")
    inferred = strategy_of(raw, options, model, machine, chunks.get(_same_pipeline(raw), 1))
    strategy = inferred.strategy
    check_strategy(model, strategy, machine.num_devices)
    seconds = _seconds(measured, model, strategy, machine)
    memory, with_workspace = _memory(measured)
    oom = bool(measured.get("oom")) or str(measured.get("status", "")).lower() == "oom"
    if seconds is None and memory is None and not oom:
        raise NotModelledError("has no time and no memory that is compared")
    return PublishedRun(
        name, group, model, machine, strategy, seconds, memory, with_workspace, oom,
        bool(measured.get("layer_total_ms")), inferred.framework, inferred.assumed,
    )  # fmt: skip


def _same_pipeline(raw: dict[str, Any]) -> str:
    model, degrees = table_of(raw, "model"), table_of(raw, "parallelism")
    sizes = tuple(model.get(key) for key in ("layers", "hidden", "seq_len"))
    return repr((raw.get("group"), *sizes, degrees.get("tp"), degrees.get("pp")))


def _stated_chunks(rows: list[Any]) -> dict[str, int]:
    """Interleaving that a source states for one run of a pipeline and leaves out for another."""
    chunks: dict[str, int] = {}
    for raw in rows:
        try:
            stated = raw["parallelism"].get("vpp")
            if isinstance(stated, int) and stated > 1 and "schedule" not in raw["parallelism"]:
                chunks[_same_pipeline(raw)] = stated
        except (KeyError, TypeError, AttributeError, NotModelledError):
            continue  # the row itself is skipped with its reason
    return chunks


def _seconds(
    measured: dict[str, Any], model: Transformer, s: Strategy, machine: Machine
) -> float | None:
    for key in ("iter_time_s", "iter_time_s_derived"):
        if measured.get(key):
            return positive(measured, key)
    for key in ("layer_total_ms", "iter_time_ms"):
        if measured.get(key):
            return positive(measured, key) / 1e3
    for key, each, devices in (
        ("tokens_per_s_per_gpu", model.seq, machine.num_devices),
        ("tokens_per_s", model.seq, 1),
        ("samples_per_s_per_gpu", 1, machine.num_devices),
        ("samples_per_s", 1, 1),
    ):
        if measured.get(key):
            return s.batch * each / positive(measured, key) / devices
    return None


def _memory(measured: dict[str, Any]) -> tuple[float | None, bool]:
    """Bytes of the fullest rank; frameworks report what they allocated, devices all of it."""
    for key, unit in (("mem_alloc_gib", 2.0**30), ("mem_gb", 1e9), ("peak_memory_bytes", 1.0)):
        if measured.get(key):
            return positive(measured, key) * unit, key == "peak_memory_bytes"
    return None, False
