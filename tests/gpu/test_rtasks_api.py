"""`partita.rtasks`: something to call like the model, with a report; refusals and their reasons."""

import json

import pytest

torch = pytest.importorskip("torch")

from rtasks_modules import SMALL, examples  # noqa: E402
from torch import nn  # noqa: E402

import partita  # noqa: E402
from partita.errors import InputError, MissingExtraError, VerificationError  # noqa: E402
from partita.gpu import choose  # noqa: E402
from partita.gpu.flow import eager  # noqa: E402
from partita.gpu.reference_output import as_tuple  # noqa: E402
from partita.gpu.rtasks import api, improve, job, launches  # noqa: E402
from partita.gpu.rtasks.execute import RegionPipeline  # noqa: E402
from partita.gpu.rtasks.job import Job  # noqa: E402
from partita.gpu.rtasks.piece_times import PieceTimes, op_times, piece_times  # noqa: E402
from partita.gpu.rtasks.plan_cache import keep_plan, plan_path, read_plan  # noqa: E402
from partita.gpu.rtasks.planned import plan_region  # noqa: E402
from partita.gpu.rtasks.regroup import split_by_branches  # noqa: E402

EXAMPLES = examples()


def small(module, *inputs, **options):
    return partita.rtasks(module, inputs, device="cpu", method="list", **options)


def job_of(name):
    module, inputs = EXAMPLES[name]
    job = Job([module], [inputs], torch.device("cpu"), lambda text: None)
    job.lower()
    job.plan(SMALL, "list", 1.0, 2, 0)
    return job


@pytest.mark.parametrize("name", ["mlp", "block", "cells", "nasnet"])
def test_it_is_called_like_the_model(name):
    module, inputs = EXAMPLES[name]
    fused = small(module, *inputs)
    other = tuple(torch.randn_like(each) for each in inputs)
    with torch.no_grad():
        for given in (inputs, other):
            torch.testing.assert_close(fused(*given), module(*given))


def test_a_result_stays_when_it_is_called_again():
    module, inputs = EXAMPLES["mlp"]
    fused = small(module, *inputs)
    first = fused(*inputs)
    kept = first.clone()
    fused(torch.randn_like(inputs[0]))
    assert torch.equal(first, kept)


def test_the_model_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    small(module, torch.randn(1, 8))
    assert all(part.training for part in module.modules())


def test_outputs_keep_their_nesting():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            y = self.one(x)
            return {"y": y, "rest": (self.two(y), x * 2)}

    module, x = Nested().eval(), torch.randn(1, 8)
    with torch.no_grad():
        torch.testing.assert_close(small(module, x)(x), module(x))


def test_the_report_names_regions_fallbacks_and_reasons():
    module, inputs = EXAMPLES["block"]
    report = small(module, *inputs).report()
    text = str(report)
    assert "2 fused regions, 1 fallback; run tile by tile without a GPU, slowly" in text
    assert "fallback scaled_dot_product_attention: aten.scaled_dot_product" in text
    data = json.loads(json.dumps(report.to_json()))
    assert data["format"] == "partita/rtasks-report@1"
    assert [region["num_ops"] for region in data["regions"]] == [3, 4]
    assert data["fallbacks"][0]["name"] == "scaled_dot_product_attention"
    for region in report.regions:
        assert 0 <= region.gap < 1
        assert region.planned_us >= region.bound_us > 0


def test_programs_can_be_printed():
    module, inputs = EXAMPLES["mlp"]
    (program,) = small(module, *inputs).programs
    assert str(program).startswith("veu 0\n  run ")


def test_the_timeline_is_as_long_as_planned():
    module, inputs = EXAMPLES["mlp"]
    fused = small(module, *inputs)
    assert fused.timeline().makespan == pytest.approx(fused.report().planned_us * 1e-6)
    with pytest.raises(InputError, match="there is no region 3; there are 1"):
        fused.timeline(3)


def test_inputs_that_want_gradients_are_only_read():
    module, inputs = EXAMPLES["mlp"]
    fused = small(module, *inputs)
    assert not fused(inputs[0].clone().requires_grad_()).requires_grad


def test_two_models_share_a_program_and_the_report_compares():
    (a, xs), (b, ys) = EXAMPLES["mlp"], EXAMPLES["resnet"]
    fused = partita.rtasks([a, b], [xs[0], ys], device="cpu", method="list")
    with torch.no_grad():
        torch.testing.assert_close(fused(*xs, *ys), (a(*xs), b(*ys)))
    (program,) = fused.programs
    owners = {name.partition(":")[0] for name in program.names}
    assert owners == {"0", "1"}
    report = fused.report()
    assert len(report.alone_us) == 2
    assert report.planned_us < sum(report.alone_us)
    assert "one after the other" in str(report)


def test_a_type_can_be_asked_for():
    module, inputs = EXAMPLES["mlp"]
    fused = small(module, *inputs, dtype="f16")
    assert fused(inputs[0].half()).dtype == torch.float16
    assert next(module.parameters()).dtype == torch.float32
    with pytest.raises(InputError, match="dtype: found 'f8'; use one of f32, f16, bf16"):
        small(module, *inputs, dtype="f8")


