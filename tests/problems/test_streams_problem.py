import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_mutations import JSON, attempt, mutated

from partita import files
from partita.errors import InputError, ProblemError
from partita.problems import streams
from partita.problems.streams import (
    Conv,
    StreamsConstants,
    StreamsOp,
    StreamsProblem,
    StreamsSolution,
    StreamStage,
    check,
    evaluate,
    lower_bound,
    merged,
    solo_us,
    stage_us,
)

DATA = Path(__file__).parent.parent / "data" / "streams"
GPU = StreamsConstants(
    num_sms=10,
    peak_flop_per_us=100.0,
    efficiency=0.5,
    bytes_per_us=10.0,
    launch_us=4.0,
    sync_us=3.0,
    alpha=0.1,
)
SMALL = Conv(cin=1, hin=1, win=1, cout=1, hout=1, wout=1, kh=1, kw=1)


def op(t_us: float, w_us: float, *preds: int, **fields: Any) -> StreamsOp:
    return StreamsOp("op", preds, t_us, w_us, **fields)


def conv(t_us: float, w_us: float, *preds: int, shape: Conv = SMALL, key: str = "1") -> StreamsOp:
    return StreamsOp("conv", preds, t_us, w_us, merge_key=key, conv=shape)


def diamond(**fields: Any) -> StreamsProblem:
    """Op 1 feeds the convs 2 and 3; both feed 4."""
    settings: dict[str, Any] = {
        "ops": (
            StreamsOp("input", (), 0.0, 0.0),
            op(10, 1, 0),
            conv(20, 2, 1),
            conv(30, 3, 1),
            op(40, 4, 2, 3),
        ),
        "parts": ((1, 2, 3, 4),),
        "constants": GPU,
    }
    return StreamsProblem(**(settings | fields))


def plan(*stages: StreamStage) -> StreamsSolution:
    return StreamsSolution((stages,))


def side_by_side(*groups: tuple[int, ...]) -> StreamStage:
    return StreamStage(groups=groups)


SEQUENTIAL = plan(*(side_by_side((each,)) for each in (1, 2, 3, 4)))


def test_stages_one_after_the_other_add_up() -> None:
    assert evaluate(diamond(), SEQUENTIAL) == 100


def test_groups_side_by_side_take_the_longest_and_pay_for_company() -> None:
    both = plan(side_by_side((1,)), side_by_side((2,), (3,)), side_by_side((4,)))
    assert evaluate(diamond(), both) == pytest.approx(10 + (30 * 1.1 + 3) + 40)


def test_work_that_fills_the_gpu_bounds_a_stage() -> None:
    ops = (*diamond().ops[:2], op(20, 25, 1), op(30, 35, 1), diamond().ops[4])
    assert stage_us(diamond(ops=ops), side_by_side((2,), (3,))) == pytest.approx(60 * 1.1 + 3)


def test_a_group_runs_its_ops_in_order() -> None:
    tail = plan(side_by_side((1,)), side_by_side((2,)), side_by_side((3, 4)))
    assert check(diamond(), tail) == ()
    assert evaluate(diamond(), tail) == 10 + 20 + (30 + 40)


def test_merged_convs_cost_one_conv_with_all_channels_and_the_largest_kernel() -> None:
    tall = Conv(cin=8, hin=6, win=5, cout=100, hout=4, wout=5, kh=3, kw=1)
    wide = Conv(cin=8, hin=6, win=5, cout=60, hout=4, wout=5, kh=1, kw=2)
    both = merged([tall, wide])
    assert both == Conv(cin=8, hin=6, win=5, cout=160, hout=4, wout=5, kh=3, kw=2)
    used = math.ceil(160 / 64) * math.ceil(20 / 64) / 10
    computing = 2 * 160 * 20 * 8 * 6 / (100 * 0.5 * used)
    moving = 4 * (8 * 30 + 160 * 8 * 6 + 160 + 160 * 20) / (10 * 2 * used)
    assert solo_us(GPU, both) == pytest.approx(4 + max(computing, moving))
    ops = (*diamond().ops[:2], conv(20, 2, 1, shape=tall), conv(30, 3, 1, shape=wide))
    problem = diamond(ops=ops, parts=((1, 2, 3),))
    assert stage_us(problem, StreamStage(merge=(2, 3))) == solo_us(GPU, both)


