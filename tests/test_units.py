import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita import units
from partita.units import count, flops, number, rate, seconds, size, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.0, "1.00 s"),
        (1.234, "1.23 s"),
        (12.34, "12.3 s"),
        (0.9999, "1.00 s"),
        (0.9994, "999 ms"),
        (0.0123, "12.3 ms"),
        (4.5e-6, "4.50 us"),
        (7e-9, "7.00 ns"),
        (1e-12, "0.00 ns"),
        (-0.5, "-500 ms"),
        (99.94, "99.9 s"),
        (100, "1 min 40 s"),
        (119.7, "2 min 00 s"),
        (7384, "2 h 03 min"),
        (float("inf"), "inf s"),
        (float("nan"), "nan s"),
    ],
)
def test_seconds(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (80 * 1024**3, "80.0 GiB"),
        (1023.9 * 1024, "1.00 MiB"),
        (5 * 1024**6, "5,120 PiB"),
        (-2048, "-2.00 KiB"),
        (float("inf"), "inf B"),
    ],
)
def test_sizes_are_binary(value, text):
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 FLOP"), (3.14e12, "3.14 TFLOP"), (999.9e9, "1.00 TFLOP"), (2e24, "2,000 ZFLOP")],
)
def test_flops_are_decimal(value, text):
    assert flops(value) == text


def test_rates():
    assert rate(312e12, "FLOP") == "312 TFLOP/s"
    assert rate(2.039e12, "B") == "2.04 TB/s"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (124.4e6, "124M"), (6.738e9, "6.74B"), (175e9, "175B")],
)
def test_counts_are_as_people_write_them(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(10.0, "10"), (12345.0, "12,345"), (0.1 + 0.2, "0.3"), (1e20, "1e+20"), (-2.5, "-2.5")],
)
def test_numbers(value, text):
    assert number(value) == text


@given(st.floats())
def test_any_number_can_be_shown(value):
    for show in (seconds, size, flops, count, number):
        assert show(value)


@given(st.floats(min_value=1e-9, max_value=99))
def test_seconds_are_within_half_a_percent_of_what_they_show(value):
    digits, unit = seconds(value).split()
    shown = float(digits) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert shown == pytest.approx(value, rel=0.00501)


def test_a_table_aligns_words_left_and_numbers_right():
    text = table(("name", "time"), [("a", "10"), ("long name", "5")], numbers=(1,))
    assert text.splitlines() == ["name       time", "a            10", "long name     5"]


WIDE = ("name", "what it is", "step", "memory", "why not")
ROWS = [
    ("search", "pp=2 1 x [dp=4] + 1 x [dp=8] zero=1/3, ZB-H2, 6 micro-batches", "672 ms",
     "11.2 GiB", "slower"),
    ("data", "dp=12", "1.48 s", "12.8 GiB", "slower by more than anyone would like to wait for it"),
]  # fmt: skip


@pytest.mark.parametrize("columns", range(60, 201, 10))
def test_tables_keep_to_the_columns_there_are_and_lose_no_number(columns):
    whole = units.table(WIDE, ROWS, (2, 3))
    with units.fitting(columns):
        fitted = units.table(WIDE, ROWS, (2, 3))
    assert max(map(len, fitted.splitlines())) <= columns
    for figure in ("672 ms", "1.48 s", "11.2 GiB", "12.8 GiB"):
        assert figure in fitted
    assert fitted == whole or columns < max(map(len, whole.splitlines()))
    assert units.table(WIDE, ROWS, (2, 3)) == whole  # outside nothing has changed


def test_a_table_of_too_many_numbers_goes_on_in_the_next_line():
    header = [f"column {n}" for n in range(12)]
    rows = [[f"{n}{n}{n} ms" for n in range(12)] for _ in range(2)]
    with units.fitting(60):
        lines = units.table(header, rows, range(12)).splitlines()
    assert max(map(len, lines)) <= 60
    assert [line.startswith("    ") for line in lines] == [False, True, True] * 3
    assert " ".join(lines[3:6]).split() == " ".join(rows[0]).split()


def test_a_cell_wider_than_the_terminal_is_cut():
    with units.fitting(60):
        (line,) = units.table(("x" * 300,), []).splitlines()
    assert len(line) <= 60
    assert line.endswith("…")


def test_a_row_that_goes_on_has_no_line_for_empty_cells():
    rows = [("1" * 40, "2" * 40), ("3" * 40, "")]
    with units.fitting(60):
        lines = units.table(("name", "note"), rows, (0, 1)).split("\n")
    assert [line.strip()[:1] for line in lines] == ["n", "n", "1", "2", "3"]
