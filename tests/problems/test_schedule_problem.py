import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_mutations import JSON, attempt, mutated

from partita.errors import FileError, InputError, ProblemError
from partita.problems import schedule
from partita.problems.schedule import (
    ScheduleBlock,
    ScheduleProblem,
    ScheduleSolution,
    check,
    evaluate,
    heads,
    held_per_device,
    lower_bound,
    periodic,
    solution_of,
    tails,
    unroll,
)

DATA = Path(__file__).parent.parent / "data" / "schedule"
FILES = sorted(file for file in DATA.glob("*.json") if file.stem != "periods")


def pipeline(**changes: Any) -> ScheduleProblem:
    """Forward on devices 0 and 1, backward on 1 and 0: spans 1, 1, 2, 2; one unit of memory."""
    fields: dict[str, Any] = {
        "num_devices": 2,
        "blocks": (
            ScheduleBlock(1, (0,), 1, "F0", "forward"),
            ScheduleBlock(1, (1,), 1, "F1", "forward"),
            ScheduleBlock(2, (1,), -1, "B1", "backward"),
            ScheduleBlock(2, (0,), -1, "B0", "backward"),
        ),
        "deps": ((0, 1), (1, 2), (2, 3)),
        "num_microbatches": 2,
    }
    return ScheduleProblem(**(fields | changes))


ONE_BY_ONE = [[0, 1, 2, 4], [6, 7, 8, 10]]
OVERLAPPED = [[0, 1, 2, 4], [1, 4, 5, 7]]


def solved(table: list[list[float]], problem: ScheduleProblem | None = None) -> ScheduleSolution:
    return solution_of(problem or pipeline(), table)


