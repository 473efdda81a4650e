import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from partita import problems
from partita.problems.schedule import ScheduleSolution
from partita.schedules.shapes import SHAPES

DATA = Path(__file__).parents[1] / "data" / "schedule"
VSHAPE = str(DATA / "vshape.train.nd4.json")
SPLIT = ("--backward-span", "1", "--weight-span", "1")
GREEDY = ("--method", "greedy")


class TestShapes:
    @pytest.mark.parametrize("name", SHAPES)
    def test_every_shape_has_a_schedule(self, run_json, name):
        answer = run_json(
            "schedule", name, "--devices", "3", "--microbatches", "4", "--memory", "6", *GREEDY
        )
        assert answer["problem"] == f"{name}.train.nd3"
        assert answer["solution"]["makespan"] == answer["objective"] == answer["makespan"]
        assert answer["lower_bound"] <= answer["objective"]
        assert max(answer["peak_memory"]) <= 6

    def test_the_answer_can_be_checked_by_others(self, run_json, tmp_path):
        file = tmp_path / "problem.json"
        answer = run_json(
            "schedule", "kshape", "--microbatches", "3", "--memory", "3", "--save", str(file)
        )
        problem = problems.load(file)
        assert problem.num_microbatches == 3
        assert problem.memory_capacity == (3, 3, 3, 3)
        assert problems.check(problem, ScheduleSolution.from_json(answer["solution"])) == ()

    def test_without_microbatches_the_period_counts(self, run_json):
        answer = run_json("schedule", "vshape", "--memory", "4")
        assert answer["objective"] == answer["period"] == 4
        assert answer["makespan"] > 4

    def test_four_devices_unless_it_is_said(self, run_json):
        assert len(run_json("schedule", "vshape", "--microbatches", "1")["peak_memory"]) == 4

    def test_spans_and_memory_are_options(self, run_json):
        words = ("--devices", "1", "--microbatches", "2", "--forward-span", "2", "--backward-span",
                 "0.5", "--block-memory", "7")  # fmt: skip
        answer = run_json("schedule", "vshape", *words)
        assert answer["makespan"] == pytest.approx(5)
        assert answer["peak_memory"] == [7]

    def test_shared_steps_and_chunks_have_options(self, run_json):
        words = ("--devices", "2", "--microbatches", "1")
        shared = (
            "--shared-forward-span",
            "5",
            "--shared-backward-span",
            "6",
            "--shared-memory",
            "2",
        )
        answer = run_json("schedule", "mshape", *words, *shared)
        assert answer["makespan"] == 5 + 1 + 1 + 3 + 3 + 6
        assert answer["peak_memory"] == [3, 3]
        answer = run_json("schedule", "wave", *words, "--chunks", "4", "--delay", "10")
        assert answer["makespan"] == 8 * (1 + 3) + 8 * 10

    def test_inference(self, run_json):
        answer = run_json("schedule", "kshape", "--infer", "--microbatches", "4")
        assert answer["problem"] == "kshape.infer.nd4"
        assert answer["peak_memory"] == [0, 0, 0, 0]


