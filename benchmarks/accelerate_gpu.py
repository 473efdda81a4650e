"""`partita.accelerate` of models outside the zoo, beside every peer, whole calls in one run.

    python benchmarks/accelerate_gpu.py decoder experts --seconds 40 --json out.json
    python benchmarks/accelerate_gpu.py decoder --streams       the search over streams by itself

`decoder` is one token of a transformer (8 layers, 768 wide, f16) whose cache of 512 rows is 16
inputs; `experts` are 12 MLPs of unlike widths.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))


class Experts(nn.Module):
    """MLPs of unlike widths side by side, added up."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 64 * n), nn.GELU(), nn.Linear(64 * n, 256))
            for n in range(1, 13)
        )

    def forward(self, x):
        """The sum of all."""
        return sum(part(x) for part in self.parts)


def made(name):
    """A model in f16 on the GPU, and its inputs."""
    torch.manual_seed(0)
    if name == "decoder":
        from decoder_modules import decoder

        module, inputs = decoder(layers=8, width=768, heads=12, rows=512)
    else:
        module, inputs = Experts().eval(), (torch.randn(1, 256),)
    return module.cuda().half(), tuple(each.cuda().half() for each in inputs)


def main(arguments):
    """Accelerate, call with other inputs, print."""
    import partita

    results = []
    for name in arguments.models:
        module, inputs = made(name)
        began = time.perf_counter()
        if arguments.streams:
            fast = partita.streams(module, inputs, time_s=arguments.seconds, compile=False)
            print(name, fast.schedules[0].times_us)
        else:
            fast = partita.accelerate(module, inputs, time_s=arguments.seconds)
            print(fast.report(), flush=True)
            results.append({"name": name, **fast.report().to_json()})
        torch.cuda.synchronize()
        print(f"{name}: {time.perf_counter() - began:.0f} s in all")
        other = tuple(torch.randn_like(each) for each in inputs)
        with torch.no_grad():
            wanted = torch.utils._pytree.tree_leaves(module(*other))
        computed = torch.utils._pytree.tree_leaves(fast(*other))
        for mine, theirs in zip(computed, wanted, strict=True):
            assert (mine.double() - theirs.double()).norm() <= 2e-2 * theirs.double().norm()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["decoder", "experts"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--json")
    main(parser.parse_args())