class TestCheck:
    def test_schedules_that_keep_the_rules(self) -> None:
        assert check(pipeline(), solved(ONE_BY_ONE)) == ()
        assert check(pipeline(), solved(OVERLAPPED)) == ()

    def test_a_dependency_is_kept_to_the_unit(self) -> None:
        early = [[0, 1, 2, 4], [6, 7, 8, 9]]
        assert check(pipeline(), solved(early)) == (
            "B0 of micro-batch 1 starts at 9, and B1 lets it start at 10",
        )

    def test_a_delay_comes_on_top(self) -> None:
        delayed = pipeline(delays=(0, 3, 0))
        assert check(delayed, solved(ONE_BY_ONE)) == (
            "B1 of micro-batch 0 starts at 2, and F1 lets it start at 5",
            "B1 of micro-batch 1 starts at 8, and F1 lets it start at 11",
        )
        assert check(delayed, solved([[0, 1, 5, 7], [9, 10, 14, 16]])) == ()

    def test_a_device_does_one_thing_at_a_time(self) -> None:
        both = [[0, 1, 2, 4], [1, 3, 5, 7]]
        assert check(pipeline(), solved(both)) == (
            "device 1 starts F1 of micro-batch 1 at 3 while B1 of micro-batch 0 runs until 4",
        )

    def test_a_block_occupies_all_its_devices(self) -> None:
        wide = ScheduleProblem(
            2, (ScheduleBlock(2, (0, 1)), ScheduleBlock(1, (1,))), num_microbatches=1
        )
        assert check(wide, solution_of(wide, [[0, 1]])) == (
            "device 1 starts block 1 of micro-batch 0 at 1 while block 0 of micro-batch 0 runs "
            "until 2",
        )
        assert check(wide, solution_of(wide, [[0, 2]])) == ()

    def test_a_long_block_is_not_forgotten_behind_a_short_one(self) -> None:
        three = ScheduleProblem(
            1, (ScheduleBlock(9, (0,)), ScheduleBlock(1, (0,)), ScheduleBlock(1, (0,)))
        )
        three = replace(three, num_microbatches=1)
        assert len(check(three, solution_of(three, [[0, 1, 3]]))) == 2

    def test_memory_counts_from_the_start(self) -> None:
        capped = pipeline(memory_capacity=(1, 1))
        assert check(capped, solved(ONE_BY_ONE)) == ()
        assert check(capped, solved(OVERLAPPED)) == (
            "device 0 holds 2 after the start of F0 of micro-batch 1 at 1, and its cap is 1",
        )
        assert check(pipeline(memory_capacity=(2, 1)), solved(OVERLAPPED)) == ()

    def test_memory_is_taken_on_each_device_of_a_block(self) -> None:
        wide = ScheduleProblem(2, (ScheduleBlock(1, (0, 1), 3),), num_microbatches=1)
        assert check(replace(wide, memory_capacity=(3, 3)), solution_of(wide, [[0]])) == ()
        assert check(replace(wide, memory_capacity=(3, 2)), solution_of(wide, [[0]])) == (
            "device 1 holds 3 after the start of block 0 of micro-batch 0 at 0, and its cap is 2",
        )

    def test_memory_that_is_kept_counts_to_the_end(self) -> None:
        keeping = ScheduleProblem(
            1, (ScheduleBlock(1, (0,), 1),), memory_capacity=(2,), num_microbatches=3
        )
        assert check(keeping, solution_of(keeping, [[0], [1], [2]])) == (
            "device 0 holds 3 after the start of block 0 of micro-batch 2 at 2, and its cap is 2",
        )

    @pytest.mark.parametrize(
        ("starts", "message"),
        [
            ([(0, 0, 0)], "F1 of micro-batch 0 is not scheduled"),
            ([(2, 0, 0)], "micro-batch 2 is scheduled, and they are 0 to 1"),
            ([(-1, 0, 0)], "micro-batch -1 is scheduled, and they are 0 to 1"),
            ([(0, 4, 0)], "block 4 is scheduled, and blocks are 0 to 3"),
            ([(0, 0, -1)], "F0 of micro-batch 0 starts at -1"),
            ([(0, 0, math.nan)], "F0 of micro-batch 0 starts at nan"),
            ([(0, 0, math.inf)], "F0 of micro-batch 0 starts at inf"),
            ([(0, 0, 0), (0, 0, 9)], "F0 of micro-batch 0 is scheduled twice"),
        ],
    )
    def test_each_block_of_each_microbatch_is_there_once(
        self, starts: list[tuple[int, int, float]], message: str
    ) -> None:
        wrong = ScheduleSolution(None, 1, tuple(starts))
        assert check(pipeline(), wrong)[0] == message
        with pytest.raises(ProblemError, match=r"starts: .*; give a complete schedule"):
            evaluate(pipeline(), wrong)

    def test_a_claim_that_is_not_true_is_refused(self) -> None:
        right = solved(OVERLAPPED)
        assert check(pipeline(), replace(right, makespan=8)) == (
            "the makespan is 9, and 8 is claimed",
        )
        assert check(pipeline(), replace(right, period=3)) == ()
        assert check(pipeline(), replace(right, period=2.5)) == (
            "a period of 2.5 is claimed, and a device works 3 in each",
        )

    def test_rounding_is_forgiven_and_no_more(self) -> None:
        thirds = pipeline(blocks=tuple(replace(b, span=b.span / 3) for b in pipeline().blocks))
        table = [[start / 3 for start in row] for row in OVERLAPPED]
        table[1][1] -= 1e-13
        assert check(thirds, solution_of(thirds, table)) == ()
        table[1][1] -= 1e-6
        assert len(check(thirds, solution_of(thirds, table))) == 1

    def test_memory_that_is_not_whole_may_round(self) -> None:
        blocks = (
            ScheduleBlock(1, (0,), 0.1),
            ScheduleBlock(1, (0,), 0.2),
            ScheduleBlock(1, (0,), -0.3),
        )
        tight = ScheduleProblem(1, blocks, memory_capacity=(0.3,), num_microbatches=1)
        assert 0.1 + 0.2 > 0.3
        assert check(tight, solution_of(tight, [[0, 1, 2]])) == ()

    @settings(max_examples=300, deadline=None)
    @given(
        starts=st.tuples(*[st.integers(0, 9)] * 6),
        spans=st.tuples(*[st.integers(1, 2)] * 3),
        memory=st.tuples(*[st.integers(-2, 2)] * 3),
        devices=st.tuples(*[st.sampled_from([(0,), (1,), (0, 1)])] * 3),
        cap=st.integers(0, 3),
    )
    def test_it_agrees_with_looking_at_every_moment(
        self,
        starts: tuple[int, ...],
        spans: tuple[int, ...],
        memory: tuple[int, ...],
        devices: tuple[tuple[int, ...], ...],
        cap: int,
    ) -> None:
        blocks = tuple(map(ScheduleBlock, spans, devices, memory))
        problem = ScheduleProblem(2, blocks, ((0, 2),), (1,), (cap, cap), 2)
        rows = [starts[:3], starts[3:]]
        right = all(row[2] >= row[0] + spans[0] + 1 for row in rows)
        for device in (0, 1):
            runs = [
                (row[b], row[b] + spans[b], memory[b])
                for row in rows
                for b in range(3)
                if device in devices[b]
            ]
            for time in range(12):
                right &= sum(start <= time < end for start, end, _ in runs) <= 1
                right &= sum(amount for start, _, amount in runs if start <= time) <= cap or not (
                    any(start == time for start, _, _ in runs)
                )
        assert (check(problem, solution_of(problem, rows)) == ()) == right


