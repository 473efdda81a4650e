"""What the documents show is true: their code runs, their links lead somewhere."""

import functools
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import click
import doc_commands
import pytest

import partita

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)#:]+)\)")
COMMENT = re.compile(r"^print\((.*)\) +# (.+)$", re.M)


def code(page: Path) -> str:
    return "\n".join(BLOCK.findall(page.read_text()))


@pytest.mark.parametrize("name", [
    "README.md", "docs/flow.md", "docs/from_ftpipe.md", "docs/from_tessel.md", "docs/notebook.md",
])  # fmt: skip
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


# --- commands ------------------------------------------------------------------------------------

WITH_COMMANDS = [page for page in doc_commands.PAGES if doc_commands.commands(page)]
TUTORIAL = "tutorial.md"  # ends in a run on two ranks: tests/run/distributed/test_tutorial.py


@pytest.mark.parametrize(
    "page", [page for page in WITH_COMMANDS if page.name != TUTORIAL], ids=lambda page: page.name
)
def test_the_commands_of_a_page_run_as_pasted(page, tmp_path, monkeypatch):
    doc_commands.enter(tmp_path, monkeypatch)
    for line in doc_commands.commands(page):
        result = doc_commands.run(line)
        assert result.exit_code == 0, f"{line}\n{result.output}"
        assert result.stdout


@pytest.mark.parametrize("page", doc_commands.PAGES, ids=lambda page: page.name)
def test_every_other_command_of_a_page_is_read_by_the_command_line(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in doc_commands.other_commands(page):
        if command.is_spoken:
            unknown = doc_commands.unknown_options(command.asks_partita)
            assert not unknown, f"{command.text}: there is no {unknown[0]}"
            continue
        try:
            doc_commands.check_words(command.asks_partita)
        except click.exceptions.Exit:
            pass  # --help
        except click.ClickException as error:
            raise AssertionError(f"{command.text}: {error.format_message()}") from None


def test_the_pages_for_seed_systems_and_the_tutorial_have_commands():
    names = {page.name for page in WITH_COMMANDS}
    seeds = ("pase", "ftpipe", "tessel", "exprimo", "ios", "rammer")
    assert {TUTORIAL, "faq.md", *(f"from_{seed}.md" for seed in seeds)} <= names


# --- the site ------------------------------------------------------------------------------------


def test_every_page_has_its_place_in_the_site():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": (\S+\.md)$", text, re.M)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@functools.cache
def site_hook():
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "docs" / "site_hook.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def test_the_reference_has_every_public_name():
    page = site_hook().on_page_markdown((ROOT / "docs" / "api.md").read_text())
    titles = re.findall(r"^### (\w+)$", page, re.M)
    assert sorted(titles) == sorted(partita.__all__)
    assert "| `step_s` |" in page
    assert " at 0x" not in page
    assert "simulate(model: str | Graph | Plan" in page.replace("(\n    ", "(")
    for name in titles:
        assert re.search(rf"^### {name}\n\n(```python\n{name}\(|\w)", page, re.M), name


@pytest.mark.parametrize("text", [
    '<script src="https://cdn.example/a.js">', "<img alt=a src=//x.example/a.png>",
    '<link rel="stylesheet" href="http://fonts.example/a.css">',
])  # fmt: skip
def test_a_page_of_the_site_that_loads_something_from_elsewhere_is_a_warning(text, caplog):
    page = SimpleNamespace(file=SimpleNamespace(src_path="a.md"))
    site_hook().on_post_page(text, page=page)
    assert "a.md loads" in caplog.text
    caplog.clear()
    site_hook().on_post_page('<a href="https://example.org">out</a><img src="a.png">', page=page)
    assert not caplog.text


def test_the_site_asks_for_no_fonts():
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()
