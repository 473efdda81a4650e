"""A training script runs as it was written, on two CPU ranks, and ruff has nothing to say of it."""

import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from partita.cli import partita
from partita.errors import PlanError
from partita.plans import read_plan
from tests.emit.transparency import assert_ruff_has_nothing_to_say

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "run" / "distributed"))
from distributed_ranks import run_on_ranks  # noqa: E402

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 30))

    def forward(self, ids, targets, smoothing):
        logits = self.layers(self.tokens(ids))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)


def make(batch=8):
    return Net(), (torch.zeros(batch, 5).long(), torch.zeros(batch, 5).long(), 0.1)


def logits(batch=8):
    return nn.Linear(4, 4), (torch.randn(batch, 4),)
"""


def partita_(*words, code=0):
    result = CliRunner().invoke(partita, [*map(str, words), "--quiet"])
    assert result.exit_code == code, result.output
    return result.output


def lines_of(stderr):
    return [line for line in stderr.splitlines() if line.startswith(("step", "goes on"))]


def torchrun(script, *words):
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), *map(str, words)],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return lines_of(done.stderr)


def _rank(rank, script, words):
    logging.getLogger().handlers.clear()
    sys.argv = [str(script), *map(str, words)]
    runpy.run_path(str(script), run_name="__main__")


def forked(script, *words):
    """The script on two ranks as torchrun starts it, without the time that imports take."""
    ends = run_on_ranks(2, _rank, script, words, folder=script.parent)
    assert [end.code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    return lines_of(ends[0].stderr)


def losses(lines):
    return [line.split(",")[0] for line in lines if line.startswith("step")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Plans of a user's model and of a model of the zoo, each for two devices."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "models").mkdir()
    (folder / "models" / "net.py").write_text(MODEL)
    spec = f"{folder / 'models' / 'net.py'}:make"
    pins = ("--pin", "pp=2", "--pin", "micro-batches=2", "--time-limit", "2")
    partita_("plan", spec, "-c", "2xA100", *pins, "-o", folder / "own.json")
    zoo = ("squeezenet1_1@32", "-c", "2xA100", "--batch", "4", "--dtype", "f32")
    partita_("plan", *zoo, "--optimizer", "sgd", *pins, "-o", folder / "zoo.json")
    return folder


def test_a_script_for_a_users_model_trains_saves_and_goes_on(folder):
    script = folder / "train.py"
    said = partita_("emit", folder / "own.json", "--training", "-o", script)
    assert f"start it with: torchrun --standalone --nproc-per-node 2 {script}" in said
    assert_ruff_has_nothing_to_say(script)
    keep = ("--checkpoint", folder / "kept", "--every", 2)
    first = torchrun(script, "--steps", 2, *keep)
    again = forked(script, "--steps", 4, *keep)
    whole = forked(script, "--steps", 4)
    assert again[0] == "goes on after step 2"
    assert losses(first) + losses(again) == losses(whole)


def test_a_script_for_a_model_of_the_zoo_trains_its_reference_module(folder):
    script = folder / "zoo_train.py"
    partita_("emit", folder / "zoo.json", "--training", "-o", script)
    assert_ruff_has_nothing_to_say(script)
    assert len(forked(script, "--steps", 2)) == 2


def test_the_script_tells_its_command_data_and_optimizer(folder):
    text = partita_("emit", folder / "own.json", "--training")
    for words in (
        "    torchrun --standalone --nproc-per-node 2 train.py    #",
        "    torchrun --standalone --nproc-per-node 2 train.py --device cuda    #",
        "from net import make",
        "ids = torch.randint(30, (BATCH, 5), generator=generator)",
        "targets = torch.randint(30, (BATCH, 5), generator=generator)",
        "argument2 = 0.1",
        "torch.optim.AdamW(parameters, lr=LEARNING_RATE)",
    ):
        assert words in text


def test_what_is_there_is_not_overwritten(folder):
    script = folder / "mine.py"
    script.write_text("mine")
    said = partita_("emit", folder / "own.json", "--training", "-o", script, code=2)
    assert "exists already" in said
    assert script.read_text() == "mine"


def test_a_plan_without_a_loss_has_no_script(folder):
    from partita.emit.training import training_script

    spec = f"{folder / 'models' / 'net.py'}:logits"
    partita_("plan", spec, "-c", "2xA100", "--time-limit", "2", "-o", folder / "logits.json")
    with pytest.raises(PlanError, match=r"a tensor of \[8, 4\] and no loss; let its forward"):
        training_script(read_plan(folder / "logits.json"), folder / "logits.json")


def test_a_script_is_for_all_ranks(folder):
    said = partita_("emit", folder / "own.json", "--training", "--rank", "0", code=2)
    assert "leave --rank out" in said
