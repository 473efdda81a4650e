"""Models of the zoo on one GPU: trained and run, eager and compiled, predicted beside measured.

    python benchmarks/h200_models.py --out models.json               # under nine minutes
    python benchmarks/h200_models.py --out try.json --device cpu --quick

Three parts, each in processes of its own, so that nothing that dies takes the rest along. First
every (model, batch) pair in eager mode, training and inference, with nothing beside it. Then pairs
are compiled by torch.compile, several side by side, while partita predicts all pairs: nothing is
timed. What is not compiled in time is stopped and said. Last the compiled ones have their turns,
one after the other. (Kernels that Inductor tunes by running them are tuned while others run.)

Half of the pairs, told by a hash of model and batch, may be looked at to set the parameters of a
kind (`fit_device.py`); the errors to quote are those of the other half. The file has what such a
fit needs: kernels and their time by phase and name, the host's time by phase, memory.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

Pair = tuple[str, int]

# By importance: a run that is short of time leaves out the last.
PAIRS: tuple[Pair, ...] = (
    ("resnet50", 64), ("gpt2", 8), ("vit-b16", 64), ("t5-base", 16), ("bert-large", 16),
    ("densenet121", 64), ("inception_v3", 64), ("unet", 4), ("gpt2-large", 4), ("gpt3-1.3b", 2),
    ("llama-1.1b", 2), ("rnnlm", 64), ("resnext50", 64), ("transformer-big", 32), ("lstm", 1),
    ("deepspeech2", 16), ("vgg16", 64), ("squeezenet", 64),
    ("resnet50", 256), ("gpt2", 32), ("vit-b16", 16), ("t5-base", 4), ("bert-large", 4),
    ("densenet121", 16), ("inception_v3", 16), ("unet", 1), ("gpt2-large", 1), ("gpt3-1.3b", 4),
    ("llama-1.1b", 1), ("rnnlm", 16), ("transformer-big", 8), ("alexnet", 256),
    ("resnet50", 16), ("gpt2", 1), ("vit-b16", 256), ("t5-base", 64), ("bert-large", 32),
    ("densenet121", 128), ("inception_v3", 128), ("unet", 16), ("gpt2-large", 8), ("gpt3-1.3b", 1),
    ("llama-1.1b", 8), ("lstm", 64), ("vgg16", 16), ("nasnet_large", 8), ("llama-7b", 1),
)  # fmt: skip
COMPILED: tuple[Pair, ...] = (
    ("densenet121", 64), ("inception_v3", 64), ("t5-base", 16), ("gpt2-large", 4),
    ("bert-large", 16), ("resnet50", 64), ("gpt2", 8), ("vit-b16", 64), ("gpt3-1.3b", 2),
    ("llama-1.1b", 2), ("unet", 4), ("transformer-big", 32),
    ("resnet50", 256), ("gpt2", 32), ("vit-b16", 16), ("t5-base", 4), ("bert-large", 4),
    ("unet", 1), ("resnet50", 16), ("gpt2", 1), ("densenet121", 16), ("inception_v3", 16),
)  # fmt: skip
BOTH = 12  # of these are compiled for inference, too
QUICK: tuple[Pair, ...] = (("squeezenet1_1@64", 1), ("lstm@2", 1))
KINDS = ("train", "infer")
MODES = ("eager", "compiled")
CASE_S = 60.0  # after which a pair in eager mode is given up
TURN_S = 30.0
GIB = 2**30
ROOM_BYTES = 118 * GIB  # for all compiling processes together
MOST_CHILDREN = 30  # that hold a compiled model: each takes 3 to 4 GiB of the host's memory
HOST_BYTES = 5 * GIB  # that must be free for each that compiles
CONTEXT_BYTES = 1.2 * GIB  # that a process takes beside its tensors


def half_of(pair: Pair) -> str:
    """Which half a pair belongs to: told by its name alone."""
    text = f"{pair[0].partition('@')[0]}:{pair[1]}"
    return ("calibrate", "report")[hashlib.sha256(text.encode()).digest()[0] & 1]


def named(pair: Pair) -> str:
    """A pair as text."""
    return f"{pair[0]}:{pair[1]}"


def pair_of(text: str) -> Pair:
    """The pair that a text names."""
    model, _, batch = text.rpartition(":")
    return model, int(batch)


class Child:
    """A process that writes lines of JSON into a file of its own."""

    def __init__(self, folder: Path, name: str, args: argparse.Namespace, *extra: str) -> None:
        self.lines_path = folder / f"{name}.jsonl"
        self.log_path = folder / f"{name}.log"
        self.lines_path.touch()
        self.read = 0
        self.name = name
        command = [sys.executable, "-X", "faulthandler", __file__, "--lines", str(self.lines_path)]
        command += ["--out", str(args.out), "--device", args.device, "--cluster", args.cluster]
        command += ["--quick"] * args.quick + list(extra)
        settings = {
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # processes side by side are enough
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "OMP_NUM_THREADS": "1" if args.quick or "compile" in extra else "4",
            "KINETO_LOG_LEVEL": "5",
        }
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **settings}, stdin=subprocess.PIPE, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        """Is it still there?"""
        return self.process.poll() is None

    def new_lines(self) -> list[dict[str, Any]]:
        """What it has written since it was last asked."""
        with self.lines_path.open("rb") as lines:
            lines.seek(self.read)
            whole, newline, _ = lines.read().rpartition(b"\n")
        self.read += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    def tell(self, text: str) -> None:
        """A line to its standard input."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def stop(self) -> None:
        """It stands still: nothing it does may disturb what is timed."""
        self._send(signal.SIGSTOP)

    def end(self) -> None:
        """Nothing of it stays."""
        self._send(signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def last_words(self) -> str:
        """Why it died, as far as it said."""
        lines = [t for t in self.log_path.read_text(errors="replace").splitlines() if t.strip()]
        return f"exit code {self.process.poll()}: " + " | ".join(t[:200] for t in lines[-4:])


def say(path: str, value: dict[str, Any]) -> None:
    """One line to the parent."""
    with Path(path).open("a") as lines:
        lines.write(json.dumps(value) + "\n")


# ---------------------------------------------------------------- in the children


def work_eager(args: argparse.Namespace) -> None:
    """Pair after pair in eager mode; training before inference."""
    from gpu_timing import Clock

    clock = Clock(args.device, args.quick)
    for text in args.pairs.split(","):
        for kind in KINDS:
            say(args.lines, {"pair": text, "kind": kind, **_case(text, kind, clock)})
        say(args.lines, {"pair": text, "done": True})


def _case(text: str, kind: str, clock: Any) -> dict[str, Any]:
    from gpu_timing import free_memory
    from model_steps import Steps, measured

    model, batch = pair_of(text)
    began = time.perf_counter()
    try:
        record = measured(Steps(model, batch, kind == "train", clock))
    except Exception as error:  # too large, say: the next pair is another matter
        record = {"error": f"{type(error).__name__}: {error}"[:500]}
    free_memory(thoroughly=True)
    return {**record, "took_s": round(time.perf_counter() - began, 2)}


def work_compile(args: argparse.Namespace) -> None:
    """One pair: compile, say so, wait for the turn, measure."""
    import torch
    from gpu_timing import Clock
    from model_steps import Steps, measured

    clock = Clock(args.device, args.quick)
    model, batch = pair_of(args.pairs)
    began = time.perf_counter()
    backend = "inductor" if clock.cuda else "eager"
    steps = Steps(model, batch, args.kind == "train", clock, backend)
    steps.step()
    steps.step()
    clock.sync()
    compile_s = round(time.perf_counter() - began, 2)
    held = 0
    if clock.cuda:
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
    say(args.lines, {"ready": True, "compile_s": compile_s, "held_bytes": held})
    if sys.stdin.readline().strip() == "go":
        say(args.lines, {**measured(steps), "compile_s": compile_s})
    os._exit(0)  # the result is out; taking everything down takes seconds


def work_predict(args: argparse.Namespace) -> None:
    """What partita says, pair by pair."""
    from model_steps import predicted

    for text in args.pairs.split(","):
        model, batch = pair_of(text)
        line: dict[str, Any] = {"pair": text}
        for kind in KINDS:
            try:
                line[kind] = {
                    mode: predicted(model, batch, kind == "train", args.cluster, mode)
                    for mode in MODES
                }
            except Exception as error:
                line[kind] = {"error": f"{type(error).__name__}: {error}"[:500]}
        say(args.lines, line)


# ---------------------------------------------------------------- in the parent


def eager_part(results: Any, folder: Path, args: argparse.Namespace, pairs: list[Pair]) -> None:
    """All pairs in eager mode; a child that dies or hangs loses one pair."""
    left = [named(pair) for pair in pairs]
    number = 0
    while left and results.elapsed_s < args.eager_until:
        child = Child(folder, f"eager{number}", args, "--work", "eager", "--pairs", ",".join(left))
        number += 1
        since, seen = time.perf_counter(), set()
        why = ""
        while left:
            alive = child.alive
            for line in child.new_lines():
                since = time.perf_counter()
                if "done" in line:
                    left.remove(line["pair"])
                    seen = set()
                    continue
                seen.add(line["kind"])
                keep(results, line, "eager")
            limit = CASE_S + (60.0 if len(left) == len(pairs) else 0.0)  # the first one loads all
            if not left or results.elapsed_s > args.eager_until:
                break
            if not alive or time.perf_counter() - since > limit:
                why = child.last_words() if not alive else f"no answer in {limit:.0f} s"
                break
            time.sleep(0.05)
        child.end()
        if why and left:
            lost = left.pop(0)
            for kind in KINDS:
                if kind not in seen:
                    keep(results, {"pair": lost, "kind": kind, "error": why}, "eager")
    for text in left:
        results.skip(f"eager {text}", "out of time")


def keep(results: Any, line: dict[str, Any], mode: str) -> None:
    """A measured case becomes a record, and a line of progress."""
    pair = pair_of(line.pop("pair"))
    record = {"model": pair[0], "batch": pair[1], "kind": line.pop("kind"), "mode": mode,
              "half": half_of(pair), **line}  # fmt: skip
    results.add(record)
    name = f"{named(pair):20} {record['kind']:5} {mode:8}"
    if "error" in record:
        print(f"{results.elapsed_s:7.1f} {name} {record['error'][:160]}", flush=True)
        return
    print(
        f"{results.elapsed_s:7.1f} {name} step {record['step_s'] * 1e3:9.2f} ms, queued "
        f"{record['queued_step_s'] * 1e3:9.2f}, host {record['host_step_s'] * 1e3:8.2f}, "
        f"GPU busy {record.get('gpu_busy_s', 0.0) * 1e3:9.2f}, {record.get('kernels', 0)} kernels, "
        f"{record['max_allocated_bytes'] / GIB:6.2f} GiB",
        flush=True,
    )


def room_of(results: Any, job: tuple[Pair, str]) -> float:
    """Bytes of the GPU that a compiling process may need at most."""
    for record in results.value["records"]:
        same = (record["model"], record["batch"]) == job[0] and record["kind"] == job[1]
        if same and "max_reserved_bytes" in record:
            return float(record["max_reserved_bytes"] * 1.25 + CONTEXT_BYTES)
    return 25.0 * GIB


def free_host_bytes() -> float:
    """Memory of the host that can be had."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return float(line.split()[1]) * 1024
    return math.inf


class Compiling:
    """The part in which models are compiled side by side and predictions are made."""

    def __init__(self, results: Any, folder: Path, args: argparse.Namespace) -> None:
        self.results, self.folder, self.args = results, folder, args
        self.busy: dict[tuple[Pair, str], Child] = {}
        self.ready: dict[tuple[Pair, str], Child] = {}
        self.taken: dict[tuple[Pair, str], float] = {}
        self.predicting: list[Child] = []
        self.order: list[tuple[Pair, str]] = []

    def run(self, jobs: list[tuple[Pair, str]], pairs: list[Pair]) -> None:
        """Until everything is compiled and predicted, or the time is up."""
        self.order, waiting = jobs, list(jobs)
        helpers = 1 if self.args.quick else 3
        for number in range(helpers):
            some = ",".join(named(pair) for pair in pairs[number::helpers])
            if some:
                child = Child(
                    self.folder, f"predict{number}", self.args, "--work", "predict", "--pairs", some
                )
                self.predicting.append(child)
        while self.results.elapsed_s < self.args.compile_until:
            self._look()
            self._begin(waiting)
            if not waiting and not self.busy and not any(p.alive for p in self.predicting):
                break
            time.sleep(0.1)
        self._look()
        for child in self.predicting:
            if child.alive:
                child.stop()
                self.results.skip(child.name, "not everything predicted in time")
        for job, child in self.busy.items():
            child.stop()
            self.results.skip(f"compiled {named(job[0])} {job[1]}", "not compiled in time")
        for pair, kind in waiting:
            self.results.skip(f"compiled {named(pair)} {kind}", "not begun in time")

    def _begin(self, waiting: list[tuple[Pair, str]]) -> None:
        """Start what fits beside the others."""
        for job in tuple(waiting):
            room = room_of(self.results, job)
            if len(self.busy) >= self.args.side_by_side or len(self.taken) >= MOST_CHILDREN:
                return
            if self.busy and free_host_bytes() < HOST_BYTES * (len(self.busy) + 1):
                return
            if self.busy and sum(self.taken.values()) + room > ROOM_BYTES:
                continue
            waiting.remove(job)
            name = f"compile_{named(job[0]).replace(':', '_').replace('@', '_')}_{job[1]}"
            self.busy[job] = Child(
                self.folder, name, self.args,
                "--work", "compile", "--pairs", named(job[0]), "--kind", job[1],
            )  # fmt: skip
            self.taken[job] = room

    def _look(self) -> None:
        """Which are ready, which died; what was predicted."""
        for job, child in tuple(self.busy.items()):
            alive = child.alive
            lines = child.new_lines()
            if lines:
                self.ready[job] = self.busy.pop(job)
                self.taken[job] = lines[0]["held_bytes"] + CONTEXT_BYTES
                self._note(f"{named(job[0])} {job[1]} compiled in {lines[0]['compile_s']} s")
            elif not alive:
                del self.busy[job], self.taken[job]
                line = {"pair": named(job[0]), "kind": job[1], "error": child.last_words()}
                child.end()
                keep(self.results, line, "compiled")
        for child in self.predicting:
            for line in child.new_lines():
                self.results.value["predicted"][line.pop("pair")] = line
                self.results.flush()

    def _note(self, text: str) -> None:
        print(f"{self.results.elapsed_s:7.1f} {text}", flush=True)

    def turns(self) -> None:
        """Every compiled one measures, and nothing else runs."""
        for job, child in sorted(self.ready.items(), key=lambda item: self.order.index(item[0])):
            if self.results.left_s < 4.0:
                self.results.skip(f"compiled {named(job[0])} {job[1]}", "no time for its turn")
                continue
            child.tell("go")
            end = time.perf_counter() + min(TURN_S, self.results.left_s)
            line: dict[str, Any] = {"error": "no answer in its turn"}
            while time.perf_counter() < end:
                alive, lines = child.alive, child.new_lines()
                if lines:
                    line = lines[0]
                elif not alive:
                    line = {"error": child.last_words()}
                else:
                    time.sleep(0.02)
                    continue
                break
            child.end()
            keep(self.results, {"pair": named(job[0]), "kind": job[1], **line}, "compiled")

    def end(self) -> None:
        """Nothing of it stays."""
        for child in (*self.busy.values(), *self.ready.values(), *self.predicting):
            child.end()


# ---------------------------------------------------------------- predicted beside measured


def rows(results: Any) -> list[dict[str, Any]]:
    """Measured cases that were predicted, with both numbers."""
    rows = []
    for record in results.value["records"]:
        said = results.value["predicted"].get(named((record["model"], record["batch"])), {})
        said = said.get(record["kind"], {}).get(record["mode"], {})
        if "step_s" in record and "step_s" in said:
            rows.append(row_of(record, said))
    return rows


def row_of(record: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """One case: what was measured beside what is predicted."""
    return {
        **{key: record[key] for key in ("model", "batch", "kind", "mode", "half")},
        "measured_s": record["step_s"], "predicted_s": said["step_s"],
        "ratio": said["step_s"] / record["step_s"],
        "measured_bytes": record["max_allocated_bytes"], "predicted_bytes": said["allocated_bytes"],
        "memory_ratio": said["allocated_bytes"] / max(record["max_allocated_bytes"], 1),
    }  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{row['model']:16}{row['batch']:4} {row['kind']:5} {row['mode']:8} {row['half']:9} "
        f"measured {row['measured_s'] * 1e3:9.2f} ms predicted {row['predicted_s'] * 1e3:9.2f}"
        f" x{row['ratio']:5.2f}   {row['measured_bytes'] / GIB:6.2f} GiB predicted "
        f"{row['predicted_bytes'] / GIB:6.2f} x{row['memory_ratio']:5.2f}"
    )


def errors_of(table: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean of |predicted / measured - 1| by mode, kind and half, for time and memory."""
    errors = {}
    for mode in MODES:
        for kind in KINDS:
            for half in ("calibrate", "report"):
                wanted = (mode, kind, half)
                mine = [row for row in table if (row["mode"], row["kind"], row["half"]) == wanted]
                if mine:
                    errors[" ".join(wanted)] = {
                        "pairs": len(mine),
                        "time": statistics.fmean(abs(row["ratio"] - 1) for row in mine),
                        "memory": statistics.fmean(abs(row["memory_ratio"] - 1) for row in mine),
                    }
    return errors


def summary(results: Any) -> dict[str, Any]:
    """The table, and the errors of both halves."""
    table = rows(results)
    for row in table:
        print(shown(row))
    errors = errors_of(table)
    for name, error in errors.items():
        print(
            f"{name}: mean error of {error['pairs']} pairs {error['time']:.1%} of the time, "
            f"{error['memory']:.1%} of the memory"
        )
    return {"rows": table, "errors": errors}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="two tiny models: does it all work?")
    parser.add_argument("--seconds", type=float, default=525.0, help="for everything")
    parser.add_argument("--cluster", default="1xH200", help="the cluster to predict with")
    parser.add_argument(
        "--side-by-side", type=int, default=max(1, min(13, (os.cpu_count() or 2) - 3))
    )
    parser.add_argument("--no-compile", action="store_true", help="eager mode only")
    parser.add_argument("--models", default="", help="only these, with commas")
    for hidden in ("--work", "--pairs", "--kind", "--lines"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.eager_until = args.seconds * (0.45 if not args.no_compile else 0.9)
    args.compile_until = args.seconds * 0.77
    return args


def main(arguments: list[str] | None = None) -> None:
    """All three parts, then the table."""
    args = parsed(arguments)
    warnings.simplefilter("ignore")
    if args.work:
        {"eager": work_eager, "compile": work_compile, "predict": work_predict}[args.work](args)
        return
    from gpu_timing import Results, StateLog, machine, state_from

    chosen = [name for name in args.models.split(",") if name]
    pairs = [p for p in (QUICK if args.quick else PAIRS) if not chosen or p[0] in chosen]
    compiled = [p for p in (QUICK[:1] if args.quick else COMPILED) if p in pairs]
    kinds = KINDS[:1] if args.quick else KINDS
    jobs = [(pair, kind) for pair in compiled[:BOTH] for kind in kinds]
    jobs += [(pair, "train") for pair in compiled[BOTH:]]
    about = {"script": "h200_models", "quick": args.quick, "predicted": {}, "machine": machine()}
    results = Results(args.out, args.seconds, about)
    log = args.out.with_suffix(".smi")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, StateLog(log):
        folder = Path(name)
        eager_part(results, folder, args, pairs)
        compiling = Compiling(results, folder, args)
        try:
            compiling.run([] if args.no_compile else jobs, pairs)
            compiling.turns()
        finally:
            compiling.end()
    if log.is_file():
        results.value["states"] = [state_from(line) for line in log.read_text().splitlines()]
        log.unlink()
    results.value["summary"] = summary(results)
    results.finish()
    print(f"{len(results.value['records'])} records, {results.elapsed_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
