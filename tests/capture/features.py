"""One small model per feature that real models have: `FEATURES[name]`.

38 are captured; four are refused, each by name. Every `make()` gives the same model, arguments and
keyword arguments each time it is called, weights included.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)  # the tensors are tiny

T = torch.Tensor
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Feature:
    """A model with one feature: how it is made, and what capturing it must do.

    `options` are keyword arguments that capture needs for it; `says` must stand in the refusal.
    `random` models draw numbers: equal only for equal seeds.
    """

    make: Callable[[], Made]
    expected: str = "captured"
    says: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    random: bool = False


class Chain(nn.Module):
    """A plain chain."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: T) -> T:
        return self.c(torch.relu(self.b(torch.tanh(self.a(x)))))


class Arithmetic(nn.Module):
    """Operators between branches, reflected ones, powers, signs and @."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        a, b = self.a(x), self.b(x)
        y = (1 - a) * 0.5 + b / 3 - a * b
        y = y + 2 / (1 + b**2) + (-a) + a @ b.T @ b
        return y + 0.1 * (a // 0.25).detach() + a % 2.0


class FreeTensors(nn.Module):
    """A parameter and a buffer of the model itself, used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.p = nn.Parameter(torch.randn(6))
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("unsaved", torch.rand(6), persistent=False)

    def forward(self, x: T) -> T:
        return torch.relu(self.a(x * self.p) * self.scale) + self.p + self.unsaved


class ParamContainers(nn.Module):
    """ParameterList and ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(3)])
        self.by_name = nn.ParameterDict({"shift": torch.randn(6), "gain": torch.randn(6)})

    def forward(self, x: T) -> T:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.by_name["gain"] + self.by_name["shift"]


class ModList(nn.Module):
    """A loop over a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: T) -> T:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i % 2 else torch.relu(layer(x))
        return x


class ModDict(nn.Module):
    """Modules looked up by name."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"wide": nn.Linear(6, 8), "thin": nn.Linear(8, 6)})
        self.acts = nn.ModuleDict({"gelu": nn.GELU(), "silu": nn.SiLU()})

    def forward(self, x: T) -> T:
        return self.acts["silu"](self.parts["thin"](self.acts["gelu"](self.parts["wide"](x))))


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, a: T, b: T) -> tuple[T, T]:
        return torch.relu(self.left(a)), torch.tanh(self.right(b))


class Tuples(nn.Module):
    """Sub-modules that give tuples, swapped and unpacked with a star."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = _Pair(), _Pair(), _Pair()

    def forward(self, x: T) -> T:
        a, b = self.one(x, x)
        pair = self.two(b, a)
        a, b = self.three(*pair)
        return a - b


class _Gather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> dict[str, Any]:
        return {"pair": (self.a(x), [self.b(x), x]), "same": {"x": x}}


class _Scatter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 6)

    def forward(self, parts: dict[str, Any]) -> T:
        a, (b, x) = parts["pair"]
        return self.c(a * b) + x + parts["same"]["x"]


class Nested(nn.Module):
    """Nested tuples, lists and dicts between modules and as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Gather(), _Scatter()

    def forward(self, given: dict[str, Any]) -> T:
        x, (y, z) = given["x"], given["rest"]
        return self.second(self.first(x + y)) * z


class MultiOut(nn.Module):
    """A nested tuple as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: T) -> tuple[T, tuple[T, T], list[T]]:
        a = self.a(x)
        b = torch.relu(self.b(a))
        return a, (b, self.c(b)), [a + b, x]


class DictOut(nn.Module):
    """A dict as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: T) -> dict[str, Any]:
        hidden = torch.relu(self.a(x))
        return {"logits": self.b(hidden), "states": (hidden,), "kind": "small", "none": None}


class Kwargs(nn.Module):
    """Keyword inputs, some left at their defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T, *, scale: float = 1.0, shift: T | None = None, other: T) -> T:
        y = self.a(x) * scale
        if shift is not None:
            y = y + shift
        return self.b(torch.relu(y)) * other


class OptionalNone(nn.Module):
    """An optional input passed as None and asked about with `is None`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T, mask: T | None = None, past: tuple[T, T] | None = None) -> T:
        y = self.a(x)
        y = y if mask is None else y * mask
        if past is None:
            y = torch.relu(y)
        return self.b(y)


class _TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(6, 6)

    def forward(self, a: T, b: T) -> T:
        return self.w(a) * b


class SameTensorTwice(nn.Module):
    """The same tensor for two arguments, of the model and of a module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.two = nn.Linear(6, 6), _TwoArguments()

    def forward(self, x: T, y: T) -> T:
        h = torch.tanh(self.a(x) + y)
        return self.two(h, h)


