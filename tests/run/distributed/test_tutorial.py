"""The tutorial from its first command to its last: planned, verified, run on two ranks, traced."""

import os
import shlex
from pathlib import Path

import doc_commands
import pytest

torch = pytest.importorskip("torch")

from distributed_ranks import run_on_ranks  # noqa: E402

from partita.jobs.compare_trace import compare_trace  # noqa: E402
from partita.jobs.run_trace import read_traces  # noqa: E402
from partita.notebook.charts import chart_of  # noqa: E402
from partita.plans import read_plan  # noqa: E402

PAGE = doc_commands.ROOT / "docs" / "tutorial.md"


def run_rank(rank, folder, words):
    """What `python -m partita` of one rank prints, where torchrun would have started it."""
    os.chdir(folder)
    result = doc_commands.run(shlex.join(["partita", *words]))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_commands_of_the_tutorial_run_as_pasted(tmp_path, monkeypatch):
    doc_commands.enter(tmp_path, monkeypatch)
    lines = doc_commands.commands(PAGE)
    assert len(lines) > 8
    ran = False
    for line in lines:
        if line.startswith("torchrun"):
            words = shlex.split(line)
            assert line.startswith("torchrun --standalone --nproc-per-node 2 -m partita run ")
            ends = run_on_ranks(2, run_rank, tmp_path, words[6:], folder=tmp_path)
            assert [end.code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
            assert "step 6: loss" in ends[0].result
            ran = True
        else:
            result = doc_commands.run(line)
            assert result.exit_code == 0, f"{line}\n{result.output}"
    assert ran
    _shows_itself(Path("plan.json"), Path("trace"))
    for name in ("plan.json", "report.html", "measured.json", "again.json", "train.py"):
        assert Path(name).stat().st_size > 0, name


def _shows_itself(plan, trace):
    """A traced run beside its prediction, as a notebook shows it."""
    compared = compare_trace(read_plan(plan), read_traces(trace))
    assert compared._repr_html_().startswith("<div><b>predicted</b>")
    table = compared.table()
    assert {row["purpose"] for row in table.to_dicts()} >= {"compute", "update"}
    assert len(chart_of(compared).table) == 2 * len(table)


def test_micro_batches_of_one_sample_run(tmp_path, monkeypatch):
    doc_commands.enter(tmp_path, monkeypatch)
    model = "examples/gpt2_two_ranks.py:make_tiny"
    plan = f"partita plan {model} --cluster 2xA100 --pin pp=2 --pin micro-batches=4 -o plan.json"
    made = doc_commands.run(plan)
    assert made.exit_code == 0, made.output
    assert read_plan("plan.json").model.batch == 4
    words = ["run", "plan.json", "--steps", "1", "--device", "cpu"]
    ends = run_on_ranks(2, run_rank, tmp_path, words, folder=tmp_path)
    assert [end.code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    assert "step 1: loss" in ends[0].result
