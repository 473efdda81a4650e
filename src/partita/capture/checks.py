"""Checks that a model makes of its values: they are left out of what is captured.

    assert torch.all(ids >= 0).item(), "..."
    if lengths.max() > limit: raise ValueError(...)

Values are not known when a model is captured, so that such a line cannot be followed; but whatever
it asks, it changes no result, it only ends a run that would be wrong. So a tensor's truth is
decided there so that nothing is raised: True in an `assert`, False in an `if` that only raises, the
other way round behind a `not`; several conditions of which one has a `not` are not decided. Each
line that was left out is said once. So it is with checks of PyTorch's own layers, losses and
distributions.
"""

import ast
import contextlib
import functools
import linecache
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from partita.capture import lines

log = logging.getLogger("partita")
# PyTorch's own: what distributions and losses are given.
CHECKING = tuple(str(Path(torch.__file__).parent / part) for part in ("distributions", "nn"))


@contextlib.contextmanager
def passing_checks(says: bool = True) -> Iterator[None]:
    """Let checks of values pass while a model is followed, and say which."""
    said: set[tuple[str, int]] = set()

    def deciding(method: Callable[..., Any]) -> Callable[..., Any]:
        def on_truth(self: torch.Tensor) -> Any:
            frame = sys._getframe(1)
            file, number = frame.f_code.co_filename, frame.f_lineno
            wanted = None
            own = lines.is_called_by_user(frame)
            if _is_truth(self, method is item) and (own or file.startswith(CHECKING)):
                wanted = _passes(file, number)
            if wanted is None:
                return method(self)
            if says and (file, number) not in said:
                said.add((file, number))
                line = lines.SourceLine(file, number) if own else lines.of_stack()
                log.warning(
                    "%s: the check `%s` is left out of what is captured", line.place, line.code
                )
            return wanted

        return on_truth

    truth, item = torch.Tensor.__bool__, torch.Tensor.item
    torch.Tensor.__bool__ = deciding(truth)  # type: ignore[method-assign]
    torch.Tensor.item = deciding(item)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.__bool__ = truth  # type: ignore[method-assign]
        torch.Tensor.item = item  # type: ignore[method-assign]


def _is_truth(tensor: torch.Tensor, is_item: bool) -> bool:
    return tensor.numel() == 1 and (not is_item or tensor.dtype is torch.bool)


def _passes(file: str, number: int) -> bool | None:
    """The truth with which the check in this line passes; None if there is no check."""
    for first, last, wanted in _checks(file):
        if first <= number <= last:
            return wanted
    return None


@functools.lru_cache(maxsize=256)
def _checks(file: str) -> tuple[tuple[int, int, bool], ...]:
    """First line, last line and what passes, of every check in a file; inner ones first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    checks = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            checks.append((node.test, True))
        elif isinstance(node, ast.If) and not node.orelse and _only_raises(node.body):
            checks.append((node.test, False))
    spans = [
        (test.lineno, test.end_lineno or test.lineno, passes != _is_negated(test))
        for test, passes in checks
        if not isinstance(test, ast.BoolOp) or not any(map(_is_negated, test.values))
    ]
    return tuple(sorted(spans, key=lambda span: (span[1] - span[0], span)))


def _only_raises(body: list[ast.stmt]) -> bool:
    return all(isinstance(inner, ast.Raise) for inner in body)


def _is_negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
