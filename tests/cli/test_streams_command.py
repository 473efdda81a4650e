import io
import sys

import pytest

from partita.cli.base import Output
from partita.cli.streams import _progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("quiet", [False, True])
def test_elsewhere_progress_is_lines_unless_quiet(quiet, capsys):
    with _progress(Output(quiet=quiet), 10.0) as note:
        note("measuring steps: 16 of 64")
    assert capsys.readouterr().err == ("" if quiet else "measuring steps: 16 of 64\n")


def test_on_a_terminal_progress_is_a_bar_that_goes_away(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with _progress(Output(), 10.0) as note:
        note("measuring steps: 16 of 64")
    shown = terminal.getvalue()
    assert "━" in shown
    assert "measuring steps: 16 of 64" in shown
    assert shown.endswith("\x1b[2K")  # the line is taken away
