"""A trial: what may fail badly runs in a process of its own, where a fault costs the trial alone.

An illegal memory access or a program that waits for ever takes the whole CUDA context of its
process with it. So a search runs its candidates for the first time in a child: the module goes
there through a file, what was decided comes back as JSON, and only what ran there without a fault
is built here. A child that does not end in time is asked to stop (Ctrl-C: it keeps the best so
far), then ended.

The file has the module itself where the child can import its classes, else (classes of a script, of
a notebook, of a function) the program that `torch.export` makes of it.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.gpu.choose import said
from partita.gpu.flow.export import exported_program

T = torch.Tensor
Work = Callable[[nn.Module, tuple[T, ...], Mapping[str, Any]], Any]
GRACE_S = 10.0  # between asking a child to stop and ending it


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial gave, or why it gave nothing."""

    value: Any = None
    failure: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A module on its way to a child, and the module that names things as the child does."""

    path: Path
    module: nn.Module


def pack(module: nn.Module, inputs: tuple[T, ...], folder: Path) -> Parcel:
    """Write a module and its inputs where children can read them."""
    path = folder / "module.pt"
    if _is_importable(module):
        with suppress(Exception):  # something in it cannot be written: a lambda, a lock, a file
            torch.save({"module": module, "inputs": inputs}, path)
            return Parcel(path, module)
    program = exported_program(module, inputs)
    torch.export.save(program, folder / "program.pt2")
    torch.save({"program": "program.pt2", "inputs": inputs}, path)
    return Parcel(path, program.module())


def _is_importable(module: nn.Module) -> bool:
    """Will another process find the classes of all parts under their names?"""
    for each in module.modules():
        kind = type(each)
        home = sys.modules.get(kind.__module__)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__ or home is None:
            return False
        if getattr(home, "__file__", None) is None:
            return False
    return True


def unpack(path: Path) -> tuple[nn.Module, tuple[T, ...]]:
    """What `pack` wrote."""
    value = torch.load(path, weights_only=False)
    if "module" in value:
        return value["module"], value["inputs"]
    return torch.export.load(path.parent / value["program"]).module(), value["inputs"]


def run_trial(work: str, parcel: Parcel, options: Mapping[str, Any], limit_s: float) -> TrialResult:
    """Run `package.module:function` of a module, its inputs and options in a child."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        order, answer = Path(folder) / "order.json", Path(folder) / "answer.json"
        order.write_text(
            json.dumps(
                {"work": work, "parcel": str(parcel.path), "options": dict(options),
                 "answer": str(answer), "path": sys.path}
            )
        )  # fmt: skip
        failure = _run_child([sys.executable, "-m", "partita.gpu.trial", str(order)], limit_s)
        seconds = time.perf_counter() - began
        if answer.exists():
            told = json.loads(answer.read_text())
            return TrialResult(told.get("value"), told.get("failure", ""), seconds)
    return TrialResult(failure=failure or "ended without an answer", seconds=seconds)


def _run_child(command: list[str], limit_s: float) -> str:
    """Why a child failed, or nothing; it never outlives its limit and a short grace."""
    path = os.pathsep.join(each for each in sys.path if each)
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=GRACE_S)
        return f"did not end within {limit_s:.0f} s"
    finally:
        if child.poll() is None:
            _end(child)
    if child.returncode == 0:
        return ""
    if child.returncode < 0:
        return f"ended by {signal.Signals(-child.returncode).name}"
    return (errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1][:200]


def _end(child: "subprocess.Popen[str]") -> None:
    """End a child and the compilers that it started: the group of processes that is its own."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def main(order_path: str) -> None:
    """In the child: do what the order says, and write the answer."""
    # Started from a shell's background, a process is deaf to the signal that asks it to stop.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    order = json.loads(Path(order_path).read_text())
    sys.path[:] = list(dict.fromkeys([*order["path"], *sys.path]))
    answer = Path(order["answer"])
    try:
        place, _, name = order["work"].partition(":")
        work: Work = getattr(importlib.import_module(place), name)
        module, inputs = unpack(Path(order["parcel"]))
        told = {"value": work(module, inputs, order["options"])}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a fault that nobody has heard of yet is this trial's
    except KeyboardInterrupt:
        told = {"failure": "was stopped before it had anything"}
    except Exception as error:
        traceback.print_exc()
        told = {"failure": said(error, 200)}
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(told))
    part.rename(answer)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # a broken CUDA context would fail again in the destructors
