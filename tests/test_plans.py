"""Plans: records that refuse contradictions and survive a file."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import InputError, PlanError
from partita.plans import (
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
    read_plan,
)

MESH = Mesh((Axis("x", 2),), (0, 1))
PLAN = Plan(
    ModelRef("gpt2", 8, "bf16", True, "adamw", "0123456789abcdef"),
    ClusterRef("2xA100", 2, "fedcba9876543210"),
    (Stage("model", MESH, (OpSplit("wte", ("e",), 1), OpSplit("h.0.fc", ("",)))),),
    Prediction(0.5, 0.4, 0.45, 0.1, (1e9, 1e9), (8e10, 8e10)),
    Origin("pase", "feasible", "because", 0, 1.5, "0.1.0"),
)


def again(*ops, recompute=False):
    return Stage(
        "s",
        MESH,
        (OpSplit("a", ("",)),),
        "full" if recompute else "selective" if ops else "none",
        recomputed=ops,
    )


def test_a_plan_survives_its_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(PLAN.to_json())
    assert read_plan(path) == PLAN


def test_what_is_recomputed_survives_its_file():
    stage = replace(PLAN.stages[0], checkpointing="selective", recomputed=("h.0.fc",))
    selective = replace(PLAN, stages=(stage,))
    assert plan_from_json(json.loads(selective.to_json())) == selective


def test_a_plan_is_told_in_a_line():
    named = replace(PLAN.stages[0], mesh=Mesh((Axis("tp", 2),), (0, 1)))
    plan = replace(PLAN, stages=(named,))
    assert str(plan) == "gpt2 on 2xA100: tp=2 zero=1"
    parts = replace(plan, schedule=Schedule("1f1b", 4))
    assert str(parts) == "gpt2 on 2xA100: tp=2 zero=1, 4 micro-batches"
    far = replace(named, name="more", mesh=Mesh((Axis("tp", 2),), (2, 3)))
    two = replace(parts, stages=(named, far))
    assert str(two) == "gpt2 on 2xA100: pp=2 tp=2 zero=1, 1F1B, 4 micro-batches"


def test_what_counts_is_the_step_unless_batches_follow_each_other(tmp_path):
    assert PLAN.prediction.objective_s == 0.5
    steady = replace(PLAN, prediction=replace(PLAN.prediction, interval_s=0.3))
    assert steady.prediction.objective_s == 0.3
    path = tmp_path / "plan.json"
    path.write_bytes(steady.to_json())
    assert read_plan(path) == steady


def test_a_stage_says_what_it_recomputes():
    (stage,) = PLAN.stages
    assert stage.checkpointing == "none"
    assert (
        replace(stage, checkpointing="selective", recomputed=("wte",)).checkpointing == "selective"
    )
    assert replace(stage, checkpointing="full").checkpointing == "full"


def test_weights_give_unlike_shares():
    axis = Axis("x", 3, (2, 2, 1))
    assert axis.parts == 5
    assert [axis.ways(place) for place in range(3)] == [2.5, 2.5, 5.0]
    assert axis.ways() == 2.5
    assert str(axis) == "x=3 (2:2:1)"
    assert Axis("x", 3).ways() == 3


def test_devices_know_their_place():
    mesh = Mesh((Axis("x", 2), Axis("y", 3)), (5, 4, 3, 2, 1, 0))
    assert [mesh.place(device) for device in (5, 3, 2, 0)] == [(0, 0), (0, 2), (1, 0), (1, 2)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axis("x", 0), "axis 'x' has size 0"),
        (lambda: Mesh((Axis("x", 3),), (0, 1)), "a mesh of 3 places has 2 devices"),
        (lambda: Mesh((Axis("x", 2),), (0, 0)), "a mesh of 2 places has 2 devices"),
        (lambda: Mesh((Axis("x", 2), Axis("x", 1)), (0, 1)), "two axes have the same name"),
        (lambda: OpSplit("a", ("b",), "zero3"), "found 'zero3'; use a ZeRO stage from 0 to 3"),
        (lambda: Stage("s", MESH, (OpSplit("a", ()),)), "op 'a' has 0 dims for 1 axes"),
        (lambda: again("b"), "names op 'b', which is not in it"),
        (lambda: again("a", "a"), "names an op twice; name ops of the stage, each once"),
        (lambda: again("a", recompute=True), "names ops with full checkpointing"),
        (lambda: Axis("x", 2, (1,)), "axis 'x' of 2 has the weights [1]"),
        (lambda: Axis("x", 2, (1, 0)), "give one whole number of at least 1 per place"),
        (lambda: Plan(PLAN.model, PLAN.cluster, (), PLAN.prediction, PLAN.origin), "no stages"),
    ],
)
def test_contradictions_are_refused(make, message):
    with pytest.raises(PlanError) as caught:
        make()
    assert message in str(caught.value)


def test_a_newer_plan_asks_for_an_upgrade():
    value = json.loads(PLAN.to_json()) | {"format": "partita/plan@7"}
    with pytest.raises(InputError, match=r"p\.json: format: .* newer partita .* pip install -U"):
        plan_from_json(value, "p.json")


def test_a_wrong_field_is_named():
    value = json.loads(PLAN.to_json())
    value["stages"][0]["mesh"]["axes"][0]["size"] = "two"
    with pytest.raises(InputError, match=r"p\.json: stages\[0\]\.mesh\.axes\[0\]\.size"):
        plan_from_json(value, "p.json")


@given(
    st.sampled_from(["model", "cluster", "stages", "prediction", "origin", "format"]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=5,
    ),
)
def test_any_value_in_any_field_is_read_or_refused(field, value):
    plain = json.loads(PLAN.to_json()) | {field: value}
    try:
        plan_from_json(plain, "p.json")
    except InputError as error:
        assert "p.json" in str(error)
