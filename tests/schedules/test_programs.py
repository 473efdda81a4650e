from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.engine import run
from partita.errors import ProblemError, ProgramError
from partita.problems import schedule as problems
from partita.program import Kind
from partita.schedules.actions import Action, Order, parse_action
from partita.schedules.pipeline import pipeline_of
from partita.schedules.placement import Block, Placement, asked
from partita.schedules.programs import ordered_program, program_of, start_column
from partita.schedules.shapes import SHAPES, ShapeOptions, shape
from partita.search import searches
from partita.timeline import Timeline
from partita.verify import verify_timeline


def order(*rows: str) -> Order:
    return tuple(tuple(map(parse_action, row.split())) for row in rows)


class TestProgramOf:
    def test_tasks_are_blocks_of_microbatches(self):
        problem = shape("kshape", 4, ShapeOptions(delay=0.5)).problem(memory=[1, 2, 3, 4])
        program = program_of(problem, 3)
        assert program.num_tasks == 30
        assert program.task_name(10 + 4) == "F1@b4"
        assert program.lanes_of(10 + 4) == (0, 1, 2, 3)
        assert program.waits_of(10 + 4) == ((12, 0.5), (13, 0.5))
        assert [memory.capacity for memory in program.memories] == [1, 2, 3, 4]

    def test_kinds_say_whether_a_backward_is_whole(self):
        whole = program_of(shape("mshape", 2).problem(), 1)
        split = program_of(shape("mshape", 2, ShapeOptions(weight_span=1)).problem(), 1)
        assert set(whole.kind) == {Kind.FORWARD, Kind.BACKWARD}
        # The step on all devices is not split.
        kinds = {
            split.blocks[b]: Kind(int(k)) for b, k in zip(split.block, split.kind, strict=True)
        }
        assert set(kinds.values()) == {Kind.FORWARD, Kind.BACKWARD, Kind.DGRAD, Kind.WGRAD}

    def test_other_kinds_are_other(self):
        program = program_of(Placement(1).add(Block("x", 1, kind="thinking"), 0).problem(), 1)
        assert program.kind.tolist() == [Kind.OTHER]

    @settings(max_examples=60, deadline=None)
    @given(
        name=st.sampled_from(sorted(SHAPES)),
        caps=st.lists(st.integers(3, 9), min_size=3, max_size=3),
        changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(-3, 9)), max_size=2),
    )
    def test_the_verifier_and_the_problem_agree_on_any_times(self, name, caps, changes):
        """Schedules that are valid, and what becomes of them when a block or two is moved."""
        free = shape(name, 3).problem(microbatches=3)
        starts = list(searches("schedule")["greedy"](free).solution.starts)
        for place, later in changes:
            microbatch, block, start = starts[place % len(starts)]
            starts[place % len(starts)] = (microbatch, block, max(0, start + later))
        problem = asked(free, memory=caps)
        table = [[0] * len(problem.blocks) for _ in range(3)]
        for microbatch, block, start in starts:
            table[microbatch][block] = start
        solution = problems.solution_of(problem, table)
        count, start = start_column(problem, solution.starts)
        program = program_of(problem, count)
        timeline = Timeline(program, start, start + program.duration)
        refused = bool(problems.check(problem, solution))
        assert bool(verify_timeline(program, timeline)) == refused

    def test_starts_may_be_listed_in_any_order(self):
        problem = shape("vshape", 2).problem()
        starts = [(m, b, 10 * m + b) for m in range(2) for b in range(4)]
        count, column = start_column(problem, starts[::-1])
        assert count == 2
        assert column.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


class TestOrderedProgram:
    def ends(self, problem, *rows, microbatches=2):
        program = ordered_program(problem, pipeline_of(problem), order(*rows), microbatches)
        return run(program)

    def test_it_runs_as_early_as_the_order_lets_it(self):
        problem = shape("vshape", 2).problem()
        timeline = self.ends(problem, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
        assert timeline.makespan == 2 * 4 + 4

    def test_a_backward_of_two_blocks_passes_the_gradient_on_when_both_are_done(self):
        problem = shape("vshape", 2, ShapeOptions(backward_span=2, weight_span=1)).problem()
        rows = ("0F0 0B0", "1F0 1B0")
        assert self.ends(problem, *rows, microbatches=1).makespan == 1 + 1 + 3 + 3
        rows = ("0F0 0I0 0W0", "1F0 1I0 1W0")
        assert self.ends(problem, *rows, microbatches=1).makespan == 1 + 1 + 2 + 3

    def test_a_stricter_wait_keeps_its_delay(self):
        options = ShapeOptions(backward_span=2, weight_span=1, delay=5)
        problem = shape("vshape", 2, options).problem()
        assert (
            self.ends(problem, "0F0 0B0", "1F0 1B0", microbatches=1).makespan
            == 1 + 5 + 1 + 3 + 5 + 3
        )

    def test_a_deadlock_is_named(self):
        problem = shape("vshape", 2).problem()
        with pytest.raises(ProgramError, match="B0@b2"):
            self.ends(problem, "0F0 0B0", "1B0 1F0", microbatches=1)

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (("0F0 0F0", "1F0 1B0"), "0F0 is there twice"),
            (("0F0", "1F0 1B0"), "b3 of micro-batch 0 is not in it"),
            (("0F0 0B0 2F0", "1F0 1B0"), "2F0 cannot run: stages are 0 to 1"),
            (("0F0 0B0 0F1", "1F0 1B0"), "0F1 cannot run: micro-batches are 0 to 0"),
            (("0F0 0B0 1F0", "1B0"), "1F0 cannot run: stage 1 is on device 1, not 0"),
            (("0F0 0I0", "1F0 1B0"), "0I0 cannot run: the placement has no block for it"),
            (("0F0 0W0", "1F0 1B0"), "0W0 cannot run: the placement has no block for it"),
        ],
    )
    def test_an_order_that_is_none_is_refused(self, rows, message):
        with pytest.raises(ProblemError) as refused:
            self.ends(shape("vshape", 2).problem(), *rows, microbatches=1)
        assert message in str(refused.value)


def test_the_capacity_of_a_program_is_that_of_the_problem():
    problem = replace(shape("vshape", 2).problem(), memory_capacity=None)
    assert [memory.capacity for memory in program_of(problem, 1).memories] == [None, None]


def test_an_action_is_read_as_it_is_written():
    assert parse_action("12I3") == Action(12, "I", 3)
    assert str(Action(12, "I", 3)) == "12I3"
