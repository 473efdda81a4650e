"""What is piped follows the module's mode: each is captured by itself, none runs for another."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import partita
from partita.errors import CaptureError
from partita.run.piped import Piped
from partita.search.base import Stop
from tests.capture.compare import differences, ran

QUICK = Stop(gap=0.05, evaluations=2000)
T = torch.Tensor
X = torch.linspace(-1, 1, 4 * 3 * 6 * 6).view(4, 3, 6, 6)


class ByMode(nn.Module):
    """Everything that training changes: statistics, dropout, a branch, what is given back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.deep, self.head, self.aux = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: T) -> T | tuple[T, T]:
        y = self.drop(F.relu(self.norm(self.conv(x)))).mean((2, 3))
        deeper = self.deep(y)
        if self.training:  # stochastic depth
            deeper = deeper * torch.rand(len(deeper), 1).round()
        y = F.dropout(y + deeper, 0.2, self.training)
        return (self.head(y), self.aux(y)) if self.training else self.head(y)


def made(training: bool) -> tuple[nn.Module, Piped, nn.Module]:
    """A module, it piped in a mode, and another with the same numbers."""
    torch.manual_seed(0)
    module = ByMode().train(training)
    plain = copy.deepcopy(module)
    return module, partita.pipe(module, (X,), devices=2, stop=QUICK), plain


def assert_same(piped: Piped, plain: nn.Module) -> None:
    """Outputs in one structure, gradients and buffers are those of the plain module."""
    for each in (piped, plain):
        each.zero_grad()
    torch.manual_seed(3)
    wanted = plain(X)
    torch.manual_seed(3)
    assert type(piped(X)) is type(wanted)
    assert differences(ran(piped, (X,), {}), ran(plain, (X,), {})) == []


@pytest.mark.parametrize("training", [True, False])
def test_a_switched_mode_is_captured_when_it_is_first_called(training):
    module, piped, plain = made(training)
    for mode in (training, not training, not training, training):
        piped.train(mode)
        plain.train(mode)
        assert module.training is mode
        assert_same(piped, plain)
    assert len(piped._known) == 2


def test_the_original_may_be_switched_instead():
    module, piped, plain = made(training=True)
    assert_same(piped, plain)
    module.eval()
    assert_same(piped, plain.eval())
    assert piped.plan.model.training is False


def test_a_part_may_have_a_mode_of_its_own():
    module, piped, plain = made(training=True)
    module.norm.eval()
    plain.norm.eval()
    assert_same(piped, plain)
    assert module.norm.num_batches_tracked == 0


def test_capturing_the_other_mode_draws_no_random_numbers():
    _, piped, plain = made(training=False)
    piped.train()
    plain.train()
    torch.manual_seed(5)
    outcome = piped(X)
    torch.manual_seed(5)
    assert all(map(torch.equal, outcome, plain(X)))


def test_a_cast_reaches_the_stages_of_both_modes():
    _, piped, plain = made(training=True)
    piped.eval()(X)
    piped.double()
    plain.double()
    for mode in (True, False):
        torch.manual_seed(1)
        outcome = piped.train(mode)(X.double())
        torch.manual_seed(1)
        torch.testing.assert_close(outcome, plain.train(mode)(X.double()))


class Branches(nn.Module):
    def forward(self, x: T) -> T:
        return -x if self.training and x.sum() > 0 else x + 1


def test_a_mode_that_cannot_be_captured_is_refused_when_it_is_called():
    piped = partita.pipe(Branches().eval(), (X,), devices=2, stop=QUICK)
    assert torch.equal(piped(X), X + 1)
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        piped.train()(X)
    assert torch.equal(piped.eval()(X), X + 1)
    assert torch.equal(piped(X[:2]), X[:2] + 1)


class Interleaved(nn.Module):
    """Two branches whose draws alternate, one of which has several in what is placed as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: T) -> T:
        first, second = x, x
        for one, other in zip(self.layers[:3], self.layers[3:], strict=True):
            first = F.dropout(one(first), 0.3)
            second = F.dropout(other(second), 0.4)
            first = F.dropout(torch.relu(first), 0.5)
        return first + second * torch.rand_like(second)


@pytest.mark.parametrize("devices", [2, 3, 5])
@pytest.mark.parametrize("straight", [False, True])
def test_random_numbers_are_drawn_in_the_order_of_the_program(devices, straight):
    torch.manual_seed(0)
    module, x = Interleaved(), torch.randn(4, 6)
    piped = partita.pipe(module, (x,), devices=devices, straight=straight, stop=QUICK)
    assert differences(ran(piped, (x,), {}), ran(copy.deepcopy(module), (x,), {})) == []
    drawn = {op.name for op in piped._now.run.captured.graph.ops} & set(
        piped._now.run.captured.random_ops()
    )
    assert len(drawn) == 10


class DrawnAcross(nn.Module):
    def forward(self, x: T) -> T:
        return x * torch.rand_like(x.t()).t() + torch.empty_like(x.t()).uniform_().t()


def test_what_is_drawn_like_a_transposed_tensor_is_drawn_in_its_order():
    x = torch.ones(4, 6)
    piped = partita.pipe(DrawnAcross(), (x,), devices=2, stop=QUICK)
    assert differences(ran(piped, (x,), {}), ran(DrawnAcross(), (x,), {})) == []


class Empty(nn.Module):
    """Rotates a part of the features and passes on the rest, of which there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("nothing", torch.zeros(0, 6))

    def forward(self, x: T) -> tuple[T, T]:
        y = self.a(x)
        rotated, rest = y[:, :6], y[:, 6:]
        y = torch.cat([rotated * 2, rest + 1], dim=-1)
        return self.b(torch.cat([y, self.nothing])), rest


def test_tensors_without_elements_are_carried_along():
    torch.manual_seed(0)
    module, x = Empty(), torch.randn(4, 6)
    piped = partita.pipe(module, (x,), devices=3, stop=QUICK)
    assert differences(ran(piped, (x,), {}), ran(copy.deepcopy(module), (x,), {})) == []
    assert all(0 not in tensor.shape for tensor in piped._now.run.captured.graph.tensors)


class Checkpoints(nn.Module):
    """Checkpoints a part of itself, as `gradient_checkpointing_enable` has models do."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 6))

    def forward(self, x: T) -> T:
        y = checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)
        return self.last(torch.relu(y)).sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_models_own_checkpointing_is_kept_or_left_to_the_plan(reentrant: bool) -> None:
    module, x = Checkpoints(reentrant), torch.linspace(-1, 1, 24).view(4, 6)
    runs = {}
    for how in ("keep", "inline"):
        piped = partita.pipe(copy.deepcopy(module), (x,), devices=2, checkpointing=how, stop=QUICK)
        assert differences(ran(piped, (x,), {}), ran(copy.deepcopy(module), (x,), {})) == []
        with Calls() as calls:
            piped(x).backward()
        runs[how] = calls.names.count("gelu")
    assert runs == {"keep": 2, "inline": 1}


class Calls(TorchDispatchMode):
    """Which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def test_two_ways_to_run_again_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"own checkpointing is to be kept.* recompute=False"):
        partita.pipe(Checkpoints(False), (X,), checkpointing="keep", recompute=True)
