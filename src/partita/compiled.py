"""Functions that numba compiles, and keeps on disk under a name that says what they were made of.

numba keeps machine code beside the module of a function. To see whether it is still right it looks
at that module's own file only, and not before it has read an index that names classes. After an
upgrade in place such an index may name a class that is gone, so that nothing runs any more, and
code may hold constants and functions of other modules as they were. So the name under which a
function is kept has a fingerprint in it: of its module, and of all modules of this package which
that imports. What other sources have left behind is never opened.

The first use on a machine compiles, seconds for some searches: a line says so. Where nothing can be
kept (a container whose folders are read-only) every process compiles anew, and a line says that.
"""

import functools
import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., Any])

log = logging.getLogger("partita")

PACKAGE = Path(__file__).parent
DIGITS = 12  # of the fingerprint: enough for it never to come again
# Imports that are indented do not matter: nothing that is compiled can have them.
_IMPORT = re.compile(r"^(?:from|import) partita((?:\.\w+)*)(?: import (\([^)]*\)|.*))?", re.M)


def compiled(**options: Any) -> Callable[[Function], Function]:
    """Compile a function when it is first called; `options` are those of `numba.njit`."""

    def decorate(function: Function) -> Function:
        made_of = fingerprint(Path(function.__code__.co_filename))
        function.__qualname__ = f"{function.__qualname__}_{made_of}"
        _announce()
        try:
            dispatcher: Function = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # numba found no folder that it may write to
            _say_that_nothing_is_kept()
            dispatcher = numba.njit(**options)(function)
        return dispatcher

    return decorate


@functools.cache  # once in a process
def _say_that_nothing_is_kept() -> None:
    log.info(
        "no folder for compiled code can be written, so each run compiles anew; "
        "NUMBA_CACHE_DIR may name one"
    )


class _Announcer(event.Listener):
    """Says once in a process that something is compiled; what is read from disk is no news."""

    def on_start(self, event: event.Event) -> None:
        _say_that_it_compiles()

    def on_end(self, event: event.Event) -> None:
        """Nothing to say."""


@functools.cache
def _say_that_it_compiles() -> None:
    log.info("compiling for this machine: some seconds, the first time only")


@functools.cache
def _announce() -> None:
    event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]


def fingerprint(file: Path, package: Path = PACKAGE) -> str:
    """Of a module's text and that of all modules of the package which it imports, at any depth."""
    known: dict[Path, bytes] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path not in known:
            known[path], imported = _read(path, package, *_stamp(path))
            waiting.extend(imported)
    digest = hashlib.sha256()
    for path in sorted(known):
        digest.update(path.name.encode() + b"\0" + known[path])
    return digest.hexdigest()[:DIGITS]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:  # not a file of its own: then numba keeps nothing of it either
        return 0, -1
    return status.st_mtime_ns, status.st_size


@functools.cache  # most functions of a folder need the same files
def _read(
    path: Path, package: Path, modified_ns: int, size_bytes: int
) -> tuple[bytes, tuple[Path, ...]]:
    """The digest of a file, and the files of the package that it imports."""
    if size_bytes < 0:
        return b"", ()
    text = path.read_bytes()
    imported: list[Path] = []
    for module, names in _IMPORT.findall(text.decode(errors="replace")):
        place = package.joinpath(*module.split("."))
        candidates = [place.with_suffix(".py"), place / "__init__.py"]
        # `from partita.search import sharding` may mean a module.
        candidates += [place / f"{name}.py" for name in re.findall(r"\w+", names)]
        imported.extend(candidate for candidate in candidates if candidate.is_file())
    return hashlib.sha256(text).digest(), tuple(imported)
