"""Orders as torch.distributed.pipelining reads and writes them."""

import csv
from dataclasses import replace

import pytest

from partita.errors import FileError, InputError, ProblemError
from partita.jobs.baselines import named_schedule, run_order
from partita.jobs.schedule import schedule
from partita.problems.schedule import ScheduleProblem, ScheduleSolution
from partita.schedules.actions import Order, order_text
from partita.schedules.named import NAMED
from partita.schedules.order_problem import (
    csv_pipeline,
    in_flight,
    order_of_solution,
    placement_of_order,
)
from partita.schedules.shapes import ShapeOptions, shape
from partita.schedules.torch_comms import in_loss_order, with_comms
from partita.schedules.torch_csv import parse_torch_csv, read_torch_csv, torch_schedule
from partita.verify.torch_schedules import torch_refusals
from tests.schedules.torch_lowering import lowered_by_torch

SPLIT = ShapeOptions(backward_span=1, weight_span=1)
COMPUTED = ["F", "I", "W", "B"]
MESSAGES = ["SEND_F", "RECV_F", "SEND_B", "RECV_B"]


def schedule_csv(problem: ScheduleProblem, solution: ScheduleSolution) -> str:
    return torch_schedule(order_of_solution(problem, solution)).to_csv()


def parse_csv(text: str) -> Order:
    return parse_torch_csv(text).order


def num_microbatches(order: Order) -> int:
    return torch_schedule(order).num_microbatches


def written(name: str, options: ShapeOptions | None = None) -> str:
    result = schedule(shape(name, 2, options), memory=4, microbatches=3, method="greedy")
    return schedule_csv(result.problem, result.outcome.solution)


class TestWriting:
    def test_a_row_per_rank_and_a_cell_per_action(self):
        starts = ((0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 5))
        text = schedule_csv(shape("vshape", 2).problem(), ScheduleSolution(None, 8, starts))
        assert text == "0F0,0B0\n1F0,1B0\n"

    def test_split_backwards_are_i_and_w(self):
        cells = written("vshape", SPLIT).replace("\n", ",").strip(",").split(",")
        assert len(cells) == 2 * 3 * 3
        assert {cell.strip("0123456789") for cell in cells} == {"F", "I", "W"}

    @pytest.mark.parametrize(
        ("name", "options", "why"),
        [
            ("mshape", None, "CSV: this is no pipeline: b0 occupies 2 devices"),
            ("xshape", None, "CSV: cannot be written: it holds 2 pipelines side by side"),
            ("vshape", ShapeOptions(training=False), "CSV: cannot be written: it has no backward"),
        ],
    )
    def test_what_torch_has_no_words_for_is_refused(self, name, options, why):
        with pytest.raises(ProblemError) as refused:
            written(name, options)
        assert str(refused.value).startswith(why)
        assert str(refused.value).endswith("; use --trace or --svg, which draw any placement")

    def test_a_device_without_work_has_no_row(self):
        problem = replace(shape("vshape", 2).problem(), num_devices=3)
        with pytest.raises(ProblemError, match="cannot be written: device 2 runs nothing"):
            csv_pipeline(problem)