def test_a_grouped_conv_has_its_own_number_of_blocks() -> None:
    grouped = Conv(cin=8, hin=32, win=32, cout=8, hout=32, wout=32, kh=3, kw=3, groups=8)
    computing = 2 * 8 * 1024 * 1 * 9 / (100 * 0.5 * 0.8)
    moving = 4 * (8 * 1024 + 8 * 9 + 8 + 8 * 1024) / 10
    assert solo_us(GPU, grouped) == pytest.approx(4 + max(computing, moving))


@pytest.mark.parametrize("model", ["squeezenet", "inception_v3"])
def test_the_formula_gives_the_recorded_time_of_every_conv(model: str) -> None:
    problem = streams.read(DATA / f"{model}.json")
    convs = [each for each in problem.ops if each.conv is not None]
    assert len(convs) >= 30
    for each in convs:
        assert each.conv is not None
        assert solo_us(problem.constants, each.conv) == pytest.approx(each.t_us, rel=1e-12)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(1,), (2,), (3,)], "part 0: op 4 is not scheduled"),
        ([(1,), (2,), (3,), (4,), (4,)], "part 0: op 4 is scheduled 2 times"),
        ([(1,), (2,), (3,), (4,), (9,)], "part 0: op 9 does not belong here"),
        ([(0,), (1,), (2,), (3,), (4,)], "part 0: op 0 does not belong here"),
        ([(2,), (1,), (3,), (4,)], "stage 1: the group [1] is not all that follows from one op"),
        ([(1,), (2, 3), (4,)], "stage 1: the group [2, 3] is not all that follows from one op"),
        ([(1,), (2,), (4, 3)], "stage 2: the group [4, 3] runs an op before what it needs"),
        ([(1,), (2,), (3,), (4,), ()], "stage 4: has a group without ops"),
    ],
)
def test_wrong_groups_are_told_in_words(stages: list[tuple[int, ...]], message: str) -> None:
    wrong = plan(*(side_by_side(group) for group in stages))
    assert any(message in each for each in check(diamond(), wrong))
    with pytest.raises(ProblemError, match="give a valid solution"):
        evaluate(diamond(), wrong)


def test_a_group_may_run_in_any_order_that_respects_its_producers() -> None:
    problem = diamond(parts=((1, 2, 3), (4,)))
    either_way = StreamsSolution(((side_by_side((1, 3, 2)),), (side_by_side((4,)),)))
    assert check(problem, either_way) == ()


def test_limits_on_groups_are_kept() -> None:
    both = plan(side_by_side((1,)), side_by_side((2,), (3,)), side_by_side((4,)))
    assert check(diamond(s=1), both) == ("part 0: stage 1: has 2 groups, more than s = 1",)
    tail = plan(side_by_side((1,)), side_by_side((2,)), side_by_side((3, 4)))
    assert check(diamond(r=1), tail) == (
        "part 0: stage 2: the group [3, 4] has more ops than r = 1",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merge_key": "2"}, "ops 2 and 3 cannot be merged"),
        ({"conv": dataclasses.replace(SMALL, groups=2)}, "ops 2 and 3 cannot be merged"),
        ({"preds": (0, 1)}, "ops 2 and 3 cannot be merged"),
        ({"inputs": (((1, 0, 5),),)}, "ops 2 and 3 cannot be merged"),
        ({}, None),
    ],
)
def test_convs_merge_if_key_input_and_groups_agree(
    change: dict[str, Any], message: str | None
) -> None:
    ops = list(diamond().ops)
    ops[3] = dataclasses.replace(ops[3], **change)
    merging = plan(side_by_side((1,)), StreamStage(merge=(2, 3)), side_by_side((4,)))
    violations = check(diamond(ops=tuple(ops)), merging)
    assert violations == ((f"part 0: stage 1: {message}",) if message else ())


def test_only_ops_from_which_nothing_follows_can_be_merged() -> None:
    ops = (*diamond().ops[:4], conv(40, 4, 1), op(1, 1, 3))
    problem = diamond(ops=ops, parts=((1, 2, 3, 4, 5),))
    first = plan(side_by_side((1,)), StreamStage(merge=(2, 3, 4)), side_by_side((5,)))
    assert check(problem, first) == ()
    apart = plan(side_by_side((1,)), side_by_side((3, 5)), StreamStage(merge=(2, 4)))
    assert check(problem, apart) == ()
    too_late = plan(side_by_side((1,)), side_by_side((5,)), StreamStage(merge=(2, 3, 4)))
    assert check(problem, too_late) == (
        "part 0: stage 2: something still follows from op 3, which is merged",
    )


