"""Python in a process of its own, in which Triton's interpreter runs the kernels: no GPU needed."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]

# The interpreter does every sum and product of integers once more, in 64 bits, and compares; what
# comes out is looked at in debug mode only. That is half of the time of small kernels.
BEGIN = """
from dataclasses import replace
from triton.runtime.interpreter import interpreter_builder
if not interpreter_builder.options.debug:
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
"""


def in_a_process(code: str, **settings: str) -> str:
    """What Python code prints."""
    path = os.pathsep.join(
        [str(HERE / "src"), str(HERE / "tests" / "gpu"), os.environ.get("PYTHONPATH", "")]
    )
    everything = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **settings}
    done = subprocess.run(
        [sys.executable, "-c", code], env=everything, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_interpreter(code: str, **settings: str) -> str:
    """What Python code prints that runs kernels in Triton's interpreter."""
    return in_a_process(BEGIN + code, TRITON_INTERPRET="1", **settings)
