"""What every command shares: `--json`, `--seed`, `--quiet`, an output file, and a running search.

    @click.command()
    @click.argument("problem")
    @output_option("Write the result here.")
    @common_options
    def command(problem: str, output: OutputFile | None, out: Output) -> int:
        with out.stop(time_s=10) as stop:
            result = search(problem, stop, out.seed)
        if output is not None:
            out.save(output, lambda: files.encode_json(result))  # a full disk loses the file alone
        out.show(...)           # for people
        out.result({...})       # for --json
        return 0 if result.solution else 1

What a command returns is its exit code (None is 0); after Ctrl-C it is 130 instead.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from partita import files, units
from partita.cli import INTERRUPTED
from partita.cli.counted import Counted, counted
from partita.cli.fitted import fitted, room
from partita.cli.progress import Interrupt, shown
from partita.errors import FileError
from partita.search.base import Stop
from partita.suggest import suggest
from partita.units import number

__all__ = [
    "Output", "OutputFile", "common_options", "output_option", "refuse_twice", "suggest",
]  # fmt: skip

NO_JSON = (
    ".svg", ".html", ".htm", ".png", ".jpg", ".jpeg", ".gif", ".pdf", ".csv", ".txt", ".md", ".py",
    ".pickle", ".onnx", ".pt", ".toml", ".yaml", ".yml",
)  # fmt: skip
PAGE = (".html", ".htm")
MAX_SEED = 2**32 - 1  # what every random generator we use accepts

Command = Callable[..., int | None]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write at the end. What is there already is kept unless `force`."""

    path: Path
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse before the work begins what would be refused after it."""
        name = str(self.path)
        if name == "-":
            raise FileError("is not a file", fix="name a file; --json prints to stdout", file=name)
        if self.path.is_dir():
            raise FileError("is a folder", fix="name a file in it", file=name)
        if self.path.exists() and not self.force:
            raise FileError("exists already", fix="choose another name or add --force", file=name)
        if not self.path.parent.is_dir():
            raise FileError("its folder does not exist", fix="make the folder first", file=name)
        if not files.can_hold_files(self.path.parent):
            raise FileError("its folder cannot be written", fix="choose another place", file=name)

    def ending(self, known: Iterable[str]) -> str:
        """Which of the known endings the name has, the longest first; others are refused."""
        endings = tuple(known)
        for ending in sorted(endings, key=len, reverse=True):
            if self.path.name.lower().endswith(ending):
                return ending
        raise FileError(
            f"has an ending that says nothing: {self.path.suffix or 'none'}",
            fix=f"end the name in one of {', '.join(endings)}",
            file=str(self.path),
        )

    def check_json(self) -> None:
        """Refuse an ending that promises something else than JSON, which is all that is written."""
        if self.path.suffix.lower() in NO_JSON:
            raise FileError(
                f"ends in {self.path.suffix}, and what is written is JSON",
                fix="end the name in .json; partita report draws plans",
                file=str(self.path),
            )

    def check_page(self) -> None:
        """Refuse an ending that promises something else than a page."""
        self.ending(PAGE)

    def write(self, data: bytes | str) -> Path:
        """Write all of it or nothing."""
        return files.write_atomically(self.path, data, overwrite=self.force)


def refuse_twice(*outputs: OutputFile | Path | None) -> None:
    """Refuse two outputs of one name: the second would find the first, after all the work."""
    seen: set[Path] = set()
    for output in outputs:
        path = output.path if isinstance(output, OutputFile) else output
        if path is not None and path.resolve() in seen:
            raise FileError("is named for two outputs", fix="give each its own", file=str(path))
        seen |= set() if path is None else {path.resolve()}


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's words go: answers to stdout, everything else to stderr."""

    json: bool = False
    quiet: bool = False
    seed: int = 0
    _results: list[dict[str, Any]] = field(default_factory=list, repr=False, compare=False)
    _interrupt: Interrupt = field(default_factory=Interrupt, repr=False, compare=False)
    _unsaved: list[str] = field(default_factory=list, repr=False, compare=False)

    @property
    def width(self) -> int:
        """Columns that answers may take: the terminal's, within reason; 100 without one."""
        return room() or 100

    def show(self, text: str) -> None:
        """Print an answer for people, as wide as their terminal; nothing under `--json`."""
        if not self.json:
            width = room()
            click.echo(text if width is None else fitted(text, width))

    def result(self, data: dict[str, Any]) -> None:
        """The answer for programs: under `--json` the one object printed when the command ends."""
        assert not self._results, "a command has one result"
        assert "format" in data, "a result says its format"
        self._results.append(data)

    def save(self, target: OutputFile, make: Callable[[], bytes | str]) -> Path | None:
        """Write what was found, or a picture, a trace or another form of it; None where that fails.

        Then one line says why, all else of the answer is given, and the exit code is 2.
        """
        return self.keep(target.path, lambda: target.write(make()))

    def keep(self, path: Path, write: Callable[[], object]) -> Path | None:
        """The same where something else than an output file writes it."""
        try:
            write()
        except Exception as error:
            self._unsaved.append(str(path))
            said = str(error).removeprefix(f"{path}: ")
            click.echo(f"error: {path} is not written: {said}", err=True)
            return None
        return path

    def note(self, text: str) -> None:
        """Say something on the side, unless `--quiet`."""
        if not self.quiet:
            click.echo(text, err=True)

    @property
    def interrupted(self) -> bool:
        """Was Ctrl-C pressed during a search? Then what is written is the best so far."""
        return self._interrupt.asked

    @contextmanager
    def stop(
        self,
        time_s: float | None = None,
        gap: float = 0.0,
        target: float | None = None,
        evaluations: int | None = None,
        words: Callable[[float], str] = number,
    ) -> Iterator[Stop]:
        """The stop rule to hand to a search: the given limits and Ctrl-C; shows improvements.

        `words` says an objective as people read it: `partita.units.seconds`, say.
        """
        with self._interrupt.listening(self.quiet), shown(self.quiet, words, time_s) as view:

            def interrupted() -> bool:
                if view is not None:
                    view.tick()
                return self.interrupted

            yield Stop(time_s, gap, target, evaluations, interrupted, view)

    @contextmanager
    def parts(self, what: str, total: int) -> Iterator[Counted]:
        """What to tell of each of many parts; Ctrl-C ends them with those that are there.

        `tick` is to be asked between them, as `interrupted` is.
        """
        with self._interrupt.listening(self.quiet), counted(self.quiet, what, total) as view:
            yield view

    def _close(self, code: int | None) -> int:
        if self.json:
            assert self._results, "a command under --json gives its result"
            click.echo(files.encode_json(self._results[0]), nl=False)
        return INTERRUPTED if self.interrupted else code or (2 if self._unsaved else 0)


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or int(text) > MAX_SEED:
        raise click.BadParameter(f"found {text!r}, a whole number of 0 to {MAX_SEED:,} is needed")
    return int(text)


