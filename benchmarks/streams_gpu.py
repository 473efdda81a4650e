"""Models on one GPU: partita.streams against the sequential CUDA graph and torch.compile.

    python benchmarks/streams_gpu.py                              # the whole table, under 8 minutes
    python benchmarks/streams_gpu.py --rows inception_v3:f16:1,resnext50:f32:16
    python benchmarks/streams_gpu.py --alone inception_v3:f16:1   # one call, from empty caches

Every row has a process of its own. First all rows are exported and compiled, several side by side:
nothing is timed then. Then they have their turns, one after the other, and nothing else runs:
cuDNN picks its kernels (`cudnn.benchmark`), ours are measured, graphs are captured. A row that has
not been compiled in time is stopped until the others are done; one that dies is said.

All candidates of a row are timed in one process in turns: whole calls, back to back, CUDA events,
medians. A call of torch.compile's takes the host longer than the GPU (it looks whether all is as it
was compiled for); column `(gpu)` has the GPU's part alone, calls queued behind a long kernel. The
models are the zoo's reference modules with random weights, norms set from a batch of random
images; inputs have channels last; TF32 is as PyTorch has it by default (on for convolutions), for
all alike. Column `ours` is the best of our own graphs, `kept` what partita.streams returned.
"""

import argparse
import contextlib
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

MODELS = ("nasnet_large", "randwire", "inception_v3", "densenet121", "squeezenet", "resnext50")
ROWS = [
    *(f"{name}:{dtype}:1" for name in MODELS for dtype in ("f16", "f32")),
    *(
        f"{name}:{dtype}:{batch}"
        for name in ("inception_v3", "resnext50")
        for dtype in ("f16", "f32")
        for batch in (16, 32)
    ),
    "vit:f16:1",
]
TURN = {"nasnet_large": 2.5}  # times longer turns than the others
COMPILERS = {"nasnet_large": "8"}  # processes of Inductor; 2 for others
CYCLES_PER_S = 2e9  # of the GPU's clock, at most
REST_S = 3.0  # of a turn: capturing and the last comparison, after the time limit


def model(name: str, batch: int) -> tuple[Any, Any]:
    """A reference module whose norms know the size of what comes: numbers stay of order one."""
    import torch

    from partita.capture.reference_module import example_inputs, reference_module
    from partita.zoo import build

    device = "cuda" if torch.cuda.is_available() else "cpu"  # to try this script itself
    graph = build(name, batch=batch, loss=False)
    module: Any = reference_module(graph).to(device)  # the stubs do not know memory formats
    (image,) = example_inputs(graph)
    wide = reference_module(build(name, batch=8, loss=False)).to(device)
    wide.load_state_dict(module.state_dict())
    for part in wide.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = 1.0
    with torch.no_grad():
        wide.train()(torch.randn(8, *image.shape[1:], device=device))
    module.load_state_dict(wide.state_dict())
    return module.eval().to(memory_format=torch.channels_last), image.to(device)


def chooser_of(row: str, args: argparse.Namespace, began: float) -> Any:
    """The model of a row, about to be optimised."""
    import torch

    from partita.gpu.step_times import StepTimes
    from partita.gpu.streams.candidates import Options
    from partita.gpu.streams.choose import Chooser

    name, dtype, batch = row.split(":")
    module, image = model(name, int(batch))
    kind = {"f16": torch.float16, "f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    image = image.to(kind).contiguous(memory_format=torch.channels_last)
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    options = Options(time_s=args.time_limit, compile=not args.no_compile, backend=backend)

    def note(text: str) -> None:
        if args.verbose:
            print(f"  {time.perf_counter() - began:6.1f} {row} {text}", file=sys.stderr, flush=True)

    return Chooser(module.to(kind), (image,), options, StepTimes(args.profile), note)


def work(row: str, args: argparse.Namespace) -> None:
    """One row in this process: compile, wait for the turn, measure; two lines of JSON."""
    import torch

    began = time.perf_counter()
    chooser = chooser_of(row, args, began)
    if not args.alone:
        if row.split(":")[0] not in TURN:
            os.nice(10)  # the long ones first
        chooser.prepare(args.compile_limit - 70)  # cuDNN by its rules: times now would be wrong
        torch.cuda.empty_cache()
        say({"ready_s": round(time.perf_counter() - began, 1), **memory()})
        chooser.options = replace(chooser.options, time_s=float(input()))
    torch.backends.cudnn.benchmark = True
    turn = time.perf_counter()
    best, schedule = chooser.choose()
    times = dict(schedule.times_us)
    ours = [t for label, t in times.items() if ", " in label and "(" not in label]
    say({
        "row": row, "sequential_us": times.get("sequential graph"),
        "compile_us": times.get("torch.compile"),
        "graph_us": times.get("compiled graph"), "ours_us": min(ours, default=None),
        "kept": schedule.label, "kept_us": schedule.time_us, "error": schedule.error,
        "model_error": schedule.model_error, "prepared_s": round(chooser.prepared_s, 1),
        "turn_s": round(time.perf_counter() - turn, 1), "times_us": times,
        "notes": schedule.notes, "pieces": len(schedule.pieces),
        "exact_steps": sum("exactconv" in way for _, way in schedule.strategies), **memory(),
        **device_times(chooser, best),
    })  # fmt: skip
    os._exit(0)  # the results are out; taking everything down takes seconds


def device_us(call: Any, inputs: Any, calls: int = 25) -> float:
    """The GPU's part of a call: many of them, queued while the GPU is busy with something else."""
    import torch

    device_us: list[float] = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call(*inputs)
        host_s = time.perf_counter() - began
        torch.cuda._sleep(int(min(0.3, 2 * host_s * calls) * CYCLES_PER_S))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(calls):
            call(*inputs)
        marks[1].record()
        torch.cuda.synchronize()
        device_us.append(1e3 * marks[0].elapsed_time(marks[1]) / calls)
    return min(device_us)


def device_times(chooser: Any, best: Any) -> dict[str, float]:
    """The GPU's part of torch.compile and of what was kept."""
    import torch

    if not torch.cuda.is_available():
        return {}
    with torch.no_grad():
        device_times = {"kept_gpu_us": device_us(best.call, chooser.inputs)}
        for each in chooser.candidates:
            if each.form == "compile":
                device_times["compile_gpu_us"] = device_us(each.call, chooser.inputs)
    return device_times


def say(value: dict[str, Any]) -> None:
    """One line for the process that asked."""
    print(json.dumps(value), flush=True)


def memory() -> dict[str, float]:
    """What this process has taken, in GB."""
    import torch

    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"host_gb": round(host, 1), "gpu_gb": round(torch.cuda.max_memory_reserved() / 2**30, 1)}


