"""The profile database: what was measured, in a file of JSON lines, for one GPU and its software.

A line is {"key": ..., "way": ..., "us": ..., "on": ...}; `on` names the GPU and the versions, and
only lines of the present ones count. Without a path nothing is kept. Saving writes a new file and
puts it in the place of the old one, together with what other processes have added meanwhile.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from partita.gpu.streams.ways import Way


def here() -> str:
    """The GPU and the versions that times depend on."""
    import torch

    if not torch.cuda.is_available():
        return f"cpu torch {torch.__version__}"
    name = torch.cuda.get_device_name()
    cudnn = torch.backends.cudnn.version()
    tf32 = torch.backends.cudnn.allow_tf32
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    return f"{name} torch {torch.__version__} triton {version} cudnn {cudnn} tf32 {tf32}"


class Profile:
    """Times in microseconds by structure and way; negative: it does not run."""

    def __init__(self, path: str | Path | None = None, on: str | None = None) -> None:
        self.path = Path(path) if path else None
        self.on = here() if on is None else on
        self.times: dict[tuple[str, str], float] = {}
        if self.path is not None:
            for line in _lines(self.path):
                if line["on"] == self.on:
                    self.times[line["key"], line["way"]] = line["us"]

    def get(self, key: str, way: Way) -> float | None:
        """The time, if known."""
        return self.times.get((key, str(way)))

    def put(self, key: str, way: Way, time_us: float) -> None:
        """Remember a time."""
        self.times[key, str(way)] = time_us

    def save(self) -> None:
        """Write all that is known, atomically."""
        if self.path is None:
            return
        rows = {(line["on"], line["key"], line["way"]): line["us"] for line in _lines(self.path)}
        rows |= {(self.on, key, way): time for (key, way), time in self.times.items()}
        text = "".join(
            json.dumps({"on": on, "key": key, "way": way, "us": round(time, 4)}) + "\n"
            for (on, key, way), time in sorted(rows.items())
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, self.path)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines that can be read; a line cut short by a crash is not one."""
    found = []
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(line, dict) and {"on", "key", "way", "us"} <= line.keys():
                found.append(line)
    return found
