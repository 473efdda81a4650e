import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.costs.measured import Environment, Measurement, append, read_database
from partita.errors import FileError, PlanError, VerificationError
from partita.gpu.flow import precision
from partita.gpu.flow.precision import nearest
from partita.gpu.flow.steps import Flow, Step, Window
from partita.gpu.reference_output import as_tuple, reference_output, relative
from partita.gpu.step_times import StepTimes, here, in_words
from partita.gpu.streams.order import Launch, LaunchPlan
from partita.gpu.streams.record import (
    StreamSchedule,
    check_plan,
    fingerprint,
    read_schedules,
    write_schedules,
)
from partita.gpu.streams.ways import EAGER, NUM_SMS, Way, conv_ways, ways

ONE, TWO = (Environment(name, "2.11.0", False, "none") for name in ("one", "two"))
CHOSEN = StreamSchedule(
    shapes=((1, 3, 8, 8),),
    dtype="float16",
    on="a GPU",
    form="streams",
    variant="merge",
    fingerprint="00",
    plan=LaunchPlan("2 streams", (Launch(0, 0), Launch(1, 1, (0,)))),
    ways=(("a", "conv 16x32x64 w4 s4 k2"), ("b", "eager")),
    times_us=(("sequential graph", 10.0), ("merge, 2 streams", 5.0)),
    error=1e-3,
    model_error=9e-4,
    seconds=1.5,
    notes=("a note",),
)


def test_schedules_go_both_ways(tmp_path):
    path = tmp_path / "schedule.json"
    write_schedules(path, (CHOSEN,), "Model")
    assert read_schedules(path) == (CHOSEN,)
    assert CHOSEN.time_us == 5.0
    with pytest.raises(FileError, match="exists already"):
        write_schedules(path, (CHOSEN,), "Model")


