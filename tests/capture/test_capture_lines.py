"""Whose line is to blame: the user's, a library's beside PyTorch, but not PyTorch's own."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from partita.capture import capture, lines  # noqa: E402
from partita.errors import CaptureError  # noqa: E402

BESIDE_TORCH = str(Path(torch.__file__).parents[1] / "torchstrange" / "models.py")
SOURCE = """
import dataclasses
import torch

class Keeps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.state = torch.zeros(4, 6)

    def forward(self, x):
        self.state = self.state + x
        return self.state

class SwitchesOff(torch.nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return x @ x.T

class Branches(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

@dataclasses.dataclass
class Checked:
    x: torch.Tensor

    def __post_init__(self):
        if self.x.sum() > 0:
            raise ValueError
"""


def strange(file: str) -> dict[str, type]:
    """The classes of a library whose source lies in `file`."""
    names: dict[str, type] = {"__name__": "torchstrange"}
    exec(compile(SOURCE, file, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("model", "says", "line"),
    [
        ("Keeps", "keeps a tensor for the next call", 11),
        ("SwitchesOff", "switches gradients off within an autocast region", 16),
        ("Branches", "depends on the values of a tensor", 21),
    ],
)
def test_a_package_whose_name_begins_with_torch_is_not_torch(model, says, line):
    with pytest.raises(CaptureError, match=says) as caught:
        capture(strange(BESIDE_TORCH)[model](), (torch.ones(4, 6),))
    assert caught.value.file == f"{BESIDE_TORCH}:{line}"


def test_what_a_dataclass_compiles_of_a_string_is_not_the_users_line():
    def checked(x: torch.Tensor) -> torch.Tensor:
        Checked(x)
        return x

    Checked = strange("<string>")["Checked"]  # noqa: N806
    try:
        checked(torch.ones(1))
    except ValueError as error:
        assert lines.of_traceback(error.__traceback__).file == __file__
    else:
        pytest.fail("nothing was raised")


def test_pytorch_and_partita_are_nobodys_own_code():
    assert not lines._is_users(torch.__file__)
    assert not lines._is_users(str(Path(lines.__file__).parents[1] / "run" / "pipe.py"))
    assert lines._is_users(BESIDE_TORCH)
