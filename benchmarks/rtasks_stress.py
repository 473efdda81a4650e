"""Thousands of launches of every persistent kernel, with and without random delays in programs.

    python benchmarks/rtasks_stress.py                      all cases, in a process that is watched
    python benchmarks/rtasks_stress.py gru rnn --launches 20000
    python benchmarks/rtasks_stress.py --sanitize --launches 20     under compute-sanitizer
    python benchmarks/rtasks_stress.py hang --seconds 10    what is said of a kernel that hangs

A case must agree with PyTorch within its tolerance the first time it sees a length, and be equal to
that bit by bit ever after: with delays before every wait and signal too, since nothing is summed in
an order that depends on time. Where nothing is heard in time, the process is ended, the case named.
"""

import argparse
import glob
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

T = torch.Tensor
Run = Callable[[int], tuple[T, ...]]  # a length: what the kernel gives for its inputs


@dataclass(frozen=True)
class Case:
    """A kernel and what it must agree with; `make` takes the largest delay in nanoseconds."""

    make: Callable[[int], Run]
    wanted: Run
    lengths: tuple[int, ...]
    tolerance: float


def recurrent_case(
    kind: str, sizes: tuple[int, int, int], both=False, batch=1, dtype=torch.float32
) -> Case:
    """Layers of (inputs, hidden, layers) against `nn.LSTM`, `nn.GRU` or `nn.RNN`."""
    from partita.gpu.recurrent.layers import compile_recurrent, spec_of

    module = getattr(torch.nn, kind)(*sizes, bidirectional=both).cuda().to(dtype).eval()
    lengths = (1, 2, 7, 20, 33)
    inputs = {n: torch.randn(n, batch, sizes[0], device="cuda", dtype=dtype) for n in lengths}
    states = torch.randn(2, sizes[2] * (2 if both else 1), batch, sizes[1], device="cuda").to(dtype)

    def make(delay_ns: int) -> Run:
        layers = compile_recurrent(
            spec_of(module, batch), module._flat_weights, torch.device("cuda"), delay_ns=delay_ns
        )
        given = states if kind == "LSTM" else states[:1]
        return lambda n: tuple(t for t in layers(inputs[n], *given) if t is not None)

    def wanted(n: int) -> tuple[T, ...]:
        given = tuple(states) if kind == "LSTM" else states[0]
        output, last = module(inputs[n], given)
        return (output, *last) if kind == "LSTM" else (output, last)

    return Case(make, wanted, lengths, 2e-5 if dtype == torch.float32 else 3e-2)


def decoder_case(kind: str, size: int, num_layers: int, vocabulary: int) -> Case:
    """A decoder against its module; lengths are the most steps it may make."""
    from partita.gpu.recurrent.decode import GreedyDecoder, compile_decoder

    rnn = getattr(torch.nn, kind)(size, size, num_layers)
    head = torch.nn.Linear(size, vocabulary)
    module = GreedyDecoder(torch.nn.Embedding(vocabulary, size), rnn, head, eos=3).cuda().eval()
    lengths = (1, 4, 17, 30)
    states = {n: torch.randn(2, num_layers, 1, size, device="cuda") for n in lengths}
    first = {n: torch.randint(vocabulary, (1,), device="cuda") for n in lengths}
    with torch.no_grad():  # some sequence is to end early
        chosen = module(states[30][0], states[30][1] if kind == "LSTM" else None, first[30], 30)
        module.eos = int(chosen.tokens[12])

    def start(n: int) -> tuple[T, T | None, T]:
        return states[n][0], states[n][1] if kind == "LSTM" else None, first[n]

    def make(delay_ns: int) -> Run:
        run = compile_decoder(module, torch.device("cuda"), delay_ns=delay_ns)

        def call(n: int) -> tuple[T, ...]:
            return tuple(t for t in run(*start(n), n) if t is not None)

        return call

    def wanted(n: int) -> tuple[T, ...]:
        wanted = module(*start(n), n)
        return tuple(t.cuda() for t in wanted if t is not None)

    return Case(make, wanted, lengths, 2e-5)


