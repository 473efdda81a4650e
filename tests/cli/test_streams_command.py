import io
import sys

import pytest

from partita.cli.base import Output
from partita.cli.progress import saying


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("quiet", [False, True])
def test_elsewhere_progress_is_lines_unless_quiet(quiet, capsys):
    with saying(quiet, 10.0, Output(quiet=quiet).note) as note:
        note("measuring steps: 16 of 64")
    assert capsys.readouterr().err == ("" if quiet else "measuring steps: 16 of 64\n")


def test_on_a_terminal_progress_is_a_bar_that_goes_away(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with saying(False, 10.0) as note:
        note("measuring steps: 16 of 64")
    shown = terminal.getvalue()
    assert "━" in shown
    assert "at most 10 s left measuring steps: 16 of 64" in shown
    assert shown.endswith("\x1b[2K")  # the line is taken away


def test_elsewhere_nothing_is_said_without_a_place_for_lines(capsys):
    with saying(False, 10.0) as note:
        note("what if: links twice as fast")
    assert capsys.readouterr().err == ""
