"""All figures of running plans that need cores of their own, in one go.

    taskset -c 0-9 python benchmarks/run_free_cores.py --out results --seconds 540
    python benchmarks/run_free_cores.py --out results --ranks 2 --small      # tries the script

Parts are scripts of their own, each with cores of its own (one for a rank, and one more), a limit
of time, and a process group that is ended with it: what fails or hangs ends nothing else. Small
parts run beside each other first, on as many cores as there are ranks, then those that need all.
Where two cores turn out to be threads of one, every second is taken. By the clock, one thread a
rank:

* prediction: 1F1B, ZB-H1, a searched order, ZeRO 3 and a tensor-parallel plan, twice, predicted by
  a calibration from 1F1B and from an earlier run of the same plan; speed-ups over one process
  (`run_prediction.py`)
* shapes: an M shape, its searched order against 1F1B (`run_shapes.py`)
* torch: the same stages in torch.distributed.pipelining, and FSDP2 (`run_against_torch.py`);
  torch's interleaved schedule last and by itself
* random: random plans on as many gloo ranks, their numbers (`run_random.py`)
* gpu: where there is one, plans on it (`tests/run/distributed/distributed_gpu.py`)

The folder gets `results.json`, `log.txt` with all that the parts printed, and `traces.tar.gz`: the
plans of the predictions and their traces, so that what is off can be looked into anywhere.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LEFT_S = 15.0  # a part with less than this is not begun
PACE_S = 0.5
SHARED = 1.2  # times as long as alone: two cores are one


@dataclass(frozen=True)
class Part:
    """A script with its words, and what it may take."""

    name: str
    words: tuple[str, ...]
    ranks: int
    limit_s: float
    spare: int = 1  # cores besides one for each rank

    @property
    def num_cores(self) -> int:
        """Of its own."""
        return self.ranks + self.spare


@dataclass
class Running:
    """A part that was begun."""

    part: Part
    cores: list[int]
    process: subprocess.Popen[bytes]
    output: Path
    began: float = field(default_factory=time.monotonic)


def sizes(ranks: int, small: bool) -> tuple[str, ...]:
    """How large the model of the predictions is: layers enough for the ranks."""
    batch, count = (2 * ranks, ranks) if small else (4 * ranks, 2 * ranks)
    words = ("--ranks", ranks, "--layers", 2 * ranks, "--batch", batch)
    return tuple(map(str, (*words, "--microbatches", count)))


def phases(ranks: int, small: bool, folder: Path) -> list[list[Part]]:
    """What runs beside each other, and then what needs most cores, each in order of interest."""
    steps, rounds, moments = ("3", "2", "5") if small else ("6", "9", "20")
    predicted = [
        ("run_prediction.py", "--steps", steps, "--json", "--order", str(folder / f"{name}.json"),
         "--keep", str(folder / "traces" / name))
        for name in ("half", "all")
    ]  # fmt: skip
    half, width = max(2, ranks // 2), ("--width", "64" if small else "256")
    torch = ("run_against_torch.py", "--rounds", rounds, *width)
    plain = ("--schedules", "1f1b")
    shapes = ("run_shapes.py", "--json", "--steps", moments, "--search", "15")
    wide = () if small else ("--width", "384")
    two = ("--ranks", "2", "--layers", "6", "--batch", "16")
    four = ("--ranks", "4", "--layers", "8", "--batch", "32", "--microbatches", "8")
    most = ("--ranks", ranks, "--layers", 2 * ranks, "--batch", 8 * ranks, "--microbatches", ranks)
    own, others = sizes(ranks, small), sizes(half, small)
    beside = [
        Part("prediction, half the ranks", (*predicted[0], *others), half, 160, 0),
        Part("shapes, 2 ranks", (*shapes, *two, *wide, "--microbatches", "4"), 2, 110, 0),
        Part("torch, 2 ranks", (*torch, *plain), 2, 110, 0),
        Part("gpu", ("../tests/run/distributed/distributed_gpu.py",), 1, 130, 0),
        Part("torch, ZBV, 2 ranks", (*torch, *_alone("zb-v")), 2, 60, 0),
        Part("torch, interleaved, 2 ranks", (*torch, *_alone("interleaved")), 2, 60, 0),
        Part("shapes of short blocks", (*shapes, *two, "--microbatches", "8"), 2, 80, 0),
        Part("shapes, 4 ranks", (*shapes, *four), 4, 100, 0),
    ]  # fmt: skip
    alone = [
        Part("torch", (*torch, *own, *plain, "--no-overhead"), ranks, 80),
        Part("prediction", (*predicted[1], *own, "--repeat", "2"), ranks, 240),
        Part("shapes", (*shapes, *map(str, most), "--shared", "0.15"), ranks, 80),
        Part("torch, ZBV", (*torch, *own, *_alone("zb-v")), ranks, 45),
        Part("torch, interleaved", (*torch, *own, *_alone("interleaved")), ranks, 45),
        Part("random", random_words(ranks, small), ranks, 70),
    ]
    return [[part for part in phase if part.ranks <= ranks] for phase in (beside, alone)]


def _alone(schedule: str) -> tuple[str, ...]:
    return ("--schedules", schedule, "--no-fsdp", "--no-overhead")


def random_words(ranks: int, small: bool) -> tuple[str, ...]:
    """Random plans on as many ranks, one start of them after the other."""
    plans = "2" if small else "36"
    fixed = ("--local", "0", "--kills", "0", "--workers", "1", "--seed", "1119")
    return ("run_random.py", "--plans", plans, "--ranks", str(ranks), *fixed)


def begin(part: Part, cores: list[int], folder: Path, limit_s: float) -> Running:
    """Start a part on its cores, in a process group of its own."""
    output = folder / f"{re.sub('[^a-z0-9]+', '-', part.name)}.txt"
    script, *words = part.words
    if script == "run_random.py":  # which stops by itself
        words += ["--seconds", str(limit_s - 10)]
    hidden = {"PARTITA_TRACEBACK": "1"} if part.name == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", str((HERE / script).resolve()), *words],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **hidden},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
    return Running(part, cores, process, output)


def has_ended(running: Running, deadline: float) -> dict[str, Any] | None:
    """What a part said, if it has ended or its time is over; then nothing of it is left."""
    code, took = running.process.poll(), time.monotonic() - running.began
    timed_out = code is None and (took > running.part.limit_s or running.began + took > deadline)
    if code is None and not timed_out:
        return None
    end_all(running.process.pid)
    text = running.output.read_text(errors="replace")
    return {
        "name": running.part.name, "words": list(running.part.words), "cores": running.cores,
        "seconds": round(took, 1), "timed_out": timed_out, "exit_code": running.process.wait(),
        "rows": rows_in(text), "text": text,
    }  # fmt: skip


def end_all(leader: int) -> None:
    """End a part and all that it started, ranks of torchrun in sessions of their own too."""
    parents = _parents()
    below = [leader]
    for pid in below:
        below += [child for child, parent in parents.items() if parent == pid]
    for each in below:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(each, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """The parent of every process."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            stat = (place / "stat").read_text()
            parents[int(place.name)] = int(stat.rpartition(")")[2].split()[1])
    return parents


