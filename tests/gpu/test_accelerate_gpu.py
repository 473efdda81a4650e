"""On a GPU: a decoder whose cache is its inputs goes through every search without a fault.

In a process of its own: what this is about once took the whole process down.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HERE = Path(__file__).parents[2]
SCRIPT = HERE / "benchmarks" / "accelerate_gpu.py"


@pytest.mark.parametrize("extra", [["--streams"], []], ids=["streams", "accelerate"])
def test_a_decoder_with_its_cache_as_inputs_is_right_and_not_slower(extra):
    path = os.pathsep.join([str(HERE / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "decoder", "--seconds", "15", *extra],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