class TestReading:
    @pytest.mark.parametrize("name", ["vshape", "looped", "wave"])
    @pytest.mark.parametrize("options", [ShapeOptions(), SPLIT])
    def test_what_is_written_runs_as_it_was_scheduled(self, name, options):
        result = schedule(shape(name, 3, options), memory=6, microbatches=4, method="greedy")
        order = parse_csv(schedule_csv(result.problem, result.outcome.solution))
        problem = placement_of_order(order, options).problem(memory=6)
        timeline = run_order(problem, order, num_microbatches(order))
        assert timeline.makespan <= result.makespan
        assert tuple(timeline.peaks()) == result.peak_memory

    @pytest.mark.parametrize("name", [n for n in NAMED if NAMED[n].layout != "two-way"])
    def test_published_orders_come_back_as_they_were(self, name):
        count = 4 if name == "hanayo" else 8
        baseline = named_schedule(name, 4, count, forward=2, backward=2, weight=2)
        order = NAMED[name].order(4, 2, count)
        text = "\n".join(",".join(map(str, row)) for row in order)
        assert parse_csv(text) == order
        chunks = 2 if NAMED[name].layout in ("looped", "wave") else 1
        whole = 4 / chunks if not NAMED[name].split else 2 / chunks
        options = ShapeOptions(
            forward_span=2 / chunks, backward_span=whole, memory=1 / chunks,
            weight_span=2 / chunks if NAMED[name].split else None,
        )  # fmt: skip
        timeline = run_order(placement_of_order(order, options).problem(), order, count)
        assert timeline.makespan == baseline.makespan
        assert tuple(timeline.peaks()) == baseline.peak_memory

    def test_torch_puts_in_what_does_not_compute(self):
        order = parse_csv(
            "0UNSHARD,0F0,0SEND_F0,,(0F1;0B0)OVERLAP_F_B,0RECV_B1, 0B1 ,0REDUCE_GRAD\n"
            "1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1RESHARD\n"
        )
        assert order_text(order) == "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"
        assert run_order(placement_of_order(order).problem(), order, 2).makespan == 12

    def test_forward_only_is_inference(self):
        order = parse_csv("0F0,0F1\n1F0,1F1\n")
        problem = placement_of_order(order).problem()
        assert {block.memory for block in problem.blocks} == {0}
        assert run_order(problem, order, 2).makespan == 3

    def test_a_delay_is_between_ranks(self):
        order = parse_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
        timeline = run_order(placement_of_order(order, ShapeOptions(delay=10)).problem(), order, 1)
        assert timeline.makespan == 4 * 1 + 4 * 3 + 4 * 10

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "has no actions; give a row per rank"),
            (",,\n\n", "has no actions"),
            ("0F0,F0", "row 1 (rank 0), cell 2: 'F0' is no action; write stage, one of F B I W"),
            ("0F0\n1F0,1X0", "row 2 (rank 1), cell 2: '1X0' is no action"),
            ("0F0,0F", "row 1 (rank 0), cell 2: '0F' is no action"),
            ("0F0,(0F1;0Z1)OVERLAP_F_B", "row 1 (rank 0), cell 2: '0Z1' is no action"),
            ("0F-1", "row 1 (rank 0), cell 1: '0F-1' is no action"),
            ("0F" + "9" * 30, "row 1 (rank 0), cell 1: '0F99999"),
            ("0SEND_F", "row 1 (rank 0), cell 1: '0SEND_F' is no action; SEND_F has its micro"),
            ("0UNSHARD1", "row 1 (rank 0), cell 1: '0UNSHARD1' is no action; UNSHARD has no micro"),
            ("0BW1", "row 1 (rank 0), cell 1: '0BW1' is no action; early torch wrote it so"),
            ("(0F1;0W0)OVERLAP_F_B", "row 1 (rank 0), cell 1: '(0F1;0W0)OVERLAP_F_B' is no forw"),
        ],
    )
    def test_what_is_no_order_is_refused_by_row_and_cell(self, text, message):
        with pytest.raises(InputError) as refused:
            parse_csv(text)
        assert str(refused.value).startswith(message)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0F0,0B0\n0F1,0B1", "order: stage 0 is on rank 0 and on rank 1"),
            ("0F0,0B0\n2F0,2B0", "order: stage 1 is missing; number them from 0"),
        ],
    )
    def test_stages_that_do_not_fit_together_are_refused(self, text, message):
        with pytest.raises(ProblemError) as refused:
            placement_of_order(parse_csv(text))
        assert str(refused.value).startswith(message)

    def test_errors_name_the_file(self, tmp_path):
        file = tmp_path / "order.csv"
        file.write_text("0F0,zzz")
        with pytest.raises(
            FileError, match=r"order\.csv: row 1 \(rank 0\), cell 2: 'zzz' is no action"
        ):
            read_torch_csv(file)
        file.write_bytes(b"\xff\xfe0F0")
        with pytest.raises(FileError, match=r"order\.csv: is not text"):
            read_torch_csv(file)