def test_a_stage_is_groups_or_a_merge() -> None:
    rest = (side_by_side((1,)), side_by_side((2,)), side_by_side((3,)), side_by_side((4,)))
    assert check(diamond(), plan(*rest, StreamStage())) == (
        "part 0: stage 4: needs either groups or a merge",
    )
    assert check(diamond(), plan(*rest[:2], StreamStage(merge=(3,)), rest[3])) == (
        "part 0: stage 2: a merge needs at least two ops",
    )
    confused = plan(*rest[:2], StreamStage(groups=((3,),), merge=(4,)))
    assert check(diamond(), confused) == ("part 0: stage 2: needs either groups or a merge",)
    assert check(diamond(), StreamsSolution(())) == ("the solution has 0 parts for 1",)


def test_the_bound_is_the_longest_path_or_all_work() -> None:
    unmergeable = tuple(
        dataclasses.replace(each, merge_key=None, conv=None) for each in diamond().ops
    )
    assert lower_bound(diamond(ops=unmergeable)) == 10 + 30 + 40
    busy = tuple(dataclasses.replace(each, w_us=100.0 * each.t_us) for each in unmergeable)
    assert lower_bound(diamond(ops=busy)) == 100 * (10 + 20 + 30 + 40)


def test_a_conv_that_may_be_merged_counts_only_its_launch() -> None:
    assert lower_bound(diamond()) == 10 + GPU.launch_us + 40
    ops = list(diamond().ops)
    for index in (2, 3):  # by themselves they keep the GPU busy, together as one conv they do not
        ops[index] = dataclasses.replace(ops[index], w_us=1000.0)
    merging = plan(side_by_side((1,)), StreamStage(merge=(2, 3)), side_by_side((4,)))
    problem = diamond(ops=tuple(ops))
    assert lower_bound(problem) <= evaluate(problem, merging) < 1000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "r: is 0; give 1 or more"),
        ({"s": -1}, "s: is -1; give 1 or more"),
        ({"r": 1.5}, "r: is 1.5"),
        (
            {"constants": dataclasses.replace(GPU, num_sms=0)},
            "syn_constants.SMS: is 0; a positive number is needed",
        ),
        (
            {"constants": dataclasses.replace(GPU, alpha=-0.1)},
            "syn_constants.ALPHA: is -0.1; a number that is not negative",
        ),
        (
            {"constants": dataclasses.replace(GPU, sync_us=math.nan)},
            "syn_constants.SYNC_us: is nan",
        ),
        ({"ops": (op(-1, 1),)}, "ops[0].syn_t_us: is -1"),
        ({"ops": (op(1, math.inf),)}, "ops[0].syn_w_us: is inf"),
        ({"ops": (op(1, 1, 1), op(1, 1))}, "ops[0].preds: op 0 names 1, which is no earlier op"),
        ({"ops": (op(1, 1, 0),)}, "ops[0].preds: op 0 names 0, which is no earlier op"),
        ({"ops": (op(1, 1, -1),)}, "ops[0].preds: op 0 names -1"),
        (
            {"ops": (op(1, 1), op(1, 1, 0, inputs=(((2, 0, 1),),)))},
            "ops[1].inputs: come from the ops [2] where preds are [0]",
        ),
        ({"ops": (op(1, 1, merge_key="1"),)}, "ops[0].merge_key: has one of the two"),
        ({"ops": (op(1, 1, merge_key="{", conv=SMALL),)}, "ops[0].merge_key: is not JSON text"),
        (
            {"ops": (conv(1, 1, shape=dataclasses.replace(SMALL, kh=0)),)},
            "ops[0]: has kh = 0; sizes of a conv are 1 to",
        ),
        (
            {"ops": (op(1, 1), StreamsOp("input", (0,), 0, 0))},
            "ops[1].preds: an input has producers",
        ),
        ({"parts": ((1, 2, 3),)}, "blocks.parts: leave out op 4"),
        ({"parts": ((1, 2, 3, 4, 7),)}, "blocks.parts[0]: names 7, which cannot be scheduled"),
        ({"parts": ((0, 1, 2, 3, 4),)}, "blocks.parts[0]: names 0, which cannot be scheduled"),
        ({"parts": ((1, 2), (2, 3, 4))}, "blocks.parts[1]: has op 2, as part 0 has"),
        (
            {"parts": ((2, 3, 4), (1,))},
            "blocks.parts: op 2 of part 0 needs op 1 of part 1; parts run in order",
        ),
        ({"ops": (StreamsOp("input", (), 0, 0),), "parts": ()}, "ops: hold nothing to schedule"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        diamond(**fields)
    assert message in str(caught.value)


def test_files_are_read_with_their_pruning() -> None:
    free = streams.read(DATA / "squeezenet.json")
    assert (free.r, free.s, len(free.ops), len(free.parts)) == (None, None, 51, 12)
    pruned = streams.read(DATA / "squeezenet.json", r=3, s=8)
    assert (pruned.r, pruned.s) == (3, 8)
    assert pruned.model == "squeezenet"


@pytest.mark.parametrize("model", ["squeezenet", "inception_v3"])
def test_json_goes_both_ways(model: str) -> None:
    problem = streams.read(DATA / f"{model}.json", r=3)
    text = files.encode_json(problem.to_json())
    assert streams.from_json(files.decode_json(text)) == problem
    assert streams.from_json(files.decode_json(text), r=5).r == 5


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("ops", 1, "id"), 7, "ops[1].id: is 7; an op's id is its position"),
        (("ops", 2, "in_shape"), [1, 2], "ops[2].in_shape: is (1, 2); an op with a merge_key"),
        (("ops", 2, "out_shape"), None, "ops[2].out_shape: is None; an op with a merge_key"),
        (("ops", 2, "attrs"), {}, "ops[2].attrs.kernel: is missing; an op with a merge_key"),
        (("ops", 2, "attrs", "kernel"), 3, "ops[2].attrs.kernel: Expected `array"),
        (("edges",), [[0, 1]], "edges: only preds have 1 -> 2"),
        (("edges", 0), [0, 4], "edges: only preds have 0 -> 1"),
        (("syn_constants",), {}, "syn_constants: Object missing required field `SMS`"),
        (("ops", 1, "preds"), None, "ops[1].preds: Expected `array`, got `null`"),
    ],
)
def test_wrong_json_is_refused_with_its_field(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    content: Any = diamond().to_json()
    parent = content
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    with pytest.raises(InputError) as caught:
        streams.from_json(content, "f.json")
    assert str(caught.value).startswith(f"f.json: {message}")


def test_edges_that_preds_do_not_have_are_refused() -> None:
    content = diamond().to_json()
    content["edges"].append([0, 4])
    with pytest.raises(ProblemError, match="edges: preds do not have 0 -> 4"):
        streams.from_json(content)


def test_a_solution_is_written_as_the_format_says() -> None:
    written = {"parts": [[{"groups": [[1, 2], [3]]}, {"merge": [4, 5]}], []]}
    given = StreamsSolution(((side_by_side((1, 2), (3,)), StreamStage(merge=(4, 5))), ()))
    assert given.to_json() == written
    assert StreamsSolution.from_json(written) == given


@settings(max_examples=300, deadline=None)
@given(mutated(diamond(r=3, s=2).to_json()))
def test_any_json_is_read_or_refused(value: dict[str, Any]) -> None:
    problem = attempt(streams.from_json, value, "f.json")
    if isinstance(problem, InputError):
        assert problem.file == "f.json"
        return
    one_by_one = StreamsSolution(
        tuple(tuple(side_by_side((each,)) for each in sorted(part)) for part in problem.parts)
    )
    assert lower_bound(problem) <= evaluate(problem, one_by_one) * (1 + 1e-9)
    assert streams.from_json(problem.to_json()) == problem


OPS = st.lists(st.integers(-1, 5), max_size=3)
STAGES = st.fixed_dictionaries({}, optional={"groups": st.lists(OPS, max_size=3), "merge": OPS})


@given(st.lists(st.lists(STAGES, max_size=5), min_size=1, max_size=1) | JSON)
def test_any_solution_is_read_or_refused(parts: Any) -> None:
    try:
        given = StreamsSolution.from_json({"parts": parts})
    except InputError:
        return
    if not check(diamond(), given):
        assert evaluate(diamond(), given) >= lower_bound(diamond())