def region_case(kind: str, dtype=torch.float32, device: str = "cuda") -> Case:
    """The fused region of a small model; a "length" is which of some inputs it gets."""
    from partita.cluster import resolve
    from partita.gpu.flow.fold import fold
    from partita.gpu.rtasks.execute import RegionPipeline
    from partita.gpu.rtasks.lower import captured, lower_flow
    from partita.gpu.rtasks.planned import plan_regions
    from partita.gpu.rtasks.region import Region

    torch.backends.cudnn.allow_tf32 = False  # a region rounds where PyTorch would
    module, shape = REGIONS[kind]()
    module = module.to(device, dtype).eval()
    inputs = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
    with torch.no_grad():
        lowered = lower_flow(fold(captured(module, (inputs[0],))), inputs[0].device)
        plans = plan_regions(lowered, resolve("H200").kinds[0], time_s=1.0)

    def make(delay_ns: int) -> Run:
        arena = lowered.arena
        launches = [
            plan
            and Region(plan.region, plan.tiles, plan.program, arena.data, arena.wide,
                       delay=delay_ns // 5)  # counted in reads of memory
            for plan in plans
        ]  # fmt: skip
        pipeline = RegionPipeline(lowered, launches)
        return lambda n: pipeline(inputs[n])

    def wanted(n: int) -> tuple[T, ...]:
        with torch.no_grad():
            return (module(inputs[n]),)

    return Case(make, wanted, tuple(range(4)), 2e-5 if dtype == torch.float32 else 2e-2)


def _mlp() -> tuple[torch.nn.Module, tuple[int, ...]]:
    layers = [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 200), torch.nn.Softmax(-1)), (1, 256)


def _convolutions() -> tuple[torch.nn.Module, tuple[int, ...]]:
    conv, act = torch.nn.Conv2d, torch.nn.ReLU
    layers = [conv(16, 32, 3, padding=1), act(), conv(32, 32, 5, padding=2, groups=32), act()]
    return torch.nn.Sequential(*layers, torch.nn.MaxPool2d(3, 2, 1), conv(32, 40, 1)), (
        1, 16, 14, 14,
    )  # fmt: skip


REGIONS = {"mlp": _mlp, "convolutions": _convolutions}


def hanging_case() -> Case:
    """A kernel that waits for ever, since it is told that more was done before than was."""
    from partita.gpu.recurrent.layers import compile_module

    layers = compile_module(torch.nn.LSTM(16, 16, 2).cuda().eval(), torch.device("cuda"))
    x = torch.randn(3, 1, 16, device="cuda")

    def make(delay_ns: int) -> Run:
        layers(x)
        layers._counters[0][-2] += 1000
        return lambda n: layers(x)[:2]

    return Case(make, lambda n: layers(x)[:2], (3,), 0.0)


CASES: dict[str, Callable[[], Case]] = {
    "lstm": lambda: recurrent_case("LSTM", (64, 64, 4)),
    "lstm-f16": lambda: recurrent_case("LSTM", (256, 256, 10), dtype=torch.float16),
    "lstm-wide-input": lambda: recurrent_case("LSTM", (300, 128, 3)),
    "gru": lambda: recurrent_case("GRU", (48, 96, 3)),
    "gru-both": lambda: recurrent_case("GRU", (100, 128, 2), both=True),
    "lstm-both-bf16": lambda: recurrent_case("LSTM", (64, 128, 2), True, dtype=torch.bfloat16),
    "lstm-batch": lambda: recurrent_case("LSTM", (64, 64, 3), batch=3),
    "gru-batch-both": lambda: recurrent_case("GRU", (64, 96, 2), both=True, batch=2),
    "rnn": lambda: recurrent_case("RNN", (40, 200, 2)),
    "decode-lstm": lambda: decoder_case("LSTM", 128, 4, 1000),
    "decode-gru": lambda: decoder_case("GRU", 96, 2, 5000),
    "region-mlp": lambda: region_case("mlp"),
    "region-mlp-f16": lambda: region_case("mlp", torch.float16),
    "region-convolutions": lambda: region_case("convolutions"),
    "tiny": lambda: recurrent_case("LSTM", (16, 16, 2)),
    "tiny-decode": lambda: decoder_case("GRU", 16, 1, 32),
    "hang": hanging_case,
}  # what is stressed, by name; made on the GPU when it is its turn


