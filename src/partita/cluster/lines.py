"""Where in a TOML text each key and list element stands, so that an error can name the line.

`tomllib` gives values without positions. This walks a text that `tomllib` has accepted and so
needs to know only where things begin and end: comments, keys, strings, lists and inline tables.
"""

import re
import tomllib
from contextlib import suppress

Path = tuple[str | int, ...]

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[ \t]*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*""")
_TEXT = re.compile(
    r"\"\"\"(?:[^\\]|\\.)*?\"\"\"+|" r"'''.*?'''+|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'", re.DOTALL
)
_PLAIN = re.compile(r"[^,\]}\n#]*")


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
