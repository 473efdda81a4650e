import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from partita.errors import FileError, ProblemError
from partita.problems import schedule as problems
from partita.schedules.placement import Block, Placement, asked, unique_names

DATA = Path(__file__).parents[1] / "data" / "schedule"


def pipeline() -> Placement:
    """Two stages there and back, the second backward first."""
    place = Placement(2, "two")
    place.chain([Block("F0", 1, memory=1), Block("F1", 1, memory=1)], devices=[0, 1])
    back = [Block("B1", 2, -1, "backward"), Block("B0", 2, -1, "backward")]
    return place.chain(back, devices=[1, 0], after="F1")


class TestBuilding:
    def test_a_chain_runs_one_after_the_other(self):
        problem = pipeline().problem()
        assert problem.deps == ((0, 1), (1, 2), (2, 3))
        assert [block.devices for block in problem.blocks] == [(0,), (1,), (1,), (0,)]
        assert [block.name for block in problem.blocks] == ["F0", "F1", "B1", "B0"]
        assert [block.kind for block in problem.blocks] == ["forward"] * 2 + ["backward"] * 2
        assert problem.delays == ()

    def test_steps_can_be_written_as_statements_or_in_one_expression(self):
        a, b = Block("a", 1), Block("b", 1)
        written = Placement(2)
        written.add(a, 0)
        written.add(b, [0, 1])
        written.depends(a, b)
        chained = Placement(2).add(a, 0).add(b, (0, 1), after=a)
        assert written.problem() == chained.problem()

    def test_depends_names_what_comes_before_first(self):
        place = Placement(1).add(Block("late", 1), 0).add(Block("early", 1), 0)
        assert place.depends("early", "late").problem().deps == ((1, 0),)

    def test_a_delay_is_kept_with_its_dependency(self):
        place = pipeline().depends("F0", "B0", delay=0.5)
        problem = place.problem()
        assert dict(zip(problem.deps, problem.delays, strict=True))[0, 3] == 0.5

    def test_of_two_delays_between_the_same_blocks_the_longer_holds(self):
        place = Placement(1).add(Block("a", 1), 0).add(Block("b", 1), 0)
        assert place.depends("a", "b", 3).depends("a", "b", 1).problem().delays == (3,)

    def test_a_chain_may_have_delays(self):
        place = Placement(2).chain([Block("a", 1), Block("b", 1)], [0, 1], delay=2)
        assert place.problem().delays == (2,)

    def test_a_block_may_wait_for_several(self):
        place = Placement(2).add(Block("a", 1), 0).add(Block("b", 1), 1)
        place.add(Block("c", 1), [0, 1], after=["a", "b"])
        assert place.problem().deps == ((0, 2), (1, 2))
        assert place.devices_of("c") == (0, 1)

    def test_numbers_of_numpy_are_numbers(self):
        place = Placement(np.int64(2)).add(Block("a", np.float32(1.5), np.int32(3)), np.int64(1))
        block = place.problem(memory=np.float64(3.0), microbatches=np.int16(2)).blocks[0]
        assert (block.span, block.memory, block.devices) == (1.5, 3, (1,))

    def test_whole_numbers_stay_exact(self):
        problem = Placement(1).add(Block("a", 2.0, Fraction(4, 2)), 0).problem(memory=3.0)
        assert isinstance(problem.blocks[0].span, int)
        assert isinstance(problem.blocks[0].memory, int)
        assert problem.memory_capacity == (3,)
        assert isinstance(problem.memory_capacity[0], int)

    def test_it_says_what_it_is(self):
        assert str(pipeline()) == "two: 4 blocks on 2 devices, 3 dependencies"
        assert [block.name for block in pipeline().blocks] == ["F0", "F1", "B1", "B0"]


class TestLimits:
    def test_one_cap_for_all_or_one_for_each(self):
        assert pipeline().problem(memory=3).memory_capacity == (3, 3)
        assert pipeline().problem(memory=[3, 4]).memory_capacity == (3, 4)
        assert pipeline().problem().memory_capacity is None

    def test_what_is_asked_wins_over_what_a_file_said(self):
        place = Placement.from_problem(pipeline().problem(memory=3, microbatches=5))
        assert place.problem().num_microbatches == 5
        assert place.problem(microbatches=7).num_microbatches == 7
        assert place.problem(memory=9).memory_capacity == (9, 9)


