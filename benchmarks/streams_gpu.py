"""Models on one GPU: partita.streams against the sequential CUDA graph and torch.compile.

    python benchmarks/streams_gpu.py                              # the whole table
    python benchmarks/streams_gpu.py --rows inception_v3:f16:1,resnext50:f32:16

First every row is compiled once, all rows side by side in processes of their own: that fills the
caches of Inductor and Triton on disk. Then the rows run one after the other in one process.
All candidates of one row are timed in one process in turns: whole calls, back to back, CUDA events,
medians. The models are the zoo's twins with random weights, norms set from a batch of random
images; inputs have channels last; TF32 is as PyTorch has it by default (on for convolutions), for
all alike. Column `ours` is the best of our own graphs, `kept` what partita.streams returned.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

from partita.capture.twin import example_inputs, twin
from partita.run.streams.api import streams
from partita.run.streams.profile import here
from partita.zoo import build

ROWS = ",".join(
    [
        *(f"inception_v3:{dtype}:1" for dtype in ("f16", "f32")),
        *(f"squeezenet:{dtype}:1" for dtype in ("f16", "f32")),
        *(f"resnext50:{dtype}:1" for dtype in ("f16", "f32")),
        *(f"{name}:f16:1" for name in ("densenet121", "randwire", "nasnet_large")),
        *("inception_v3:f16:32", "resnext50:f16:16"),
        *(f"{name}:f32:1" for name in ("densenet121", "randwire", "nasnet_large")),
    ]
)  # the last ones only if there is time
DTYPES = {"f16": torch.float16, "f32": torch.float32, "bf16": torch.bfloat16}


def model(name: str, batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A twin whose norms know the size of what comes, so that numbers stay of order one."""
    graph = build(name, batch=batch, loss=False)
    module = twin(graph).cuda()
    (image,) = example_inputs(graph)
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = 1.0
    wide = twin(build(name, batch=8, loss=False)).cuda()
    wide.load_state_dict(module.state_dict())
    for part in wide.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = 1.0
    with torch.no_grad():
        wide.train()(torch.randn(8, *image.shape[1:], device="cuda"))
    module.load_state_dict(wide.state_dict())
    return module.eval().to(memory_format=torch.channels_last), image.cuda()


def row(name: str, dtype: str, batch: int, args: argparse.Namespace) -> dict[str, object]:
    """Optimise one model and say what was measured."""
    module, image = model(name, batch)
    module = module.to(DTYPES[dtype])
    image = image.to(DTYPES[dtype]).contiguous(memory_format=torch.channels_last)
    began = time.perf_counter()
    found = streams(
        module, image, time_s=args.time_limit, profile=args.profile, compile=not args.no_compile,
        note=(lambda text: print(f"  {time.perf_counter() - began:6.1f} {text}")) if args.verbose
        else None,
    )  # fmt: skip
    schedule = found.schedules[0]
    times = dict(schedule.times_us)
    ours = min((t for label, t in times.items() if ", " in label and "(" not in label), default=0.0)
    return {
        "model": name, "dtype": dtype, "batch": batch,
        "sequential_us": times.get("sequential graph"), "compile_us": times.get("torch.compile"),
        "ours_us": ours, "kept": schedule.label, "kept_us": schedule.time_us,
        "error": schedule.error, "model_error": schedule.model_error,
        "seconds": time.perf_counter() - began, "times_us": times, "notes": schedule.notes,
    }  # fmt: skip


def shown(found: dict[str, object]) -> str:
    """One line of the table."""

    def ratio(base: object) -> str:
        kept = float(str(found["kept_us"]))
        return f"{float(str(base)) / kept:5.2f}x" if base else "     -"

    def us(value: object) -> str:
        return f"{float(str(value)):9.1f}" if value else "        -"

    return (
        f"{found['model']:14}{found['dtype']:>5}{found['batch']:>4}{us(found['sequential_us'])}"
        f"{us(found['compile_us'])}{us(found['ours_us'])}{us(found['kept_us'])} "
        f"{ratio(found['sequential_us'])} {ratio(found['compile_us'])} "
        f"{float(str(found['error'])):8.1e}{float(str(found['model_error'])):8.1e}"
        f"{float(str(found['seconds'])):6.0f} {found['kept']}"
    )


def driver() -> str:
    """The driver's version."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return "driver " + subprocess.run(asked, capture_output=True, text=True).stdout.strip()


def fill_caches(rows: list[str], args: argparse.Namespace) -> None:
    """Compile every row once, side by side; what takes too long is stopped."""
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"}
    extra = ["--no-compile"] if args.no_compile else []
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--warm", each, *extra],
            env={**os.environ, **settings}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for each in sorted(rows, key=lambda each: "nasnet" not in each)
    ]  # fmt: skip
    end = time.perf_counter() + args.warm_limit
    for process in running:
        try:
            process.wait(max(0.1, end - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    """Print the table; raw numbers go to a JSON file if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=ROWS, help="model:dtype:batch, comma-separated")
    parser.add_argument("--time-limit", type=float, default=18.0, help="seconds per row")
    parser.add_argument("--total", type=float, default=430.0, help="seconds; later rows are left")
    parser.add_argument("--warm-limit", type=float, default=170.0, help="seconds to fill caches")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--profile", help="keep measurements in this file")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("-o", "--output", help="raw numbers as JSON")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = True
    if args.warm:
        name, dtype, batch = args.warm.split(":")
        args.time_limit = 0.1
        row(name, dtype, int(batch), args)
        return
    began = time.perf_counter()
    print(here(), driver())
    wanted = args.rows.split(",")
    fill_caches(wanted, args)
    print(f"{time.perf_counter() - began:.0f} s to fill the caches")
    print(
        f"{'model':14}{'':>5}{'n':>4}{'seq us':>9}{'compile':>9}{'ours':>9}{'kept':>9} "
        f"{'/seq':>6} {'/comp':>6} {'error':>8}{'model':>8}{'s':>6} what was kept"
    )
    rows = []
    for each in wanted:
        if time.perf_counter() - began > args.total:
            print(f"{each}: no time left")
            continue
        name, dtype, batch = each.split(":")
        found = row(name, dtype, int(batch), args)
        rows.append(found)
        print(shown(found), flush=True)
        for note in found["notes"]:  # type: ignore[attr-defined]
            print(f"    {note}")
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        if args.output:
            raw = {"on": here(), "driver": driver(), "rows": rows}
            Path(args.output).write_text(json.dumps(raw, indent=1))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
