"""`partita.rtasks` on a GPU: the model's numbers, never slower than the sequential graph.

Each model runs in a process of its own with a time limit: a kernel that waits for ever would hold
the device, and everything after it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

HERE = Path(__file__).parents[2]
LIMIT_S = 240
CODE = """
import sys
import torch
import partita
from rtasks_modules import examples
from torch import nn

name, dtype = sys.argv[1], getattr(torch, sys.argv[2])
if name == "layers":
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(32, 64), nn.Linear(128, 16)
            self.layers = nn.LSTM(64, 64, 2, bidirectional=True)

        def forward(self, x):
            return self.two(self.layers(torch.relu(self.one(x)))[0])

    module, inputs = Layers().eval(), (torch.randn(20, 1, 32),)
else:
    module, inputs = examples()[name]
module = module.cuda().to(dtype)
inputs = tuple(each.cuda().to(dtype) for each in inputs)
fused = partita.rtasks(module, inputs)
report = fused.report()
print(report)
assert report.used_us <= report.sequential_us
assert all(each.kept == (each.fused_us < each.unfused_us) for each in report.regions)
other = tuple(torch.randn_like(each) for each in inputs)
least = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]  # TF32 inside
for _ in range(50):
    found = torch.utils._pytree.tree_leaves(fused(*other))
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(module(*other))
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.double() - theirs.double()).norm() <= least * theirs.double().norm()
"""


CASES = [
    *((name, "float32") for name in ("mlp, 20 rows", "block", "cells", "wide", "lenet", "layers")),
    *((name, dtype) for name in ("mlp", "nasnet") for dtype in ("float16", "bfloat16")),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_it_is_called_like_the_model_and_not_slower_than_the_graph(name, dtype):
    path = os.pathsep.join(
        [str(HERE / "src"), str(HERE / "tests" / "gpu"), os.environ.get("PYTHONPATH", "")]
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", CODE, name, dtype],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.fail(f"{name} in {dtype} did not end within {LIMIT_S} s: a program waits for ever")
    assert done.returncode == 0, done.stdout + done.stderr
