"""Schedules as torch runs them: what hangs, stops or is wrong is refused, and nothing else."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.schedules.named import NAMED
from partita.schedules.torch_comms import with_comms
from partita.schedules.torch_csv import (
    KINDS,
    WHOLE_STAGE,
    TorchAction,
    TorchSchedule,
    parse_torch_csv,
    torch_schedule,
)
from partita.verify.torch_schedules import (
    lockstep_refusals,
    torch_refusals,
    verify_torch_schedule,
)
from tests.schedules.torch_lowering import lowered_by_torch
from tests.verify.torch_runtime import runs

BASES = {
    "gpipe": (3, 1, 3), "1f1b": (2, 1, 3), "zb-h1": (3, 1, 4), "interleaved": (2, 2, 4),
    "looped-bfs": (2, 3, 2), "zb-v": (2, 2, 3), "dualpipe-v": (2, 2, 4), "hanayo": (2, 2, 2),
}  # fmt: skip
CHANGED = 120  # of every schedule and form


def base(name: str) -> TorchSchedule:
    return torch_schedule(NAMED[name].order(*BASES[name]))


def paired() -> TorchSchedule:
    """Two ranks, there and back, with overlapped pairs where a B follows an F of another stage."""
    rows = []
    for row in base("dualpipe-v").rows:
        cells: list[tuple[TorchAction, ...]] = []
        for (action,) in row:
            pair = (
                action.kind == "B" and cells and len(cells[-1]) == 1
                and cells[-1][0].kind == "F" and cells[-1][0].stage != action.stage
            )  # fmt: skip
            cells = [*cells[:-1], (cells[-1][0], action)] if pair else [*cells, (action,)]
        rows.append(tuple(cells))
    return TorchSchedule(tuple(rows))


def changed(schedule: TorchSchedule, rng: random.Random) -> TorchSchedule:
    """The schedule with one thing wrong, or only different."""
    rows = [list(row) for row in schedule.rows]
    rank = rng.randrange(len(rows))
    row = rows[rank]
    place = rng.randrange(len(row))
    other = min(len(row) - 1, max(0, place + rng.choice([-3, -2, -1, 1, 2, 3])))
    way = rng.choice(["drop", "swap", "move", "again", "aim", "aim", "rank", "wait"])
    if way == "drop":
        del row[place]
    elif way == "swap":
        row[place], row[other] = row[other], row[place]
    elif way == "move":
        row.insert(rng.randrange(len(row)), row.pop(place))
    elif way == "again":
        row.insert(rng.randrange(len(row) + 1), row[place])
    elif way == "aim" and row[place]:
        row[place] = tuple(aimed(action, rng) for action in row[place])
    elif way == "rank":
        target = rows[rng.randrange(len(rows))]
        target.insert(rng.randrange(len(target) + 1), row.pop(place))
    elif way == "wait":
        row.insert(place, ())
    return TorchSchedule(tuple(map(tuple, rows)))


def aimed(action: TorchAction, rng: random.Random) -> TorchAction:
    """The action with another stage, kind or micro-batch."""
    stage, kind, microbatch = action
    what = rng.randrange(3)
    if what == 0:
        stage = max(0, stage + rng.choice([-1, 1]))
    elif what == 1:
        kind = rng.choice(KINDS)
    elif microbatch is not None:
        microbatch = max(0, microbatch + rng.choice([-1, 1]))
    return TorchAction(stage, kind, None if kind in WHOLE_STAGE else microbatch or 0)


def judged_by_oracle(schedule: TorchSchedule, in_order: bool = False) -> bool:
    """What torch's lowering and the runtime with symbols make of it."""
    if schedule.form == "compute_only":
        lowered = lowered_by_torch(schedule)
        return lowered is not None and runs(lowered, in_order=in_order)
    return runs(schedule, in_order=in_order)


def agree(schedule: TorchSchedule) -> bool:
    """Verifier and oracle say the same; that is returned."""
    for in_order in (False, True):
        refusals = torch_refusals(schedule, in_order=in_order)
        right = judged_by_oracle(schedule, in_order)
        text = f"in order {in_order}: oracle {right}, {refusals[:1]}\n{schedule.to_csv()}"
        assert (not refusals) == right, text
        if not in_order:
            verdict = right
    return verdict


