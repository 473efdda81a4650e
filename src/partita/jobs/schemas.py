"""JSON Schemas of what partita writes: files by kind, and what `--json` prints.

Files whose reader is a typed record have the schema of that record, every field of it. What
commands print is described by hand: the fields that are always there, with their types; answers may
have more.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from partita.cluster import Cluster
from partita.cluster.calibration import Calibration
from partita.errors import InputError
from partita.graph.files import schema_record
from partita.plans import VERSION, Plan
from partita.suggest import suggest

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES = {
    "text": "string", "number": "number", "whole": "integer", "flag": "boolean", "list": "array",
    "object": "object", "null": "null",
}  # fmt: skip

# What each answer has at least; `or null` where there may be nothing to say.
ANSWERS: dict[str, dict[str, str]] = {
    "clusters": {"machines": "object"},
    "comparison": {"model": "text", "cluster": "text", "lower_bound_s": "number", "rows": "list"},
    "compared-curve": {"model": "text", "cluster": "text", "points": "list", "missing": "list"},
    "curve": {
        "model": "text", "cluster": "text", "points": "list", "missing": "list",
        "choice": "object or null",
    },
    "difference": {"first": "text", "second": "text", "figures": "list", "num_ops": "whole"},
    "doctor": {"partita": "text", "python": "text"},
    "emitted": {"plan": "text", "model": "text", "lines": "whole", "source": "text or null"},
    "error": {"error": "text", "field": "text or null", "file": "text or null"},
    "experiment": {"experiment": "text", "folder": "text", "runs": "whole", "missing": "whole"},
    "experiment-table": {"experiment": "text", "missing": "whole", "rows": "list"},
    "explanation": {"plan": "text"},
    "export": {
        "plan": "text", "target": "text", "strategy": "text", "step_s": "number",
        "plan_step_s": "number", "fits": "flag", "exact": "flag", "differences": "list",
        "text": "text or null",
    },
    "forecast": {
        "model": "text", "cluster": "text", "num_devices": "whole", "strategy": "object",
        "step_s": "number", "interval_s": "object", "mfu": "number", "fits": "flag",
        "memory_bytes": "list",
    },
    "kineto-comparison": {
        "file": "text", "num_steps": "whole", "predicted_step_s": "number",
        "measured_step_s": "number", "predicted": "object", "measured": "object",
    },
    "methods": {"kinds": "object"},
    "model": {"name": "text"},
    "models": {"models": "list"},
    "placement": {"semantics": "text", "batches": "whole", "in_flight": "whole", "plan": "object"},
    "program": {"lanes": "list", "memories": "list", "blocks": "list", "works": "list"},
    "result": {"problem": "text or null"},
    "run": {},
    "schema": {"kind": "text", "schema": "object"},
    "schemas": {"kinds": "list"},
    "serve": {"url": "text"},
    "simulation": {
        "model": "text", "cluster": "text", "batch": "whole", "step_s": "number", "mfu": "number",
        "fits": "flag", "peak_memory_bytes": "list", "ops": "list",
    },
    "timeline": {"program": "object", "start": "list", "end": "list"},
    "trace-comparison": {
        "model": "text", "ranks": "whole", "predicted_step_s": "number",
        "measured_step_s": "number", "causes": "list", "rows": "list", "tasks": "list",
    },
    "validation": {},
    "verification": {"file": "text", "verified": "flag", "violations": "list"},
}  # fmt: skip


def schema_of(kind: str) -> Schema:
    """The JSON Schema of `partita/KIND`."""
    if kind in FILES:
        version, make = FILES[kind]
        return _with_format(make(), kind, version)
    if kind in ANSWERS:
        return _answer(kind)
    raise InputError(f"there is no schema of {kind!r}", fix=suggest(kind, kinds()), field="KIND")


def kinds() -> tuple[str, ...]:
    """All kinds that have a schema, files first."""
    return (*FILES, *ANSWERS)


def _record(record: type) -> Callable[[], Schema]:
    return lambda: msgspec.json.schema(record)


def _plan() -> Schema:
    schema = msgspec.json.schema(Plan)
    del schema["$defs"]["Plan"]["properties"]["folder"]  # where a file is stands in no file
    return schema


FILES: dict[str, tuple[int, Callable[[], Schema]]] = {
    "plan": (VERSION, _plan),
    "graph": (1, _record(schema_record())),
    "cluster": (1, _record(Cluster)),
    "calibration": (1, _record(Calibration)),
}


def _with_format(schema: Schema, kind: str, version: int) -> Schema:
    """A record's schema, with the format that its file begins with."""
    name = schema["$ref"].rpartition("/")[2]
    top = dict(schema["$defs"][name])
    form = {"type": "string", "pattern": f"^partita/{kind}@[1-{version}]$"}
    top["properties"] = {"format": form, **top["properties"]}
    top["required"] = ["format", *(f for f in top.get("required", ()) if f != "format")]
    others = {key: value for key, value in schema["$defs"].items() if key != name}
    return {"$schema": DIALECT, **top, "title": f"partita/{kind}", "$defs": others}


def _answer(kind: str) -> Schema:
    fields: Schema = {"format": {"type": "string", "pattern": f"^partita/{kind}@[0-9]+$"}}
    for name, words in ANSWERS[kind].items():
        types = [TYPES[word] for word in words.split(" or ")]
        fields[name] = {"type": types[0] if len(types) == 1 else types}
    return {
        "$schema": DIALECT, "title": f"partita/{kind}", "type": "object", "properties": fields,
        "required": list(fields),
    }  # fmt: skip