class TestFiles:
    def test_a_problem_file(self, run_json):
        answer = run_json("schedule", VSHAPE, "--memory", "4", "--microbatches", "8")
        assert answer["makespan"] == 44
        assert answer["problem"] == "vshape.train.nd4"

    def test_a_cap_for_each_device(self, run_json):
        answer = run_json("schedule", VSHAPE, "--memory", "4,3,2,1", "--microbatches", "8")
        peaks = answer["peak_memory"]
        assert all(peak <= cap for peak, cap in zip(peaks, (4, 3, 2, 1), strict=True))

    def test_what_the_file_says_holds_unless_something_else_is_asked(self, run, run_json, tmp_path):
        file = str(tmp_path / "p.json")
        run("schedule", "vshape", "--microbatches", "3", "--memory", "2", "--save", file, "-q")
        answer = run_json("schedule", file)
        assert len(answer["solution"]["starts"]) == 3 * 8
        assert max(answer["peak_memory"]) <= 2
        assert len(run_json("schedule", file, "--microbatches", "5")["solution"]["starts"]) == 40

    def test_everything_is_written_where_it_was_asked_for(self, run, tmp_path):
        ends = {"--save": "p.json", "--csv": "o.csv", "--svg": "s.svg", "--trace": "t.json"}
        words = [word for flag, end in ends.items() for word in (flag, str(tmp_path / end))]
        output = tmp_path / "r.json"
        asked = ("schedule", "vshape", "--microbatches", "2", *words, "-o", str(output))
        result = run(*asked, "-q")
        assert result.exit_code == 0, result.output
        written = [line for line in result.stdout.splitlines() if line.startswith("written to")]
        assert written == [f"written to {tmp_path / end}" for end in [*ends.values(), "r.json"]]
        assert (tmp_path / "o.csv").read_text().startswith("0F0,0F1")
        assert (tmp_path / "s.svg").read_text().startswith("<svg")
        assert json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
        assert json.loads(output.read_bytes())["status"] == "optimal"
        assert run(*asked, "-q").exit_code == 2
        assert run(*asked, "-q", "--force").exit_code == 0

    def test_the_picture_has_the_numbers_of_the_microbatches(self, run, tmp_path):
        picture = tmp_path / "s.svg"
        run("schedule", "vshape", *SPLIT, "--microbatches", "3", "--svg", str(picture), "-q")
        text = picture.read_text()
        assert "vshape.train.nd4, 3 micro-batches" in text
        for kind in ("forward", "data gradient", "weight gradient"):
            assert kind in text
        assert 'class="n"' in text

    def test_a_csv_that_torch_has_no_words_for_is_refused(self, run, tmp_path):
        words = ("--csv", str(tmp_path / "o.csv"), "--method", "brute")
        result = run("schedule", "mshape", "--microbatches", "64", *words)  # before it is searched
        assert result.exit_code == 2
        assert "error: CSV: this is no pipeline: b0 occupies 4 devices" in result.stderr
        assert not (tmp_path / "o.csv").exists()


