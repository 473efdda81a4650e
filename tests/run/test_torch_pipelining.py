"""The same stages and schedules on torch's own pipeline runtime give what the whole model gives."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from partita.capture import export_module
from partita.emit.stages import emit
from partita.errors import InputError, PlanError, VerificationError
from partita.files import write_atomically
from partita.jobs.plan import plan
from partita.plans import Axis, Mesh, Stage
from partita.run.sequential import SequentialStages
from partita.run.torch_pipelining import (
    ChainStage,
    TorchPipeline,
    chain_of,
    chain_of_plan,
    torch_pipeline,
)
from partita.schedules.named import NAMED
from partita.schedules.torch_csv import parse_torch_csv, torch_schedule
from partita.search.base import Stop
from tests.run import torch_ranks

SCRIPT = Path(torch_ranks.__file__)
CASES = [*torch_ranks.cases(), "plan on 2"]


@pytest.fixture(scope="module")
def planned():
    pins = ("pp=2", "micro-batches=4")
    return plan(f"{SCRIPT}:example", "2xA100", batch=8, pin=pins, stop=Stop(time_s=5)).plan


@pytest.fixture(scope="module")
def outcomes(planned, tmp_path_factory):
    """What four ranks found, all cases in one start."""
    folder = tmp_path_factory.mktemp("ranks")
    write_atomically(folder / "plan.json", planned.to_json())
    root = SCRIPT.parents[2]
    path = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=200,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_bytes()) for rank in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_whole_model(outcomes, case):
    ranks = [outcome[case] for outcome in outcomes if case in outcome]
    assert len(ranks) == (4 if "on 4" in case else 2)
    assert sum(rank["compared"] for rank in ranks) == 2 * torch_ranks.LAYERS
    assert max(rank["worst"] for rank in ranks) < 1e-12
    assert max(rank["loss"] for rank in ranks) < 1e-12
    assert sum(rank["losses"] > 0 for rank in ranks) == 1


def test_what_the_verifier_refuses_is_wrong_when_torch_runs_it(outcomes):
    # Deferred receives of a there-and-back schedule: gradients and activations change places.
    assert max(outcome["deferred"]["worst"] for outcome in outcomes[:2]) > 0.1


@pytest.mark.parametrize(
    "name", ["tensor and data parallel", "any split", "context and tensor parallel"]
)
def test_steps_written_for_single_ranks_give_the_numbers_of_the_model(outcomes, name):
    assert max(outcome["emitted"][name] for outcome in outcomes) < 1e-9


# --- refusals -------------------------------------------------------------------------------------


def chain_for(module: nn.Module, args: tuple[torch.Tensor, ...], stage_of: dict[str, int]):
    captured = export_module(module, args)
    emitted = emit(captured, stage_of)
    return chain_of(SequentialStages(captured, emitted).stages, emitted.inputs, emitted.outputs)


class Skip(nn.Module):
    def forward(self, x):
        a = torch.tanh(x)
        b = torch.relu(a)
        return torch.sigmoid(b) + a


class Branches(nn.Module):
    def forward(self, x):
        a, b = torch.tanh(x), torch.relu(x)
        return a + b


class TwoResults(nn.Module):
    def forward(self, x):
        a = torch.tanh(x)
        return a, torch.relu(a)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x))).sum()


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("module", "stages", "message"),
    [
        (Skip(), {"tanh": 0, "relu": 1, "sigmoid": 2, "add": 2}, "a passes from stage 0 to st"),
        (Branches(), {"tanh": 0, "relu": 1, "add": 2}, "stage 1 reads nothing of stage 0; it has"),
        (TwoResults(), {"tanh": 0, "relu": 1}, "result a is made in stage 0; it has the last"),
    ],
)
def test_what_is_no_chain_is_refused(module, stages, message):
    with pytest.raises(PlanError) as refused:
        chain_for(module, (X,), stages)
    assert str(refused.value).startswith(
        f"stages: torch.distributed.pipelining cannot run it: {message}"
    )


def test_whole_numbers_do_not_pass_between_stages():
    stage = nn.Module()
    stage.takes, stage.gives = ("x",), ("kinds",)
    stage.forward = lambda x: (x > 0).long()
    with pytest.raises(PlanError, match=r"kinds passes between stages as torch\.int64"):
        ChainStage(stage, ("x",), (), ("kinds",), last=False)(X)


def test_a_weight_on_two_ranks_is_refused_and_on_one_is_not():
    captured = export_module(Tied(), (X,))
    order = [op.name for op in captured.graph.ops]
    stage_of = {name: int(index > 0) for index, name in enumerate(order)}
    emitted = emit(captured, stage_of)
    chain = chain_of(SequentialStages(captured, emitted).stages, emitted.inputs, emitted.outputs)
    two = torch_schedule(NAMED["1f1b"].order(2, 1, 2))
    with pytest.raises(PlanError, match=r"layer\.\w+ is in stages 0 and 1, on two ranks"):
        torch_pipeline(chain, two, rank=0)


def test_a_schedule_that_is_wrong_or_for_other_stages_is_refused():
    chain = chain_for(TwoLayers(), (X,), {"tanh": 0, "relu": 1})
    with pytest.raises(VerificationError, match="a circle of waits"):
        torch_pipeline(chain, parse_torch_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), rank=0)
    with pytest.raises(PlanError, match="the schedule has 3 stages, and there are 2"):
        torch_pipeline(chain, torch_schedule(NAMED["1f1b"].order(3, 1, 2)), rank=0)
    with pytest.raises(PlanError, match="rank 2 has no stage; run it on 2 ranks"):
        torch_pipeline(chain, torch_schedule(NAMED["1f1b"].order(2, 1, 2)), rank=2)


class TwoLayers(nn.Module):
    def forward(self, x):
        return torch.relu(torch.tanh(x))


def test_unequal_micro_batches_are_refused():
    runtime = type("Runtime", (), {"_n_microbatches": 3})()
    with pytest.raises(InputError, match="input x: 2 samples in 3 micro-batches; torch splits ev"):
        TorchPipeline(runtime, (), ()).step({"x": X})


def test_stages_on_several_devices_are_refused(planned):
    wide = Stage("wide", Mesh((Axis("dp", 2),), (0, 1)), ())
    with pytest.raises(PlanError, match=r"'wide' is on 2 devices; it has one device for each st"):
        chain_of_plan(replace(planned, stages=(wide,)), {})
