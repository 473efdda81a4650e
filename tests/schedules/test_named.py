"""Published schedules: they run, they are those of torch, and their formulas hold."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import InputError, ProblemError
from partita.jobs.baselines import Baseline, named_schedule
from partita.schedules.actions import Action, Order, order_text
from partita.schedules.named import NAMED
from partita.schedules.torch_csv import parse_torch_csv

SPANS = [(1, 1, 1), (2, 3, 1), (3, 4, 2), (1, 2, 2), (4, 1, 3)]


def bubble(name: str, p: int, m: int, spans: tuple[float, float, float], chunks: int = 2) -> float:
    return run(name, p, m, spans, chunks).bubble


def run(
    name: str, p: int, m: int, spans: tuple[float, float, float] = (1, 1, 1), chunks: int = 2
) -> Baseline:
    forward, backward, weight = spans
    return named_schedule(
        name, p, m, forward=forward, backward=backward, weight=weight, chunks=chunks
    )


@pytest.mark.parametrize("name", NAMED)
class TestEverySchedule:
    @settings(max_examples=15, deadline=None)
    @given(p=st.integers(1, 8), chunks=st.integers(1, 4), m=st.integers(1, 20))
    def test_it_runs_wherever_it_is_not_refused(self, name, p, chunks, m):
        """Complete, no deadlock, and verified: `named_schedule` raises otherwise."""
        try:
            baseline = run(name, p, m, chunks=chunks)
        except ProblemError as error:
            assert str(error).startswith((f"{name}: {NAMED[name].title} needs", "devices: found 1"))
            return
        assert baseline.num_microbatches == m
        assert baseline.makespan >= 3 * m * (1 - 1e-9)
        assert baseline.bubble >= -1e-9

    @settings(max_examples=8, deadline=None)
    @given(p=st.sampled_from([2, 4, 6]), spans=st.tuples(*[st.integers(1, 5)] * 3))
    def test_the_work_of_a_device_does_not_depend_on_the_schedule(self, name, p, spans):
        m = p if name == "hanayo" else 2 * p
        baseline = run(name, p, m, spans)
        assert baseline.timeline.busy().tolist() == pytest.approx([m * sum(spans)] * p)

    def test_every_rank_runs_everything_it_holds_once(self, name):
        order = NAMED[name].order(4, 2, 8)
        for row in order:
            assert len(row) == len(set(row))
            stages = {action.stage for action in row}
            for stage in stages:
                kinds = [action.kind for action in row if action.stage == stage]
                assert kinds.count("F") == 8
                assert kinds.count("B") + kinds.count("I") == 8
                assert kinds.count("I") == kinds.count("W")


class TestFormulas:
    """Bubble of the rank that waits longest; memory in activations of a stage."""

    @pytest.mark.parametrize("spans", SPANS)
    @pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 4), (4, 9), (7, 8)])
    def test_gpipe(self, p, m, spans):
        baseline = run("gpipe", p, m, spans)
        assert baseline.bubble == (p - 1) * sum(spans)
        assert baseline.makespan == (m + p - 1) * sum(spans)
        assert baseline.peak_memory == (m,) * p

    @pytest.mark.parametrize("spans", SPANS)
    @pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 2), (4, 9), (7, 8)])
    def test_1f1b(self, p, m, spans):
        baseline = run("1f1b", p, m, spans)
        assert baseline.bubble == pytest.approx((p - 1) * sum(spans))
        assert baseline.peak_memory == tuple(min(m, p - rank) for rank in range(p))

    @pytest.mark.parametrize("spans", SPANS)
    @pytest.mark.parametrize("chunks", [1, 2, 3, 4])
    @pytest.mark.parametrize("p", [2, 4, 5])
    def test_interleaved(self, p, chunks, spans):
        baseline = run("interleaved", p, 3 * p, spans, chunks)
        assert baseline.bubble == pytest.approx((p - 1) * sum(spans) / chunks)
        if chunks > 1:
            assert baseline.peak_memory[0] == pytest.approx(p * (1 + (p - 1) / (p * chunks)))

    @pytest.mark.parametrize("spans", SPANS)
    @pytest.mark.parametrize("chunks", [1, 2, 3, 4])
    @pytest.mark.parametrize("p", [2, 4, 5])
    def test_looped_bfs(self, p, chunks, spans):
        baseline = run("looped-bfs", p, 2 * p + 1, spans, chunks)
        assert baseline.bubble == pytest.approx((p - 1) * sum(spans) / chunks)
        assert baseline.peak_memory == pytest.approx((2 * p + 1,) * p)

    @pytest.mark.parametrize("p", [2, 3, 4, 8])
    @pytest.mark.parametrize("spans", SPANS)
    def test_zb_h1(self, p, spans):
        forward, backward, weight = spans
        baseline = run("zb-h1", p, 2 * p, spans)
        # Published for weight <= forward; beyond that the forwards are what is waited for.
        assert baseline.bubble == (p - 1) * (max(forward, weight) + backward - weight)
        assert baseline.peak_memory == (p,) * p

    @pytest.mark.parametrize("p", [2, 3, 4, 8])
    @pytest.mark.parametrize("spans", [(1, 1, 1), (2, 3, 1), (3, 4, 2), (2, 2, 1), (4, 4, 3)])
    def test_zb_h2(self, p, spans):
        forward, backward, weight = spans
        baseline = run("zb-h2", p, 2 * p, spans)
        assert baseline.bubble == (p - 1) * (forward + backward - 2 * weight)
        assert baseline.peak_memory == (2 * p - 1,) * p

    @pytest.mark.parametrize("p", [2, 3, 4, 8])
    @pytest.mark.parametrize("m", [0, 1, 5])
    def test_zb_v_has_no_bubble_where_all_take_as_long(self, p, m):
        baseline = run("zb-v", p, 2 * p + m)
        assert baseline.bubble == 0
        assert baseline.peak_memory == (p,) * p

    @pytest.mark.parametrize("p", [2, 4, 6, 8])
    @pytest.mark.parametrize("m", [1, 2, 3])
    def test_chimera_where_a_backward_takes_as_long_as_a_forward(self, p, m):
        baseline = run("chimera", p, m * p, (3, 1, 2))
        assert baseline.bubble == (p - 2) * 3

    @pytest.mark.parametrize("p", [2, 4, 6, 8])
    @pytest.mark.parametrize("spans", [(1, 1, 1), (2, 3, 1), (3, 1, 1), (1, 2, 2)])
    def test_chimera_with_as_many_microbatches_as_devices(self, p, spans):
        forward, backward = spans[0], spans[1] + spans[2]
        baseline = run("chimera", p, p, spans)
        assert baseline.bubble == (p - 2) * max(forward, backward)
        # With a backward of two forwards that is the published ratio (p - 2) / (3p/2 + p - 2).
        if backward == 2 * forward:
            ratio = baseline.bubble / baseline.makespan
            assert ratio == pytest.approx((p - 2) / (3 * p / 2 + p - 2))

    @pytest.mark.parametrize("p", [2, 4, 6, 8])
    def test_chimera_holds_less_at_the_ends(self, p):
        held = run("chimera", p, 2 * p).peak_memory
        assert held == tuple(p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p))

    @pytest.mark.parametrize("p", [2, 3, 4, 6])
    @pytest.mark.parametrize("chunks", [2, 4, 6])
    def test_hanayo_where_a_backward_takes_as_long_as_a_forward(self, p, chunks):
        baseline = run("hanayo", p, p, (3, 1, 2), chunks)
        assert baseline.bubble == pytest.approx((p - 1) * 6 / chunks)
        held = [(p * (chunks - 1) + 1 + rank) / chunks for rank in range(p)]
        assert baseline.peak_memory == pytest.approx(held)

    @pytest.mark.parametrize("p", [2, 3, 4, 6])
    @pytest.mark.parametrize("chunks", [2, 4])
    def test_hanayo_with_as_many_microbatches_as_devices(self, p, chunks):
        assert bubble("hanayo", p, p, (1, 1, 1), chunks) == pytest.approx((p - 1) * 4 / chunks)

    @pytest.mark.parametrize("p", [2, 4, 8])
    @pytest.mark.parametrize("spans", [(1, 1, 1), (2, 2, 1), (4, 4, 3)])
    def test_dualpipe_run_one_after_the_other(self, p, spans):
        forward, backward, weight = spans
        baseline = run("dualpipe", p, 2 * p + 4, spans)
        assert baseline.bubble == (p / 2 - 1) * (forward + backward - weight)
        assert baseline.peak_memory == (p + 1,) * p

    @pytest.mark.parametrize("p", [2, 4, 5])
    @pytest.mark.parametrize("spans", [(1, 1, 1), (2, 2, 1), (4, 4, 3)])
    def test_dualpipe_v_is_dualpipe_folded(self, p, spans):
        folded = run("dualpipe-v", p, 2 * p + 1, spans)
        assert folded.bubble == pytest.approx((p - 1) * (spans[0] + spans[1] - spans[2]) / 2)
        assert folded.peak_memory == (p + 0.5,) * p

    @pytest.mark.parametrize("p", [4, 6, 8])
    @pytest.mark.parametrize("spans", [(1, 1, 1), (2, 2, 1), (4, 4, 3)])
    def test_dualpipe_with_pairs_in_one_piece_has_the_published_bubble(self, p, spans):
        """(p/2 - 1)(F&B + B - 3W), B a whole backward; exact where F is B without W."""
        forward, backward, weight = spans
        whole = backward + weight
        rows = [
            paired(row, p // 2, min(rank, p - 1 - rank), p + 2)
            for rank, row in enumerate(NAMED["dualpipe"].order(p, 1, p + 2))
        ]
        idle = idle_in_pairs(rows, p, spans)
        assert idle == (p // 2 - 1) * (forward + whole + whole - 3 * weight)

    def test_published_figures_for_four_devices_and_eight_microbatches(self):
        assert run("1f1b", 4, 8).makespan == 33
        assert run("zb-h1", 4, 8).makespan == 27
        assert run("zb-h2", 4, 8).longest_span == 24
        assert run("zb-v", 4, 8).longest_span == 24


class TestPeriod:
    @pytest.mark.parametrize("name", [name for name in NAMED if name not in ("hanayo", "chimera")])
    def test_one_more_microbatch_costs_its_work(self, name):
        assert run(name, 4, 8).period == pytest.approx(3)

    def test_units_of_equal_slots_wait_for_each_other_where_slots_are_not_equal(self):
        assert run("chimera", 4, 8, (2, 1, 1)).period == pytest.approx(4)
        assert run("chimera", 4, 8).period == pytest.approx(3.5)

    def test_what_is_for_a_few_microbatches_has_no_period(self):
        assert run("hanayo", 4, 4).period is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "p", "m", "chunks", "message"),
        [
            ("interleaved", 4, 6, 2, "interleaved 1F1B needs a multiple of 4 micro-batches"),
            ("chimera", 3, 6, 1, "Chimera (direct) needs an even number of devices"),
            ("chimera", 4, 5, 1, "Chimera (direct) needs an even number of micro-batches"),
            ("dualpipe", 4, 6, 1, "DualPipe needs 8 micro-batches or more"),
            ("dualpipe-v", 4, 7, 2, "DualPipeV needs 8 micro-batches or more"),
            ("zb-v", 4, 8, 4, "ZB-V needs two chunks on a device"),
            ("hanayo", 4, 4, 3, "Hanayo needs an even number of chunks on a device"),
            ("hanayo", 4, 5, 2, "Hanayo needs 4 micro-batches or fewer"),
        ],
    )
    def test_what_does_not_exist_is_refused_with_its_reason(self, name, p, m, chunks, message):
        with pytest.raises(ProblemError) as refused:
            run(name, p, m, chunks=chunks)
        assert str(refused.value) == f"{name}: {message}; choose other numbers"

    def test_an_unknown_name_is_answered_with_the_nearest(self):
        with pytest.raises(InputError, match="schedule: found 'zbv'; did you mean zb-v"):
            run("zbv", 4, 8)

    @pytest.mark.parametrize("m", [0, 1.5])
    def test_no_microbatches_are_refused(self, m):
        with pytest.raises(ProblemError, match="microbatches: found"):
            run("1f1b", 4, m)


def test_an_order_reads_as_a_line_per_rank():
    text = order_text(NAMED["1f1b"].order(2, 1, 2))
    assert text == "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"


@pytest.fixture
def schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


class TestTorch:
    """The same orders as torch.distributed.pipelining has, action by action."""

    @staticmethod
    def actions(row: list[object]) -> tuple[Action, ...]:
        text = ",".join("" if action is None else str(action) for action in row)
        return parse_torch_csv(text).order[0]

    @pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 12), (3, 9)])
    @pytest.mark.parametrize("chunks", [2, 3])
    @pytest.mark.parametrize(
        ("name", "kind"), [("interleaved", "ScheduleInterleaved1F1B"),
                           ("looped-bfs", "ScheduleLoopedBFS")],
    )  # fmt: skip
    def test_schedules_of_several_chunks(self, schedules, name, kind, p, m, chunks):
        me = SimpleNamespace(
            _n_microbatches=m, n_local_stages=chunks, _stages=[None] * chunks, pp_group_size=p,
            microbatches_per_round=p,
        )  # fmt: skip
        method = getattr(schedules, kind)._calculate_single_rank_operations
        ours = NAMED[name].order(p, chunks, m)
        assert ours == tuple(self.actions(method(me, rank)) for rank in range(p))

    @pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 11), (3, 7), (1, 2)])
    @pytest.mark.parametrize(
        ("name", "kind"), [("zb-v", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")]
    )
    def test_schedules_of_two_chunks_there_and_back(self, schedules, name, kind, p, m):
        me = SimpleNamespace(
            _n_microbatches=m, num_stages=2 * p, _num_stages=2 * p, pp_group_size=p
        )
        method = getattr(schedules, kind)._calculate_single_rank_operations
        ours = NAMED[name].order(p, 2, m)
        assert ours == tuple(self.actions(method(me, rank)) for rank in range(p))

    def test_zb_v_leaves_out_microbatches_that_are_not_there(self, schedules):
        me = SimpleNamespace(_n_microbatches=3, num_stages=8, pp_group_size=4)
        method = schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations
        ours = NAMED["zb-v"].order(4, 2, 3)
        assert ours == tuple(self.actions(method(me, rank)) for rank in range(4))

    @pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
    @pytest.mark.parametrize(
        ("name", "kind"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")]
    )
    def test_schedules_of_one_stage(self, schedules, name, kind, p, m):
        me = SimpleNamespace(_n_microbatches=m, pp_group_size=p, _num_stages=p)
        rows = getattr(schedules, kind)._get_pipeline_order(me)
        # torch 2.13 numbers the forwards of the last rank of 1F1B from 1 in this picture.
        ranks = p if name == "gpipe" else p - 1
        ours = NAMED[name].order(p, 1, m)[:ranks]
        assert ours == tuple(self.actions(rows[rank]) for rank in range(ranks))


# --- DualPipe with overlapped pairs as one piece of work ------------------------------------------

Pieces = list[tuple[Action, ...]]


def paired(row: Order, half: int, rank: int, n: int) -> Pieces:
    """The row with the forwards and backwards that overlap taken together."""
    left = half - rank - 1
    alone = 2 * left + 2 * (rank + 1) + 3 * left
    pieces = [(action,) for action in row[:alone]]
    at = alone
    for turn in range(n - 2 * half + rank + 1):
        first, second, third, fourth = row[at : at + 4]
        pieces += [(first,), (second,)] if not turn and rank == half - 1 else [(first, second)]
        pieces.append((third, fourth))
        at += 4
    for _ in range(left):
        pieces += [(row[at],), (row[at + 1], row[at + 2])]
        at += 3
    return pieces + [(action,) for action in row[at:]]


def idle_in_pairs(rows: list[Pieces], depth: int, spans: tuple[float, float, float]) -> float:
    """The longest any rank is idle; a piece waits for all it needs and passes on at its end."""
    span = dict(zip("FIW", spans, strict=True)) | {"B": spans[1] + spans[2]}
    end: dict[tuple[str, int, int], float] = {}
    at, free, busy = [0] * len(rows), [0.0] * len(rows), [0.0] * len(rows)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        before = list(at)
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                piece = row[at[rank]]
                needed = [need for action in piece for need in needs(action, depth)]
                if any(need not in end for need in needed):
                    break
                begin = max([free[rank], *(end[need] for need in needed)])
                length = sum(span[action.kind] for action in piece)
                free[rank] = begin + length
                busy[rank] += length
                for action in piece:
                    if action.kind != "W":
                        kind = "F" if action.kind == "F" else "B"
                        end[kind, action.stage, action.microbatch] = free[rank]
                at[rank] += 1
        assert at != before, "deadlock"
    return max(max(free) - worked for worked in busy)


def needs(action: Action, depth: int) -> list[tuple[str, int, int]]:
    stage, microbatch = action.stage, action.microbatch
    place = stage % depth
    if action.kind == "F":
        return [("F", stage - 1, microbatch)] if place else []
    if action.kind == "W":
        return [("B", stage, microbatch)]
    later = [("B", stage + 1, microbatch)] if place < depth - 1 else []
    return [("F", stage, microbatch), *later]