class StringArg(nn.Module):
    """A string argument and an integer target."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: T, target: T, reduction: str = "mean") -> T:
        return F.cross_entropy(self.b(torch.relu(self.a(x))), target, reduction=reduction)


class NoGradInputs(nn.Module):
    """Integer ids and a mask without gradients, used late."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: T, mask: T) -> T:
        places = torch.arange(ids.shape[1])
        x = self.words(ids) + self.places(places)
        x = torch.relu(self.a(x)) * mask[..., None]
        return self.b(x).masked_fill(mask[..., None] == 0, 0.0)


class InplaceOps(nn.Module):
    """In-place tensor methods on values that are used again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        y = self.a(x)
        y.add_(1.0)
        z = y * 2
        z.mul_(3.0).sub_(x)
        z.relu_()
        out = self.b(z)
        out += y
        return out


class InplaceModule(nn.Module):
    """ReLU(inplace=True) after a skip has been taken from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: T) -> T:
        y = self.bn(self.conv1(x))
        z = self.relu(y)
        return self.relu(self.conv2(z) + y)


class SetItem(nn.Module):
    """Assignment to slices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        y = torch.zeros_like(x)
        y[:, :3] = self.a(x)[:, 3:]
        y[1:, 3:] = x[1:, :3]
        y[0] = 1.0
        return self.b(y)


class Slicing(nn.Module):
    """Slices with ints from shapes, None, Ellipsis, negative numbers and steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, x: T) -> T:
        y = self.a(x)
        half = y.size(-1) // 2
        left, right = y[..., :half], y[..., half:]
        z = left[:, None, -1] + right[:, ::2].sum(1, keepdim=True)
        z = z + y[:, 1:-1:1, -half:].mean(1)[:, None] + y[:, -1][..., 1:5][:, None, :]
        return self.b(z.squeeze(1))


class ShapeInts(nn.Module):
    """Sizes asked for early and used late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: T) -> T:
        batch, positions, width = x.shape
        y = torch.relu(self.a(x))
        y = y.view(batch, positions, 2, width // 2).transpose(1, 2)
        y = y.transpose(1, 2).reshape(batch * positions, -1) / math.sqrt(width)
        return self.b(y).view(batch, positions, -1).flatten(1)


class TiedWeights(nn.Module):
    """The embedding's table is the output layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: T) -> T:
        return self.head(torch.relu(self.mid(self.emb(ids))))


class ReusedModule(nn.Module):
    """The same layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        return self.a(torch.relu(self.b(torch.relu(self.a(x)))))


class LongSkips(nn.Module):
    """An early tensor that three later places read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: T) -> T:
        early = torch.relu(self.first(x))
        y = early
        for i, layer in enumerate(self.layers):
            y = torch.tanh(layer(y))
            if i:
                y = y + early
        return y


class TensorLists(nn.Module):
    """Lists of tensors: chunk, split, unbind, stack and cat."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.parts = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])

    def forward(self, x: T) -> T:
        pieces = list(torch.chunk(self.a(x), 4, dim=1))
        mapped = [part(piece) for part, piece in zip(self.parts, pieces, strict=True)]
        joined = torch.cat(mapped, 1)
        left, right = torch.split(joined, [3, 5], 1)
        rows = torch.stack(torch.unbind(left, 1), 0)
        return rows.T.sum(1, keepdim=True) + right


class Creation(nn.Module):
    """Tensors made inside: arange, zeros, full, ones_like, and a root of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        y = self.a(x) / math.sqrt(x.size(-1))
        y = y + torch.arange(x.size(-1)) * 0.1 + torch.full((1, x.size(-1)), 0.5)
        y = torch.cat([y, torch.zeros(2, 6)]) + torch.ones_like(y[:1])
        return self.b(y) * torch.tensor(2.0) + torch.eye(6)[0]


class Dropout(nn.Module):
    """nn.Dropout and F.dropout(training=self.training), in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 6)

    def forward(self, x: T) -> T:
        y = self.drop(torch.relu(self.a(x)))
        return F.dropout(self.b(y), 0.25, training=self.training)


class BatchNorm(nn.Module):
    """Running statistics that change in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.3)

    def forward(self, x: T) -> T:
        return self.bn2(self.conv2(torch.relu(self.bn(self.conv(x))))).mean((2, 3))


