import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partita import problems
from partita.cli import solve
from partita.problems.schedule import ScheduleSolution
from partita.search import KINDS, searches
from partita.search.base import Result, Status

DATA = Path(__file__).parent.parent / "data"
VSHAPE = str(DATA / "schedule" / "vshape.train.nd4.json")
KSHAPE = str(DATA / "schedule" / "kshape.train.nd4.json")
ALEXNET = str(DATA / "placement" / "alexnet-malvik.json")

KEYS = [
    "format",
    "problem",
    "kind",
    "method",
    "status",
    "objective",
    "lower_bound",
    "gap",
    "seconds",
    "seed",
    "why",
    "evaluations",
    "solution",
]

# One small problem of each kind, with what its file leaves open.
OF_EACH_KIND = {
    "sharding": (str(DATA / "sharding" / "alexnet_p4.npz"),),
    "schedule": (VSHAPE, "--memory", "4", "--microbatches", "8"),
    "partition": (str(DATA / "partition" / "mlp.json"), "--devices", "2"),
    "placement": (ALEXNET, "--gap", "0.01"),  # without, it goes on though it has proven its answer
    "streams": (str(DATA / "streams" / "squeezenet.json"), "--prune", "3,8"),
    "rtasks": (str(DATA / "rtasks" / "lstm.json"),),
    "joint": (str(DATA / "joint" / "alexnet.json"),),
}


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_it_is_solved_and_the_answer_can_be_checked_by_others(self, run_json, kind):
        words = OF_EACH_KIND[kind]
        answer = run_json("solve", *words, "--time-limit", "8", "--seed", "3")
        assert list(answer) == KEYS
        assert answer["format"] == "partita/result@1"
        assert answer["kind"] == kind
        assert answer["problem"] == Path(words[0]).stem
        assert answer["seed"] == 3
        assert answer["solution"] is not None
        assert answer["lower_bound"] <= answer["objective"] * (1 + 1e-9)
        assert 0 <= answer["gap"] <= 1

    def test_people_read_a_few_lines(self, run, kind):
        result = run("solve", *OF_EACH_KIND[kind], "--quiet", "--time-limit", "8")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert 3 <= len(lines) <= 6
        assert lines[0].startswith(f"{Path(OF_EACH_KIND[kind][0]).stem}: {kind} problem, method ")
        assert result.stderr == ""


class TestSchedule:
    def test_the_makespan_with_a_number_of_microbatches(self, run_json):
        answer = run_json("solve", VSHAPE, "--memory", "4", "--microbatches", "8")
        assert answer["status"] == "optimal"
        assert answer["objective"] == answer["lower_bound"] == answer["solution"]["makespan"] == 44
        assert len(answer["solution"]["starts"]) == 8 * 8
        problem = problems.load(VSHAPE, memory=4, num_microbatches=8)
        assert problems.check(problem, ScheduleSolution.from_json(answer["solution"])) == ()

    def test_the_period_without(self, run_json):
        answer = run_json("solve", VSHAPE, "--memory", "4")
        assert answer["objective"] == answer["solution"]["period"] == 4
        assert answer["solution"]["makespan"] > 4

    def test_a_cap_for_each_device(self, run_json):
        answer = run_json("solve", VSHAPE, "--memory", "4,3,2,1", "--microbatches", "8")
        assert answer["objective"] == 44

    def test_people_see_what_is_counted(self, run):
        with_number = run("solve", VSHAPE, "--microbatches", "8", "-q").stdout
        assert with_number.splitlines()[1] == "makespan  44"
        without = run("solve", VSHAPE, "-q").stdout
        assert without.splitlines()[1] == "time per micro-batch  4"

    def test_infeasible_is_an_answer_with_exit_code_1(self, run, run_json):
        answer = run_json("solve", KSHAPE, "--memory", "1", code=1)
        assert answer["status"] == "infeasible"
        assert answer["objective"] is None
        assert answer["solution"] is None
        assert "the least that works is 2 on devices 0, 1, 2, 3" in answer["why"]
        result = run("solve", KSHAPE, "--memory", "1", "-q")
        assert result.exit_code == 1
        assert result.stdout.splitlines()[1:3] == ["infeasible", answer["why"]]