class TestRoundTrip:
    """What torch has is read, and written again cell by cell."""

    CLASSES = (
        ("ScheduleInterleaved1F1B", 4, 2, 8, {"microbatches_per_round": 4}),
        ("ScheduleLoopedBFS", 2, 2, 4, {}),
        ("ScheduleInterleavedZeroBubble", 2, 2, 4, {"microbatches_per_round": 2}),
        ("ScheduleZBVZeroBubble", 4, 2, 8, {}),
        ("ScheduleDualPipeV", 4, 2, 10, {}),
    )

    @pytest.mark.parametrize(("kind", "ranks", "held", "count", "more"), CLASSES)
    def test_every_schedule_class_of_torch(self, kind, ranks, held, count, more, tmp_path):
        torch = pytest.importorskip("torch.distributed.pipelining.schedules")
        made = object.__new__(getattr(torch, kind))
        made.__dict__ |= {
            "_n_microbatches": count, "n_local_stages": held, "_stages": [None] * held,
            "pp_group_size": ranks, "_num_stages": held * ranks, "num_stages": held * ranks,
            "_defer_pp_recv": False, **more,
        }  # fmt: skip
        made.stage_index_to_group_rank = torch.generate_stage_to_rank_mapping(
            ranks, held * ranks, style="v" if "V" in kind else "loop"
        )
        rows = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
        made.pipeline_order = rows
        if hasattr(made, "_add_bubbles_to_actions"):
            made.pipeline_order = made._add_bubbles_to_actions(held * ranks)
        made._stages = []
        made._prepare_schedule_with_comms(made.pipeline_order)
        for form in ("compute_only", "compute_comms"):
            file = tmp_path / f"{form}.csv"
            made._dump_csv(str(file), format=form)
            read = read_torch_csv(file)
            assert read.form == form
            assert read.to_csv() == file.read_bytes().decode().replace("\r\n", "\n")
            assert torch_refusals(read) == torch_refusals(read, in_order=True) == ()
            assert (read.num_stages, read.num_microbatches) == (held * ranks, count)
        assert {rank: len(row) for rank, row in enumerate(read.rows)} == {
            rank: len(row) for rank, row in made.pipeline_order_with_comms.items()
        }

    SIZES = (
        (name, p, v if NAMED[name].layout in ("looped", "wave") else 1, n)
        for name in NAMED
        for p, v, n in [(2, 2, 2), (3, 2, 9), (4, 3, 8), (1, 2, 3)]
        if NAMED[name].layout != "two-way"
    )

    @pytest.mark.parametrize(
        ("name", "p", "v", "n"), [size for size in SIZES if not NAMED[size[0]].refuses(*size[1:])]
    )
    def test_messages_are_those_of_torch_cell_by_cell(self, name, p, v, n):
        computed = in_loss_order(torch_schedule(NAMED[name].order(p, v, n)))
        ours = with_comms(computed)
        assert ours.to_csv() == lowered_by_torch(computed).to_csv()
        assert with_comms(ours) == ours
        assert ours.compute_only() == computed
        assert torch_refusals(ours, in_order=True) == ()

    @pytest.mark.parametrize("options", [ShapeOptions(), SPLIT])
    @pytest.mark.parametrize("name", ["vshape", "looped", "wave"])
    def test_schedules_that_were_searched_are_right_in_both_forms(self, name, options):
        result = schedule(shape(name, 3, options), memory=6, microbatches=5, method="greedy")
        order = order_of_solution(result.problem, result.outcome.solution)
        computed = in_loss_order(torch_schedule(order))
        for wanted in (computed, with_comms(computed)):
            assert parse_torch_csv(wanted.to_csv()) == wanted
            assert torch_refusals(wanted, in_order=True) == ()

    def test_stages_may_be_on_any_rank(self):
        schedule_ = parse_torch_csv("1F0,2F0,2B0,1B0\n0F0,3F0,3B0,0B0\n")
        assert schedule_.rank_of == {1: 0, 2: 0, 0: 1, 3: 1}
        assert with_comms(schedule_) == lowered_by_torch(schedule_)

    def test_micro_batches_are_numbered_as_the_last_stage_runs_them(self):
        swapped = parse_torch_csv("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n")
        assert "torch finds losses by it" in str(torch_refusals(swapped)[0])
        numbered = in_loss_order(swapped)
        assert numbered.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
        assert torch_refusals(numbered) == ()

    def test_waiting_and_pairs_are_kept(self):
        text = "0F0,,(0F1;0B0)OVERLAP_F_B,0B1\n"
        assert parse_torch_csv(text).to_csv() == text

    def test_one_that_waits_for_ever_has_no_messages(self):
        with pytest.raises(ProblemError, match="rank 0 waits for ever before 0B0; let every"):
            with_comms(parse_torch_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))

    def test_micro_batches_in_flight_are_counted_once_a_rank(self):
        assert in_flight(NAMED["1f1b"].order(4, 1, 8)) == (4, 3, 2, 1)
        assert in_flight(NAMED["gpipe"].order(2, 1, 5)) == (5, 5)
        assert in_flight(parse_csv("0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2B0,1B0")) == (1, 1)


class TestTorch:
    """torch itself loads what we write, adds its sends and receives, and does not deadlock."""

    @pytest.mark.parametrize(
        ("name", "devices", "options"),
        [("vshape", 4, None), ("looped", 2, None), ("wave", 3, SPLIT), ("vshape", 3, SPLIT)],
    )
    def test_it_loads_and_runs_through_its_own_simulator(self, tmp_path, name, devices, options):
        schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
        result = schedule(
            shape(name, devices, options), memory=2 * devices, microbatches=6, method="greedy"
        )
        file = tmp_path / "order.csv"
        file.write_text(schedule_csv(result.problem, result.outcome.solution))
        stages = sum(block.kind == "forward" for block in result.problem.blocks)
        me = object.__new__(schedules._PipelineScheduleRuntime)
        me.__dict__ |= {
            "pipeline_order": {},
            "pp_group_size": devices,
            "_num_stages": stages,
            "_n_microbatches": 6,
            "_stages": [],
            "_defer_pp_recv": False,
        }
        me._load_csv(str(file), format="compute_only")
        assert sorted(me.stage_index_to_group_rank) == list(range(stages))
        moves = {  # its simulator knows computation and messages
            rank: [a for a in row if a.computation_type.value in COMPUTED + MESSAGES]
            for rank, row in me.pipeline_order_with_comms.items()
        }
        ran = schedules._simulate_comms_compute(
            moves, me.stage_index_to_group_rank.__getitem__, stages
        )
        assert set(ran) == set(range(devices))
        with file.open(newline="") as rows:
            for row in csv.reader(rows):
                for cell in row:
                    assert str(schedules._Action.from_str(cell)) == cell