class TestFiles:
    def test_saved_and_loaded_it_is_the_same_problem(self, tmp_path):
        file = tmp_path / "p.json"
        place = pipeline().depends("F0", "B0", 0.25)
        place.save(file, memory=[2, 3], microbatches=4)
        assert json.loads(file.read_bytes())["format"] == "partita/schedule-problem@1"
        assert problems.read(file) == place.problem(memory=[2, 3], microbatches=4)
        assert Placement.load(file).problem() == place.problem(memory=[2, 3], microbatches=4)

    @pytest.mark.parametrize("file", sorted(DATA.glob("*shape.*.json")), ids=lambda f: f.stem)
    def test_problem_files_of_others_come_back_as_they_were(self, file):
        assert Placement.load(file).problem().to_json() == json.loads(file.read_bytes())

    def test_nothing_is_overwritten_unasked(self, tmp_path):
        file = tmp_path / "p.json"
        pipeline().save(file)
        with pytest.raises(FileError, match="exists already"):
            pipeline().save(file)
        pipeline().save(file, overwrite=True)

    def test_blocks_without_a_name_get_one(self):
        blocks = (problems.ScheduleBlock(1, (0,)), problems.ScheduleBlock(1, (0,), name="x"))
        blocks += (
            problems.ScheduleBlock(1, (0,), name="x"),
            problems.ScheduleBlock(1, (0,), name="b0"),
        )
        problem = problems.ScheduleProblem(1, blocks, ((0, 1),))
        assert unique_names(problem) == ["b0", "x", "x#2", "b0#3"]
        assert Placement.from_problem(problem).problem().deps == ((0, 1),)


class TestBadInput:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: Placement(0), "num_devices: found 0; give a whole number from 1"),
            (lambda: Placement(2.5), "num_devices: found 2.5; give a whole number"),
            (lambda: Placement(True), "num_devices: found True; give a whole number"),
            (lambda: Block("", 1), "name of a block: found ''; give text"),
            (lambda: Block("a", 0), "span of block 'a': found 0; give a number above zero"),
            (lambda: Block("a", -1), "span of block 'a': found -1; give a number above zero"),
            (lambda: Block("a", math.nan), "span of block 'a': found nan; give a finite number"),
            (lambda: Block("a", "1"), "span of block 'a': found '1'; give a number"),
            (lambda: Block("a", 1, math.inf), "memory of block 'a': found inf; give a finite"),
            (lambda: Placement(1).add(Block("a", 1), 1), "block 'a': found device 1; devices are"),
            (lambda: Placement(1).add(Block("a", 1), -1), "block 'a': found device -1"),
            (lambda: Placement(1).add(Block("a", 1), []), "devices of block 'a': is empty; name"),
            (lambda: Placement(1).add(Block("a", 1), 0.5), "of block 'a': found 0.5; give a whole"),
            (lambda: Placement(1).add(Block("a", 1), "0"), "of block 'a': found '0'; give a whole"),
            (lambda: Placement(2).add(Block("a", 1), [1, 1]), "'a': names a device twice"),
            (lambda: Placement(2).add("a", [1]), "blocks: found 'a'; give a Block"),
            (lambda: pipeline().add(Block("F0", 1), 0), "blocks: 'F0' is there already; give each"),
            (lambda: Placement(1).chain([Block("a", 1)], [0, 0]), "devices: found 2 for 1 blocks"),
            (lambda: pipeline().depends("F2", "B0"), "there is no block 'F2'; known are B0, B1"),
            (lambda: Placement(1).depends("a", "b"), "there is no block 'a'; add it first"),
            (lambda: pipeline().depends("F0", "F1", -1), "delay: found -1; give at least zero"),
            (lambda: pipeline().problem(memory="4"), "memory: found '4'; give a number"),
            (lambda: pipeline().problem(memory=-1), "memory: found -1; give a number of at least"),
            (lambda: pipeline().problem(memory=[1, 2, 3]), "memory: has 3 entries; give one"),
            (lambda: pipeline().problem(microbatches=0), "microbatches: found 0; give a whole"),
            (lambda: pipeline().problem(microbatches=1.5), "microbatches: found 1.5; give a whole"),
            (lambda: Placement(1).problem(), "blocks: is empty; give at least one block"),
        ],
    )  # fmt: skip
    def test_it_is_refused_with_a_sentence(self, build, message):
        with pytest.raises(ProblemError) as refused:
            build()
        assert message in str(refused.value)

    def test_a_cycle_is_named(self):
        with pytest.raises(ProblemError, match=r"wait for each other: .*F0 -> F1 -> B1 -> B0"):
            pipeline().depends("B0", "F0").problem()

    def test_a_block_that_waits_for_itself_is_a_cycle(self):
        with pytest.raises(ProblemError, match="wait for each other: F0 -> F0"):
            pipeline().depends("F0", "F0").problem()


def test_asked_without_wishes_changes_nothing():
    problem = pipeline().problem(memory=3, microbatches=2)
    assert asked(problem) is problem
