"""The commands of the documents: found where they stand, and run as they would be pasted.

A fence of `sh` is run by the suite, page by page. All others (lines of other fences, indented
lines, whole commands inside a sentence) take minutes together: the suite reads them as the
command line does, so that an option that is not there is found, and `scripts/doc-commands` runs
them (`tests/every_doc_command.py`). Of a command that a sentence only mentions (`partita solve`)
the command and its options must exist.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from click.testing import CliRunner, Result

from partita.cli import partita

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
LINE = re.compile(r"(?:\$ )?((?:partita|torchrun)\b.*)")
SPOKEN = re.compile(r"`((?:partita|torchrun) [^`\n]+)`")
NO_SHELL = ("python", "toml", "json", "sh")  # fences of `sh` are another list
LINKED = ("examples", "docs", "tests")


@dataclass(frozen=True)
class Written:
    """One command as its page has it, word by word; a line of its own, or inside a sentence."""

    text: str
    words: tuple[str, ...]
    is_spoken: bool = False

    @property
    def asks_partita(self) -> tuple[str, ...]:
        """What partita is told; torchrun's own words are left out."""
        return self.words[self.words.index("partita") + 1 :]

    @property
    def is_whole(self) -> bool:
        """Does it say all that the command needs?"""
        try:
            check_words(self.asks_partita)
        except click.exceptions.Exit:  # --help
            return True
        except click.ClickException:
            return False
        return "..." not in self.text


def commands(page: Path) -> list[str]:
    """The lines of a page's fences of `sh`."""
    fences = [text for name, text in FENCE.findall(page.read_text()) if name == "sh"]
    return [line for text in fences for line in text.splitlines() if line.strip()]


def other_commands(page: Path) -> list[Written]:
    """All other commands of a page, in its order; those in sentences come last."""
    text = page.read_text()
    bodies = [body for name, body in FENCE.findall(text) if name not in NO_SHELL]
    prose = FENCE.sub("", text)
    indented = [line[4:] for line in prose.splitlines() if line.startswith("    ")]
    lines = [line.strip() for body in (*bodies, "\n".join(indented)) for line in body.splitlines()]
    whole = [match[1] for line in lines if (match := LINE.fullmatch(line))]
    spoken = dict.fromkeys(SPOKEN.findall(prose))
    return [*_written(whole, False), *_written(spoken, True)]


def _written(lines: list[str] | dict[str, None], is_spoken: bool) -> Iterator[Written]:
    for line in lines:
        for part in line.split(" && "):
            words = shlex.split(part.replace("\\|", "|"), comments=True)
            if "partita" in words and "|" not in words:
                yield Written(shlex.join(words), tuple(words), is_spoken)


def enter(folder: Path, monkeypatch) -> None:
    """Go to a folder that looks like the repository's root and may be written."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)


def run(line: str) -> Result:
    """Run a line as a shell would start it, in this process."""
    words = shlex.split(line, comments=True)
    assert words[0] == "partita", line
    return CliRunner().invoke(partita, words[1:], prog_name="partita")


def check_words(words: tuple[str, ...]) -> None:
    """Read a command line without running it; what click refuses is raised."""
    context = click.Context(partita)
    command = command_of(words)
    command.make_context(words[0], list(words[1:]), parent=context)


def command_of(words: tuple[str, ...]) -> click.Command:
    """The command that the words begin with."""
    if words[0].startswith("-"):
        return partita
    command = partita.get_command(click.Context(partita), words[0])
    assert command is not None, f"there is no command {words[0]!r}"
    return command


def unknown_options(words: tuple[str, ...]) -> list[str]:
    """Options among the words that their command does not have."""
    known = {name for parameter in command_of(words).params for name in parameter.opts}
    known |= {name for parameter in command_of(words).params for name in parameter.secondary_opts}
    return [w for w in words if w.startswith("--") and w.split("=")[0] not in {*known, "--help"}]
