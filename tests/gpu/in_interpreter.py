"""Python in a process of its own, in which Triton's interpreter runs the kernels: no GPU needed.

Importing PyTorch and Triton takes longer than most of what is tried, so processes with the
interpreter are forked off one that has imported them and done nothing else (`interpreter_server`).
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[2]


def _environment(**settings: str) -> dict[str, str]:
    path = os.pathsep.join(
        [str(HERE / "src"), str(HERE / "tests" / "gpu"), os.environ.get("PYTHONPATH", "")]
    )
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **settings}


def in_a_process(code: str, **settings: str) -> str:
    """What Python code prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=_environment(**settings), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache  # one for all tests of a process
def _server() -> "subprocess.Popen[str]":
    server = subprocess.Popen(
        [sys.executable, "-m", "interpreter_server"],
        env=_environment(TRITON_INTERPRET="1"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # closes what it reads: it ends
    return server


def in_interpreter(code: str, **settings: str) -> str:
    """What Python code prints that runs kernels in Triton's interpreter."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"code": code, "settings": settings, "out": str(out), "err": str(err)}
        server.stdin.write(f"{json.dumps(request)}\n")
        server.stdin.flush()
        code_at_end = server.stdout.readline()
        assert code_at_end == "0\n", err.read_text() if err.exists() else "no answer"
        return out.read_text()
