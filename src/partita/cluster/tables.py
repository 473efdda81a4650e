"""The tables of a TOML text, read with care: every complaint names file, line and field.

`tomllib` gives values without positions. `lines_of` walks a text that `tomllib` has accepted and so
needs to know only where things begin and end: comments, keys, strings, lists and inline tables.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import cached_property
from typing import Any, NoReturn

from partita.cluster.record import shown
from partita.errors import ClusterError, FileError
from partita.suggest import suggest

Path = tuple[str | int, ...]

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[ \t]*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*""")
_TEXT = re.compile(
    r"\"\"\"(?:[^\\]|\\.)*?\"\"\"+|" r"'''.*?'''+|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'", re.DOTALL
)
_PLAIN = re.compile(r"[^,\]}\n#]*")
MAX_CHARACTERS = 64 * 2**20


def lines_of(text: str) -> dict[Path, int]:
    """Line numbers, from 1, by path such as `("nodes", 0, "nics", "count")`."""
    walk = _LineWalk(text)
    with suppress(ValueError, RecursionError):  # not what tomllib accepts: give what was found
        walk.document()
    return walk.lines


def nearest_line(lines: dict[Path, int], path: Path) -> int:
    """The line of the path, or of the nearest table around it; 0 if there is none."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return 0


class _LineWalk:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.lines: dict[Path, int] = {}
        self.last: dict[Path, int] = {}  # arrays of tables: index of the newest

    def document(self) -> None:
        table: Path = ()
        while True:
            self.skip(_SPACE)
            if self.at >= len(self.text):
                return
            if self.text.startswith("[", self.at):
                table = self.header()
            else:
                self.pair(table)

    def header(self) -> Path:
        line = self.line
        many = self.text.startswith("[[", self.at)
        self.at += 2 if many else 1
        keys = self.keys()
        self.at += 2 if many else 1
        path: Path = (*self.inside((), keys[:-1]), keys[-1])
        if many:
            self.lines.setdefault(path, line)
            self.last[path] = self.last.get(path, -1) + 1
        path = self.inside(path[:-1], keys[-1:])
        self.lines.setdefault(path, line)
        return path

    def inside(self, start: Path, keys: list[str]) -> Path:
        """The path of the keys, with the newest element of each array of tables on the way."""
        path = start
        for key in keys:
            path += (key,)
            if path in self.last:
                path += (self.last[path],)
        return path

    def pair(self, table: Path) -> None:
        line = self.line
        path = table
        for key in self.keys():
            path += (key,)
            self.lines.setdefault(path, line)
        self.expect("=")
        self.skip(_SPACE)
        self.value(path)

    def keys(self) -> list[str]:
        keys = []
        while True:
            raw = self.skip(_KEY).strip()
            if not raw:
                raise ValueError("a key was expected")
            keys.append(tomllib.loads(f"k = {raw}")["k"] if raw[0] in "\"'" else raw)
            if not self.text.startswith(".", self.at):
                return keys
            self.at += 1

    def value(self, path: Path) -> None:
        self.lines.setdefault(path, self.line)
        first = self.text[self.at : self.at + 1]
        if first == "[":
            self.elements(path)
        elif first == "{":
            self.inline(path)
        elif first in ("'", '"'):
            if not self.skip(_TEXT):
                raise ValueError("a string was expected")
        else:
            self.skip(_PLAIN)

    def elements(self, path: Path) -> None:
        self.at += 1
        index = 0
        while True:
            self.skip(_SPACE)
            if self.text.startswith("]", self.at):
                self.at += 1
                return
            self.value((*path, index))
            index += 1
            self.skip(_SPACE)
            if self.text.startswith(",", self.at):
                self.at += 1
            elif not self.text.startswith("]", self.at):
                raise ValueError("the list does not end")

    def inline(self, path: Path) -> None:
        self.at += 1
        while True:
            self.skip(_SPACE)
            if self.text.startswith("}", self.at):
                self.at += 1
                return
            self.pair(path)
            self.skip(_SPACE)
            if self.text.startswith(",", self.at):
                self.at += 1
            elif not self.text.startswith("}", self.at):
                raise ValueError("the inline table does not end")

    def expect(self, character: str) -> None:
        if not self.text.startswith(character, self.at):
            raise ValueError(f"{character} was expected")
        self.at += 1

    def skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        self.line += match.group().count("\n")
        return match.group()


class Document:
    """A TOML text with its name; lines are counted only when something is wrong."""

    def __init__(self, text: str, file: str = "") -> None:
        self.text = text
        self.file = file

    def root(self) -> "TomlTable":
        """The whole text as one table."""
        if len(self.text) > MAX_CHARACTERS:
            raise FileError(
                f"has {len(self.text):,} characters",
                fix=f"at most {MAX_CHARACTERS:,} are read as TOML; save it as JSON",
                file=self.file,
            )
        try:
            values = tomllib.loads(self.text)
        except RecursionError:
            raise FileError("is nested too deeply for a cluster file", file=self.file) from None
        except ValueError as error:  # TOMLDecodeError is one; so is a number of 5,000 digits
            raise FileError(
                f"is not TOML ({error})", fix="correct that line", file=self.file
            ) from None
        return TomlTable(values, self)

    @cached_property
    def lines(self) -> dict[Path, int]:
        """Line numbers by path."""
        return lines_of(self.text)

    def error(self, path: Path, wrong: str, fix: str) -> ClusterError:
        """The complaint about what stands at this path."""
        line = nearest_line(self.lines, path)
        where = ", ".join(part for part in (f"line {line}" if line else "", spelled(path)) if part)
        return ClusterError(wrong, fix=fix, field=where, file=self.file)


class TomlTable:
    """One table: ask it for its keys by type, then `close` it to refuse the keys not asked for."""

    def __init__(self, values: Mapping[str, Any], document: Document, path: Path = ()) -> None:
        self.values = values
        self.document = document
        self.path = path
        self.asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self.asked.add(key)
        return key in self.values

    def fail(self, wrong: str, fix: str, *keys: str | int) -> NoReturn:
        """Complain about this table, or about what stands at the keys in it."""
        raise self.document.error((*self.path, *keys), wrong, fix)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Add this table's place to what a record has to say about its values."""
        try:
            yield
        except ClusterError as error:
            if error.file or error.field.startswith("line "):
                raise
            about = f"{error.field}: " if error.field else ""
            raise self.document.error(self.path, f"{about}{error.found}", error.fix) from None

    def close(self) -> None:
        """Refuse keys that nobody has asked for."""
        for key in self.values:
            if key not in self.asked:
                self.fail(f"unknown key {key!r}", suggest(key, self.asked), key)

    def get(self, key: str) -> Any:
        """The value as it is, or None."""
        return self.values.get(key) if key in self else None

    def text(self, key: str, default: str | None = None) -> str:
        """A text; required without a default."""
        value = self._present(key, default is not None)
        if value is None:
            return default or ""
        if not isinstance(value, str):
            self.fail(f"found {shown(value)}", "text in quotes is needed", key)
        return value

    def texts(self, key: str) -> list[str]:
        """A text, or a list of them; none if the key is absent."""
        value = self.get(key)
        if value is None:
            return []
        values = value if isinstance(value, list) else [value]
        for index, item in enumerate(values):
            if not isinstance(item, str):
                place = (key, index) if isinstance(value, list) else (key,)
                self.fail(f"found {shown(item)}", "text in quotes is needed", *place)
        return values

    def whole(self, key: str, default: int | None = None, least: int = 0, most: int = 2**62) -> int:
        """A whole number; required without a default."""
        value = self._present(key, default is not None)
        if value is None:
            return default or 0
        if type(value) is not int or not least <= value <= most:
            self.fail(f"found {shown(value)}", f"a whole number from {least} to {most:,}", key)
        return value

    def flag(self, key: str) -> bool:
        """True or false; false if absent."""
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.fail(f"found {shown(value)}", "true or false is needed", key)
        return value

    def quantity(self, units: Mapping[str, str], positive: bool = True) -> Decimal | None:
        """The one of these keys that is given, times its unit; None if none is."""
        given = [key for key in units if key in self]
        if not given:
            return None
        if len(given) > 1:
            self.fail(f"{given[0]} is given as {given[1]} too", "give one of them", given[1])
        key = given[0]
        value = self.number(key, positive)
        return value * Decimal(units[key])

    def number(self, key: str, positive: bool = True) -> Decimal:
        """A finite number, as the decimal that was written."""
        value = self._present(key, False)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not abs(value) < 1e300 or value < 0 or (positive and value == 0):
            needed = "above 0" if positive else "of 0 or more"
            self.fail(f"found {shown(value)}", f"a finite number {needed} is needed", key)
        return Decimal(repr(float(value))) if isinstance(value, float) else Decimal(value)

    def table(self, key: str) -> "TomlTable":
        """A table; an empty one if absent."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.fail(f"found {shown(value)}", f"a table [{key}] is needed", key)
        return TomlTable(value, self.document, (*self.path, key))

    def tables(self, key: str) -> list["TomlTable"]:
        """A list of tables; none if absent."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fail(f"found {shown(value)}", f"tables [[{key}]] are needed", key)
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                self.fail(f"found {shown(item)}", f"tables [[{key}]] are needed", key, index)
        return [
            TomlTable(item, self.document, (*self.path, key, index))
            for index, item in enumerate(value)
        ]

    def _present(self, key: str, optional: bool) -> Any:
        if key not in self and not optional:
            self.fail(f"{key} is missing", "add it")
        return self.values.get(key)


def spelled(path: Path) -> str:
    """`nodes[0].nics.count` for `("nodes", 0, "nics", "count")`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part[:60]}" if text else part[:60]
    return text
