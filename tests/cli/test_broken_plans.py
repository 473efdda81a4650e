"""Plan files that somebody has edited: whatever reads them says what is wrong, and never fails."""

import copy
import json
import random

import pytest
from click.testing import CliRunner

from partita.cli import partita

READERS = (
    ("simulate",),
    ("report",),
    ("explain", "--time-limit", "0"),
    ("explain", "features.0"),
)
ANYTHING = (
    None, 0, -1, 3, 1e308, -1e-9, 10**25, "", "x", "zb-v", "features.0", "parameters", [], {}, True,
    [0], ["b"], ["b", "b"], "\x1b[31m",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A plan of two stages and where it lies."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ("plan", "squeezenet1_1@64", "-c", "2xA100", "--batch", "4", "--pin", "pp=2", "-q")
    result = CliRunner().invoke(partita, [*words, "-o", str(path)])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text()), path


def written(value, folder):
    path = folder / "edited.json"
    path.write_text(json.dumps(value))
    return str(path)


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan["stages"][0]["splits"].pop(), "has no split"),
        (lambda plan: plan["stages"][0]["splits"][0].update(op="x"), "has no split"),
        (lambda plan: plan["stages"][0]["mesh"].update(devices=[99]), "device 99 does not exist"),
        (lambda plan: plan["stages"][0]["mesh"].update(devices=[10**25]), "does not exist"),
    ],
)
def test_decisions_that_cannot_be_carried_out_are_refused(
    run, whole, tmp_path, reader, edit, message
):
    plan = copy.deepcopy(whole[0])
    edit(plan)
    command, *words = reader
    result = run(command, written(plan, tmp_path), *words)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "partita verify lists all" in result.output


def test_a_plan_with_senseless_figures_is_still_drawn(run, whole, tmp_path):
    plan = copy.deepcopy(whole[0])
    plan["origin"]["seconds"] = 1e308
    plan["prediction"]["lower_bound_s"] = 1e308
    page = tmp_path / "page.html"
    result = run("report", written(plan, tmp_path), "-o", str(page))
    assert result.exit_code == 0, result.output
    assert "best plan and bound over time" in page.read_text()


def test_any_edit_is_an_answer_or_a_refusal(run, whole, tmp_path):
    generator = random.Random(0)
    readers = (*READERS, ("verify",), ("diff", str(whole[1])), ("report", "-o", "page.html"))
    for _ in range(150):
        plan = copy.deepcopy(whole[0])
        place, key = _somewhere(plan, generator)
        place[key] = generator.choice(ANYTHING)
        command, *words = generator.choice(readers)
        words = [str(tmp_path / "page.html") if w == "page.html" else w for w in words]
        force = ["--force"] if "-o" in words else []
        result = run(command, written(plan, tmp_path), *words, *force)
        assert result.exit_code in (0, 1, 2), (command, key, place[key], result.output)


def _somewhere(value, generator):
    """A place in a file, and a key or number there."""
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = generator.choice(list(keys))
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or generator.random() < 0.15:
            return value, key
        value = inner
