from dataclasses import replace

import pytest

from partita.errors import ProblemError
from partita.schedules.actions import Action
from partita.schedules.pipeline import held, on_devices, order_of, pipeline_of
from partita.schedules.placement import Block, Placement
from partita.schedules.shapes import ShapeOptions, shape

SPLIT = ShapeOptions(weight_span=1)


def back(name: str, span: float = 2) -> Block:
    return Block(name, span, kind="backward")


def line() -> Placement:
    place = Placement(2)
    return place.chain([Block("F0", 1), Block("F1", 1), back("B1"), back("B0")], [0, 1, 1, 0])


class TestPipelineOf:
    def test_stages_are_paired_with_their_backward(self):
        pipeline = pipeline_of(shape("vshape", 3).problem())
        assert [(s.device, s.forward, s.backward, s.weight) for s in pipeline.stages] == [
            (0, 0, 5, None), (1, 1, 4, None), (2, 2, 3, None),
        ]  # fmt: skip
        assert pipeline.training
        assert not pipeline.split

    def test_and_with_their_weight_gradients(self):
        problem = shape("vshape", 3, SPLIT).problem()
        pipeline = pipeline_of(problem)
        assert pipeline.split
        for stage in pipeline.stages:
            kinds = [problem.blocks[b].kind for b in (stage.forward, stage.backward, stage.weight)]
            assert kinds == ["forward", "backward", "weight"]
            blocks = (stage.forward, stage.backward, stage.weight)
            assert {problem.blocks[b].devices for b in blocks} == {(stage.device,)}

    def test_inference_has_no_backward(self):
        pipeline = pipeline_of(shape("wave", 3, ShapeOptions(training=False)).problem())
        assert not pipeline.training
        assert [stage.device for stage in pipeline.stages] == [0, 1, 2, 2, 1, 0]

    def test_two_directions_are_two_chains(self):
        pipeline = pipeline_of(shape("xshape", 4).problem())
        assert [[s.device for s in chain] for chain in pipeline.chains] == [
            [0, 1, 2, 3],
            [3, 2, 1, 0],
        ]

    def test_a_backward_may_name_its_forward_as_well(self):
        plain, said = line(), line().depends("F0", "B0")
        assert pipeline_of(plain.problem()) == pipeline_of(said.problem())

    @pytest.mark.parametrize(
        ("place", "why"),
        [
            (shape("mshape", 3), "b0 occupies 3 devices"),
            (shape("kshape", 4), "b4 occupies 4 devices"),
            (line().add(Block("U", 1, kind="update"), 0), "U is of kind 'update'"),
            (line().add(back("B9"), 0), "B9 belongs to 0 stages"),
            (line().add(Block("F9", 1), 1, after="F0"), "forwards branch at F0"),
            (line().add(Block("W0", 1, kind="weight"), 0, after="B0"), "some stages have a"),
            (line().depends("F1", "B0"), "B0 waits for F1"),
            (Placement(2).chain([Block("F", 1), back("B")], [0, 1]), "B is not on the device of F"),
            (Placement(1).add(back("B"), 0), "there is no forward block"),
        ],
    )  # fmt: skip
    def test_what_is_none_is_refused_with_the_reason(self, place, why):
        with pytest.raises(ProblemError, match="this is no pipeline") as refused:
            pipeline_of(place.problem())
        assert why in str(refused.value)

    def test_two_stages_that_do_not_wait_for_each_other_are_two_chains(self):
        place = Placement(2).chain([Block("F0", 1), back("B0")], [0, 0])
        place.chain([Block("F1", 1), back("B1")], [1, 1])
        assert len(pipeline_of(place.problem()).chains) == 2


class TestHeld:
    def test_ranks_follow_the_stages_whatever_the_devices_are_called(self):
        blocks = [Block("F0", 1), Block("F1", 1), back("B1"), back("B0")]
        place = Placement(2).chain(blocks, [1, 0, 0, 1])
        stage_holding = held(pipeline_of(place.problem()))
        assert stage_holding.layout == "line"
        assert stage_holding.ranks == (1, 0)

    def test_an_uneven_pipeline_is_in_no_known_layout(self):
        blocks = [Block(f"F{i}", 1) for i in range(3)]
        assert held(pipeline_of(Placement(2).chain(blocks, [0, 1, 0]).problem())) is None

    def test_devices_that_hold_nothing_are_no_ranks(self):
        assert held(pipeline_of(replace(line().problem(), num_devices=3))) is None

    def test_rows_go_where_their_ranks_are(self):
        order = ((Action(0, "F", 0),), (Action(1, "F", 0),))
        assert on_devices(order, (1, 0)) == (order[1], order[0])


def test_the_order_of_starts_is_read_as_actions():
    pipeline = pipeline_of(line().problem())
    starts = [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 2),
        (0, 3, 4),
        (1, 0, 1),
        (1, 1, 4),
        (1, 2, 5),
        (1, 3, 7),
    ]
    rows = [" ".join(map(str, row)) for row in order_of(pipeline, starts)]
    assert rows == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