@pytest.mark.parametrize("name", [*BASES, "paired"])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_no_wrong_schedule_is_accepted_and_no_right_one_refused(name, form):
    right = paired() if name == "paired" else base(name)
    right = with_comms(right) if form == "compute_comms" else right
    assert agree(right)
    rng = random.Random(f"{name} {form}")
    verdicts = Counter[bool]()
    for _ in range(CHANGED):
        schedule = right
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            schedule = changed(schedule, rng)
        verdicts[agree(schedule)] += 1
    assert verdicts[False] > CHANGED / 4
    assert verdicts[True] > (3 if form == "compute_comms" else 0)


@given(rng=st.randoms(use_true_random=False), name=st.sampled_from([*BASES, "paired"]))
@settings(max_examples=30)
def test_any_change_is_judged_as_torch_would(rng, name):
    schedule = paired() if name == "paired" else base(name)
    if rng.random() < 0.6:
        schedule = with_comms(schedule)
    for _ in range(rng.randrange(1, 4)):
        schedule = changed(schedule, rng)
    agree(schedule)


def fewest_messages(schedule: TorchSchedule) -> int:
    """The least number of messages in any circle of waits, by trying all ways (Floyd, Warshall)."""
    places = list(schedule.places())
    number = {place.action: index for index, place in enumerate(places)}
    far = len(places) + 1
    ways = [[far] * len(places) for _ in places]
    for index, (rank, _, (stage, kind, m)) in enumerate(places):
        if index and places[index - 1].rank == rank:
            ways[index][index - 1] = 0
        for other in [TorchAction(stage - 1, "F", m)] if kind == "F" else []:
            if other in number and places[number[other]].rank != rank:
                ways[index][number[other]] = 1
        for other in [TorchAction(stage + 1, "B", m)] if kind == "B" else []:
            if other in number and places[number[other]].rank != rank:
                ways[index][number[other]] = 1
    for middle in range(len(places)):
        for row in ways:
            if row[middle] < far:
                row[:] = [min(d, row[middle] + e) for d, e in zip(row, ways[middle], strict=True)]
    return min(ways[index][index] for index in range(len(places)))