class LSTM(nn.Module):
    """An LSTM of two layers with its states given and returned, and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.gru = nn.GRU(5, 4, bidirectional=True)
        self.out = nn.Linear(8, 3)

    def forward(self, ids: T, states: tuple[T, T]) -> tuple[T, tuple[T, T]]:
        y, (h, c) = self.rnn(self.emb(ids), states)
        z, _ = self.gru(y.transpose(0, 1))
        return self.out(z), (h, c)


class PackedLSTM(nn.Module):
    """A packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x: T, lengths: T) -> T:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        y, _ = self.rnn(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
        return padded


class Branching(nn.Module):
    """What is scripted in `Scripted`."""

    def forward(self, x: T) -> T:
        if bool(x.sum() > 0):
            return x * 2
        return x - 1


class Scripted(nn.Module):
    """A TorchScript module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        with _without_deprecation():
            self.inner = torch.jit.script(Branching())

    def forward(self, x: T) -> T:
        return self.b(self.inner(self.a(x)))


class DataBranch(nn.Module):
    """A Python branch on what a tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        y = self.a(x)
        if y.sum() > 0:  # the branch
            y = torch.relu(y)
        return self.b(y)


class LoopLen(nn.Module):
    """Python loops over a size and a length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        steps = [self.a(x[:, i]) for i in range(x.size(1))]
        y = torch.zeros_like(steps[0])
        for i in range(len(steps)):
            y = torch.tanh(y + steps[i] * i)
        for row in x.unbind(1):
            y = y + row
        return self.b(y)


class _Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(6, 6)

    def forward(self, x: T, extra: tuple[T, T | None, bool]) -> tuple[T, T | None, bool]:
        first, second, flag = extra
        y = self.w(x) + first
        return (y if second is None else y + second), None, not flag


class NoneInTuple(nn.Module):
    """None and bools inside tuples between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _Optional(), _Optional()

    def forward(self, x: T) -> T:
        y, nothing, flag = self.one(x, (x, None, True))
        z, _, flag = self.two(torch.relu(y), (y, nothing, flag))
        return z if flag else -z


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: T) -> T:
        return grad


class CustomFn(nn.Module):
    """A Function whose backward is not the derivative of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        return self.b(_StraightThrough.apply(self.a(x)))  # the custom function


class MaskOps(nn.Module):
    """einsum, where, masked_fill, tril and comparisons."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = torch.einsum("bik,bjk->bij", q, k)
        below = torch.tril(torch.ones(x.size(1), x.size(1), dtype=torch.bool))
        scores = scores.masked_fill(~below, float("-inf"))
        mixed = torch.einsum("bij,bjk->bik", scores.softmax(-1), v)
        return torch.where(mixed > 0, mixed, 0.1 * mixed) * (v > q).float()


class MHA(nn.Module):
    """nn.MultiheadAttention and a whole encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: T) -> T:
        y, _ = self.attn(x, x, x, need_weights=False)
        z, weights = self.attn(y, x, x)
        return self.layer(y + z) * weights.mean()


class SDPA(nn.Module):
    """F.scaled_dot_product_attention called directly, causal and with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: T, mask: T) -> T:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, 2, d // 2).transpose(1, 2) for t in self.qkv(x).split(d, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Detach(nn.Module):
    """A no_grad region and a detached tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        y = self.a(x)
        with torch.no_grad():
            scale = self.b(y).sigmoid()
        return self.c(y * scale) + y.detach() * 2


class NonBatched(nn.Module):
    """Tensors with and without a batch dim, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: T) -> T:
        gate = torch.sigmoid(self.gate(self.table)).mean(0)
        total = gate.sum()
        return torch.relu(self.a(x)) * gate + total


class _Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> tuple[T, T]:
        return self.a(x), self.b(x)


class Unused(nn.Module):
    """An input, an output of a module and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.several, self.c = _Several(), nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, x: T, unused: T) -> T:
        y, _ = self.several(x)
        _ = unused * 2
        return self.c(torch.relu(y))


class Autocast(nn.Module):
    """A region in bfloat16, and changes of dtype by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        y = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.b(torch.relu(y))
        y = self.c(z.float()).to(torch.float64)
        return y.to(x.dtype) + z


class Checkpointed(nn.Module):
    """Activation checkpointing inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        y = checkpoint(self._inner, self.a(x), use_reentrant=False)  # the region
        return self.c(y)

    def _inner(self, x: T) -> T:
        return torch.relu(self.b(torch.tanh(x)))


@contextlib.contextmanager
def _without_deprecation() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _seeded(make: Callable[[], Made]) -> Callable[[], Made]:
    """The same weights and arguments each time, without touching the caller's random state."""

    def made() -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return made


def _of(
    model: Callable[[], nn.Module],
    *shape: int,
    more: Callable[[], tuple[Any, ...]] = tuple,
    **kwargs: Any,
) -> Callable[[], Made]:
    """A model fed a random tensor of `shape`, then what `more()` gives."""
    return _seeded(lambda: (model(), (torch.randn(shape), *more()), dict(kwargs)))


