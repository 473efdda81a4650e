"""Dataclasses that a model takes and gives, and what it does besides computing."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import partita
from partita.errors import CaptureError
from partita.search.base import Stop

QUICK = Stop(gap=0.05, evaluations=2000)
T = torch.Tensor


@dataclass
class Sizes:
    """Within another."""

    scale: float
    shift: T


@dataclass(frozen=True)
class Given:
    """What a model takes."""

    x: T
    sizes: Sizes


@dataclass
class Result:
    """What a model gives."""

    y: T
    total: T
    name: str = "result"


class Records(nn.Module):
    """Takes one dataclass and gives another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, given: Given) -> Result:
        y = self.last(torch.relu(self.first(given.x * given.sizes.scale))) + given.sizes.shift
        return Result(y, y.sum())


def test_dataclasses_are_taken_and_given():
    module, given = Records(), Given(torch.randn(3, 4), Sizes(2.0, torch.ones(4)))
    result, wanted = partita.pipe(module, (given,), devices=2, stop=QUICK)(given), module(given)
    assert type(result) is Result
    assert result.name == "result"
    assert torch.equal(result.y, wanted.y)
    assert torch.equal(result.total, wanted.total)


class Does(nn.Module):
    """A linear layer, and what a test puts around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def test_a_dataclass_that_cannot_be_looked_up_is_refused():
    @dataclass
    class Local:
        y: T

    class Gives(Does):
        def forward(self, x: T) -> Local:
            return Local(self.layer(x))

    with pytest.raises(CaptureError, match=r"returns a .*Local, which cannot be taken apart"):
        partita.capture(Gives(), (torch.randn(2, 4),))


class Reads(Does):
    """Opens a file in every call."""

    def forward(self, x: T) -> T:
        return self.layer(x) + len(Path("no such file").read_text())


class Numbers(Does):
    """Leaves PyTorch."""

    def forward(self, x: T) -> T:
        return torch.from_numpy(self.layer(x).detach().numpy())


class Writes(Does):
    """Writes a value into a text."""

    def forward(self, x: T) -> T:
        y = self.layer(x)
        self.text = f"{y.mean():.3f}"
        return y


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Reads, "read it before: in __init__"),
        (Numbers, "compute it with torch"),
        (Writes, "leave texts about values out of forward"),
    ],
)
def test_what_else_a_model_does_is_refused_by_the_line_with_a_change(kind, change):
    with pytest.raises(CaptureError, match=rf"test_records\.py:\d+: `.*` cannot be.*{change}"):
        partita.capture(kind(), (torch.randn(2, 4),))


class Prints(Does):
    """Prints, and holds a file open."""

    def __init__(self) -> None:
        super().__init__()
        self.file = Path(__file__).open()  # noqa: SIM115

    def forward(self, x: T, *, scale: float) -> T:
        print("called with", tuple(x.shape))  # noqa: T201
        return self.layer(x) * scale


def test_what_a_model_prints_while_it_is_captured_is_no_output(capsys):
    module = Prints()
    partita.capture(module, (torch.randn(2, 4),), {"scale": 2.0})
    module.file.close()
    said = capsys.readouterr()
    assert said.out == ""
    assert "called with (2, 4)" in said.err
