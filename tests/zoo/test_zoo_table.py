"""docs/zoo.md says what is true."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "zoo-table"))
    page = (ROOT / "docs" / "zoo.md").read_text()
    assert page == script["page"](), "run scripts/zoo-table"
