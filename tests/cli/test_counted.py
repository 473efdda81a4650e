"""Many parts of a command: how many are done, the best of all, about how long the rest takes."""

import pytest

from partita.cli.counted import PartsDone, counted


@pytest.fixture
def clock():
    return [100.0]


def test_the_line_says_how_many_the_best_its_bound_and_the_time_left(clock):
    parts = PartsDone("points", 4, lambda: clock[0])
    assert str(parts) == "0 of 4 points  0 s"
    clock[0] += 6
    parts.add(0.2, 0.15, is_known=False)
    assert str(parts) == "1 of 4 points  6.00 s  best 200 ms  bound 150 ms  about 18.0 s left"
    clock[0] += 6
    parts.add(0.5, 0.4, is_known=False)  # slower: the bound stays that of the best
    assert str(parts) == "2 of 4 points  12.0 s  best 200 ms  bound 150 ms  about 12.0 s left"


def test_what_was_known_says_nothing_of_the_time_of_others(clock):
    parts = PartsDone("runs", 4, lambda: clock[0])
    parts.add(0.2, None, is_known=True)
    clock[0] += 3
    assert str(parts) == "1 of 4 runs  3.00 s  best 200 ms"
    parts.add(None, None, is_known=False)
    assert str(parts).endswith("about 6.00 s left")


def test_in_a_pipe_each_part_is_a_line(capsys):
    with counted(False, "points", 2) as parts:
        parts("point 1: planned", 0.2, 0.1)
        parts.tick()
        parts("point 2: planned", 0.1, 0.1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in lines] == ["point 1: planned", "point 2: planned"]
    assert "2 of 2 points" in lines[1]
    assert "best 100 ms" in lines[1]


def test_quiet_says_nothing(capsys):
    with counted(True, "points", 1) as parts:
        parts("point 1", 0.2, 0.1)
    assert capsys.readouterr().err == ""


def test_many_small_parts_are_told_once_a_second_and_the_last_always(capsys):
    with counted(False, "calls", 0) as parts:
        for done in range(1, 6):
            parts.at(done, 5, f"op{done}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[-1] for line in lines] == ["op1", "op5"]
    assert lines[0].startswith("1 of 5 calls")
    assert lines[-1].startswith("5 of 5 calls")