class TestPeriod:
    """Schedules that repeat for ever."""

    forever = pipeline(num_microbatches=None)
    capped = pipeline(num_microbatches=None, memory_capacity=(2, 1))

    def test_one_microbatch_per_repetition(self) -> None:
        schedule_solution = periodic(self.forever, [[0, 1, 2, 4]], 3)
        assert schedule_solution.period == 3
        # Two are under way at once, and two more show how it goes on.
        assert schedule_solution.starts[-1] == (3, 3, 13)
        assert schedule_solution.makespan == 15
        assert check(self.forever, schedule_solution) == ()
        assert evaluate(self.forever, schedule_solution) == 3

    def test_several_microbatches_per_repetition(self) -> None:
        schedule_solution = periodic(self.forever, [[0, 1, 2, 4], [1, 4, 5, 7]], 9)
        assert schedule_solution.period == 4.5
        assert check(self.forever, schedule_solution) == ()
        assert evaluate(self.forever, schedule_solution) == 4.5

    def test_it_unrolls_to_any_number(self) -> None:
        schedule_solution = periodic(self.forever, [[0, 1, 2, 4], [1, 4, 5, 7]], 9)
        for count in (1, 2, 7, 50):
            problem = pipeline(num_microbatches=count)
            unrolled = unroll(self.forever, schedule_solution, count)
            assert check(problem, unrolled) == ()
            assert len(unrolled.starts) == 4 * count
        assert unroll(self.forever, schedule_solution, 7).makespan == 27 + 6

    def test_repetitions_must_not_meet(self) -> None:
        # F0 of the next micro-batch starts while B0 runs.
        schedule_solution = periodic(self.forever, [[0, 1, 2, 4]], 5)
        assert check(self.forever, schedule_solution)[0] == (
            "device 0 starts F0 of micro-batch 1 at 5 while B0 of micro-batch 0 runs until 6"
        )

    def test_what_is_not_listed_is_checked_too(self) -> None:
        # Five apart: the first two meet nobody, but the third meets the first's last block.
        wide = replace(
            self.forever, blocks=(ScheduleBlock(1, (0,)), ScheduleBlock(1, (0,))), deps=((0, 1),)
        )
        first_two = solution_of(wide, [[0, 10], [5, 15]], period=5)
        assert any("micro-batch 2" in violation for violation in check(wide, first_two))

    def test_memory_is_checked_in_the_steady_state(self) -> None:
        slow = periodic(self.capped, [[0, 1, 2, 4]], 6)
        assert check(self.capped, slow) == ()
        assert check(self.capped, periodic(self.capped, [[0, 1, 2, 4]], 3)) == ()
        late = periodic(self.capped, [[0, 4, 5, 10]], 3)
        assert check(self.capped, late) == (
            "device 0 holds 3 after the start of F0 of micro-batch 2 at 6, and its cap is 2",
        )

    def test_memory_may_not_grow_for_ever(self) -> None:
        growing = ScheduleProblem(1, (ScheduleBlock(1, (0,), 1),), memory_capacity=(100,))
        assert check(growing, periodic(growing, [[0]], 1)) == (
            "device 0 keeps 1 of every micro-batch, and has a cap",
        )
        free = replace(growing, memory_capacity=None)
        assert check(free, periodic(free, [[0]], 1)) == ()
        shrinking = ScheduleProblem(1, (ScheduleBlock(1, (0,), -1),), memory_capacity=(0,))
        assert check(shrinking, periodic(shrinking, [[0]], 1)) == ()

    def test_a_repetition_must_be_shown(self) -> None:
        once = solution_of(self.forever, [[0, 1, 2, 4]], period=6)
        assert check(self.forever, once) == (
            "the starts do not show a repetition (each at least twice)",
        )
        with pytest.raises(ProblemError, match="give a periodic schedule"):
            evaluate(self.forever, once)
        with pytest.raises(ProblemError, match="give a periodic schedule"):
            unroll(self.forever, once, 3)

    def test_the_claimed_period_must_be_the_one_shown(self) -> None:
        schedule_solution = periodic(self.forever, [[0, 1, 2, 4]], 6)
        assert check(self.forever, replace(schedule_solution, period=5)) == (
            "the period is 6, and 5 is claimed",
        )
        assert check(self.forever, replace(schedule_solution, period=None)) == (
            "the period is 6, and None is claimed",
        )

    def test_a_schedule_too_spread_out_is_refused_not_unrolled(self) -> None:
        spread = solution_of(self.forever, [[0, 1, 2, 10**12], [3, 4, 5, 10**12 + 3]], period=3)
        assert "too many to check" in check(self.forever, spread)[-1]

    def test_nothing_scheduled_is_no_schedule(self) -> None:
        assert check(self.forever, ScheduleSolution(1, 1, ())) == ("no micro-batch is scheduled",)
        gap = ScheduleSolution(1, 1, ((10**9, 0, 0),))
        assert check(self.forever, gap) == ("micro-batches up to 1000000000 are named by 1 starts",)