def _ids(most: int, *shape: int) -> T:
    return torch.randint(most, shape)


def _nested() -> Made:
    given = {"x": torch.randn(4, 6), "rest": (torch.randn(4, 6), torch.randn(6))}
    return Nested(), (given,), {}


def _kwargs() -> Made:
    return Kwargs(), (torch.randn(4, 6),), {"other": torch.randn(6), "shift": torch.randn(6)}


def _same() -> Made:
    x = torch.randn(4, 6)
    return SameTensorTwice(), (x, x), {}


def _string() -> Made:
    return StringArg(), (torch.randn(4, 6), _ids(5, 4)), {"reduction": "sum"}


def _no_grad_inputs() -> Made:
    return NoGradInputs(), (_ids(11, 3, 5), (_ids(2, 3, 5) > 0).float()), {}


def _lstm() -> Made:
    return LSTM(), (_ids(11, 3, 4), (torch.randn(2, 3, 5), torch.randn(2, 3, 5))), {}


FEATURES: dict[str, Feature] = {
    "Chain": Feature(_of(Chain, 4, 6)),
    "Arithmetic": Feature(_of(Arithmetic, 4, 6)),
    "FreeTensors": Feature(_of(FreeTensors, 4, 6)),
    "ParamContainers": Feature(_of(ParamContainers, 4, 6)),
    "ModList": Feature(_of(ModList, 4, 6)),
    "ModDict": Feature(_of(ModDict, 4, 6)),
    "Tuples": Feature(_of(Tuples, 4, 6)),
    "Nested": Feature(_seeded(_nested)),
    "MultiOut": Feature(_of(MultiOut, 4, 6)),
    "DictOut": Feature(_of(DictOut, 4, 6)),
    "Kwargs": Feature(_seeded(_kwargs)),
    "OptionalNone": Feature(_of(OptionalNone, 4, 6, more=lambda: (None,), past=None)),
    "SameTensorTwice": Feature(_seeded(_same)),
    "StringArg": Feature(_seeded(_string)),
    "NoGradInputs": Feature(_seeded(_no_grad_inputs)),
    "InplaceOps": Feature(_of(InplaceOps, 4, 6)),
    "InplaceModule": Feature(_of(InplaceModule, 2, 3, 5, 5)),
    "SetItem": Feature(_of(SetItem, 4, 6)),
    "Slicing": Feature(_of(Slicing, 3, 5, 8)),
    "ShapeInts": Feature(_of(ShapeInts, 3, 5, 8)),
    "TiedWeights": Feature(_seeded(lambda: (TiedWeights(), (_ids(11, 3, 5),), {}))),
    "ReusedModule": Feature(_of(ReusedModule, 4, 6)),
    "LongSkips": Feature(_of(LongSkips, 4, 6)),
    "TensorLists": Feature(_of(TensorLists, 4, 6)),
    "Creation": Feature(_of(Creation, 4, 6)),
    "Dropout": Feature(_of(Dropout, 16, 6), random=True),
    "BatchNorm": Feature(_of(BatchNorm, 4, 3, 7, 7)),
    "LSTM": Feature(_seeded(_lstm)),
    "PackedLSTM": Feature(
        _of(PackedLSTM, 3, 4, 6, more=lambda: (torch.tensor([4, 2, 3]),)),
        "refused",
        "packed sequence",
    ),
    "Scripted": Feature(_of(Scripted, 4, 6), "refused", "TorchScript"),
    "DataBranch": Feature(_of(DataBranch, 4, 6), "refused", "if y.sum() > 0:"),
    "LoopLen": Feature(_of(LoopLen, 4, 3, 6)),
    "NoneInTuple": Feature(_of(NoneInTuple, 4, 6)),
    "CustomFn": Feature(_of(CustomFn, 4, 6)),
    "MaskOps": Feature(_of(MaskOps, 2, 5, 6)),
    "MHA": Feature(_of(MHA, 2, 5, 8)),
    "SDPA": Feature(_of(SDPA, 2, 5, 8, more=lambda: (torch.randn(2, 1, 5, 5),))),
    "Detach": Feature(_of(Detach, 4, 6)),
    "NonBatched": Feature(_of(NonBatched, 4, 6)),
    "Unused": Feature(_of(Unused, 4, 6, more=lambda: (torch.randn(3),))),
    "Autocast": Feature(_of(Autocast, 4, 6)),
    "Checkpointed": Feature(_of(Checkpointed, 4, 6), options={"checkpointing": "inline"}),
}