class Worker:
    """The process of one row."""

    def __init__(self, row: str, args: argparse.Namespace, folder: str, left_s: float) -> None:
        self.row = row
        self.log = Path(folder) / f"{row.replace(':', '_')}.err"
        threads = COMPILERS.get(row.split(":")[0], "2")
        settings = {"TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": "1"}
        extra = ["--compile-limit", str(left_s)]
        extra += ["--no-compile"] * args.no_compile + ["--verbose"] * args.verbose
        extra += ["--profile", args.profile] if args.profile else []
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", __file__, "--work", row, *extra],
                env={**os.environ, **settings}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, start_new_session=True,
            )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.text = b""
        self.ready: dict[str, Any] | None = None
        self.stopped = False

    def line(self, limit_s: float) -> dict[str, Any] | None:
        """The next line of JSON, or nothing if it dies or takes too long."""
        end = time.perf_counter() + limit_s
        with selectors.DefaultSelector() as wait:
            wait.register(self.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self.text:
                    line, _, self.text = self.text.partition(b"\n")
                    if line.startswith(b"{"):
                        answer: dict[str, Any] = json.loads(line)
                        return answer
                if not wait.select(max(0.0, end - time.perf_counter())):
                    return None
                more = os.read(self.stdout.fileno(), 2**16)
                if not more:
                    return None
                self.text += more

    def send(self, number: signal.Signals) -> None:
        """To the process and all it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Nothing of it stays."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3.0)
        self.send(signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        """Why it died, as far as it said."""
        code = self.process.poll()
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        lines = [text.strip() for text in self.log.read_text().splitlines() if text.strip()]
        fatal = [at for at, text in enumerate(lines) if text.startswith("Fatal Python error")]
        some = lines[fatal[0] : fatal[0] + 5] if fatal else lines[-3:]
        return " | ".join([how, *(text[:160] for text in some)])


def compiled(rows: list[str], args: argparse.Namespace, began: float, folder: str) -> list[Worker]:
    """Processes of all rows, ready for their turns; what is not ready in time is stopped."""
    waiting = sorted(rows, key=lambda row: (row.split(":")[0] not in TURN, rows.index(row)))
    workers: dict[str, Worker] = {}
    busy: list[Worker] = []
    end = began + args.compile_limit
    while (waiting or busy) and time.perf_counter() < end:
        while waiting and len(busy) < args.side_by_side:
            row = waiting.pop(0)
            workers[row] = Worker(row, args, folder, end - time.perf_counter())
            busy.append(workers[row])
        for worker in tuple(busy):
            worker.ready = worker.line(0.05)
            dead = worker.process.poll() is not None
            if worker.ready or dead:
                busy.remove(worker)
            if dead:
                print(f"{worker.row}: died while compiling: {worker.last_words()}", flush=True)
            elif worker.ready and args.verbose:
                print(f"{worker.row}: {worker.ready} {free_gb():.0f} GB free", flush=True)
    for worker in busy:
        worker.send(signal.SIGSTOP)
        worker.stopped = True
    for row in waiting:
        print(f"{row}: not begun in time", flush=True)
    return [workers[row] for row in rows if row in workers]


def turns(
    workers: list[Worker], args: argparse.Namespace, began: float
) -> Iterator[dict[str, Any]]:
    """One row after the other, each with its share of the time that is left; yields results."""
    alive = [each for each in workers if each.ready or each.stopped]
    alive.sort(key=lambda each: each.stopped)
    for number, worker in enumerate(alive):
        weights = [TURN.get(each.row.split(":")[0], 1.0) for each in alive[number:]]
        share = (began + args.total - time.perf_counter()) * weights[0] / sum(weights)
        if worker.stopped:
            worker.send(signal.SIGCONT)
            worker.ready = worker.line(max(1.0, share - 10.0))
            share -= 5.0
        if worker.ready is None or share < 2 * REST_S:
            print(f"{worker.row}: no time left", flush=True)
        else:
            limit = min(args.time_limit * weights[0], max(1.0, share - REST_S * weights[0]))
            yield turn(worker, limit, 3 * share + 10)
        worker.end()


def turn(worker: Worker, limit_s: float, at_most_s: float) -> dict[str, Any]:
    """The result of a row, or why there is none."""
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.write(f"{limit_s}\n".encode())
        worker.stdin.flush()
    turn = worker.line(at_most_s)
    if turn is None:
        worker.send(signal.SIGABRT)  # a last word: where it is
        time.sleep(0.5)
        turn = {"row": worker.row, "died": worker.last_words()}
    return turn


def shown(answer: dict[str, Any]) -> str:
    """One line of the table."""
    name, dtype, batch = answer["row"].split(":")
    head = f"{name:13}{dtype:>4}{batch:>3}"
    if "died" in answer:
        return f"{head} no result: {answer['died']}"

    def ratio(base: float | None, mine: float) -> str:
        return f"{base / mine:5.2f}x" if base else "     -"

    def us(value: float | None) -> str:
        return f"{value:9.1f}" if value else "        -"

    columns = ("sequential", "compile", "compile_gpu", "graph", "ours")
    times = "".join(us(answer.get(f"{each}_us")) for each in columns)
    kept, alone = answer["kept_us"], answer.get("kept_gpu_us", 1.0)
    ratios = [
        ratio(answer["sequential_us"], kept), ratio(answer["compile_us"], kept),
        ratio(answer.get("compile_gpu_us"), alone),
    ]  # fmt: skip
    return (
        f"{head}{times}{us(kept)} {' '.join(ratios)} {answer['error']:8.1e}"
        f"{answer['model_error']:8.1e}{answer['prepared_s']:6.0f}{answer['turn_s']:5.0f} "
        f"{answer['host_gb']:5.1f} {free_gb():4.0f} {answer['kept']}"
    )


def free_gb() -> float:
    """Memory of the host that can be had."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 2**20
    return 0.0


def machine() -> str:
    """GPU, driver and versions."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = "none"
    if shutil.which(asked[0]):
        driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    code = "from partita.gpu.step_times import here, in_words; print(in_words(here()))"
    here = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    return f"{here.strip()} driver {driver}"


def main() -> None:
    """Print the table; raw numbers go to a JSON file if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="model:dtype:batch, with commas")
    parser.add_argument("--time-limit", type=float, default=12.0, help="seconds per row, at most")
    parser.add_argument("--total", type=float, default=455.0, help="seconds, for everything")
    parser.add_argument("--compile-limit", type=float, default=195.0, help="seconds, of these")
    parser.add_argument("--side-by-side", type=int, default=14, help="rows compiled at once")
    parser.add_argument("--alone", help="this row, as a user would call it, and no table")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--profile", help="keep measurements in this file")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("-o", "--output", help="raw numbers as JSON")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.alone or args.work:
        work(args.alone or args.work, args)
        return
    began = time.perf_counter()
    on = machine()
    print(f"{on}\n{free_gb():.0f} GB of host memory free", flush=True)
    raw: dict[str, Any] = {"on": on, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        workers = compiled(args.rows.split(","), args, began, folder)
        try:
            print(f"{time.perf_counter() - began:.0f} s to compile", flush=True)
            print(
                f"{'model':13}{'':>4}{'n':>3}{'seq us':>9}{'compile':>9}{'(gpu)':>9}{'graph':>9}"
                f"{'ours':>9}{'kept':>9} {'/seq':>6} {'/comp':>6} {'/(gpu)':>6} {'error':>8}"
                f"{'model':>8}{'prep':>6}{'turn':>5} {'GB':>5} {'free':>4} what was kept"
            )
            for answer in turns(workers, args, began):
                print(shown(answer), flush=True)
                for note in answer.get("notes", ()):
                    print(f"    {note}", flush=True)
                raw["rows"].append(answer)
                if args.output:
                    Path(args.output).write_text(json.dumps(raw, indent=1))
        finally:
            for worker in workers:
                worker.send(signal.SIGKILL)
            if args.verbose and args.output:
                log = "".join(worker.log.read_text() for worker in workers)
                Path(args.output).with_suffix(".log").write_text(log)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