def test_other_shapes_are_refused():
    module, inputs = EXAMPLES["mlp"]
    fused = small(module, *inputs)
    with pytest.raises(InputError, match=r"an input of \[2, 24\] torch.float32; give \[1, 24\]"):
        fused(torch.randn(2, 24))
    with pytest.raises(InputError, match="2 inputs; give 1"):
        fused(*inputs, *inputs)


def test_bad_calls_are_refused():
    module, inputs = EXAMPLES["mlp"]
    with pytest.raises(InputError, match="the example has no tensors"):
        partita.rtasks(module, [], device="cpu")
    with pytest.raises(InputError, match="1 modules and 2 examples; give one for each"):
        partita.rtasks([module], [inputs, inputs], device="cpu")
    with pytest.raises(InputError, match=r"method: found 'serch'.*search"):
        partita.rtasks(module, inputs, device="cpu", method="serch")
    with pytest.raises(InputError, match="device: found meta; use cuda, or cpu"):
        partita.rtasks(module, inputs, device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_still_works():
    module, inputs = EXAMPLES["mlp"]
    with pytest.raises(InputError, match='no CUDA device here; plan and interpret with device="c'):
        partita.rtasks(module, inputs, device="cuda")


def test_without_triton_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs the package triton.*partita\[triton\]"):
        launches.need_triton()


def test_wrong_numbers_are_refused_with_the_error():
    job = job_of("mlp")
    job.lowered.arena.data.mul_(1.5)  # the weights
    with pytest.raises(
        VerificationError, match=r"the fused model is \d\.\d\de.* off float64, the m"
    ):
        job.interpret(0)


def test_a_region_slower_than_its_steps_is_left_unfused():
    job = job_of("block")
    launched = launches.interpreted(job.lowered, job.plans)
    numbers = iter([[50.0, 5.0], [5.0, 50.0]])
    times = piece_times(
        job.lowered, launched.launches, job.inputs, {}, times=lambda runs: next(numbers)
    )
    assert list(times.values()) == [PieceTimes(10.0, 1.0), PieceTimes(1.0, 10.0)]
    assert [each.is_faster for each in times.values()] == [False, True]
    outcome = job.outcome("fused", launched, times, 0.0)
    assert [region.kept for region in outcome.regions] == [False, True]
    assert "left unfused" in str(outcome.regions[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the clock of the host is read without one")
def test_what_is_slower_than_the_sequential_graph_is_not_used(monkeypatch):
    outcome = job_of("block")
    launched = launches.interpreted(outcome.lowered, outcome.plans)
    monkeypatch.setattr(job, "piece_times", lambda *args: {})
    outcome.num_warps = 4
    for numbers, used in (([9.0, 3.0], "sequential"), ([3.0, 9.0], "fused")):
        monkeypatch.setattr(choose, "compare_us", lambda runs, numbers=numbers: numbers)
        fused = outcome.measure(launched)
        assert fused.report().kept == used
        assert fused.report().used_us == 3.0
        torch.testing.assert_close(
            as_tuple(fused(*outcome.inputs)), as_tuple(outcome.modules[0](*outcome.inputs))
        )
    assert "the sequential graph is kept" not in str(fused.report())


def test_a_region_that_cannot_be_resident_is_refused_with_numbers(monkeypatch):
    from partita.errors import ProblemError

    job = job_of("mlp")
    asked = []

    def refuse(lowered, plan, num_warps):
        asked.append(len(plan.program.veus))
        raise ProblemError("264 programs, but only 132 are resident at once", fix="use fewer")

    monkeypatch.setattr(launches, "need_triton", lambda: None)
    monkeypatch.setattr(launches, "_region", refuse)
    launched = job.compile(4)
    assert len(asked) == 2  # once more with a program per unit
    assert launched.launches == (None,)
    assert launched.refused == {0: "264 programs, but only 132 are resident at once; use fewer"}
    pipeline = RegionPipeline(job.lowered, launched.launches)
    torch.testing.assert_close(pipeline(*job.inputs)[0], job.modules[0](*job.inputs).detach())


def test_the_gpu_at_hand_is_found_by_its_name():
    assert api._kind_of(torch.device("cpu"), "A100").name.startswith("A100")


def test_plans_are_kept_between_processes_and_checked_when_read(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = job_of("nasnet")
    options = {"method": "search", "time_s": 0.5, "seed": 0, "keep": True}
    first = plan_region(job.lowered, 0, SMALL, **options)
    again = plan_region(job.lowered, 0, SMALL, **options)
    assert again.result.why == "kept from an earlier search"
    assert again.program == first.program
    assert again.tiles == first.tiles
    path = plan_path(first.problem, "search", 0)
    assert tmp_path in path.parents
    text = path.read_text()
    for spoilt in (text[:-20], text.replace('"queues"', '"cues"'), "{}"):
        path.write_text(spoilt)
        assert read_plan(first.problem, "search", 0) is None
    assert plan_region(job.lowered, 0, SMALL, **options).result.why != again.result.why
    assert read_plan(first.problem, "search", 0) is not None


def test_a_plan_of_another_problem_is_not_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outcome, other = job_of("mlp").plans[0], job_of("resnet").plans[0]
    keep_plan(outcome.problem, outcome.result, "list")
    kept, wanted = (plan_path(plan.problem, "list", 0) for plan in (outcome, other))
    assert kept != wanted
    wanted.write_bytes(kept.read_bytes())
    assert read_plan(other.problem, "list", 0) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="tiles would be timed on the CPU")
def test_a_slow_region_is_cut_into_what_pays(monkeypatch):
    outcome = job_of("nasnet")
    count = len(outcome.plans[0].region.ops)
    slow = PieceTimes(100.0, 90.0)
    launched = launches.interpreted(outcome.lowered, outcome.plans)
    half = count // 2
    monkeypatch.setattr(
        improve, "op_times", lambda *args: [0.01] * half + [1000.0] * (count - half)
    )
    monkeypatch.setattr(
        job, "compiled", lambda lowered, plans, **options: launches.interpreted(lowered, plans)
    )
    monkeypatch.setattr(improve, "piece_times", lambda *args: {1: PieceTimes(1.0, 2.0)})
    outcome.num_warps = 4
    after, times = improve.without_slow(outcome, launched, {0: slow}, {})
    assert [piece.fused for piece in outcome.lowered.pieces] == [False, True]
    assert after.launches[0] is None
    assert len(after.plans[1].region.ops) <= count - half
    assert times == {1: PieceTimes(1.0, 2.0)}
    assert "100.0 us fused" in outcome.notes[0]
    pipeline = RegionPipeline(outcome.lowered, after.launches)
    torch.testing.assert_close(
        pipeline(*outcome.inputs)[0], outcome.modules[0](*outcome.inputs).detach()
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="tiles would run on the CPU")
def test_what_is_kept_is_the_faster_whole_call_not_the_faster_replay(monkeypatch):
    """A replay that is faster loses if putting its inputs in place takes longer than it saves."""
    outcome = job_of("mlp")
    launched = launches.interpreted(outcome.lowered, outcome.plans)
    seen = []

    def fastest(names, run):
        runs = [run(name) for name in names]
        seen.extend(each.args for each in runs)
        assert [as_tuple(each())[0].shape for each in runs]
        return "sequential", [3.0, 2.0]

    monkeypatch.setattr(job, "fastest", fastest)
    monkeypatch.setattr(job, "piece_times", lambda *args: {})
    fused = outcome.measure(launched)
    assert seen == [outcome.inputs] * 2  # the user's own tensors
    assert fused.report().kept == "sequential"
    assert fused.report().used_us == 2.0
    assert all(map(torch.equal, fused.inputs, outcome.inputs))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the clock of the host is read without one")
def test_unfused_ops_are_timed_one_by_one():
    job = job_of("wide")
    times = op_times(job.lowered, 0, job.inputs)
    assert len(times) == len(job.lowered.regions[0].ops)
    assert times[0] == times[1] > 0  # two groups of one convolution


def test_a_region_of_too_many_kinds_becomes_several(monkeypatch):
    monkeypatch.setattr(job, "MOST_BRANCHES", 3)
    monkeypatch.setattr(job, "split_by_branches", lambda ops: split_by_branches(ops, most=3))
    module, inputs = EXAMPLES["nasnet"]
    outcome = job_of("nasnet")
    assert sum(plan is not None for plan in outcome.plans) > 1
    fused = outcome.interpret(0)
    torch.testing.assert_close(fused(*inputs), module(*inputs).detach())


def test_a_relu_that_no_convolution_takes_runs_by_itself(monkeypatch):
    job = job_of("resnet")
    pipeline = RegionPipeline(job.lowered, [None] * len(job.lowered.pieces))
    whole = eager.compute

    def fussy(step, values, constants):
        if step.kind == "conv" and step.relu:
            raise RuntimeError("not supported")
        return whole(step, values, constants)

    monkeypatch.setattr(eager, "compute", fussy)
    for _ in range(2):
        found_now = pipeline(*job.inputs)[0]
        torch.testing.assert_close(found_now, job.modules[0](*job.inputs).detach())
    assert len(pipeline.apart) == 2


def test_what_is_said_of_a_piece_goes_with_its_launch():
    def launched(word, count):
        return launches.Launched(
            (word,) * count, (None,) * count, dict.fromkeys(range(count), word), {0: word},
            {1: 1.0 if word == "old" else 2.0},
        )  # fmt: skip

    this_launched = launches.merged(launched("old", 2), launched("new", 3), [0, None, 1])
    assert this_launched.launches == ("old", "new", "old")
    assert this_launched.about == {0: "old", 1: "new", 2: "old"}
    assert this_launched.refused == {0: "old"}
    assert this_launched.seconds == {1: 2.0, 2: 1.0}
