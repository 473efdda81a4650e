"""What the page offers to choose from: models, machines, schedules, with what each hangs on."""

from collections.abc import Collection
from typing import Any

from partita.cluster import list_kinds, list_presets
from partita.forecast.inputs import RECOMPUTE
from partita.forecast.inputs import SCHEDULES as PIPELINES
from partita.forecast.models import KNOWN, STACKS
from partita.schedules.named import NAMED
from partita.schedules.shapes import SHAPES
from partita.zoo.catalogue import MODELS


def choices(files_allowed: Collection[str] = ()) -> dict[str, Any]:
    """The choices; files are those named when the page was started."""
    clusters = [name for name in files_allowed if name.lower().endswith(".toml")]
    return {
        "models": [
            {
                "name": model.name,
                "about": model.summary,
                "batch": model.batch,
                "size": model.option,
                "default": model.default,
                "by_name": model.builder in STACKS,
                "by_ops": True,
            }
            for model in MODELS.values()
        ]
        + [_plain(name, by_name=True, by_ops=False) for name in sorted(set(KNOWN) - set(MODELS))]
        + [
            _plain(name, by_name=name.endswith(".json"), by_ops=True)
            for name in files_allowed
            if name not in clusters
        ],
        "kinds": [
            {"name": kind.name, "memory_gib": kind.memory_bytes / 2**30} for kind in list_kinds()
        ],
        "machines": [*clusters, *sorted(list_presets())],
        "shapes": [{"name": name, "about": shape.about, "chunked": shape.chunked}
                   for name, shape in SHAPES.items()],
        "orders": [{"name": name, "about": named.title, "chunked": named.layout != "line"}
                   for name, named in NAMED.items() if named.layout != "two-way"],
        "pipelines": list(PIPELINES),
        "recompute": list(RECOMPUTE),
    }  # fmt: skip


def _plain(name: str, *, by_name: bool, by_ops: bool) -> dict[str, Any]:
    """A model of which no more is known."""
    return {"name": name, "about": "", "batch": 32, "size": "seq", "default": None,
            "by_name": by_name, "by_ops": by_ops}  # fmt: skip
