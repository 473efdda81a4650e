"""Which process a rank is, and whether it is still there, for those who share a machine with it.

A process is known by its number and the moment it started, since numbers are used again. Numbers
mean something only within one boot of one machine and one namespace: who lives elsewhere cannot be
looked up, and has only its signs of life. Where there is no /proc nobody can be looked up.
"""

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine or another; `home` is empty where it cannot be looked up."""

    home: str
    number: int
    started: int  # ticks since the machine booted


def this_process() -> Process:
    """Who we are."""
    number = os.getpid()
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        home = f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
        state = _state(number)
    except OSError:
        return Process("", number, 0)
    return Process("" if state is None else home, number, 0 if state is None else state[1])


def is_gone(other: Process, own: Process) -> bool:
    """Has a process that would be here ended? Of one that lives elsewhere nothing is known."""
    if not own.home or other.home != own.home:
        return False
    state = _state(other.number)
    return state is None or state[0] in "ZX" or state[1] != other.started


def _state(number: int) -> tuple[str, int] | None:
    """A process's state and the moment it started, or None if there is none of this number."""
    try:
        text = (PROC / str(number) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold anything
    return fields[0], int(fields[19])
