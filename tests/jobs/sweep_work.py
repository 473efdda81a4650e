"""Work for the tests of sweeps: in a module of its own, so that other processes can import it."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from partita.errors import InputError


@dataclass(frozen=True)
class Square:
    """A number; it dies, or is refused, where that is asked for."""

    number: int
    folder: str = ""
    dies: bool = False
    refused: bool = False


def square(task: Square) -> dict[str, int]:
    if task.refused:
        raise InputError(f"found {task.number}", fix="give another")
    if task.folder:
        with (Path(task.folder) / "calls").open("a") as calls:
            calls.write(f"{task.number}\n")
    if task.dies:
        os._exit(9)
    return {"square": task.number**2}


def wait_for_ever(task: Square) -> dict[str, int]:
    """Says which process it is, and does not end."""
    with (Path(task.folder) / "calls").open("a") as calls:
        calls.write(f"{os.getpid()}\n")
    time.sleep(3600)
    return {}


def hears(task):
    """Would Ctrl-C interrupt the process that does this?"""
    return {"hears": signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
