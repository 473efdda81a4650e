"""What the documents show is true: their code runs, their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)#:]+)\)")
COMMENT = re.compile(r"^print\((.*)\) +# (.+)$", re.M)


def code(page: Path) -> str:
    return "\n".join(BLOCK.findall(page.read_text()))


@pytest.mark.parametrize("name", ["README.md", "docs/flow.md"])
def test_the_python_in_a_page_runs_from_top_to_bottom(name, capsys):
    text = code(ROOT / name)
    assert text
    exec(compile(text, name, "exec"), {})
    assert capsys.readouterr().out


def test_the_tour_prints_what_it_says(capsys):
    text = code(ROOT / "docs/flow.md")
    promised = [comment for _, comment in COMMENT.findall(text) if "|" in comment]
    exec(compile(text, "flow", "exec"), {})
    printed = capsys.readouterr().out
    assert promised
    for line in promised:
        assert line in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page):
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tour_names_parts_in_the_order_that_imports_follow():
    from test_imports import ORDER

    sentence = (ROOT / "docs/flow.md").read_text().split("a test says so: ")[1].split(".")[0]
    named = [name.strip() for name in sentence.split(",")]
    assert named == [name for name in ORDER if name in named]
    assert len(named) > 15
