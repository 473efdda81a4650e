"""What the measuring scripts share: clocks, a results file that is always whole, the GPU's state.

Times of the GPU come from CUDA events; on a machine without one (to try the scripts) from the
host's clock. A results file is written anew after every case under another name and then renamed,
so that whatever stops a run leaves a file that can be read.
"""

import contextlib
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], object]
GRAPH_S = 4e-3  # of work in one CUDA graph
LEAST_TIMED_S = 0.03
SMI_FIELDS = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"


def write_json(path: Path, value: object) -> None:
    """Write a file at once or not at all."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(value, indent=1))
    os.replace(beside, path)


def free_memory(thoroughly: bool = False) -> None:
    """Give back what no tensor holds; thoroughly: also what only cycles hold (0.1 s)."""
    if thoroughly:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class OutOfTimeError(Exception):
    """The seconds that were allowed are used up."""


class Results:
    """Records of a run, on disk after each of them; stops the run when its time is used up."""

    def __init__(self, path: Path, seconds: float, about: dict[str, Any]) -> None:
        self.path = path
        self.began = time.perf_counter()
        self.seconds = seconds
        self.value: dict[str, Any] = {**about, "records": [], "skipped": [], "finished": False}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.flush()

    @property
    def elapsed_s(self) -> float:
        """Since the beginning of the run."""
        return time.perf_counter() - self.began

    @property
    def left_s(self) -> float:
        """Until the run must end."""
        return self.seconds - self.elapsed_s

    def flush(self) -> None:
        """Write everything so far."""
        write_json(self.path, {**self.value, "elapsed_s": round(self.elapsed_s, 2)})

    def add(self, record: dict[str, Any]) -> None:
        """One more record, a line of progress, and the file."""
        record["at_s"] = round(self.elapsed_s, 2)
        self.value["records"].append(record)
        self.flush()

    def skip(self, what: str, why: str) -> None:
        """Say what was left out."""
        self.value["skipped"].append({"what": what, "why": why})
        self.flush()

    def finish(self) -> None:
        """The run came to its end by itself."""
        self.value["finished"] = True
        self.flush()

    def case(self, kind: str, measure: Callable[[], dict[str, Any]], **about: Any) -> None:
        """Measure one case; what goes wrong is its result. Raises when the time is used up."""
        if self.left_s <= 0:
            raise OutOfTimeError
        record: dict[str, Any] = {"kind": kind, **about}
        try:
            record.update(measure())
        except Exception as error:  # whatever it is, the other cases still count
            record["error"] = f"{type(error).__name__}: {error}"[:500]
            record["where"] = traceback.format_exc(limit=-3)[-800:]
            free_memory(thoroughly=True)
        self.add(record)
        print(f"{self.elapsed_s:7.1f} {shown(record)}", flush=True)


def shown(record: dict[str, Any]) -> str:
    """A record as one line."""
    parts = []
    for name, value in record.items():
        if name in ("at_s", "where") or isinstance(value, dict):
            continue
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        parts.append(text if name == "kind" else f"{name}={text}")
    return " ".join(parts)[:230]


class Clock:
    """Times calls on one device: in short bursts, sustained, and the host's part alone."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.quick = quick
        if quick:
            torch.set_num_threads(1)  # tiny sizes: threads would only wait for each other

    def sync(self) -> None:
        """Wait until the device has nothing to do."""
        if self.cuda:
            torch.cuda.synchronize()

    def span(self, run: Run, times: int) -> float:
        """Seconds of `times` calls back to back, on the device's clock."""
        if not self.cuda:
            began = time.perf_counter()
            for _ in range(times):
                run()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def warm(self, run: Run, least: int = 3) -> float:
        """Run a few times; the shortest time of one call (with the host's part, if longer)."""
        self.sync()
        shortest = math.inf
        for _ in range(1 if self.quick else least):
            shortest = min(shortest, self.span(run, 1))
        self.sync()
        return max(shortest, 1e-7)

    def burst(self, run: Run, graph: bool = True) -> dict[str, Any]:
        """Seconds of one call on the device in a short burst: a CUDA graph of it, replayed.

        Without a graph calls follow each other: for what waits for the device in its middle.
        """
        once = self.warm(run)
        if self.quick or not self.cuda:
            return {"seconds": self.span(run, 1), "how": "host"}
        if once > GRAPH_S:
            return {"seconds": statistics.median(self.span(run, 2) / 2 for _ in range(3)),
                    "how": "events"}  # fmt: skip
        captured, inside = self._captured(run, once) if graph else (None, 0)
        if captured is None:
            times = max(3, min(200, int(LEAST_TIMED_S / once)))
            return {"seconds": statistics.median(self.span(run, times) / times for _ in range(3)),
                    "how": "events, the graph failed" if graph else "events"}  # fmt: skip
        self.span(captured.replay, 1)
        per_graph = self.span(captured.replay, 1)
        replays = max(1, min(8, int(LEAST_TIMED_S / 3 / max(per_graph, 1e-6))))
        spans = [self.span(captured.replay, replays) / replays / inside for _ in range(3)]
        return {"seconds": statistics.median(spans), "how": f"graph of {inside}"}

    def _captured(self, run: Run, once: float) -> tuple[Any, int]:
        """A CUDA graph that holds several calls, or none where it cannot be captured."""
        inside = max(2, min(50, int(GRAPH_S / once)))
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            self.sync()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(inside):
                    run()
        except Exception:
            self.sync()
            return None, inside
        return graph, inside

    def sustained(self, run: Run, seconds: float = 1.0) -> dict[str, Any]:
        """Seconds of one call when calls follow each other for so long that clocks settle.

        The first third is not counted. Calls are queued a quarter of a second ahead.
        """
        if self.quick or not self.cuda:
            return {"sustained_s": self.span(run, 2) / 2, "ran_s": 0.0}
        once = max(self.warm(run, 2), 2e-6)
        chunk = max(1, int(0.08 / once))
        marks, counts = [torch.cuda.Event(enable_timing=True)], [0]
        marks[0].record()
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(chunk):
                run()
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            counts.append(counts[-1] + chunk)
            if len(marks) > 3:
                marks[-3].synchronize()
        self.sync()
        total_s = marks[0].elapsed_time(marks[-1]) / 1e3
        first = min(range(len(marks) - 1), key=lambda i: abs(i - len(marks) / 3))
        late_s = marks[first].elapsed_time(marks[-1]) / 1e3
        return {
            "sustained_s": late_s / (counts[-1] - counts[first]),
            "ran_s": round(total_s, 3),
            "calls": counts[-1],
            "ended_unix_s": round(time.time(), 2),  # to find it in the log of the GPU's state
        }

    def host(self, run: Run, per: int = 1, tries: int = 7) -> float:
        """Seconds until a call returns while the device's queue is empty, over `per`."""
        for _ in range(1 if self.quick else 2):
            run()
        self.sync()
        times = []
        for _ in range(2 if self.quick else tries):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) / per)
            self.sync()
        return statistics.median(times)

    def wall(self, run: Run, tries: int = 7) -> float:
        """Seconds of a call and of waiting for the device."""
        for _ in range(1 if self.quick else 2):
            run()
        self.sync()
        times = []
        for _ in range(2 if self.quick else tries):
            began = time.perf_counter()
            run()
            self.sync()
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def gpu_state() -> dict[str, float | str]:
    """Clocks, power and temperature as nvidia-smi reads them now; nothing where there is none."""
    if not shutil.which("nvidia-smi"):
        return {}
    asked = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        out = subprocess.run(asked, capture_output=True, text=True, timeout=5).stdout.strip()
        return state_from(out.splitlines()[0]) if out else {}
    return {}


