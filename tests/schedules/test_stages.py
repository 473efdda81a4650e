import pytest

from partita.errors import ProblemError
from partita.jobs.schedule import schedule
from partita.problems.schedule import memory_per_microbatch, work_per_device
from partita.schedules.pipeline import held, pipeline_of
from partita.schedules.stages import StageCost, StageLink, placement_from_stages

GIB = 2**30


def stage(device: int | tuple[int, ...], scale: float = 1.0, **changes: float) -> StageCost:
    fields = {"forward_s": 0.010 * scale, "backward_s": 0.021 * scale} | changes
    return StageCost(device, activation_bytes=GIB * scale, **fields)


class TestChain:
    def test_stages_become_a_pipeline_of_seconds_and_bytes(self):
        place = placement_from_stages([stage(0), stage(1, 1.5)])
        problem = place.problem()
        assert place.time_unit == "s"
        assert problem.num_devices == 2
        assert [b.name for b in problem.blocks] == ["F stage0", "F stage1", "B stage1", "B stage0"]
        assert [b.span for b in problem.blocks] == pytest.approx([0.010, 0.015, 0.0315, 0.021])
        assert [b.memory for b in problem.blocks] == [GIB, 1.5 * GIB, -1.5 * GIB, -GIB]
        assert problem.deps == ((0, 1), (1, 2), (2, 3))
        assert held(pipeline_of(problem)).layout == "line"

    def test_links_cost_what_they_take_in_each_direction(self):
        place = placement_from_stages([stage(0), stage(1)], [StageLink(0, 1, 0.001, 0.002)])
        problem = place.problem()
        late = dict(zip(problem.deps, problem.delays, strict=True))
        assert late == {(0, 1): 0.001, (1, 2): 0, (2, 3): 0.002}

    def test_several_stages_on_a_device_are_a_mixed_pipe(self):
        place = placement_from_stages([stage(0), stage(1), stage(0), stage(1)])
        assert held(pipeline_of(place.problem())).layout == "looped"
        assert work_per_device(place.problem()) == pytest.approx([0.062, 0.062])

    def test_a_stage_may_have_several_devices_and_a_name(self):
        place = placement_from_stages([stage((0, 1)), stage(2, name="head")], num_devices=4)
        assert place.num_devices == 4
        assert place.devices_of("F stage0") == (0, 1)
        assert place.devices_of("B head") == (2,)

    def test_weight_gradients_with_a_time_of_their_own_are_blocks(self):
        stages = [stage(0, weight_s=0.009, weight_bytes=GIB / 4), stage(1, weight_s=0.009)]
        problem = placement_from_stages(stages).problem()
        memory = {block.name: block.memory for block in problem.blocks}
        assert memory["B stage0"] == -0.75 * GIB
        assert memory["W stage0"] == -0.25 * GIB
        assert memory["B stage1"] == 0
        assert memory["W stage1"] == -GIB
        assert memory_per_microbatch(problem) == [0, 0]
        assert pipeline_of(problem).split

    def test_without_a_backward_it_is_inference(self):
        problem = placement_from_stages([StageCost(0, 0.1, activation_bytes=5)]).problem()
        assert [(b.name, b.memory) for b in problem.blocks] == [("F stage0", 0)]


def test_branches_meet():
    links = [StageLink(0, 2), StageLink(1, 2)]
    problem = placement_from_stages([stage(0), stage(1), stage(2)], links).problem()
    named = {(problem.label(a), problem.label(b)) for a, b in problem.deps}
    assert named == {
        ("F stage0", "F stage2"), ("F stage1", "F stage2"), ("F stage2", "B stage2"),
        ("B stage2", "B stage0"), ("B stage2", "B stage1"),
    }  # fmt: skip


def test_it_can_be_scheduled_and_drawn_in_seconds():
    stages = [stage(0), stage(1, 1.1), stage(2, 0.9)]
    links = [StageLink(0, 1, 0.001, 0.001), StageLink(1, 2, 0.001, 0.001)]
    result = schedule(
        placement_from_stages(stages, links), memory=3 * GIB, microbatches=4, method="greedy"
    )
    assert result.timeline().program.time_unit == "s"
    assert max(result.peak_memory) <= 3 * GIB
    assert result.makespan >= result.lower_bound > 4 * 0.0341


class TestBadInput:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: placement_from_stages([]), "stages: is empty; give at least one stage"),
            (
                lambda: placement_from_stages([stage(0), stage(1, backward_s=0)]),
                "stages: stage1 has no backward_s and others have; give it to all stages",
            ),
            (
                lambda: placement_from_stages([stage(0, name="a"), stage(1, name="a")]),
                "stages: 'a' is there twice",
            ),
            (
                lambda: placement_from_stages([stage(0)], [StageLink(0, 1)]),
                "links: found stage 1; stages are 0 to 0",
            ),
            (
                lambda: placement_from_stages([stage(0), stage(3)], num_devices=2),
                "devices of block 'F stage1': found device 3; devices are 0 to 1",
            ),
            (
                lambda: placement_from_stages([stage(0, forward_s=0.0)]),
                "span of block 'F stage0': found 0.0; give a number above zero",
            ),
            (
                lambda: placement_from_stages([stage(0, weight_s=0.1, weight_bytes=2 * GIB)]),
                "weight_bytes of stage0: found 2147483648, and the stage holds 1073741824",
            ),
            (
                lambda: placement_from_stages([StageCost(0, 1.0, 1.0, activation_bytes=-1)]),
                "activation_bytes of stage0: found -1; give at least zero",
            ),
        ],
    )
    def test_it_is_refused_with_a_sentence(self, build, message):
        with pytest.raises(ProblemError) as refused:
            build()
        assert str(refused.value).startswith(message)

    def test_stages_in_a_circle(self):
        links = [StageLink(0, 1), StageLink(1, 0)]
        with pytest.raises(ProblemError, match="wait for each other"):
            placement_from_stages([stage(0), stage(1)], links).problem()