def stress(case: Case, launches: int, delay_ns: int, seed: int) -> str:
    """Launch the kernel in a random order of lengths; what was found, or raise."""
    torch.backends.cudnn.allow_tf32 = False  # PyTorch would round what it multiplies
    kernels = [case.make(0)] + ([case.make(delay_ns)] if delay_ns else [])
    first: dict[int, tuple[T, ...]] = {}
    with torch.no_grad():
        for length in case.lengths:
            first[length] = kernels[0](length)
            for ours, theirs in zip(first[length], case.wanted(length), strict=True):
                close = {"rtol": case.tolerance, "atol": case.tolerance}
                torch.testing.assert_close(ours, theirs.to(ours.dtype), **close)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    turns = random.Random(seed)
    for _ in range(launches):
        length = turns.choice(case.lengths)
        outputs = turns.choice(kernels)(length)
        for ours, before in zip(outputs, first[length], strict=True):
            wrong += (ours != before).any()
    count = int(wrong)
    if count:
        raise SystemExit(f"{count} of {launches} launches differ")
    return f"{launches} launches, no mismatch"


def here(names: list[str], chosen: argparse.Namespace) -> None:
    """Run cases in this process; say which one before and after."""
    for name in names:
        print(f"begin {name}", flush=True)
        torch.manual_seed(chosen.seed)
        begin = time.perf_counter()
        text = stress(CASES[name](), chosen.launches, chosen.delay, chosen.seed)
        print(f"{name}: {text}, {time.perf_counter() - begin:.1f} s", flush=True)


def watched(names: list[str], command: list[str], seconds: float) -> int:
    """Run cases in another process, and in a new one after each that fails; how many did."""
    left, failed = list(names), 0
    while left:
        process = subprocess.Popen(
            [*command, *left],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        problem = follow(process, left, seconds)
        if problem:
            failed += 1
            print(f"{left.pop(0)}: {problem}", flush=True)
        elif left:
            raise SystemExit(f"the process ended well, but without {left}")
    return failed


def follow(process: "subprocess.Popen[str]", left: list[str], seconds: float) -> str:
    """Take cases off the list as they are reported; what went wrong with the next one, or ''."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    seen: list[str] = []
    while True:
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"HUNG: nothing within {seconds:.0f} s; a program of its kernel waits for ever"
        if line is None:
            break
        seen.append(line)
        if left and line.startswith(f"{left[0]}: "):
            print(line, flush=True)
            left.pop(0)
        elif "SUMMARY" in line:
            print(line, flush=True)
    code = process.wait()
    text = "\n  ".join(seen[-12:])
    return f"FAILED with exit code {code}\n  {text}" if code else ""


def sanitizer() -> str | None:
    """Where compute-sanitizer is, if anywhere."""
    sanitizer = shutil.which("compute-sanitizer")
    return sanitizer or next(
        iter(sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))), None
    )


def main() -> None:
    """Run the cases one after the other, watched."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all but hang if none")
    parser.add_argument("--launches", type=int, default=3000)
    parser.add_argument("--delay", type=int, default=3000, help="largest, in ns; 0 for none")
    parser.add_argument("--seconds", type=float, default=60, help="until a case counts as hung")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitize", action="store_true", help="tiny ones under compute-sanitizer")
    parser.add_argument("--here", action="store_true", help="in this process, not watched")
    chosen = parser.parse_args()
    names = chosen.cases or [name for name in CASES if name != "hang"]
    if chosen.here:
        here(names, chosen)
        return
    own = [sys.executable, __file__, "--here", "--seed", str(chosen.seed)]
    own += ["--launches", str(chosen.launches), "--delay", str(chosen.delay)]
    if not chosen.sanitize:
        raise SystemExit(1 if watched(names, own, chosen.seconds) else 0)
    tool = sanitizer()
    if tool is None:
        raise SystemExit("compute-sanitizer is not installed here")
    failed = 0
    for check in ("memcheck", "racecheck"):
        print(f"under {check}:", flush=True)
        command = [tool, "--tool", check, "--error-exitcode", "9", *own]
        failed += watched(["tiny", "tiny-decode", "region-mlp"], command, chosen.seconds)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