class TestBound:
    def test_heads_and_tails_are_longest_paths(self) -> None:
        assert heads(pipeline()) == [0, 1, 2, 4]
        assert tails(pipeline()) == [6, 5, 4, 2]
        assert heads(pipeline(delays=(0, 3, 0))) == [0, 1, 5, 7]
        assert tails(pipeline(delays=(0, 3, 0))) == [9, 8, 4, 2]

    def test_it_is_the_critical_path_for_one_microbatch(self) -> None:
        assert lower_bound(pipeline(num_microbatches=1)) == 6

    def test_it_is_the_work_of_a_device_with_its_head_and_tail_for_many(self) -> None:
        assert lower_bound(pipeline(num_microbatches=10)) == 1 + 10 * 3 + 2
        assert lower_bound(pipeline(num_microbatches=None)) == 3

    def test_memory_held_over_time_bounds_both(self) -> None:
        assert held_per_device(pipeline()) == [4, 1]
        assert lower_bound(pipeline(num_microbatches=10, memory_capacity=(1, 1))) == 10 * 4 + 2
        assert lower_bound(pipeline(num_microbatches=None, memory_capacity=(1, 1))) == 4

    def test_whole_times_round_a_bound_up(self) -> None:
        capped = pipeline(num_microbatches=10, memory_capacity=(9, 9), delays=(0, 90, 0))
        assert held_per_device(capped) == [94, 91]
        assert lower_bound(capped) == math.ceil(10 * 94 / 9) + 2

    def test_memory_that_does_not_pair_up_bounds_nothing(self) -> None:
        back_first = ScheduleProblem(
            1, (ScheduleBlock(1, (0,), -1), ScheduleBlock(1, (0,), 1)), ((0, 1),)
        )
        assert held_per_device(back_first) == [None]
        kept = ScheduleProblem(1, (ScheduleBlock(1, (0,), 1),))
        assert held_per_device(kept) == [None]

    def test_devices_without_blocks_do_not_matter(self) -> None:
        assert lower_bound(pipeline(num_devices=5, num_microbatches=10)) == 33


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_devices": 0}, "num_devices: found 0; give a whole number from 1 to 100,000"),
    ({"num_devices": 10**9}, "num_devices: found 1000000000;"),
    ({"blocks": ()}, "blocks: is empty; give at least one block"),
    ({"num_microbatches": 0}, "num_microbatches: found 0; give a whole number from 1 to 5,000,000"),
    ({"num_microbatches": -3}, "num_microbatches: found -3;"),
    ({"num_microbatches": 10**18}, "num_microbatches: found 1000000000000000000;"),
    ({"blocks": (ScheduleBlock(0, (0,)),)}, "blocks[0].span: found 0; give a number above zero"),
    ({"blocks": (ScheduleBlock(-1, (0,)),)}, "blocks[0].span: found -1;"),
    ({"blocks": (ScheduleBlock(math.nan, (0,)),)}, "blocks[0].span: found nan;"),
    ({"blocks": (ScheduleBlock(math.inf, (0,)),)}, "blocks[0].span: found inf;"),
    (
        {"blocks": (ScheduleBlock(1, (0,), math.nan),)},
        "blocks[0].memory: found nan; give a number;",
    ),
    ({"blocks": (ScheduleBlock(1, (0,), -math.inf),)}, "blocks[0].memory: found -inf;"),
    ({"blocks": (ScheduleBlock(1, ()),)}, "blocks[0].devices: is empty; name the devices"),
    (
        {"blocks": (ScheduleBlock(1, (0, 2)),)},
        "blocks[0].devices[1]: found device 2; devices are 0 to 1 (num_devices is 2)",
    ),
    ({"blocks": (ScheduleBlock(1, (-1,)),)}, "blocks[0].devices[0]: found device -1;"),
    ({"blocks": (ScheduleBlock(1, (0, 0)),)}, "blocks[0].devices: names a device twice;"),
    ({"deps": ((0, 1), (1, 9))}, "deps[1][1]: found block 9; blocks are 0 to 3"),
    ({"deps": ((-1, 0),)}, "deps[0][0]: found block -1;"),
    (
        {"deps": ((0, 1), (1, 2), (2, 1), (2, 3))},
        "deps: blocks wait for each other: F1 -> B1 -> F1; remove one of these dependencies",
    ),
    ({"deps": ((3, 3),)}, "deps: blocks wait for each other: B0 -> B0;"),
    ({"delays": (1,)}, "delays: has 1 entries; give one per dependency: 3"),
    ({"delays": (0, -1, 0)}, "delays[1]: found -1; give a number of at least zero"),
    ({"delays": (0, math.nan, 0)}, "delays[1]: found nan;"),
    (
        {"memory_capacity": (1,)},
        "memory_capacity: has 1 entries; give one number, or one per device: 2",
    ),
    ({"memory_capacity": (1, -1)}, "memory_capacity[1]: found -1;"),
    ({"memory_capacity": (1, math.nan)}, "memory_capacity[1]: found nan;"),
]