class TestSearch:
    def test_the_method_can_be_chosen(self, run_json):
        assert run_json("solve", ALEXNET)["method"] == "auto"
        answer = run_json("solve", ALEXNET, "--method", "brute", "--time-limit", "0.2")
        assert answer["method"] == "brute"
        assert answer["status"] == "stopped"
        assert answer["why"] == "the time limit of 0.2 s is used up"

    def test_an_unknown_method_is_answered_with_the_nearest_and_the_list(self, run):
        result = run("solve", ALEXNET, "--method", "brut")
        assert result.exit_code == 2
        assert result.stderr == (
            "error: --method: found 'brut'; did you mean brute? "
            f"(for a placement problem there is {', '.join(searches('placement'))})\n"
        )
        result = run("solve", ALEXNET, "--method", "zzz")
        first = ", ".join(sorted(searches("placement"))[:10])
        assert result.stderr.startswith(f"error: --method: found 'zzz'; known are {first}")

    def test_a_gap_is_enough(self, run_json):
        answer = run_json("solve", ALEXNET, "--gap", "0.99")
        assert answer["why"] == "within the asked gap of 99.00%"
        assert answer["evaluations"] == 1

    def test_no_time_gives_no_answer_and_exit_code_1(self, run):
        result = run("solve", ALEXNET, "--time-limit", "0", "-q")
        assert result.exit_code == 1
        assert result.stdout.splitlines()[1] == "no answer found"

    def test_progress_goes_to_stderr(self, run):
        result = run("solve", ALEXNET)
        assert "best " in result.stderr
        assert "best " not in result.stdout

    def test_the_same_seed_gives_the_same_answer(self, run_json):
        def timeless(answer):
            return {key: value for key, value in answer.items() if key != "seconds"}

        first = run_json("solve", VSHAPE, "--microbatches", "5", "--seed", "7")
        again = run_json("solve", VSHAPE, "--microbatches", "5", "--seed", "7")
        assert timeless(first) == timeless(again)


class TestVerification:
    """Nothing is shown that the problem's own check refuses."""

    def answer(self, monkeypatch, **changes):
        starts = tuple((0, block, start) for block, start in enumerate([0, 1, 2, 3, 4, 7, 10, 13]))
        fields = {
            "method": "liar",
            "status": Status.FEASIBLE,
            "solution": ScheduleSolution(None, 16, starts),
            "objective": 16,
            "lower_bound": 10.0,
            "why": "",
            "seconds": 0.0,
            "seed": 0,
        } | changes
        known = {"liar": lambda problem, stop, seed: Result(**fields)}
        monkeypatch.setattr(solve, "searches", lambda kind: known)

    def test_what_is_true_is_shown(self, run, monkeypatch):
        self.answer(monkeypatch)
        assert run("solve", VSHAPE, "--microbatches", "1").exit_code == 0

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"solution": ScheduleSolution(None, 1, ())}, "b0 of micro-batch 0 is not scheduled"),
            ({"objective": 15}, "the objective is 16, and 15 is claimed"),
            ({"objective": math.nan}, "the objective is 16, and nan is claimed"),
            ({"lower_bound": 17.0}, "the lower bound 17.0 is above the objective 16"),
        ],
    )
    def test_what_is_not_true_is_refused(self, run, monkeypatch, tmp_path, changes, message):
        self.answer(monkeypatch, **changes)
        output = tmp_path / "result.json"
        result = run("solve", VSHAPE, "--microbatches", "1", "-o", str(output))
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith(f"error: not verified: {message}")
        assert not output.exists()