class TestOrders:
    """An order in a CSV file is run and checked, not searched for."""

    @pytest.fixture
    def order(self, tmp_path):
        file = tmp_path / "1f1b.csv"
        file.write_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
        return str(file)

    def test_it_runs_as_early_as_it_can(self, run_json, order):
        answer = run_json("schedule", order)
        assert answer["method"] == "order"
        assert answer["problem"] == "1f1b"
        assert answer["makespan"] == 3 * 4 + 4
        assert answer["peak_memory"] == [2, 1]

    def test_what_is_written_can_be_read(self, run, run_json, tmp_path):
        file = str(tmp_path / "o.csv")
        words = (*SPLIT, "--forward-span", "1", "--memory", "4")
        first = run_json(
            "schedule", "vshape", *words, "--microbatches", "6", "--csv", file, *GREEDY
        )
        again = run_json("schedule", file, *words)
        assert again["makespan"] <= first["makespan"]
        assert max(again["peak_memory"]) <= 4

    def test_an_order_over_the_cap_is_not_verified(self, run, order):
        result = run("schedule", order, "--memory", "1")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: not verified: memory device 0 holds 2 of 1")

    def test_an_order_that_deadlocks_is_not_verified(self, run, tmp_path):
        file = tmp_path / "o.csv"
        file.write_text("0F0,0B0\n1B0,1F0\n")
        result = run("schedule", str(file))
        assert result.exit_code == 1
        assert f"error: not verified: {file}: row 2 (rank 1), cell 1, 1B0: stands" in result.stderr

    def test_what_torch_makes_of_it_is_said(self, run, run_json, order):
        lines = run("schedule", order, "-q").stdout.splitlines()
        assert "in flight 2, 1 micro-batches at most on each rank" in lines
        assert (
            "torch     compute_only, 2 ranks, 2 stages, 3 micro-batches: messages match, "
            "nobody waits for ever, gradients are complete"
        ) in lines
        assert any(line.startswith("  older   PipelineScheduleMulti cannot") for line in lines)
        torch = run_json("schedule", order)["torch"]
        assert (torch["form"], torch["verified"], torch["nccl"]) == ("compute_only", True, [])
        assert (torch["ranks"], torch["stages"], torch["microbatches"]) == (2, 2, 3)
        assert torch["in_flight"] == [2, 1]

    def test_messages_are_written_and_read(self, run, run_json, order, tmp_path):
        file = tmp_path / "comms.csv"
        first = run_json("schedule", order, "--csv", str(file), "--comms")
        assert file.read_text().startswith("0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0")
        again = run_json("schedule", str(file))
        assert again["torch"]["form"] == "compute_comms"
        assert again["makespan"] == first["makespan"]
        back = tmp_path / "back.csv"
        run("schedule", str(file), "--csv", str(back), "-q")
        assert back.read_text() == Path(order).read_text()

    def test_messages_that_hang_with_nccl_are_told(self, run, tmp_path):
        file = tmp_path / "o.csv"
        file.write_text(
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
        )
        for command in ("schedule", "verify"):
            result = run(command, str(file))
            assert result.exit_code == 0
            assert "NCCL" in result.stdout
            assert "a circle of waits: the message 1SEND_B0 (rank 1, cell 4)" in result.stdout

    def test_a_published_schedule_is_an_order(self, run, run_json, tmp_path):
        file = tmp_path / "zbv.csv"
        words = ("--devices", "2", "--microbatches", "3", "--weight-span", "1")
        answer = run_json("schedule", "zb-v", *words, "--csv", str(file))
        assert answer["torch"]["stages"] == 4
        assert file.read_text().startswith("0F0,0F1,0F2,3F0,3I0,3W0")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("zb-v",), "--microbatches: zb-v is for a number of them; add --microbatches 8"),
            (("chimera", "--microbatches", "4"), "PLACEMENT: Chimera (direct) holds the model"),
            (("zb-v", "--microbatches", "4", "--chunks", "3"), "PLACEMENT: ZB-V needs two chunks"),
            (("1f1b", "--microbatches", "4", "--chunks", "3"), "--chunks: says nothing to 1f1b"),
            (("1f1b", "--microbatches", "0"), "--microbatches: found 0; give 1 or more"),
            (("1f1b", "--microbatches", "4", "--devices", "0"), "--devices: found 0; give 1"),
            (("vshape", "--microbatches", "4", "--comms"), "--comms: is for --csv; add --csv"),
        ],
    )
    def test_what_an_order_cannot_be_is_refused(self, run, words, message):
        result = run("schedule", *words)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {message}")

    def test_forwards_alone_run_as_inference(self, run, tmp_path):
        file = tmp_path / "o.csv"
        file.write_text("0F0,0F1\n1F0,1F1\n")
        result = run("schedule", str(file))
        assert result.exit_code == 0
        assert "torch     torch's runtime asks for a backward of every forward" in result.stdout

    def test_the_verifier_lists_what_is_wrong_with_a_file(self, run, run_json, order, tmp_path):
        answer = run_json("verify", order)
        assert (answer["kind"], answer["verified"]) == ("torch-schedule", True)
        file = tmp_path / "o.csv"
        file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
        result = run("verify", str(file))
        assert result.exit_code == 1
        lines = result.stdout.splitlines()
        assert lines[0] == (
            "not verified: compute_only schedule of 2 stages, 2 micro-batches, 2 ranks"
        )
        assert lines[1].startswith("  a circle of waits: 0B0 (rank 0, cell 2) waits for 1B0")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--devices", "2"), "--devices: says nothing to"),
            (("--infer",), "--infer: says nothing to"),
            (("--microbatches", "2"), "--microbatches: says nothing to an order, which has its"),
        ],
    )
    def test_what_an_order_says_itself_is_not_asked_again(self, run, order, words, message):
        result = run("schedule", order, *words)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {message}")

    def test_a_cell_that_is_no_action_is_named(self, run, tmp_path):
        file = tmp_path / "o.csv"
        file.write_text("0F0,whatever\n")
        result = run("schedule", str(file))
        assert result.exit_code == 2
        assert f"error: {file}: row 1 (rank 0), cell 2: 'whatever' is no action" in result.stderr


class TestText:
    def test_one_screen_with_the_gantt(self, run):
        result = run("schedule", "vshape", "--microbatches", "6", "--memory", "4", "-q", *GREEDY)
        lines = result.stdout.splitlines()
        assert lines[0] == (
            "vshape.train.nd4: 8 blocks on 4 devices, 6 micro-batches, memory cap 4; method greedy"
        )
        assert lines[1].startswith("makespan  36; devices idle 33.3%")
        assert lines[2].startswith("period    4 a micro-batch")
        assert lines[3] == "memory    4, 4, 4, 1 at most on each device"
        assert any(line.startswith("device 3 ") for line in lines)
        assert lines[-1].startswith("proven optimal: ")
        assert len(lines) <= 24
        assert result.stderr == ""

    def test_how_far_from_optimal_it_can_be(self, run):
        text = run(
            "schedule", "xshape", "--microbatches", "6", "--memory", "3", "-q", *GREEDY
        ).stdout
        assert "from optimal, which is " in text
        assert "not proven optimal" in text

    def test_the_period_is_the_answer_where_no_number_is_asked(self, run):
        text = run("schedule", "vshape", "-q").stdout
        assert "micro-batches without end, no memory cap" in text
        assert "makespan" not in text

    def test_infeasible_says_the_least_that_works(self, run, run_json):
        result = run("schedule", "kshape", "--memory", "1", "--microbatches", "2", "-q")
        assert result.exit_code == 1
        lines = result.stdout.splitlines()
        assert lines[1] == "infeasible"
        assert "the least that works is 2 on devices 0, 1, 2, 3 (where the cap is 1)" in lines[2]
        answer = run_json("schedule", "kshape", "--memory", "1", "--microbatches", "2", code=1)
        assert answer["status"] == "infeasible"

    def test_no_time_gives_no_schedule(self, run):
        result = run("schedule", "vshape", "--time-limit", "0", "-q", *GREEDY)
        assert result.exit_code == 1
        assert result.stdout.splitlines()[1] == "no schedule found"