class TestBadInput:
    @pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m for _, m in REFUSED])
    def test_a_wrong_field_is_named_with_what_to_do(
        self, changes: dict[str, Any], message: str
    ) -> None:
        if "blocks" in changes:
            changes = {"deps": ()} | changes
        with pytest.raises(ProblemError) as refused:
            pipeline(**changes)
        assert str(refused.value).startswith(message)

    def test_a_long_cycle_is_shown_in_short(self) -> None:
        ring = tuple((index, (index + 1) % 50) for index in range(50))
        with pytest.raises(ProblemError) as refused:
            ScheduleProblem(1, (ScheduleBlock(1, (0,)),) * 50, ring)
        assert len(str(refused.value)) < 200

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("memory_capcity", 3, "Object contains unknown field `memory_capcity`;"),
            ("num_devices", 2.5, "num_devices: Expected `int`, got `float`;"),
            ("num_microbatches", True, "num_microbatches: Expected `int | null`, got `bool`;"),
            ("memory_capacity", "4", "memory_capacity: Expected"),
            ("deps", [[0]], "deps[0]: Expected `array` of length 2, got 1;"),
        ],
    )
    def test_a_wrong_part_of_a_file_is_named_with_the_file(
        self, key: str, value: object, message: str
    ) -> None:
        with pytest.raises(ProblemError) as refused:
            schedule.from_json(pipeline().to_json() | {key: value}, "s.json")
        assert str(refused.value).startswith(f"s.json: {message}")

    def test_another_format_is_refused(self) -> None:
        with pytest.raises(FileError, match="partita/schedule-problem@1"):
            schedule.from_json(pipeline().to_json() | {"format": "partita/graph@1"})
        with pytest.raises(FileError, match="written by a newer partita"):
            schedule.from_json(pipeline().to_json() | {"format": "partita/schedule-problem@2"})

    @settings(max_examples=300, deadline=None)
    @given(content=mutated(pipeline(delays=(0, 1, 0), memory_capacity=(2, 1)).to_json()))
    def test_whatever_is_in_a_file_it_is_read_or_refused(self, content: dict[str, Any]) -> None:
        input_error = attempt(schedule.from_json, content, "f")
        if isinstance(input_error, InputError):
            assert input_error.file == "f"
        else:
            assert schedule.from_json(input_error.to_json()) == input_error
            assert lower_bound(input_error) > 0

    @settings(max_examples=200, deadline=None)
    @given(
        value=JSON | mutated(solved(OVERLAPPED).to_json()),
        count=st.none() | st.just(2),
    )
    def test_whatever_is_given_as_a_solution_is_read_and_judged_or_refused(
        self, value: object, count: int | None
    ) -> None:
        solution = attempt(ScheduleSolution.from_json, value)
        if isinstance(solution, InputError):
            return
        violations = check(pipeline(num_microbatches=count), solution)
        assert all(isinstance(violation, str) for violation in violations)


