"""What the parameters of a device kind need: every rate and fixed cost, measured on this GPU.

    python benchmarks/device_kind.py --out H200.json                  # under five minutes
    python benchmarks/device_kind.py --out try.json --device cpu --quick

One record per case: its kind, shape and type, seconds in a short burst (a CUDA graph of it,
replayed), for large products also sustained for a second, and the rates that follow. A case that
fails is recorded with its error. Groups run in the order of GROUPS, the most needed first; a run
whose seconds are used up ends where it is and says what is missing. nvidia-smi writes the GPU's
clocks, power and temperature beside it twice a second (`states`).
"""

import argparse
import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import device_bytes
import device_host
import device_products
import torch
from gpu_timing import (
    Clock,
    OutOfTimeError,
    Results,
    StateLog,
    each,
    free_memory,
    machine,
    state_from,
)

GROUPS: dict[str, Callable[[Results, Clock], None]] = {
    "fixed_memory": device_host.fixed_memory,  # first: libraries must not be loaded yet
    "launches": device_host.launches,
    "graphs": device_host.graphs,
    "squares": device_products.squares,
    "layers": device_products.layers,
    "attention": device_products.attention,
    "copies": device_bytes.copies,
    "norms": device_bytes.norms,
    "elementwise": device_bytes.elementwise,
    "losses": device_bytes.losses,
    "skinny": device_products.skinny,
    "batched": device_products.batched,
    "optimizers": device_bytes.optimizers,
    "overlaps": device_bytes.overlaps,
    "compiled": device_host.compiled,
    "convolutions": device_products.convolutions,  # last: cuDNN may try algorithms for long
}


def main(arguments: list[str] | None = None) -> None:
    """Measure group by group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it all work?")
    parser.add_argument("--seconds", type=float, default=290.0, help="stop after so many")
    parser.add_argument("--groups", default="", help="only these, with commas")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler is not to talk
    gc.freeze()  # what was imported is not looked through again at every capture
    torch.manual_seed(0)
    clock = Clock(args.device, args.quick)
    results = Results(args.out, args.seconds, {"script": "device_kind", "quick": args.quick})
    groups = each(GROUPS, args.groups)
    log = args.out.with_suffix(".smi")
    with StateLog(log) as states:
        for number, name in enumerate(groups):
            began = results.elapsed_s
            try:
                GROUPS[name](results, clock)
            except OutOfTimeError:
                for missing in groups[number:]:
                    results.skip(missing, "out of time; a part of it may be there")
                print(f"out of time: {', '.join(groups[number:])} missing", flush=True)
                break
            except Exception as error:  # of the group itself: go on with the next
                results.skip(name, f"{type(error).__name__}: {error}"[:500])
                print(f"group {name} ended: {error}", flush=True)
            free_memory(thoroughly=True)
            if number == 0:
                results.value["machine"] = machine()
            print(f"group {name}: {results.elapsed_s - began:.1f} s", flush=True)
        states.__exit__()
    if log.is_file():
        results.value["states"] = [state_from(line) for line in log.read_text().splitlines()]
        log.unlink()
    results.finish()
    failed = sum("error" in record for record in results.value["records"])
    print(f"{len(results.value['records'])} records, {failed} failed, {results.elapsed_s:.0f} s")


if __name__ == "__main__":
    main()