class TestCompare:
    def test_published_schedules_stand_beside_ours(self, run):
        words = ("schedule", "vshape", *SPLIT, "--microbatches", "8", "--memory", "4")
        text = run(*words, "--compare", "-q", *GREEDY).stdout
        rows = {line[3:20].strip(): line for line in text.splitlines()}
        assert "-> this schedule" in text
        assert rows["1F1B"].split()[-5:] == ["33", "3", "33", "27.3%", "4"]
        assert rows["ZB-H1"].split()[-5:] == ["27", "3", "27", "11.1%", "4"]
        assert rows["ZB-H2"].split()[-6:] == ["27", "3", "24", "11.1%", "7", "over"]
        assert rows["ZB-V"].split()[-5:] == ["25.5", "3", "24", "5.9%", "4"]

    def test_programs_get_the_same_rows(self, run_json):
        answer = run_json("schedule", "vshape", "--microbatches", "8", "--memory", "4", "--compare")
        rows = {row["name"]: row for row in answer["compare"]}
        assert rows["ours"]["makespan"] == answer["makespan"]
        assert rows["1f1b"]["makespan"] == 44
        assert rows["1f1b"]["fits"]
        assert not rows["gpipe"]["fits"]
        assert [row["makespan"] for row in answer["compare"]] == sorted(
            row["makespan"] for row in answer["compare"]
        )

    def test_no_published_schedule_that_fits_is_shorter_than_ours_placed_alike(self, run_json):
        words = ("schedule", "vshape", *SPLIT, "--microbatches", "8", "--memory", "4")
        rows = run_json(*words, "--compare")["compare"]
        ours = {row["placement"]: row for row in rows if row["name"].startswith("ours")}
        fitting = [row for row in rows if row["fits"] and not row["name"].startswith("ours")]
        assert {row["name"] for row in fitting} == {"1f1b", "zb-h1", "zb-v", "chimera"}
        for row in fitting:
            assert ours[row["placement"]]["makespan"] <= row["makespan"]
            assert ours[row["placement"]]["fits"]

    def test_what_is_left_out_says_why(self, run):
        text = run("schedule", "vshape", "--microbatches", "8", "--compare", "-q").stdout
        assert (
            "not here: ZB-H1, ZB-H2, ZB-V, DualPipeV, DualPipe: needs the weight gradients as "
            "blocks of their own" in text
        )

    def test_a_placement_that_is_no_pipeline_has_no_published_schedule(self, run):
        text = run("schedule", "mshape", "--microbatches", "2", "--compare", "-q").stdout
        assert "not here: published schedules: this is no pipeline: b0 occupies 4 devices" in text

    def test_without_a_number_four_for_each_device_are_compared(self, run):
        text = run("schedule", "vshape", "--devices", "2", "--compare", "-q").stdout
        assert "for 8 micro-batches:" in text

    def test_two_directions_count_for_two(self, run_json):
        answer = run_json("schedule", "xshape", "--microbatches", "4", "--compare", *GREEDY)
        ours = next(row for row in answer["compare"] if row["name"] == "ours")
        assert ours["microbatches"] == 8
        assert ours["period"] == answer["period"] / 2