def test_a_schedule_of_another_format_is_refused(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text('{"format": "partita/plan@1"}')
    with pytest.raises(FileError, match="streams-schedule"):
        read_schedules(path)


def flow(kernel=(3, 3), cin=16, cout=32, **fields):
    step = Step("y", "conv", ("x",), window=Window(kernel, padding=(1, 1)), weight="w", **fields)
    shapes = {"x": (1, cin, 8, 8), "y": (1, cout, 8, 8)}
    return Flow((step,), ("x",), ("y",), shapes, dict.fromkeys(shapes, torch.float16), {})


def test_a_schedule_belongs_to_its_steps():
    mine = dataclasses.replace(CHOSEN, fingerprint=fingerprint(flow()))
    check_plan(mine, flow())
    with pytest.raises(PlanError, match="for other steps"):
        check_plan(mine, flow(kernel=(1, 1)))


def test_ways_go_both_ways():
    for way in (EAGER, Way("conv", (16, 32, 64), 4, 3, 2), Way("window", (8, 64), 2)):
        assert Way.parse(str(way)) == way


def test_a_convolution_has_kernels_and_pytorch_to_choose_from():
    all_ways = ways(flow(), flow().steps[0])
    assert all_ways[-1] == EAGER
    assert len(all_ways) > 3
    assert all(way.kernel == "conv" for way in all_ways[:-1])


def test_tiles_of_grouped_convolutions_stay_inside_their_block():
    grouped = flow(cin=64, cout=64, groups=16)
    assert all(way.block[1] <= 32 for way in ways(grouped, grouped.steps[0])[:-1])


def test_sums_are_split_only_while_processors_are_idle():
    for way in conv_ways(64, 192, 9, 448, 192, 2, 50):
        tiles = -(-64 // way.block[0]) * -(-192 // way.block[1])
        assert way.splits == 1 or tiles * way.splits <= 3 * NUM_SMS


def test_a_profile_is_kept_for_its_gpu_alone(tmp_path):
    path = tmp_path / "folder" / "times.jsonl"
    mine = StepTimes(path, on=ONE)
    mine.put("step", EAGER, 3.25)
    mine.save()
    other = StepTimes(path, on=TWO)
    assert other.get("step", EAGER) is None
    other.put("step", EAGER, 4.0)
    other.save()
    assert StepTimes(path, on=ONE).get("step", EAGER) == 3.25
    assert StepTimes(path, on=TWO).get("step", EAGER) == 4.0


def test_saving_keeps_what_others_have_added_and_a_line_cut_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "times.jsonl"
    mine, yours = StepTimes(path, on=ONE), StepTimes(path, on=ONE)
    mine.put("a", EAGER, 1.0)
    mine.save()
    yours.put("b", EAGER, 2.0)
    yours.save()
    with path.open("a") as file:
        file.write('{"call": "c", "environ')
    again = StepTimes(path, on=ONE)
    assert (again.get("a", EAGER), again.get("b", EAGER)) == (1.0, 2.0)
    again.put("d", EAGER, 3.0)
    again.save()
    assert [json.loads(line).get("call") for line in path.read_text().splitlines()] == [
        None, "a", "b", "d"
    ]  # fmt: skip


def test_what_is_saved_is_not_written_again(tmp_path):
    path = tmp_path / "times.jsonl"
    mine = StepTimes(path, on=ONE)
    mine.put("a", EAGER, 1.0)
    mine.save()
    before = path.read_bytes()
    mine.save()
    assert path.read_bytes() == before


def test_a_way_that_does_not_run_is_remembered(tmp_path):
    path = tmp_path / "times.jsonl"
    mine = StepTimes(path, on=ONE)
    mine.put("a", EAGER, -1.0)
    mine.save()
    assert StepTimes(path, on=ONE).get("a", EAGER) == -1.0


def test_times_of_steps_lie_beside_those_of_ops_in_one_file(tmp_path):
    path = tmp_path / "all.jsonl"
    op = Measurement("relu f32[2] -> f32[2]", Environment("one", "2.11.0", True), 1e-3, 2e-3)
    append(path, op)
    mine = StepTimes(path, on=ONE)
    mine.put("a", EAGER, 1.5)
    mine.save()
    known = read_database(path)
    assert known.find(op.call, op.environment) == op
    assert known.find("a", ONE, str(EAGER)).forward_s == pytest.approx(1.5e-6)


def test_older_times_of_this_gpu_are_found(tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_text(
        json.dumps({"on": in_words(here()), "key": "a", "way": str(EAGER), "us": 2.5}) + "\n"
    )
    assert StepTimes(path).get("a", EAGER) == 2.5


def test_an_output_may_be_as_far_off_as_the_model_itself():
    module = torch.nn.Linear(64, 64)
    reference = reference_output(module, (torch.randn(2, 64),))
    assert reference.errors[0] < 1e-6
    assert reference.holds(tuple(each.float() for each in reference.outputs))
    assert not reference.holds(tuple(each.float() * 1.001 for each in reference.outputs))


def test_the_yardstick_is_pytorch_s_own_run_and_not_what_rounding_might_explain():
    module = torch.nn.Linear(64, 64).half()
    wide = reference_output(module, (torch.randn(2, 64).half(),), depth=400)
    assert wide.floor == pytest.approx(40 * 2.0**-11)
    off = [tuple((each * factor).float() for each in wide.outputs) for factor in (1.002, 1.005)]
    assert all(map(wide.holds, off))
    narrow = wide.beside(off[0])
    assert narrow.errors[0] == pytest.approx(2e-3, rel=1e-2)
    assert narrow.holds(off[0])
    assert narrow.holds(tuple((each * 1.0039).float() for each in wide.outputs))
    assert not narrow.holds(off[1])


def test_what_a_model_makes_in_float32_is_float64_in_the_run_that_is_the_truth():
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(8, 8)

        def forward(self, x):
            state = torch.full((8, 8), 0.1, dtype=torch.float32)
            return self.mix(x.float() @ state + x.to(torch.float32))

    torch.manual_seed(0)
    module, x = Mixed(), torch.randn(2, 8)
    reference = reference_output(module, (x,))
    mix = module.mix
    wide = x.double() @ torch.full((8, 8), 0.1, dtype=torch.float64) + x.double()
    exact = wide @ mix.weight.double().T + mix.bias.double()
    assert relative(reference.outputs[0], exact.detach()) < 1e-15
    assert 0 < reference.errors[0] < 1e-6


@given(st.floats(2.0**-100, 2.0**100))
def test_tf32_keeps_ten_bits(value):
    exact = torch.tensor([value], dtype=torch.float32)
    rounded = nearest(exact)
    assert abs(float(rounded) / float(exact) - 1) <= 2.0**-11
    assert torch.equal(nearest(rounded), rounded)
    assert int(rounded.view(torch.int32)) % 2**13 == 0


def cut(values):
    return (values.contiguous().view(torch.int32) & -0x2000).view(torch.float32)


def half(values):
    return values.half().float()


@pytest.mark.parametrize("how", [None, nearest, cut, half])
def test_a_convolution_that_rounds_its_factors_is_found_out(how, monkeypatch):
    def conv2d(x, w, *rest):
        exact = how is None or x.dtype == torch.float64
        return plain(x, w, *rest) if exact else plain(how(x), how(w), *rest)

    plain = precision.nnf.conv2d
    monkeypatch.setattr(precision.nnf, "conv2d", conv2d)
    mine = replace_dtype(flow(), torch.float32)
    rounds = precision.rounds(mine, mine.steps[0], torch.device("cpu"))
    assert rounds == (how is not None)
    assert not precision.needs_exact(mine, mine.steps[0], torch.device("cpu"))


def replace_dtype(flow, dtype):
    weight = {"w": torch.zeros(32, 16, 3, 3)}
    return dataclasses.replace(flow, dtypes=dict.fromkeys(flow.dtypes, dtype), constants=weight)


def test_exact_convolutions_have_the_same_tiles():
    all_ways = ways(flow(), flow().steps[0], exact=True)
    assert [way.block for way in all_ways] == [way.block for way in ways(flow(), flow().steps[0])]
    assert {way.kernel for way in all_ways} == {"exactconv", "eager"}
    assert Way.parse(str(all_ways[0])) == all_ways[0]


def test_nothing_can_be_checked_against_nan():
    class Broken(torch.nn.Module):
        def forward(self, x):
            return x / 0 * 0

    with pytest.raises(VerificationError, match="not a number"):
        reference_output(Broken(), (torch.zeros(2),))


def test_outputs_of_any_nesting_are_compared():
    one = torch.ones(2)
    assert len(as_tuple({"a": one, "b": [one, (one,)]})) == 3
    assert relative(one, torch.ones(3)) == float("inf")
    with pytest.raises(VerificationError, match="type str"):
        as_tuple("text")
