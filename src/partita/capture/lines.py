"""Which line of the user's model is to blame: the innermost frame that is not PyTorch's or ours."""

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

import torch

# Folders, each with its separator: torchvision lies beside torch, and is no part of it.
_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


class SourceLine:
    """A place in a source file, shown as `model.py:12` and the code that stands there."""

    def __init__(self, file: str = "", number: int = 0) -> None:
        self.file = file
        self.number = number

    @property
    def place(self) -> str:
        """File and line number; empty if unknown."""
        return f"{self.file}:{self.number}" if self.file else ""

    @property
    def code(self) -> str:
        """What stands in that line; a stand-in if it cannot be read."""
        return linecache.getline(self.file, self.number).strip() or "a line of the model"


def of_traceback(trace: TracebackType | None) -> SourceLine:
    """The innermost line of the model in what an exception has passed through."""
    places = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(trace)]
    return _innermost(reversed(places))


def blame(error: BaseException, line: SourceLine) -> None:
    """Leave on an error, which has passed through no line of the model, the line that led to it."""
    error.line_of_model = line  # type: ignore[attr-defined]


def of_error(error: BaseException) -> SourceLine:
    """The innermost line of the model that an error has passed through, or that is to blame."""
    line = of_traceback(error.__traceback__)
    return line if line.file else getattr(error, "line_of_model", line)


def of_function(function: object) -> SourceLine:
    """Where a function begins; unknown if it is none of Python's."""
    code = getattr(function, "__code__", None)
    return SourceLine(code.co_filename, code.co_firstlineno) if code is not None else SourceLine()


def of_stack(frame: FrameType | None = None) -> SourceLine:
    """The innermost line of the model among the calls under way."""
    frames = traceback.walk_stack(frame or sys._getframe(1))
    return _innermost((outer.f_code.co_filename, number) for outer, number in frames)


def is_called_by_user(frame: FrameType | None) -> bool:
    """Did the model's own code open this context, not something within PyTorch?"""
    while frame is not None and frame.f_code.co_filename.endswith(
        ("grad_mode.py", "contextlib.py", "_contextlib.py")
    ):
        frame = frame.f_back
    return frame is not None and _is_users(frame.f_code.co_filename)


def behind_library(frame: FrameType | None) -> SourceLine:
    """The line of the model that called into Python's own library; unknown if somebody else did."""
    while frame is not None and frame.f_code.co_filename.startswith(_STANDARD):
        if "site-packages" in frame.f_code.co_filename:
            break
        frame = frame.f_back
    if frame is None or not _is_users(frame.f_code.co_filename):
        return SourceLine()
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


def of_node(stack_trace: str | None) -> SourceLine:
    """The innermost line of the model in the stack trace that an exported node carries."""
    return _innermost(reversed(places_of(stack_trace)))


def calls_under_way() -> frozenset[tuple[str, int]]:
    """File and line of every call around this one."""
    frames = traceback.walk_stack(sys._getframe(1))
    return frozenset((frame.f_code.co_filename, number) for frame, number in frames)


def without(stack_trace: str, around: frozenset[tuple[str, int]]) -> str:
    """A node's stack trace without the calls that the whole export was made in."""
    rows = stack_trace.splitlines()
    starts = [place for place, row in enumerate(rows) if row.lstrip().startswith('File "')]
    own = (place for place in starts if not around.issuperset(places_of(rows[place])))
    return "\n".join(rows[next(own, len(rows)) :])


def places_of(stack_trace: str | None) -> list[tuple[str, int]]:
    """File and line of every call in the stack trace that an exported node carries."""
    places = []
    for line in (stack_trace or "").splitlines():
        parts = line.strip().split('"')
        if len(parts) == 3 and parts[0] == "File ":
            number = parts[2].removeprefix(", line ").split(",")[0]
            if number.isdecimal():
                places.append((parts[1], int(number)))
    return places


def _innermost(places: Iterable[tuple[str, int]]) -> SourceLine:
    """The first of the model's own lines; one without a file only where there is no other.

    The methods that dataclasses get are compiled from a string: whoever calls them has the line.
    """
    without_file = SourceLine()
    for file, number in places:
        if _is_users(file):
            if not file.startswith("<"):
                return SourceLine(file, number)
            if not without_file.file:
                without_file = SourceLine(file, number)
    return without_file


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return file in ("<stdin>", "<string>") or file.startswith("<ipython")
    if file.startswith((_TORCH, _OURS)):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file