class TestMethods:
    @pytest.mark.parametrize("name", ["auto", "greedy", "periodic", "exact-makespan", "tessel"])
    def test_each_finds_a_schedule_by_its_name(self, run_json, name):
        words = ("schedule", "kshape", "--microbatches", "4", "--memory", "3")
        answer = run_json(*words, "--method", name)
        assert answer["method"] == name
        assert answer["makespan"] >= answer["lower_bound"]

    def test_the_default_proves_six_micro_batches_through_all_devices(self, run_json):
        answer = run_json("schedule", "mshape", "--microbatches", "6", "--memory", "6")
        assert (answer["method"], answer["status"], answer["makespan"]) == ("auto", "optimal", 48)
        assert answer["period"] == 6
        assert answer["gap"] == 0


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("vshap",), "PLACEMENT: found 'vshap'; did you mean vshape"),
            (("nothing.json",), "nothing.json: no such file; check the path"),
            (("no/such/thing",), "no/such/thing: no such file; check the path"),
            (("nothing.csv",), "nothing.csv: no such file; check the path"),
            (("vshape", "--devices", "0"), "--devices: found 0; vshape needs 1 or more"),
            (("xshape", "--devices", "999999999"), "--devices: found 999999999; give a whole"),
            (("xshape", "--devices", "1"), "--devices: found 1; xshape needs 2 or more"),
            (("vshape", "--devices", "x"), "invalid value for '--devices'"),
            (("vshape", "--microbatches", "0"), "--microbatches: found 0; give a whole number"),
            (("vshape", "--microbatches", "1.5"), "invalid value for '--microbatches'"),
            (("vshape", "--memory", "-1"), "--memory: found -1; give a number of at least zero"),
            (("vshape", "--memory", "1,2"), "--memory: has 2 entries; give one number, or one per"),
            (("vshape", "--memory", "1,x"), "invalid value for '--memory': found 'x', a number"),
            (("vshape", "--forward-span", "0"), "--forward-span: found 0; give a number above"),
            (("vshape", "--backward-span", "-2"), "--backward-span: found -2; give a number above"),
            (("vshape", "--block-memory", "-2"), "--block-memory: found -2; give a number of at"),
            (("vshape", "--weight-span", "3"), "--weight-span: found 3, and the whole backward"),
            (("vshape", "--forward-span", "nan"), "--forward-span: found nan; give a finite"),
            (("vshape", "--chunks", "2"), "--chunks: says nothing to vshape; leave it out"),
            (("vshape", "--shared-memory", "2"), "--shared-memory: says nothing to vshape"),
            (("wave", "--chunks", "0"), "--chunks: found 0; give 1 or more"),
            (("vshape", "--method", "gredy"), "--method: found 'gredy'; did you mean greedy?"),
            (("vshape", "--time-limit", "-1"), "invalid value for '--time-limit'"),
            ((VSHAPE, "--devices", "4"), f"{VSHAPE}: --devices: is for shapes; leave it out"),
            ((VSHAPE, "--infer"), f"{VSHAPE}: --infer: is for shapes; leave it out"),
            (("vshape", "--svg", "/nowhere/x.svg"), "/nowhere/x.svg: its folder does not exist"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_it_is_refused_with_exit_code_2_and_a_sentence(self, run, words, message):
        result = run("schedule", *words)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert result.stderr.startswith(f"error: {message}")
        assert result.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"deps": [[0, 1], [1, 0]]}, "deps: blocks wait for each other: a -> b -> a"),
            ({"blocks": [{"span": 1, "devices": []}]}, "blocks[0].devices: is empty"),
            ({"blocks": [{"span": 1, "devices": [7]}]}, "blocks[0].devices[0]: found device 7"),
            ({"blocks": [{"span": 0, "devices": [0]}]}, "blocks[0].span: found 0"),
            ({"blocks": [{"span": -3, "devices": [0]}]}, "blocks[0].span: found -3"),
            ({"num_microbatches": 0}, "num_microbatches: found 0"),
            ({"num_devices": 1.5}, "num_devices: Expected `int`, got `float`"),
        ],
    )
    def test_files_are_refused_by_field(self, run, tmp_path, change, message):
        block = {"span": 1, "devices": [0]}
        value = {
            "format": "partita/schedule-problem@1",
            "num_devices": 1,
            "blocks": [{**block, "name": "a"}, {**block, "name": "b"}],
        } | change
        file = tmp_path / "p.json"
        file.write_text(json.dumps(value))
        result = run("schedule", str(file))
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {file}: {message}")


def test_ctrl_c_ends_with_the_best_so_far_and_130(tmp_path):
    output = tmp_path / "result.json"
    words = ["schedule", "xshape", "--microbatches", "6", "--memory", "6", "--method", "brute"]
    process = subprocess.Popen(
        [sys.executable, "-m", "partita", *words, "-o", str(output)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    while "best" not in (line := process.stderr.readline()):
        assert line, "the search ended by itself"
    process.send_signal(signal.SIGINT)
    answer, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped early: interrupted" in answer
    assert "device 3" in answer
    assert json.loads(output.read_bytes())["solution"] is not None
