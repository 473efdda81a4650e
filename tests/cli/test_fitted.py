"""Answers are as wide as the terminal: prose wraps, tables lose letters of their widest columns."""

from partita.cli.fitted import fitted

TABLE = """strategy  what it is                           step
plan      our joint search over everything   687 ms
data      data parallel                       1.2 s"""


def test_tables_are_cut_in_their_widest_column_and_stay_aligned():
    lines = fitted(TABLE, 40).split("\n")
    assert max(map(len, lines)) == 40
    assert lines[1].startswith("plan      our joint search over…")
    assert {line[-4:] for line in lines} == {"step", "7 ms", ".2 s"}


def test_what_fits_is_left_alone():
    assert fitted(TABLE, 80) == TABLE
    assert fitted("", 60) == ""


def test_prose_wraps_and_values_stay_under_each_other():
    text = "bound by   " + "compute 97%, " * 8
    lines = fitted(text, 60).split("\n")
    assert all(len(line) <= 60 for line in lines)
    assert len(lines) == 3
    assert all(line.startswith(" " * 11) for line in lines[1:])


def test_a_long_word_is_not_broken():
    assert fitted("see " + "x" * 90, 60).split("\n")[-1].strip() == "x" * 90


def test_commands_stay_whole():
    line = (
        "run it with: torchrun --standalone --nproc-per-node 4 -m partita run plan.json --trace t"
    )
    assert fitted(line, 60) == line


def test_timelines_are_not_touched():
    drawn = "gpu0 │" + "█" * 100 + "│ 99% busy"
    assert fitted(f"head\n\n{drawn}", 60) == f"head\n\n{drawn}"
