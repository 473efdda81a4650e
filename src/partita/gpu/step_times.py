"""Times of steps by the ways they can run, kept in the profile database (`costs/measured.py`).

A step's structure is the call, and the environment has the versions that times of kernels depend
on. Only times of the present environment count. Without a path nothing is kept; with one, what is
new is appended when it is saved, so that several processes may share a file.
"""

from pathlib import Path

import torch

from partita.costs.measured import Environment, Measurement, append, open_database
from partita.gpu.streams.ways import Way

NONE = "none"  # no kernels of ours, no version of theirs


def here() -> Environment:
    """The GPU and the versions that times of kernels depend on."""
    version = str(torch.__version__)
    if not torch.cuda.is_available():
        return Environment("cpu", version, False, NONE)
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = NONE
    cudnn, tf32 = torch.backends.cudnn.version(), torch.backends.cudnn.allow_tf32
    kernels = f"triton {triton_version} cudnn {cudnn} tf32 {tf32}"
    return Environment(torch.cuda.get_device_name(), version, False, kernels)


def in_words(environment: Environment) -> str:
    """As schedules name it: `NVIDIA H200 torch 2.11.0 triton 3.6.0 cudnn 91002 tf32 True`."""
    kernels = "" if environment.kernels == NONE else f" {environment.kernels}"
    return f"{environment.device} torch {environment.torch}{kernels}"


class StepTimes:
    """Times in microseconds by structure and way; negative: it does not run."""

    def __init__(self, path: str | Path | None = None, on: Environment | None = None) -> None:
        self.path = Path(path) if path else None
        self.on = here() if on is None else on
        self.times: dict[tuple[str, str], float] = {}
        self._new: dict[tuple[str, str], None] = {}
        if self.path is not None:
            for entry in open_database(self.path).entries.values():
                if entry.environment == self.on:
                    time_us = round(1e6 * entry.forward_s, 4) if entry.runs else -1.0
                    self.times[entry.call, entry.way] = time_us

    def get(self, key: str, way: Way) -> float | None:
        """The time, if known."""
        return self.times.get((key, str(way)))

    def put(self, key: str, way: Way, time_us: float) -> None:
        """Remember a time."""
        self.times[key, str(way)] = time_us
        self._new[key, str(way)] = None

    def save(self) -> None:
        """Append what is new to the file, which is there afterwards even if nothing is."""
        if self.path is None or (not self._new and self.path.exists()):
            return
        entries = []
        for key, way in self._new:
            time_us = self.times[key, way]
            runs = time_us >= 0
            seconds = round(time_us, 4) / 1e6 if runs else 0.0
            entries.append(Measurement(key, self.on, seconds, way=way, runs=runs))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append(self.path, *entries)
        self._new.clear()
