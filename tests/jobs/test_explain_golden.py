"""What `partita explain` prints of two plans made by hand; `--renew-goldens` writes it anew."""

from pathlib import Path

import pytest

from partita.cli.explain_text import plan_text
from partita.jobs.explain import parameter_placements
from partita.jobs.explain_plan import explain_plan
from tests.report.plans import fully_sharded, line

GOLDEN = Path(__file__).parent / "golden"
LONG_S = 1e6  # for all changes to be simulated, however slow the machine is
PLANS = {
    "explain_one_stage": lambda: fully_sharded("gpt2@64", "2x2xA100", batch=8),
    "explain_pipeline": lambda: line("gpt2@64", "4xA100", 4, batch=8),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_explained_as_it_should_be(name, is_golden):
    plan = PLANS[name]()
    told = explain_plan(plan, budget_s=LONG_S)
    placements = {}
    for stage in plan.stages:
        placements |= parameter_placements(stage, told.simulation.workload.graph)
    is_golden(GOLDEN / f"{name}.txt", plan_text(told, placements, plan) + "\n")
