"""Models that print, log, hold files open, or are called and answer in unusual ways, piped."""

import logging
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields, is_dataclass

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import partita  # noqa: E402

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
log = logging.getLogger("someones.model")
Pair = namedtuple("Pair", "first second")


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)


class Prints(Two):
    def forward(self, x):
        print("given", x.shape)  # noqa: T201
        y = self.a(x)
        print("made", y)  # noqa: T201
        return self.b(y)


class Logs(Two):
    def forward(self, x):
        y = self.a(x)
        log.warning("shape %s of %s", y.shape, y)
        return self.b(y)


class HoldsFile(Two):
    file = None

    def forward(self, x):
        self.file.write("called\n")
        return self.b(self.a(x))


class ByName(Two):
    def forward(self, *, x, scale=2.0):
        return self.b(self.a(x)) * scale


class ManyByName(Two):
    def forward(self, **given):
        return self.b(self.a(given["x"])) + given["y"]


class Many(Two):
    def forward(self, *given):
        return self.b(self.a(given[0])) + given[1]


class Nested(Two):
    def forward(self, batch, context=None):
        y = self.a(batch["image"]["x"])
        z = self.b(y) + context["more"][0]["t"]
        return {
            "out": {"y": y, "z": [z, {"deep": z * 2}]}, "pair": Pair(y, z),
            "ordered": OrderedDict(a=y), "meta": ("text", 3, None), 7: z,
        }  # fmt: skip


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    note: str = "made"


@dataclass(frozen=True)
class Outer:
    value: torch.Tensor
    inner: Answer


@dataclass
class Question:
    x: torch.Tensor
    mask: torch.Tensor | None = None


class Answers(Two):
    def forward(self, question):
        y = self.a(question.x)
        return Outer(y, Answer(self.b(y), (question.x, y)))


CASES = {
    "prints": (Prints, (X,), {}),
    "logs": (Logs, (X,), {}),
    "holds a file open": (HoldsFile, (X,), {}),
    "arguments by name alone": (ByName, (), {"x": X}),
    "any arguments by name": (ManyByName, (), {"x": X, "y": X}),
    "any number of arguments": (Many, (X, 2 * X), {}),
    "nested dictionaries": (
        Nested, ({"image": {"x": X}, "name": ["cat", 3]},), {"context": {"more": [{"t": X}]}},
    ),
    "dataclasses": (Answers, (Question(X),), {}),
}  # fmt: skip


def same(one, other):
    """Equal in structure, types and numbers, bit for bit."""
    if isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(other):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(other))
    return one == other


def first_tensor(value):
    if isinstance(value, Outer):
        return value.value + value.inner.logits
    return value["out"]["z"][1]["deep"] if isinstance(value, dict) else value


@pytest.mark.parametrize("case", CASES)
def test_unusual_models_give_what_they_give(case, tmp_path, capsys):
    kind, args, kwargs = CASES[case]
    model, plain = kind(), kind()
    plain.load_state_dict(model.state_dict())
    with (tmp_path / "calls.txt").open("w") as file:
        if kind is HoldsFile:
            model.file = plain.file = file
        piped = partita.pipe(model, args, kwargs, devices=2)
        assert capsys.readouterr().out == ""  # it goes where messages do
        for _ in range(2):
            own, wanted = piped(*args, **kwargs), plain(*args, **kwargs)
            assert same(own, wanted)
            for out in (own, wanted):
                first_tensor(out).sum().backward()
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)
    assert model.training


class Noisy(Two):
    def __init__(self, holds=True):
        super().__init__()
        self.draws = torch.Generator() if holds else None

    def forward(self, x):
        y = self.a(x)
        return self.b(y + torch.rand(y.shape, generator=self.draws))


def test_a_generator_that_the_model_holds_is_refused_with_its_line_and_what_is_advised_works():
    number = Noisy.forward.__code__.co_firstlineno + 2
    with pytest.raises(partita.CaptureError, match="draws with a generator of its own") as why:
        partita.pipe(Noisy(), (X,), devices=2)
    assert why.value.file == f"{__file__}:{number}"
    model = Noisy(holds=False)
    piped = partita.pipe(model, (X,), devices=2)
    torch.manual_seed(1)
    wanted = model(X)
    torch.manual_seed(1)
    assert torch.equal(piped(X), wanted)
