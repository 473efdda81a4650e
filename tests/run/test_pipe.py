"""One call does it all: what is piped behaves as the module does."""

import pytest
import torch
from torch import nn

import partita
from partita.errors import CaptureError, InputError, PlanError
from partita.run.piped import Piped
from partita.search.base import Stop
from tests.capture.features import FEATURES
from tests.emit import models
from tests.emit.transparency import same

QUICK = Stop(gap=0.05, evaluations=2000)
T = torch.Tensor


def piped_gpt(**options) -> tuple[nn.Module, Piped, tuple[T, ...]]:
    torch.manual_seed(0)
    module = models.Gpt().eval()
    args = (models.ids(97, 2, 16), models.ids(97, 2, 16))
    return module, partita.pipe(module, args, stop=QUICK, **options), args


def test_a_piped_module_gives_what_the_module_gives():
    module, piped, args = piped_gpt(devices=3)
    wanted, outcome = module(*args), piped(*args)
    assert outcome.keys() == wanted.keys()
    assert all(same(outcome[key], wanted[key]) for key in wanted)


def test_gradients_arrive_under_the_original_names():
    module, piped, args = piped_gpt(devices=3)
    module(*args)["loss"].backward()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    piped.zero_grad()
    piped(*args)["loss"].backward()
    outcome = {name: parameter.grad for name, parameter in piped.named_parameters()}
    assert outcome.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(outcome[name], wanted[name])


def test_an_optimizer_of_the_module_trains_what_is_piped():
    module, piped, args = piped_gpt(devices=2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = piped(*args)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert same(module(*args)["loss"], piped(*args)["loss"])


def test_it_holds_stages_plan_prediction_and_source():
    module, piped, _ = piped_gpt(devices=2, straight=True)
    assert len(piped.stages) == 2
    assert all(isinstance(stage, nn.Module) for stage in piped.stages)
    assert piped.source.count("class Stage") == 2
    assert {s.op for stage in piped.plan.stages for s in stage.splits} == {
        op.name for op in piped._now.run.captured.graph.ops
    }
    assert piped.prediction.step_s > 0
    assert list(piped.state_dict()) == list(module.state_dict())
    assert "2 stages" in repr(piped)


def test_modes_and_dtypes_reach_the_stages():
    module, piped, args = piped_gpt(devices=2)
    piped.train()
    assert module.training
    assert not same(piped(*args)["loss"], piped(*args)["loss"])  # dropout
    piped.eval()
    piped.double()
    assert piped(*args)["loss"].dtype == torch.float64
    assert same(piped(*args)["loss"], module(*args)["loss"])
    piped.load_state_dict({k: torch.zeros_like(v) for k, v in piped.state_dict().items()})
    assert piped(*args)["logits"].abs().max() == 0


def test_buffers_are_kept_where_the_module_keeps_them():
    module = models.ResNet().train()
    x = torch.randn(2, 3, 32, 32)
    piped = partita.pipe(module, (x,), devices=2, stop=QUICK)
    piped(x)
    assert module.bn1.num_batches_tracked == 1


def test_arguments_may_be_given_by_place_or_by_name():
    module, args, kwargs = FEATURES["Kwargs"].make()
    piped = partita.pipe(module, args, kwargs, devices=2, stop=QUICK)
    assert same(piped(*args, **kwargs), module(*args, **kwargs))
    by_name = dict(zip(("x", "other", "shift"), args, strict=False), **kwargs)
    assert same(piped(**dict(reversed(by_name.items()))), module(*args, **kwargs))


def test_other_types_and_constants_are_refused_with_what_was_captured():
    module, args, kwargs = FEATURES["StringArg"].make()
    piped = partita.pipe(module, args, kwargs, devices=2, stop=QUICK)
    with pytest.raises(CaptureError, match=r"is torch.int64 \(4, 6\), and .* was captured"):
        piped(args[0].long(), args[1], **kwargs)
    with pytest.raises(CaptureError, match="is 'mean', and 'sum' was captured"):
        piped(*args, reduction="mean")
    with pytest.raises(CaptureError, match="is given x, target, and x, target, reduction was"):
        piped(*args)
    with pytest.raises(CaptureError, match="the arguments do not fit: missing a required"):
        piped()
    with pytest.raises(CaptureError, match=r"hold \[0\]\[0\], .* were captured"):
        piped([1.0], args[1], **kwargs)
    with pytest.raises(CaptureError, match="is a float"):
        piped(1.0, args[1], **kwargs)


@pytest.mark.parametrize("name", [n for n, f in FEATURES.items() if f.expected != "captured"])
def test_what_cannot_be_captured_is_refused(name):
    module, args, kwargs = FEATURES[name].make()
    with pytest.raises(CaptureError):
        partita.pipe(module, args, kwargs, devices=2, stop=QUICK)


def test_what_fits_nowhere_is_refused():
    with pytest.raises(PlanError, match="use more or larger devices"):
        piped_gpt(devices=2, memory=10.0)


def test_an_unknown_method_is_refused_with_the_nearest_one():
    with pytest.raises(InputError, match="auto"):
        piped_gpt(devices=2, method="autoo")


def test_a_cluster_may_be_named():
    _, piped, _ = piped_gpt(cluster="2xH100")
    assert piped.plan.cluster.spec == "2xH100"


def test_a_module_that_learns_nothing_is_planned_for_inference():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
    x = torch.randn(4, 8)
    piped = partita.pipe(module, (x,), devices=2, stop=QUICK)
    assert not piped.plan.model.training
    assert same(piped(x), module(x))


def test_more_devices_than_ops_leave_some_without_work():
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    piped = partita.pipe(module, (x,), devices=8, stop=QUICK)
    assert len(piped.stages) == 1
    assert same(piped(x), module(x))


@pytest.mark.parametrize("cut", ["modules", "anywhere"])
def test_outputs_and_gradients_are_as_near_to_float64_as_the_modules_own(cut):
    module, piped, args = piped_gpt(devices=3, cut=cut)
    exact = models.Gpt().eval().double()
    exact.load_state_dict(module.state_dict())

    def observed(model: nn.Module) -> list[T]:
        model.zero_grad()
        loss = model(*args)["loss"]
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    wanted, plain, staged = observed(exact), observed(module), observed(piped)
    assert same(plain[0], staged[0])  # outputs bit for bit
    for a, b, c in zip(wanted, plain, staged, strict=True):
        scale = a.abs().max()
        assert (c - a).abs().max() <= 2 * (b - a).abs().max() + 1e-6 * scale


class Idle(nn.Module):
    """Reads a weight again for a draw that nobody looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.middle(torch.relu(self.shared(x))))
        nn.functional.dropout(self.shared(x), 0.5, training=True)
        return self.last(x)


@pytest.mark.parametrize("cut", ["modules", "anywhere"])
def test_reads_of_a_weight_that_give_no_gradient_are_in_the_stage_of_those_that_do(cut):
    module, x = Idle(), torch.randn(4, 8)
    piped = partita.pipe(module, (x,), devices=2, stages=2, cut=cut, stop=QUICK)
    assert sum("shared.weight" in dict(stage.named_parameters()) for stage in piped.stages) == 1
    assert torch.equal(piped(x), module(x))