class TestOutputFile:
    def test_it_holds_what_json_shows(self, run_json, tmp_path):
        output = tmp_path / "result.json"
        shown = run_json("solve", VSHAPE, "-o", str(output))
        assert json.loads(output.read_bytes()) == shown

    def test_people_are_told(self, run, tmp_path):
        output = tmp_path / "result.json"
        result = run("solve", VSHAPE, "-o", str(output), "-q")
        assert result.stdout.splitlines()[-1] == f"written to {output}"

    def test_nothing_is_overwritten_unasked(self, run, tmp_path):
        output = tmp_path / "result.json"
        output.write_text("mine")
        assert run("solve", VSHAPE, "-o", str(output)).exit_code == 2
        assert output.read_text() == "mine"
        assert run("solve", VSHAPE, "-o", str(output), "--force").exit_code == 0
        assert json.loads(output.read_bytes())["status"] == "optimal"


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((VSHAPE, "--memory", "1,x"), "invalid value for '--memory': found '1,x', a number"),
            ((VSHAPE, "--memory", "nan"), "--memory: found nan; give a number of at least zero"),
            ((VSHAPE, "--memory", "-1"), "--memory: found -1; give a number of at least zero"),
            ((VSHAPE, "--memory", "1,2"), "--memory: has 2 entries; give one number, or one per"),
            ((VSHAPE, "--microbatches", "0"), "--microbatches: found 0; give a whole number"),
            ((VSHAPE, "--microbatches", "1.5"), "invalid value for '--microbatches'"),
            ((VSHAPE, "--time-limit", "soon"), "invalid value for '--time-limit': found 'soon'"),
            ((VSHAPE, "--time-limit", "-1"), "invalid value for '--time-limit': found -1"),
            ((VSHAPE, "--time-limit", "nan"), "invalid value for '--time-limit': found nan"),
            ((VSHAPE, "--gap", "nan"), "invalid value for '--gap': found nan, at least 0"),
            ((VSHAPE, "--prune", "3"), "invalid value for '--prune': found '3', two whole"),
            ((VSHAPE, "-o", "/nowhere/at/all.json"), "/nowhere/at/all.json: its folder does not"),
            (("no.json",), "no.json: no such file; check the path"),
            (("no.json", "--memory", "3"), "no.json: no such file; check the path"),
            ((str(DATA),), f"{DATA}: is a folder; name a file in it"),
        ],
        ids=lambda value: " ".join(map(str, value))[-40:] if isinstance(value, tuple) else "",
    )
    def test_it_is_refused_with_exit_code_2_and_a_sentence(self, run, words, message):
        result = run("solve", *words)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith(f"error: {message}")
        assert result.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((ALEXNET, "--devices", "4"), "--devices: a placement problem has no such option;"),
            (
                (VSHAPE, "--bandwidth", "1e9"),
                "--bandwidth: a schedule problem has no such option; leave it out; there is "
                "--memory, --microbatches",
            ),
            ((*OF_EACH_KIND["sharding"], "--memory", "4"), "--memory: a sharding problem has no"),
            ((*OF_EACH_KIND["streams"], "--microbatches", "4"), "--microbatches: a streams"),
            ((*OF_EACH_KIND["partition"], "--prune", "1,1"), "--prune: a partition problem has"),
        ],
    )
    def test_options_of_another_kind_are_refused_by_name(self, run, words, message):
        result = run("solve", *words)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {words[0]}: {message}")

    @pytest.mark.parametrize("option", [(), ("--memory", "3")])
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"\x00garbage", "is not JSON"),
            (b"[1]", "holds a JSON list"),
            (b"{}", "format: is missing"),
            (b'{"format": "partita/graph@1"}', 'format: found "partita/graph'),
            (b'{"format": "partita/schedule-problem@9"}', "format: found"),
            (b'{"format": "partita/schedule-problem@1", "num_devices": 0}', "Object missing"),
        ],
    )
    def test_a_file_that_is_no_problem_is_refused(self, run, tmp_path, option, content, message):
        file = tmp_path / "p.json"
        file.write_bytes(content)
        result = run("solve", str(file), *option)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {file}: {message}")


def test_ctrl_c_ends_with_the_best_so_far_and_130(tmp_path):
    output = tmp_path / "result.json"
    words = ["solve", ALEXNET, "--method", "brute", "-o", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "partita", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "best " in line:
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped early: interrupted" in stdout
    assert json.loads(output.read_bytes())["solution"] is not None
