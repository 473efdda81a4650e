"""Functions that numba compiles, and keeps on disk under a name that says what they were made of.

numba keeps machine code beside the module of a function. To see whether it is still right it looks
at that module's own file only, and not before it has read an index that names classes. After an
upgrade in place such an index may name a class that is gone, so that nothing runs any more, and
code may hold constants and functions of other modules as they were. So the name under which a
function is kept has a fingerprint in it: of its module, and of all modules of this package which
that imports. What other sources have left behind is never opened.

The first use on a machine compiles, seconds for some searches: a line says so, and `work_clock`
stands still meanwhile, so that no time limit is used up by it. Where nothing can be kept (a
container whose folders are read-only) every process compiles anew, and a line says that.

Small problems need no compiling at all: a function that says up to which size it is cheap is
interpreted by Python until that took about as long as compiling would, or at once not where its
machine code lies on disk already. Both give the same numbers to the last bit, which tests check;
a function may have a `plain` twin in numpy that is used in place of loops.
"""

import functools
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

log = logging.getLogger("partita")

PACKAGE = Path(__file__).parent
DIGITS = 12  # of the fingerprint: enough for it never to come again
# Imports that are indented do not matter: nothing that is compiled can have them.
_IMPORT = re.compile(r"^(?:from|import) partita((?:\.\w+)*)(?: import (\([^)]*\)|.*))?", re.M)

GLANCE_S = 0.05  # interpreted so long before asking whether the first machine code lies on disk
PATIENCE_S = 0.7  # interpreted so long where none does: compiling takes one or two
LONG_RUN_S = 2.0  # all functions interpreted so long: a run in which compiling pays


class _Compiling:
    """How long this process has compiled, whether it does so now; how long it has interpreted."""

    seconds = 0.0
    interpreted_s = 0.0
    is_running = False  # machine code of some function: that of others is soon read
    depth = 0
    began = 0.0


class _Interpreting(threading.local):
    """Inside a function that is interpreted those that it calls are, too."""

    depth = 0


_interpreting = _Interpreting()


def work_clock() -> float:
    """Seconds of `time.perf_counter` without those in which numba compiled: what limits count."""
    now = _Compiling.began if _Compiling.depth else time.perf_counter()
    return now - _Compiling.seconds


class Compiled:
    """A function that numba compiles when it is first called, or that is interpreted while small.

    `small` is up to how many numbers in all array arguments together it may be interpreted, or a
    function of the arguments that says whether it may. `plain` does the same in numpy.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        small: int | Callable[..., bool],
        plain: Callable[..., Any] | None,
        options: dict[str, Any],
    ) -> None:
        made_of = fingerprint(Path(function.__code__.co_filename))
        function.__qualname__ = f"{function.__qualname__}_{made_of}"
        functools.update_wrapper(self, function)
        self.function, self.plain = function, plain or function
        self.small, self.options = small, options
        self.interpreted_s = 0.0
        self.is_kept: bool | None = None  # on disk; None while nobody has looked
        self.call: Callable[..., Any] = self.first if small else self.compile_and_call

    def __call__(self, *arguments: Any) -> Any:
        """Call it, compiled or not."""
        if _interpreting.depth:
            return self.plain(*arguments)
        return self.call(*arguments)

    def first(self, *arguments: Any) -> Any:
        """The calls before it is compiled."""
        if not self.is_small(arguments) or not self.has_patience():
            return self.compile_and_call(*arguments)
        import numpy as np

        began = time.thread_time()
        _interpreting.depth += 1
        try:
            with np.errstate(all="ignore"):  # as machine code: hashes wrap around, 1 / 0 is inf
                return self.plain(*arguments)
        finally:
            _interpreting.depth -= 1
            spent = time.thread_time() - began
            self.interpreted_s += spent
            _Compiling.interpreted_s += spent

    def is_small(self, arguments: tuple[Any, ...]) -> bool:
        """May a call be interpreted?"""
        if callable(self.small):
            return self.small(*arguments)
        return _numbers_in(arguments) <= self.small

    def has_patience(self) -> bool:
        """Is it still sooner done without compiling?"""
        if self.interpreted_s < GLANCE_S and not _Compiling.is_running:
            return True
        if self.is_kept is None:
            folder = getattr(self.dispatcher.stats, "cache_path", None)
            kept = f"*{self.function.__qualname__}-*.nbi"
            self.is_kept = folder is not None and any(Path(folder).glob(kept))
        is_long = _Compiling.interpreted_s >= LONG_RUN_S
        return not self.is_kept and self.interpreted_s < PATIENCE_S and not is_long

    def compile_and_call(self, *arguments: Any) -> Any:
        """From now on compiled."""
        self.call = self.dispatcher
        _Compiling.is_running = True
        return self.dispatcher(*arguments)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """What numba makes of the function; it reads or compiles code when called."""
        import numba

        _announce()
        try:
            made = numba.njit(cache=True, **self.options)(self.function)
            _bear_with_files(made._cache)
            return made
        except RuntimeError:  # numba found no folder that it may write to
            _say_that_nothing_is_kept()
            return numba.njit(**self.options)(self.function)


def _bear_with_files(cache: Any) -> None:
    """A full disk, or what others left behind and cannot be read, costs compiling, not the run."""
    load, save = cache.load_overload, cache.save_overload

    def loaded(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception:  # an index may be cut off, and unpickling fails in any way
            return None

    def saved(*arguments: Any) -> None:
        try:
            save(*arguments)
        except Exception:
            _say_that_nothing_is_kept()

    cache.load_overload, cache.save_overload = loaded, saved


def compiled(
    *,
    small: int | Callable[..., bool] = 0,
    plain: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[[Function], Function]:
    """Compile a function when it is first called; `options` are those of `numba.njit`."""

    def decorate(function: Function) -> Function:
        made: Any = Compiled(function, small, plain, options)
        return made  # type: ignore[no-any-return]

    return decorate


def _numbers_in(arguments: Iterable[Any]) -> int:
    """How many numbers arrays hold, those in tuples too."""
    total = 0
    for argument in arguments:
        if isinstance(argument, tuple):
            total += _numbers_in(argument)
        else:
            total += getattr(argument, "size", 1)
    return total


@functools.cache  # once in a process
def _say_that_nothing_is_kept() -> None:
    log.info(
        "no folder for compiled code can be written, so each run compiles anew; "
        "NUMBA_CACHE_DIR may name one"
    )


@functools.cache
def _say_that_it_compiles() -> None:
    log.info("compiling for this machine: some seconds, the first time only")


@functools.cache
def _announce() -> None:
    """Tell numba what our functions are, and listen to when it compiles."""
    from numba import types
    from numba.core import event
    from numba.extending import typeof_impl

    class Announcer(event.Listener):
        """Says once that something is compiled, and stops the clock; reading code is no news."""

        def on_start(self, event: event.Event) -> None:
            _say_that_it_compiles()
            if not _Compiling.depth:
                _Compiling.began = time.perf_counter()
            _Compiling.depth += 1

        def on_end(self, event: event.Event) -> None:
            _Compiling.depth -= 1
            if not _Compiling.depth:
                _Compiling.seconds += time.perf_counter() - _Compiling.began

    event.register("numba:compile", Announcer())  # type: ignore[no-untyped-call]

    @typeof_impl.register(Compiled)
    def _(value: Compiled, _: Any) -> Any:
        return types.Dispatcher(value.dispatcher)


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
