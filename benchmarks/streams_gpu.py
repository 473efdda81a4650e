"""Models on one GPU: partita.streams against the sequential CUDA graph and torch.compile.

    python benchmarks/streams_gpu.py --models inception_v3,nasnet_large --dtypes f16,f32 --batches 1

All candidates of one row are timed in one process in turns: whole calls, back to back, CUDA events,
medians. The models are the zoo's twins with random weights, norms set from a batch of random
images; inputs have channels last; TF32 is as PyTorch has it by default (on for convolutions), for
all alike. Column `ours` is the best of our own graphs, `kept` what partita.streams returned.
"""

import argparse
import json
import time
import warnings
from pathlib import Path

import torch

from partita.capture.twin import example_inputs, twin
from partita.run.streams.api import streams
from partita.run.streams.profile import here
from partita.zoo import build

MODELS = "inception_v3,nasnet_large,randwire,squeezenet,densenet121,resnext50"
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


def main() -> None:
    """Print the table; raw numbers go to a JSON file if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--dtypes", default="f16,f32")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per model")
    parser.add_argument("--total", type=float, default=470.0, help="seconds; later rows are left")
    parser.add_argument("--profile", help="keep measurements in this file")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("-o", "--output", help="raw numbers as JSON")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = True
    began = time.perf_counter()
    print(here())
    print(
        f"{'model':14}{'':>5}{'n':>4}{'seq us':>9}{'compile':>9}{'ours':>9}{'kept':>9} "
        f"{'/seq':>6} {'/comp':>6} {'error':>8}{'model':>8}{'s':>6} what was kept"
    )
    rows = []
    for batch in map(int, args.batches.split(",")):
        for name in args.models.split(","):
            for dtype in args.dtypes.split(","):
                if time.perf_counter() - began > args.total:
                    print(f"{name} {dtype} {batch}: no time left")
                    continue
                found = row(name, dtype, batch, args)
                rows.append(found)
                print(shown(found), flush=True)
                for note in found["notes"]:  # type: ignore[attr-defined]
                    print(f"    {note}")
                torch._dynamo.reset()
                torch.cuda.empty_cache()
                if args.output:
                    Path(args.output).write_text(json.dumps({"on": here(), "rows": rows}, indent=1))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
