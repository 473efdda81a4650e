"""What can be asked on the live page, and that its command line gives the same answer."""

import json

import pytest
from click.testing import CliRunner

from partita.cli import partita
from partita.errors import InputError
from partita.search.base import Stop
from partita.serve.answers import answer
from partita.serve.asks import ASKS, PlanAsk, ScheduleAsk, SimulateAsk, StrategyAsk, read_ask
from partita.serve.choices import choices

QUESTIONS = [
    SimulateAsk("gpt2@64", "2xA100", 4, memory_gib=24.5, links=0.25),
    SimulateAsk("alexnet", "2xV100+2xP100", 8, dtype="f16", training=False),
    StrategyAsk("gpt2", "8xA100", 64, micro_batch=2, tp=2, pp=2, zero=1, sp=True, memory_gib=1),
    StrategyAsk("gpt2", "2x4xH100", 64, pp=4, vpp=3, recompute="full", dtype="f16", links=2),
    PlanAsk("alexnet", "2xA100", 4, memory_gib=4, micro_batches=1, time_limit=600),
    ScheduleAsk("vshape", 3, 5, memory=3, forward_span=1, backward_span=2.5, time_limit=600),
    ScheduleAsk("looped", 2, 2, chunks=2, weight_span=1, backward_span=1, delay=1, time_limit=600),
    ScheduleAsk("1f1b", 4, 6, backward_span=2),
    ScheduleAsk("zb-v", 2, 6, weight_span=1, backward_span=1),
]
TIMES = ("seconds", "num_drafted", "num_simulated")  # of a search: no two clocks agree


@pytest.mark.parametrize("ask", QUESTIONS, ids=lambda ask: " ".join(ask.words())[:50])
def test_the_command_that_is_shown_gives_the_same_answer(ask):
    ours = answer(ask, Stop())
    result = CliRunner().invoke(partita, [*ask.words(), "--json", "-q"], prog_name="partita")
    theirs = json.loads(result.stdout)
    assert result.exit_code == (0 if ours["fits"] else 1)
    assert len(ours["numbers"]) > 5
    for name, value in ours["numbers"].items():
        if name not in TIMES:
            assert theirs[name] == value, name


def test_every_kind_of_question_is_among_them():
    assert {type(ask) for ask in QUESTIONS} == set(ASKS.values())


def test_an_answer_has_what_the_page_shows():
    told = answer(QUESTIONS[2], Stop())
    names = [name for name, _, _ in told["cards"]]
    assert names[:4] == ["step", "throughput", "MFU", "memory"]
    assert "DOES NOT FIT" in {name: note for name, _, note in told["cards"]}["memory"]
    assert [bar["name"] for bar in told["memory"]["bars"]] == ["stage 0", "stage 1"]
    assert set(told["memory"]["bars"][0]["parts"]) == set(told["memory"]["parts"])
    assert told["view"].startswith("<!doctype html>")
    json.dumps(told, allow_nan=False)


def test_a_plan_comes_with_its_page_and_its_file():
    told = answer(QUESTIONS[4], Stop())
    assert "<h2>What bounds it</h2>" in told["view"] or "Timeline" in told["view"]
    assert json.loads(told["files"]["plan.json"])["format"].startswith("partita/plan@")


def test_a_schedule_without_an_answer_says_why():
    told = answer(ScheduleAsk("vshape", 4, 8, memory=1, time_limit=5), Stop())
    assert told["fits"] is (told["view"] is not None)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("plann", {}, "kind: found 'plann'; did you mean plan"),
        ("plan", {"model": "gpt2", "cluster": "2xA100", "batch": 4, "bach": 1}, "found 'bach'"),
        ("simulate", {"model": "gpt2", "cluster": "2xA100", "batch": "4"}, "batch: Expected `int`"),
        ("simulate", {"model": "gpt2"}, "missing required field `cluster`"),
        ("simulate", {"model": "x" * 300, "cluster": "2xA100", "batch": 1}, "has 300 characters"),
        ("simulate", {"model": "/etc/x.json", "cluster": "2xA100", "batch": 1}, "may not open"),
        ("simulate", {"model": "m.py:make", "cluster": "2xA100", "batch": 1}, "may not open"),
        ("simulate", {"model": "m.onnx", "cluster": "2xA100", "batch": 1}, "may not open"),
        ("simulate", {"model": "gpt2", "cluster": "lab.toml", "batch": 1}, "may not open"),
        ("simulate", {"model": "gpt2", "cluster": "lab.toml@links=2", "batch": 1}, "may not open"),
        ("simulate", {"model": "gpt2", "cluster": "2xA100+c.json", "batch": 1}, "may not open"),
        ("schedule", {"placement": "order.csv"}, "may not open"),
        ("schedule", {"placement": "vshape", "time_limit": 1e9}, "time_limit: found 1e+09"),
        ("schedule", {"placement": "vshape", "time_limit": 0}, "time_limit: found 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(kind, value, message):
    with pytest.raises(InputError) as error:
        read_ask(kind, value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_named_at_the_start_may_be_asked_about(tmp_path):
    file = str(tmp_path / "config.json")
    value = {"model": f"{file}@128", "cluster": "2xA100", "batch": 1}
    assert read_ask("simulate", value, [file]).model == f"{file}@128"
    with pytest.raises(InputError, match="may not open"):
        read_ask("simulate", {**value, "model": "/etc/config.json"}, [file])


def test_the_choices_are_what_commands_take():
    offered = choices(["mine.json", "lab.toml", "net.py:make"])
    names = [model["name"] for model in offered["models"]]
    assert {"gpt2", "resnet50", "mine.json", "net.py:make"} <= set(names)
    assert len(names) == len(set(names))
    assert offered["machines"][0] == "lab.toml"
    assert {"A100-80GB-SXM", "H100-SXM"} <= {kind["name"] for kind in offered["kinds"]}
