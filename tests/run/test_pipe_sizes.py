"""What is piped takes arguments of other sizes: the numbers of the module, or its own refusal."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import partita
from partita.errors import CaptureError
from partita.run import programs
from partita.run.piped import Piped
from partita.search.base import Stop
from tests.capture.compare import differences, ran

QUICK = Stop(gap=0.05, evaluations=2000)
T = torch.Tensor


class Block(nn.Module):
    """Causal attention of two heads, dropout, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: T) -> T:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 2, 12).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))


class Text(nn.Module):
    """A small language model with a table of sixteen positions, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: T, labels: T) -> dict[str, T]:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Rows(nn.Module):
    """Something done with the sizes of a batch of rows, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: T) -> T:
        return self.last(self.between(self.first(x)))

    def between(self, x: T) -> T:
        raise NotImplementedError


class Constant(Rows):
    """A tensor made of a size, which the export keeps as a constant."""

    def between(self, x: T) -> T:
        return x * torch.tensor([1.0, float(x.shape[1])])[1]


class Branch(Rows):
    """Long texts go another way."""

    def between(self, x: T) -> T:
        return x.cumsum(1) if x.shape[1] > 9 else x


class Padded(Rows):
    """Texts are filled up to windows of four."""

    def between(self, x: T) -> T:
        more = -x.shape[1] % 4
        windows = F.pad(x, (0, 0, 0, more)).view(len(x), -1, 4, 4)
        return (windows - windows.mean(2, keepdim=True)).flatten(1, 2)[:, : x.shape[1]]


class Scaled(Rows):
    """Numbers that are made of sizes."""

    def between(self, x: T) -> T:
        return x * x.shape[1] ** -0.5 + len(x) / 7


class Even(Rows):
    """Even and odd batches differ."""

    def between(self, x: T) -> T:
        return x.tanh() if len(x) % 2 else x


class Halves(Rows):
    """The first half of a text, and the second."""

    def between(self, x: T) -> T:
        half = x.shape[1] // 2
        return torch.cat([x[:, half:], x[:, :half]], 1)


class Fours(Rows):
    """A number that is no size and is the same as one."""

    def between(self, x: T) -> T:
        return x.reshape(-1, 4)[:, [3, 2, 1, 0]].view(len(x), -1, 4).roll(4, 1)


class Pooled(Rows):
    """A table of the length where nothing tells it any more."""

    def between(self, x: T) -> T:
        return x.mean(1) * torch.arange(x.shape[1]).sum()