class TestRefusals:
    """Each names row, cell and action, what is wrong and what to do."""

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0F0,0B0\n\n1F0,1B0", "row 2 (rank 1): has no action; give the rank a stage, or no"),
            (
                "0F0,0SEND_F0,,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
                "row 1 (rank 0), cell 3: is empty beside messages; leave it out",
            ),
            ("0F0,0B0\n0F1,0B1", "row 2 (rank 1), cell 1, 0F1: stage 0 is on rank 0 too; run a"),
            ("0F0,0B0\n2F0,2B0", "stage 1 is nowhere; number stages from 0"),
            ("0F0,0F0,0B0", "row 1 (rank 0), cell 2, 0F0: is there already in cell 1; run"),
            ("0F0,0B0,0F1", "stage 0 has no B, or I and W, of micro-batch 1; give every stage a"),
            ("0F1,0B1", "stage 0 has no F of micro-batch 0; give every stage"),
            ("0F0,0I0", "stage 0 has no B, or I and W, of micro-batch 0"),
            ("0F0", "stage 0 has no B, or I and W, of micro-batch 0"),
            ("0F0,0B0,0I0,0W0", "row 1 (rank 0), cell 2, 0B0: is there as I or W as well; keep B"),
            ("0B0,0F0", "row 1 (rank 0), cell 1, 0B0: stands before 0F0, whose result it reads"),
            ("0F0,0W0,0I0", "row 1 (rank 0), cell 2, 0W0: stands before 0I0, whose result it"),
            (
                "0F1,0F0,0B0,0B1",
                "row 1 (rank 0), cell 1, 0F1: is forward number 0 of the last stage; run its "
                "micro-batches in order, or number them so: torch finds losses by it",
            ),
            ("1F0,0F0,1B0,0B0", "row 1 (rank 0), cell 1, 1F0: stands before 0F0, whose result"),
            ("0F0,1F0,0B0,1B0", "row 1 (rank 0), cell 3, 0B0: stands before 1B0 or I, whose"),
            ("0F0,0UNSHARD,0B0", "row 1 (rank 0), cell 2, 0UNSHARD: stands behind 0F0, which"),
            ("0UNSHARD,0F0,0UNSHARD,0B0", "row 1 (rank 0), cell 3, 0UNSHARD: is gathered already"),
            ("0UNSHARD,0RESHARD,0F0,0B0", "row 1 (rank 0), cell 2, 0RESHARD: was not used since"),
            ("0F0,0B0,0RESHARD", "row 1 (rank 0), cell 3, 0RESHARD: is not gathered; UNSHARD,"),
            ("0UNSHARD,0F0,0RESHARD,0B0", "row 1 (rank 0), cell 4, 0B0: stage 0 is not gathered"),
            ("0UNSHARD,0F0,0B0", "row 1 (rank 0): stage 0 is still gathered at the end; add"),
            ("0F0,0REDUCE_GRAD,0B0", "row 1 (rank 0), cell 2, 0REDUCE_GRAD: stands before the"),
            ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "row 1 (rank 0), cell 4, 0REDUCE_GRAD: is there"),
            (
                "0F0,1F0,1B0,0B0,0REDUCE_GRAD",
                "row 1 (rank 0): there is no 1REDUCE_GRAD, and other stages have one; add it",
            ),
            (
                "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0",
                "row 2 (rank 1), cell 1, 1F0: there is no 1RECV_F0 on rank 1; add it before",
            ),
            (
                "0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
                "row 2 (rank 1), cell 2, 1F0: there is no 0SEND_F0 on rank 0; add it after 0F0",
            ),
            (
                "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
                "row 1 (rank 0), cell 1, 0SEND_F0: stands before 0F0, which makes it; swap them",
            ),
            (
                "0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0",
                "row 1 (rank 0), cell 4, 0RECV_B0: stands behind 0B0, which reads it; swap them",
            ),
            (
                "0F0,0SEND_F0,1F0,1B0,0B0",
                "row 1 (rank 0), cell 2, 0SEND_F0: has no other end: both stages are on one rank",
            ),
            ("0RECV_F0,0F0,0B0", "row 1 (rank 0), cell 1, 0RECV_F0: has no other end: there is no"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_named_with_its_place(self, text, message):
        refusals = torch_refusals(parse_torch_csv(text))
        assert str(refusals[0]).startswith(message)

    def test_messages_are_matched_by_their_place(self):
        schedule = parse_torch_csv(
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
        )
        assert str(torch_refusals(schedule)[0]) == (
            "row 2 (rank 1), cell 1, 1RECV_F1: is message 1 from rank 0 to rank 1, and rank 0 "
            "sends 0SEND_F0 then (its cell 2); receive in the order of the sends"
        )

    def test_a_circle_is_shown_step_by_step(self):
        schedule = parse_torch_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
        assert list(map(str, torch_refusals(schedule))) == [
            "a circle of waits: 0B0 (rank 0, cell 2) waits for 1B0 (rank 1, cell 3), which comes "
            "after 1F1 (rank 1, cell 2), which waits for 0F1 (rank 0, cell 3), which comes after "
            "0B0 (rank 0, cell 2); compute in an order that follows what is read"
        ]

    def test_no_circle_has_fewer_messages_than_the_one_shown(self):
        rng = random.Random(5)
        shown = Counter[int]()
        for _ in range(400):
            name, sizes = rng.choice([("1f1b", (4, 1, 3)), ("interleaved", (4, 2, 4))])
            schedule = torch_schedule(NAMED[name].order(*sizes))
            for _ in range(rng.choice([1, 2])):
                rows = [list(row) for row in schedule.rows]
                row = rng.choice(rows)
                row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
                schedule = TorchSchedule(tuple(map(tuple, rows)))
            for refusal in torch_refusals(schedule):
                if "circle" in refusal.wrong:
                    messages = refusal.wrong.count(" waits for ")
                    assert messages == fewest_messages(schedule)
                    shown[messages] += 1
        assert len(shown) > 1

    def test_messages_in_two_orders_hang_where_they_run_one_at_a_time(self):
        schedule = parse_torch_csv(
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
        )
        verdict = verify_torch_schedule(schedule)
        assert verdict.refusals == ()
        assert str(verdict.in_order[0]).startswith(
            "a circle of waits: the message 1SEND_B0 (rank 1, cell 4) to 0RECV_B0 (rank 0, cell 5) "
            "waits for the message 0SEND_F1 (rank 0, cell 4) to 1RECV_F1 (rank 1, cell 5), which "
            "waits for the message 1SEND_B0"
        )
        assert "no REDUCE_GRAD: gradients stay sums over micro-batches" in verdict.notes[0]
        assert verdict.notes[1].startswith("no UNSHARD")

    def test_a_large_number_is_refused_at_once(self):
        (refusal, *_) = torch_refusals(parse_torch_csv("0F0,0B0,999999999F0,0F999999999"))
        assert "stage 1 is nowhere" in str(refusal)
        (refusal, *_) = torch_refusals(parse_torch_csv("0F0,0B0,0F999999999"))
        assert "has no F of micro-batch 1" in str(refusal)


class TestTorchsOwn:
    """What torch itself makes of its schedules."""

    def test_deferred_receives_of_there_and_back_schedules_take_the_wrong_messages(self):
        # torch matches by place: an activation would be taken for a gradient of the same shape.
        deferred = lowered_by_torch(base("zb-v"), defer_receives=True)
        assert deferred is not None
        assert "receive in the order of the sends" in str(torch_refusals(deferred)[0])
        assert not runs(deferred)

    def test_its_picture_of_1f1b_is_no_schedule(self):
        # `_get_pipeline_order` lets the last rank begin with micro-batch 1.
        torch = pytest.importorskip("torch.distributed.pipelining.schedules")
        made = object.__new__(torch.Schedule1F1B)
        made.__dict__ |= {"_num_stages": 2, "_n_microbatches": 4}
        rows = made._get_pipeline_order().values()
        text = "\n".join(",".join(map(str, filter(None, row))) for row in rows)
        refusals = torch_refusals(parse_torch_csv(text))
        assert str(refusals[0]).startswith("stage 0 has no F of micro-batch 4; give every stage")

    def test_deferred_receives_of_1f1b_hang_where_messages_run_one_at_a_time(self):
        deferred = lowered_by_torch(base("1f1b"), defer_receives=True)
        assert deferred is not None
        verdict = verify_torch_schedule(deferred)
        assert verdict.refusals == ()
        assert "a circle of waits" in str(verdict.in_order[0])
        assert runs(deferred)
        assert not runs(deferred, in_order=True)


class TestLockstep:
    """`PipelineScheduleMulti` exchanges what each column computed, and waits."""

    def test_there_and_back_hangs_since_a_rank_sends_to_itself(self):
        schedule = parse_torch_csv("0F0,,,3F0,3B0,,,0B0\n,1F0,2F0,,,2B0,1B0,")
        verdict = verify_torch_schedule(schedule)
        assert verdict.refusals == ()
        assert [str(refusal) for refusal in verdict.lockstep] == [
            "row 2 (rank 1): holds stages 1 and 2, would send to itself and fail, and others wait; "
            "use a runtime with messages of its own: _PipelineScheduleRuntime"
        ]

    def test_a_result_is_there_one_column_later(self):
        assert lockstep_refusals(parse_torch_csv("0F0,,,0B0\n,1F0,1B0,")) == ()
        (refusal,) = lockstep_refusals(parse_torch_csv("0F0,,0B0\n,1F0,1B0"))
        assert str(refusal) == (
            "row 1 (rank 0), cell 3, 0B0: reads what rank 1 makes in cell 3; "
            "leave cells empty until a later column than that"
        )

    def test_messages_and_pairs_are_not_for_it(self):
        comms = with_comms(base("1f1b"))
        assert str(lockstep_refusals(comms)[0]).startswith("has messages; PipelineScheduleMulti")
        said = {f"{r.wrong}; {r.fix}" for r in lockstep_refusals(paired())}
        assert "is one of a pair; write the two in two cells" in said
