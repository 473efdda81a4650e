"""What docs/schedules.md and the examples show happens; tests/test_docs.py runs its commands."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from partita.schedules.shapes import SHAPES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "schedules.md").read_text()
GOLDEN = Path(__file__).parent / "golden"


def test_python_blocks_print_what_stands_under_them():
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", PAGE, re.S)
    assert len(blocks) == PAGE.count("```python")
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "schedules.md", "exec"), names)
        assert printed.getvalue() == shown


def test_every_shape_is_in_the_table():
    assert set(re.findall(r"`(\w+)`(?=[^|]*\|)", PAGE)) >= set(SHAPES)


def run_example(name: str, *words: str) -> str:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return printed.getvalue()


def test_the_published_schedules_side_by_side(is_golden):
    is_golden(GOLDEN / "schedule_published.txt", run_example("schedule_published.py"))


def test_a_placement_of_your_own(tmp_path):
    picture = tmp_path / "picture.svg"
    printed = run_example("schedule_your_own.py", str(picture))
    assert re.match(r"\d+ steps for 8 micro-batches, (optimal|feasible|stopped)\n", printed)
    assert "device 3" in printed
    assert picture.read_text().startswith("<svg")