def common_options(command: Command) -> Command:
    """Add `--json`, `--seed` and `--quiet`, handed to the command as `out: Output`."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
    @click.option(
        "--seed",
        metavar="N",
        type=_seed,
        default="0",
        help="Same seed, same answer; 0 if not given.",
    )
    @click.option("--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")
    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool, seed: int, quiet: bool, **options: Any) -> None:
        out = Output(json=as_json, quiet=quiet, seed=seed)
        with _warnings_noted(out), units.fitting(room()):
            code = out._close(command(*args, out=out, **options))
        click.get_current_context().exit(code)

    return wrapped


@contextmanager
def _warnings_noted(out: Output) -> Iterator[None]:
    """The library logs; here its warnings and what it says on its way become notes."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
            out.note(f"{prefix}{record.getMessage()}")

    log, notes = logging.getLogger("partita"), Notes(logging.INFO)
    level = log.level
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(notes)


def output_option(
    text: str, *, default: str | None = None, required: bool = False, only_json: bool = False
) -> Callable[[Command], Command]:
    """Add `-o/--output FILE` and `--force`, handed on as `output: OutputFile | None`."""

    def decorate(command: Command) -> Command:
        @click.option(
            "-o",
            "--output",
            "output_path",
            metavar="FILE",
            default=default,
            required=required,
            show_default=default is not None,
            help=text,
        )
        @click.option("--force", is_flag=True, help="Overwrite the output file.")
        @functools.wraps(command)
        def wrapped(*args: Any, output_path: str | None, force: bool, **options: Any) -> int | None:
            output = None if output_path is None else OutputFile(Path(output_path), force)
            if output is not None and only_json:
                output.check_json()
            return command(*args, output=output, **options)

        return wrapped

    return decorate