class TestFiles:
    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_what_is_written_is_read_back(self, file: Path) -> None:
        problem = schedule.read(file)
        assert json.loads(json.dumps(problem.to_json())) == json.loads(file.read_bytes())
        assert schedule.from_json(problem.to_json()) == problem

    def test_options_replace_what_the_file_says(self) -> None:
        file = DATA / "vshape.train.nd4.json"
        assert schedule.read(file).memory_capacity is None
        assert schedule.read(file, memory=4).memory_capacity == (4, 4, 4, 4)
        assert schedule.read(file, memory=(4, 3, 2, 1)).memory_capacity == (4, 3, 2, 1)
        assert schedule.read(file, num_microbatches=8).num_microbatches == 8
        with pytest.raises(ProblemError, match=r"vshape.*json: num_microbatches: found 0"):
            schedule.read(file, num_microbatches=0)
        with pytest.raises(ProblemError, match=r"vshape.*json: memory_capacity: has 2 entries"):
            schedule.read(file, memory=(1, 2))

    def test_whole_numbers_stay_whole_however_they_are_written(self) -> None:
        content = pipeline().to_json()
        content["blocks"][0]["span"] = 1.0
        content["memory_capacity"] = 2.0
        problem = schedule.from_json(content)
        assert schedule.is_whole(problem)
        assert problem.memory_capacity == (2, 2)
        assert isinstance(problem.memory_capacity[0], int)

    def test_caps_are_written_as_one_number_where_they_are_equal(self) -> None:
        assert pipeline(memory_capacity=(2, 2)).to_json()["memory_capacity"] == 2
        assert pipeline(memory_capacity=(2, 1)).to_json()["memory_capacity"] == [2, 1]

    def test_a_solution_is_written_as_the_format_says(self) -> None:
        schedule_solution = solved([[0, 1, 2, 4]], pipeline(num_microbatches=1))
        assert schedule_solution.to_json() == {
            "period": None,
            "makespan": 6,
            "starts": [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 3, 4]],
        }
        assert ScheduleSolution.from_json(schedule_solution.to_json()) == schedule_solution
