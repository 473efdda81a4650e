"""What `partita explain` prints of two plans made by hand; `--renew-goldens` writes it anew."""

from pathlib import Path

import pytest

from partita.cli.explain_text import plan_text
from partita.jobs.explain import parameter_placements
from partita.jobs.explain_plan import explain_plan
from tests.report.plans import fully_sharded, line
from tests.shallow import GPT2 as GPT2_SPEC

GPT2 = Path(GPT2_SPEC)
GOLDEN = Path(__file__).parent / "golden"
LONG_S = 1e6  # for all changes to be simulated, however slow the machine is
PLANS = {
    "explain_one_stage": lambda: fully_sharded(f"{GPT2.name}@64", "2x2xA100", batch=8),
    "explain_pipeline": lambda: line(f"{GPT2.name}@64", "4xA100", 4, batch=8),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_explained_as_it_should_be(name, is_golden, monkeypatch):
    monkeypatch.chdir(GPT2.parent)  # its name alone, without a folder of this machine
    plan = PLANS[name]()
    told = explain_plan(plan, budget_s=LONG_S)
    placements = {}
    for stage in plan.stages:
        placements |= parameter_placements(stage, told.simulation.workload.graph)
    is_golden(GOLDEN / f"{name}.txt", plan_text(told, placements, plan) + "\n")
