import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from partita.cli.progress import PlainLines, describe
from partita.search.base import Improvement


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Improvement(1.5, None, 3.0, 0), "1.50 s  no answer yet  bound 3"),
        (Improvement(0.25, 10.0, None, 0), "250 ms  best 10"),
        (Improvement(2.0, 7.0, None, 1), "2.00 s  best 7  1 evaluation"),
        (Improvement(2.0, 10.5, 10.5, 3), "2.00 s  best 10.5  bound 10.5  gap 0.0%  3 evaluations"),
    ],
)
def test_an_improvement_is_one_line(step, text):
    assert describe(step) == text


def test_with_a_time_limit_a_line_says_what_is_left(capsys):
    lines = PlainLines(time_s=60.0)
    lines(Improvement(12.4, 10.0, 8.0, 0))
    assert capsys.readouterr().err == ("12.4 s  best 10  bound 8  gap 20.0%  at most 48.0 s left\n")
    assert describe(Improvement(70.0, 1.0, None, 0), left_s=-3.0).endswith("at most 0 s left")


def test_tables_fit_the_terminal_and_pipes_get_them_whole(run):
    columns = 60
    words = [sys.executable, "-m", "partita", "methods"]
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    subprocess.run(words, stdout=theirs, env=environment, check=True)
    os.close(theirs)
    shown = b""
    with suppress(OSError):
        while more := os.read(ours, 1 << 16):
            shown += more
    os.close(ours)
    lines = shown.decode().splitlines()
    assert 40 < max(map(len, lines)) <= columns
    assert max(map(len, run("methods").stdout.splitlines())) > columns


def test_an_objective_can_be_said_in_its_own_words(capsys):
    lines = PlainLines(words=lambda value: f"{value * 1e3:g} ms")
    lines(Improvement(0.5, 0.058, 0.05, 0))
    assert capsys.readouterr().err == "500 ms  best 58 ms  bound 50 ms  gap 13.8%\n"


def test_lines_come_at_most_once_a_second_and_the_last_always(capsys):
    now = [0.0]
    lines = PlainLines(clock=lambda: now[0])
    for time, objective in ((0.0, 9.0), (0.5, 8.0), (1.1, 7.0), (1.2, 6.0), (1.3, 5.0)):
        now[0] = time
        lines(Improvement(time, objective, None, 0))
    lines.close()
    lines.close()
    shown = [line.split("best ")[1] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["9", "7", "5"]


def test_a_line_that_waits_is_shown_when_the_search_asks_whether_to_go_on(capsys):
    now = [0.0]
    lines = PlainLines(clock=lambda: now[0])
    lines(Improvement(0.0, 9.0, None, 0))
    lines(Improvement(0.1, 8.0, None, 0))
    now[0] = 0.9
    lines.tick()
    assert "best 8" not in capsys.readouterr().err
    now[0] = 1.0
    lines.tick()
    assert capsys.readouterr().err == "100 ms  best 8\n"
    lines.close()
    assert capsys.readouterr().err == ""


SEARCH = """
import os, signal, time
from partita.cli.base import Output
from partita.search.base import Improvement
out = Output()
with out.stop() as stop:
    stop.progress(Improvement(0.5, 10.0, 8.0, 1000))
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.interrupted()
print("done", out.interrupted)
"""


def test_on_a_terminal_one_line_is_kept_up_to_date():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SEARCH],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    answer, _ = process.communicate(timeout=60)
    screen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        screen += piece
    os.close(ours)
    assert answer == b"done True\n"
    assert b"best 10  bound 8  gap 20.0%" in screen
    assert b"stopping with the best so far" in screen
    assert b"\x1b[?25h" in screen  # the cursor is shown again


def test_the_first_ctrl_c_is_answered_at_once():
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from partita.cli.base import Output\nimport time\nout = Output()\n"
            "with out.stop() as stop:\n"
            "    print('searching', flush=True)\n"
            "    while not stop.interrupted(): time.sleep(0.01)\n",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "searching\n"
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 0
    assert words == "stopping with the best so far (Ctrl-C again aborts)\n"


@pytest.mark.parametrize(
    ("room", "text"),
    [
        (0, "2.00 s  best 10  bound 8  gap 20.0%  3 evaluations  at most 5.00 s left"),
        (60, "2.00 s  best 10  bound 8  gap 20.0%  at most 5.00 s left"),
        (50, "2.00 s  best 10  bound 8  at most 5.00 s left"),
        (10, "2.00 s  best 10  bound 8  at most 5.00 s left"),
    ],
)
def test_a_narrow_terminal_keeps_best_bound_and_time_left(room, text):
    assert describe(Improvement(2.0, 10.0, 8.0, 3), left_s=5.0, room=room) == text
