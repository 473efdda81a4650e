"""Plan files of older versions are read in the words of this one."""

import json
from dataclasses import replace

import pytest

from partita.errors import PlanError
from partita.plans import (
    CHECKPOINTING,
    Axis,
    ClusterRef,
    Mesh,
    ModelRef,
    OpSplit,
    Origin,
    Plan,
    Prediction,
    Schedule,
    Stage,
    plan_from_json,
    upgraded,
)

MESH = Mesh((Axis("dp", 2),), (0, 1))
SPLITS = (OpSplit("wte", ("b",), 1), OpSplit("h.0.fc", ("",)))
PLAN = Plan(
    ModelRef("gpt2", 8, "bf16", True, "adamw", "0123456789abcdef"),
    ClusterRef("2xA100", 2, "fedcba9876543210"),
    (Stage("model", MESH, SPLITS),),
    Prediction(0.5, 0.4, 0.45, 0.1, (1e9, 1e9), (8e10, 8e10)),
    Origin("pase", "feasible", "because", 0, 1.5, "0.1.0"),
)
SHARDED = ("none", "states", "gradients", "parameters")


def older(plan: Plan, version: int) -> dict:
    """The plan as version 3 wrote it."""
    value = json.loads(plan.to_json()) | {"format": f"partita/plan@{version}"}
    for stage in value["stages"]:
        stage["recompute"] = stage.pop("checkpointing") == "full"
        stage["checkpoints"], stage["again"] = stage.pop("segments"), stage.pop("recomputed")
        for split in stage["splits"]:
            split["sharded"] = SHARDED[split.pop("zero")]
    return value


@pytest.mark.parametrize("version", [3, 4, 5])
def test_older_files_gather_the_parameters_of_each_op_by_themselves(version):
    value = older(PLAN, 3) if version == 3 else json.loads(PLAN.to_json())
    for stage in value["stages"]:
        del stage["bundles"]
    assert plan_from_json(value).stages[0].bundles == (() if version == 3 else None)
    value["format"] = f"partita/plan@{version}"
    assert plan_from_json(value).stages[0].bundles == ()


@pytest.mark.parametrize("zero", range(4))
def test_levels_of_older_files_are_zero_stages(zero):
    stage = Stage("model", MESH, (OpSplit("wte", ("b",), zero),))
    plan = replace(PLAN, stages=(stage,))
    assert plan_from_json(older(plan, 3)) == plan


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"checkpointing": "full"},
        {"checkpointing": "full", "segments": ("wte", "h.0.fc")},
        {"checkpointing": "selective", "recomputed": ("h.0.fc",)},
    ],
)
def test_recompute_of_older_files_is_checkpointing(fields):
    plan = replace(PLAN, stages=(Stage("model", MESH, SPLITS, **fields),))
    assert plan_from_json(older(plan, 3)) == plan
    assert plan_from_json(json.loads(plan.to_json())) == plan


def test_files_without_the_later_fields_keep_everything():
    value = older(PLAN, 1)
    for stage in value["stages"]:
        for field in ("recompute", "checkpoints", "again"):
            del stage[field]
        for split in stage["splits"]:
            del split["sharded"]
    del value["schedule"]
    stage = Stage("model", MESH, tuple(replace(split, zero=0) for split in SPLITS))
    assert plan_from_json(value) == replace(PLAN, stages=(stage,), schedule=Schedule())


def test_a_level_that_never_was_is_refused_in_an_older_file():
    value = older(PLAN, 3)
    value["stages"][0]["splits"][0]["sharded"] = "weights"
    with pytest.raises(Exception, match="zero"):
        plan_from_json(value)


def test_a_file_of_this_version_is_not_touched():
    value = json.loads(PLAN.to_json())
    assert upgraded(value) is value


def test_contradictions_are_refused_with_what_to_do():
    with pytest.raises(PlanError, match="names ops with none checkpointing"):
        Stage("s", MESH, SPLITS, segments=("wte",))
    with pytest.raises(PlanError, match="names ops with full checkpointing"):
        Stage("s", MESH, SPLITS, "full", recomputed=("wte",))
    with pytest.raises(PlanError, match="names no op"):
        Stage("s", MESH, SPLITS, "selective")
    with pytest.raises(PlanError, match="names op 'nope', which is not in it"):
        Stage("s", MESH, SPLITS, "selective", recomputed=("nope",))
    with pytest.raises(PlanError, match="names an op twice"):
        Stage("s", MESH, SPLITS, "selective", recomputed=("wte", "wte"))
    with pytest.raises(PlanError, match=", ".join(CHECKPOINTING)):
        Stage("s", MESH, SPLITS, "some")
    with pytest.raises(PlanError, match="from 0 to 3"):
        OpSplit("a", (), 4)


def test_a_plan_is_told_in_a_line():
    assert str(PLAN) == "gpt2 on 2xA100: dp=2 zero=1"