def rows_in(text: str) -> list[Any]:
    """The JSON that a part printed: lines of it, or one object over many lines."""
    lines = text.splitlines()
    rows = [json.loads(each) for each in lines if each.startswith('{"') and each.endswith("}")]
    whole = re.search(r"^\{\n.*?^\}$", text, re.MULTILINE | re.DOTALL)
    return [*rows, json.loads(whole.group())] if whole else rows


def machine() -> dict[str, Any]:
    """What the figures hang on."""
    import torch

    def said(*words: str) -> str:
        try:
            return subprocess.run(words, capture_output=True, text=True, check=False).stdout
        except OSError:
            return ""

    return {
        "cores": os.cpu_count(), "allowed": sorted(os.sched_getaffinity(0)),
        "load": os.getloadavg(), "python": platform.python_version(), "torch": torch.__version__,
        "lscpu": said("lscpu"), "cpus": said("lscpu", "-e"),
    }  # fmt: skip


def write(out: Path, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """All that is known so far, so that whoever stops this script has it."""
    plain = [{k: v for k, v in each.items() if k != "text"} for each in results]
    beside = out / "results.json.part"
    beside.write_text(json.dumps({"machine": about, "parts": plain}, indent=1))
    beside.replace(out / "results.json")
    (out / "log.txt").write_text(
        "\n".join(
            f"==== {each['name']}: {each['seconds']} s, exit code {each['exit_code']}"
            f"{', its time was over' if each['timed_out'] else ''}\n{each['text']}"
            for each in results
        )
    )


def run_phase(
    parts: list[Part], cores: list[int], folder: Path, deadline: float
) -> Iterator[dict[str, Any]]:
    """Parts in their order, each as soon as there are cores for it; what each said as it ends."""
    waiting, running, free = list(parts), list[Running](), list(cores)
    while waiting or running:
        left = deadline - time.monotonic()
        for part in [each for each in waiting if left < LEFT_S]:
            print(f"{part.name}: no time is left", flush=True)
            waiting.remove(part)
        for part in list(waiting):
            if len(free) >= part.num_cores or not running:
                own, free = free[: part.num_cores], free[part.num_cores :]
                running.append(begin(part, own, folder, min(part.limit_s, left)))
                waiting.remove(part)
        time.sleep(0.1)
        for each in list(running):
            result = has_ended(each, deadline)
            if result is not None:
                running.remove(each)
                free = [core for core in cores if core in {*free, *each.cores}]
                told = {k: result[k] for k in ("name", "seconds", "timed_out", "exit_code")}
                print(told, result["text"][-1500:], flush=True)
                yield result


def pace(core: int, beside: int | None) -> float:
    """Products of small matrices in a second on a core, while another one is as busy."""
    import numpy as np

    def work(own: int, counts: Any) -> None:
        os.sched_setaffinity(0, [own])
        x, count, end = np.ones((96, 96), np.float32), 0, time.monotonic() + PACE_S
        while time.monotonic() < end:
            x = x @ x * np.float32(1 / 96)
            count += 1
        counts.put((own, count))

    context = multiprocessing.get_context("fork")
    counts = context.Queue()
    busy = [core] if beside is None else [core, beside]
    ranks = [context.Process(target=work, args=(own, counts)) for own in busy]
    for rank in ranks:
        rank.start()
    done = dict(counts.get() for _ in ranks)
    for rank in ranks:
        rank.join()
    return float(done[core]) / PACE_S


def apart(cores: list[int]) -> tuple[list[int], dict[str, float]]:
    """Cores in an order in which those that share one (two threads) are not neighbours.

    A virtual machine may not know which of its cores do: so two are kept busy at once.
    """
    if len(cores) < 4:
        return cores, {}
    alone = pace(cores[0], None)
    steps = {"neighbour": 1, "half": len(cores) // 2}
    slower = {name: alone / pace(cores[0], cores[step]) for name, step in steps.items()}
    order = [*cores[::2], *cores[1::2]] if slower["neighbour"] > SHARED else cores
    return order, slower


def main() -> None:
    """Run the waves, keep what they say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder, made if it is not there")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540, help="of all parts together")
    parser.add_argument("--only", help="names of parts, with ; between them")
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the script")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    if options.small:
        os.environ["RUN_PREDICTION_WIDTH"] = "64"
    cores, slower = apart(sorted(os.sched_getaffinity(0)))
    about = {**machine(), "order": cores, "slower_beside": slower}
    print(about["lscpu"], about["order"], slower, flush=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "traces").mkdir()
        for parts in phases(options.ranks, options.small, folder):
            wanted = [p for p in parts if options.only is None or p.name in options.only.split(";")]
            wanted = [p for p in wanted if p.name != "gpu" or _has_gpu()]
            own = cores[: max(options.ranks, 2)] if parts[0].spare == 0 else cores
            for result in run_phase(wanted, own, folder, deadline):
                results.append(result)
                write(options.out, about, results)
                with tarfile.open(options.out / "traces.tar.gz", "w:gz") as archive:
                    archive.add(folder / "traces", "traces")


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    main()
