"""The commands of the documents: found, and run as they would be pasted.

A fence of `sh` is run from top to bottom, page by page, in a folder with the repository's files.
Other lines that begin with `partita` (they need a GPU or minutes, or serve a page) are read as the
command line reads them: an option that is not there, or a missing word, is found.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner, Result

from partita.cli import partita

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
COMMAND = re.compile(r"^(?:    |\$ )+(partita \S.*|torchrun .*)$", re.M)
LINKED = ("examples", "docs", "tests")


def commands(page: Path) -> list[str]:
    """The lines of a page's fences of `sh`."""
    fences = [text for name, text in FENCE.findall(page.read_text()) if name == "sh"]
    return [line for text in fences for line in text.splitlines() if line.strip()]


def other_commands(page: Path) -> Iterator[list[str]]:
    """The words of all other lines that begin with `partita`, after that."""
    for line in COMMAND.findall(page.read_text()):
        for part in line.split(" && "):
            words = shlex.split(part.replace("...", ""), comments=True)
            if "partita" in words and "|" not in words:
                yield words[words.index("partita") + 1 :]


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


def check_words(words: list[str]) -> None:
    """Read a command line without running it; what click refuses is raised."""
    context = click.Context(partita)
    command = partita.get_command(context, words[0])
    assert command is not None, f"there is no command {words[0]!r}"
    command.make_context(words[0], words[1:], parent=context)
