import random
from collections import Counter
from functools import cache

import pytest
import torch
from interleave import interleaved
from streams_modules import MODULES, Branches, Dense, made
from torch import nn

from partita.errors import CaptureError, InputError
from partita.gpu.flow import eager
from partita.gpu.flow.export import flow_of
from partita.gpu.flow.fold import fold, fold_norms
from partita.gpu.flow.place import place
from partita.gpu.reference_output import relative
from partita.gpu.sequential import SequentialGraph
from partita.gpu.streams import order
from partita.gpu.streams.api import streams
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.candidates import variants
from partita.gpu.streams.merge import merge, reorder
from partita.gpu.streams.replay import Replay

ROUNDING = 1e-5


@cache
def exported(name):
    module, image = made(name)
    with torch.no_grad():
        return flow_of(module, (image,)), image, module(image)


def computed(flow, image):
    values = {flow.inputs[0]: image}
    for step in flow.steps:
        values[step.name] = eager.compute(step, values, flow.constants)
    return values[flow.outputs[0]]


def kinds(flow):
    return Counter(step.kind for step in flow.steps)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "passes",
    [lambda flow: flow, fold_norms, fold, lambda flow: merge(reorder(fold(flow)))],
    ids=["read", "norms", "fold", "merge"],
)
def test_no_pass_changes_what_is_computed(name, passes):
    flow, image, wanted = exported(name)
    assert relative(computed(passes(flow), image), wanted) < ROUNDING


def test_norms_and_relus_vanish_into_convolutions():
    flow = fold(exported("branches")[0])
    assert kinds(flow)["combine"] == 0
    assert sum(step.relu for step in flow.steps) == kinds(flow)["conv"] == 7


def test_norms_before_a_convolution_become_part_of_its_input():
    flow = fold(exported("dense")[0])
    assert Counter(step.pre for step in flow.steps if step.kind == "conv") == {
        "affine_relu": 3,
        "": 1,
    }


def test_sums_become_residuals_and_one_weighted_sum():
    flow = fold(exported("separable")[0])
    sums = [step for step in flow.steps if step.kind == "combine"]
    assert sum(bool(step.residual) for step in flow.steps) >= 1
    assert any(len(step.factors) == 2 and 0 < step.factors[0] < 1 for step in sums)
    assert any(step.factors == (1.0, pytest.approx(2 / 3)) for step in sums)


def test_convolutions_of_one_input_are_merged_and_the_average_goes_behind():
    flow = merge(reorder(fold(exported("branches")[0])))
    merged = next(step for step in flow.steps if step.name.count("+") == 2)
    assert flow.shapes[merged.name][1] == 24
    assert merged.relu_from == 8  # the average comes before its ReLU
    average = next(step for step in flow.steps if step.kind == "avgpool")
    assert average.relu
    assert flow.shapes[average.name][1] == 8


def test_concatenations_need_no_copies():
    for name in ("branches", "dense"):
        for flow in variants(exported(name)[0]).values():
            placed, placement = place(flow)
            assert not [step for step in placed.steps if ".copy" in step.name]
            for step in placed.steps:
                if step.kind == "cat":
                    assert len({placement.places[each].buffer for each in step.inputs}) == 1


def test_a_value_in_two_places_is_copied():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x):
            x = self.conv(x)
            return torch.cat([x, x], 1)

    module, image = Twice().eval(), torch.randn(1, 3, 4, 4)
    with torch.no_grad():
        placed, placement = place(fold(flow_of(module, (image,))))
        bound = Bound(placed, placement, torch.device("cpu"))
        outcome = Replay(bound, order.sequential(placed), {})(image)[0]
        assert relative(outcome, module(image)) < ROUNDING
    assert len([step for step in placed.steps if ".copy" in step.name]) == 1


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("num_streams", [1, 2, 4, 8])
def test_streams_in_any_order_that_waits_allow_give_the_same(name, num_streams):
    flow, image, wanted = exported(name)
    placed, placement = place(merge(reorder(fold(flow))))
    times = {step: 1.0 + step % 3 for step in order.launched(placed)}
    plan = order.listed(placed, num_streams, times)
    assert plan.num_streams <= num_streams
    for seed in range(3):
        bound = Bound(placed, placement, torch.device("cpu"))
        bound.set_inputs((image,))
        for step in interleaved(plan, random.Random(seed)):
            bound.run(placed.steps[step])
        assert relative(bound.outputs()[0], wanted) < ROUNDING