def state_from(line: str) -> dict[str, float | str]:
    """One line of nvidia-smi's table, by field."""
    names = [field.strip() for field in SMI_FIELDS.split(",")]
    state: dict[str, float | str] = {}
    for name, text in zip(names, (part.strip() for part in line.split(",")), strict=False):
        try:
            state[name] = float(text)
        except ValueError:
            state[name] = text
    return state


class StateLog:
    """nvidia-smi beside a whole run, a line every half second; its own process, ended here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: subprocess.Popen[bytes] | None = None
        self.began_at = time.time()

    def __enter__(self) -> "StateLog":
        if shutil.which("nvidia-smi"):
            asked = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
            with contextlib.suppress(OSError), self.path.open("wb") as out:
                self.process = subprocess.Popen(
                    [*asked, "-lms", "500"], stdout=out, stderr=subprocess.DEVNULL
                )
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3)


def machine() -> dict[str, Any]:
    """The GPU and the versions of everything that times depend on."""
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        about["gpu"] = properties.name
        about["memory_bytes"] = properties.total_memory
        about["multiprocessors"] = properties.multi_processor_count
        about["cache_bytes"] = getattr(properties, "L2_cache_size", None)
        about["cudnn"] = torch.backends.cudnn.version()
        about["state"] = gpu_state()
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm",
                     "--format=csv,noheader"]  # fmt: skip
            out = subprocess.run(asked, capture_output=True, text=True, timeout=5).stdout
            about["driver"] = out.strip()
    return about


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


def each(names: Iterable[str], chosen: str) -> list[str]:
    """Those of the names that were asked for; all where nothing was."""
    wanted = [name for name in chosen.split(",") if name]
    return [name for name in names if not wanted or name in wanted]