class Told(nn.Module):
    """Gives the length back as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: T) -> tuple[T, int]:
        return self.layer(x), x.shape[1]


class Image(nn.Module):
    """Convolutions with statistics over any image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.more = (
            nn.Conv2d(3, 4, 3, 2),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3),
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: T) -> T:
        x = self.more(F.relu(self.norm(self.conv(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def made(module: nn.Module, *args: T) -> tuple[Piped, nn.Module]:
    """A module piped, and another with the same numbers."""
    plain = copy.deepcopy(module)
    return partita.pipe(module, args, devices=2, stop=QUICK), plain


def assert_same(piped: Piped, plain: nn.Module, *args: T) -> None:
    """Outputs, gradients and buffers are those of the plain module, and so is what is drawn."""
    for each in (piped, plain):
        each.zero_grad()
    assert differences(ran(piped, args, {}), ran(plain, args, {})) == []


def ids(*shape: int) -> T:
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(sum(shape)))


def count_exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs were captured from here on, as the one number of a list."""
    count = [0]
    export = torch.export.export

    def counting(*args, **kwargs):
        count[0] += 1
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counting)
    return count


def test_one_capture_serves_several_batches_and_lengths(monkeypatch):
    piped, plain = made(Text(), ids(4, 6), ids(4, 6))
    plan = piped.plan
    assert_same(piped, plain, ids(3, 9), ids(3, 9))
    count = count_exports(monkeypatch)
    for shape in ((2, 9), (5, 6), (3, 16), (7, 2)):
        assert_same(piped, plain, ids(*shape), ids(*shape))
    assert count == [0]
    assert piped.plan is plan
    assert "length" in piped.source


def test_one_sample_has_a_capture_of_its_own(monkeypatch):
    piped, plain = made(Text(), ids(4, 6), ids(4, 6))
    count = count_exports(monkeypatch)
    for _ in range(2):
        assert_same(piped, plain, ids(1, 6), ids(1, 6))
    assert count == [1]


def test_a_model_captured_with_one_sample_takes_more(monkeypatch):
    piped, plain = made(Text(), ids(1, 6), ids(1, 6))
    for batch in (4, 3):
        assert_same(piped, plain, ids(batch, 6), ids(batch, 6))
    count = count_exports(monkeypatch)
    assert_same(piped, plain, ids(7, 6), ids(7, 6))
    assert count == [0]


def test_each_mode_has_sizes_of_its_own():
    piped, plain = made(Text(), ids(4, 6), ids(4, 6))
    for mode in (True, False, True):
        for shape in ((3, 6), (2, 6)):
            assert_same(piped.train(mode), plain.train(mode), ids(*shape), ids(*shape))


@pytest.mark.parametrize(
    "kind",
    [Constant, Branch, Padded, Scaled, Even, Halves, Fours, Pooled, Told],
    ids=lambda k: k.__name__,
)
def test_what_depends_on_sizes_in_other_ways_is_right_at_every_size(kind):
    torch.manual_seed(0)
    piped, plain = made(kind(), torch.randn(4, 8, 4))
    for batch, length in ((4, 4), (4, 6), (6, 12), (5, 9), (4, 10)):
        x = torch.randn(batch, length, 4)
        assert_same(piped, plain, x)


def test_images_of_other_sizes_are_captured_and_batches_followed(monkeypatch):
    piped, plain = made(Image(), torch.randn(4, 3, 9, 9))
    for shape in ((4, 3, 12, 9), (4, 3, 16, 16), (3, 3, 9, 9)):
        assert_same(piped, plain, torch.randn(shape))
    count = count_exports(monkeypatch)
    assert_same(piped, plain, torch.randn(6, 3, 9, 9))
    assert count == [0]


def test_what_the_model_does_not_take_is_refused_by_the_model():
    piped, plain = made(Text(), ids(4, 6), ids(4, 6))
    for each in (plain, piped):
        with pytest.raises(IndexError, match="index out of range"):
            each(ids(4, 17), ids(4, 17))
    with pytest.raises(CaptureError, match=r"ValueError.*sizes \(4, 6\), \(3, 6\)\); give"):
        piped(ids(4, 6), ids(3, 6))


def test_no_sample_at_all_is_refused():
    piped, _ = made(Text(), ids(4, 6), ids(4, 6))
    with pytest.raises(CaptureError, match=r"is torch.int64 \(0, 6\), and .* at least one element"):
        piped(ids(0, 6), ids(0, 6))


def test_truths_are_no_integers():
    piped, _ = made(Branch(), torch.randn(4, 8, 4))
    with pytest.raises(CaptureError, match=r"is torch\.bool"):
        piped(torch.ones(4, 8, 4, dtype=torch.bool))


def test_only_so_many_sizes_are_remembered(monkeypatch):
    monkeypatch.setattr(programs, "MOST_SIZES", 2)
    piped, plain = made(Told(), torch.randn(4, 8, 4))
    for length in (8, 3, 5, 7, 3):
        assert_same(piped, plain, torch.randn(4, length, 4))
    ((_, known),) = piped._known
    assert len(known.by_shapes) == 2


def test_other_sizes_follow_tensors_that_are_moved():
    piped, plain = made(Fours(), torch.randn(4, 8, 4))
    assert_same(piped, plain, torch.randn(6, 8, 4))
    piped.double()
    assert_same(piped, plain.double(), torch.randn(6, 8, 4).double())