def test_results_stay_as_they_are_when_the_next_call_comes():
    flow, image, wanted = exported("branches")
    placed, placement = place(fold(flow))
    run = Replay(Bound(placed, placement, torch.device("cpu")), order.sequential(placed), {})
    first = run(image)[0]
    run(torch.zeros_like(image))
    assert relative(first, wanted) < ROUNDING


def test_the_baseline_computes_the_model():
    flow, image, wanted = exported("separable")
    plain = SequentialGraph(fold_norms(flow), (torch.zeros_like(image),))
    assert relative(plain(image)[0], wanted) < ROUNDING


def test_what_the_model_was_doing_it_does_afterwards():
    module, image = made("branches")
    module.train()
    module.stem.eval()
    flow_of(module, (image,))
    assert module.training
    assert not module.stem.training
    assert module.fc.training


def test_control_flow_is_refused_with_its_line():
    class Chooses(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(CaptureError, match=r"`if x.sum\(\) > 0:` of Chooses cannot be captured"):
        flow_of(Chooses(), (torch.randn(2),))


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda x: x[x > 0], r"aten.index.Tensor\) has the dynamic shape \[u0\]"),
        (lambda x: torch.nonzero(x), r"aten.nonzero.default\) has the dynamic shape"),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "unknown operator: cond"),
    ],
    ids=["mask", "nonzero", "cond"],
)
def test_dynamic_shapes_and_control_flow_are_refused_with_the_operator(forward, said):
    class Dynamic(nn.Module):
        def forward(self, x):
            return forward(x)

    with pytest.raises(InputError, match=said):
        flow_of(Dynamic(), (torch.randn(4),))


def test_an_output_without_input_is_refused():
    class Constant(nn.Module):
        def forward(self, x):
            return torch.zeros(3) + 1

    with pytest.raises(InputError, match="does not depend on the input"):
        flow_of(Constant(), (torch.randn(2),))


def test_random_operators_are_named():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    assert flow_of(Noisy(), (torch.randn(2),)).random_ops == ("aten.rand_like.default",)


def test_dropout_does_nothing_when_evaluating():
    flow = flow_of(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)).train(), (torch.randn(1, 4),))
    assert flow.random_ops == ()
    assert [step.target for step in flow.steps] == ["aten.linear.default"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_analytic_mode_is_offered():
    with pytest.raises(InputError, match=r"no CUDA device here.*--device analytic"):
        streams(Branches(), torch.randn(1, 3, 8, 8))


def test_models_of_other_operators_run_as_calls():
    module, tokens = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(1, 3, 8)
    with torch.no_grad():
        flow = fold(flow_of(module.eval(), (tokens,)))
        placed, placement = place(flow)
        bound = Bound(placed, placement, torch.device("cpu"))
        run = Replay(bound, order.listed(placed, 3, dict.fromkeys(order.launched(placed), 1.0)), {})
        assert relative(run(tokens)[0], module(tokens)) < ROUNDING


def test_the_dense_lists_are_prefixes_of_one_buffer():
    assert Dense  # the module the next line is about
    _, placement = place(fold(exported("dense")[0]))
    widths = sorted(shape[1] for shape in placement.buffers.values())
    assert widths == [8, 32]  # the padded image and everything else


def test_a_model_that_keeps_state_is_refused():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count += 1
            return x + self.count

    with pytest.raises(InputError, match="the model changes count when it is called"):
        flow_of(Counts(), (torch.randn(2),))


def test_the_indices_of_a_maximum_can_be_read():
    class Indices(nn.Module):
        def forward(self, x):
            value, index = nn.functional.max_pool2d(x, 2, return_indices=True)
            return value + index

    image = torch.randn(1, 8, 4, 4)
    placed, placement = place(fold(flow_of(Indices(), (image,))))
    bound = Bound(placed, placement, torch.device("cpu"))
    run = Replay(bound, order.listed(placed, 2, dict.fromkeys(order.launched(placed), 1.0)), {})
    assert relative(run(image)[0], Indices()(image)) == 0


def test_a_norm_in_float32_inside_a_model_of_16_bits_is_read():
    """`torch.export` writes assertions about types for `.float()`: they make no value."""

    class Norm(nn.Module):
        def forward(self, x):
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    x = torch.randn(2, 8).half()
    flow = flow_of(Norm(), (x,))
    assert not any("_assert" in step.target for step in flow.steps)
    assert torch.equal(SequentialGraph(flow, (x,))(x)[0], Norm()(x))
