"""What a module notes for its next call, in numbers, lists, dicts and objects, is not lost."""

from collections import deque
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import partita  # noqa: E402
from partita.capture import export_module  # noqa: E402
from partita.errors import CaptureError  # noqa: E402

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Notes(nn.Module):
    """Notes something of each call, in one way or another, and multiplies by what it has noted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)


class Counts(Notes):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.a(x) * self.calls


class CountsInDict(Notes):
    def __init__(self):
        super().__init__()
        self.notes = {"calls": 0}

    def forward(self, x):
        self.notes["calls"] += 1
        return self.a(x) * self.notes["calls"]


class CountsInObject(Notes):
    def __init__(self):
        super().__init__()
        self.notes = SimpleNamespace(calls=0)

    def forward(self, x):
        self.notes.calls += 1
        return self.a(x) * self.notes.calls


class Collects(Notes):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(self.a(x).detach())
        return self.b(sum(self.seen))


class Remembers(Notes):
    def __init__(self):
        super().__init__()
        self.known = {}

    def forward(self, x):
        if "y" not in self.known:
            self.known["y"] = self.a(x).detach()
        return self.b(self.known["y"])


class Last(Notes):
    """The same operations in every call, on what the one before has given."""

    def __init__(self):
        super().__init__()
        self.seen = deque([torch.zeros(4, 6)], maxlen=1)

    def forward(self, x):
        y = self.a(x) + self.seen[0]
        self.seen.append(y.detach())
        return y


class OnceOnly(Notes):
    is_new = True

    def forward(self, x):
        if self.is_new:
            self.is_new = False
            return self.a(x)
        return self.b(x)


@pytest.mark.parametrize("kind", [
    Counts, CountsInDict, CountsInObject, Collects, Remembers, Last, OnceOnly,
])  # fmt: skip
def test_a_module_whose_second_call_does_something_else_is_refused(kind):
    with pytest.raises(CaptureError, match="does something else in the second call") as caught:
        export_module(kind(), (X,))
    assert caught.value.file.startswith(f"{__file__}:")


class CountsInBuffer(Notes):
    """`Counts` with the change that its refusal asks for."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.a(x) * self.calls


class Told(Notes):
    """`Counts` with what it notes as an argument."""

    def forward(self, x, calls):
        return self.a(x) * calls


def test_a_buffer_or_an_argument_does_what_was_noted():
    for model, args in ((CountsInBuffer(), ()), (Told(), (torch.tensor(3.0),))):
        plain = type(model)()
        plain.load_state_dict(model.state_dict())
        piped = partita.pipe(model, (X, *args), devices=2)
        for _ in range(3):
            assert torch.equal(piped(X, *args), plain(X, *args))


def test_what_only_the_first_call_does_may_be_done_before():
    model = OnceOnly()
    model(X)
    assert torch.equal(export_module(model, (X,)).program.module()(X), model(X))


class Shows(Notes):
    """Leaves behind what no call reads: a count, what it has seen, a table made of constants."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.tables = 0, [], {}
        self.more = SimpleNamespace(deep=deque())

    def forward(self, x):
        self.calls += 1
        self.more.deep.append(x)
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1]).float()
        y = self.a(x) + self.tables[x.shape[1]]
        self.seen.append(y.detach())
        return nn.functional.dropout(y, 0.5)


def test_what_is_left_behind_and_not_read_is_no_matter():
    model = Shows()
    piped = partita.pipe(model, (X,), devices=2)
    assert (model.calls, model.seen, model.tables, len(model.more.deep)) == (0, [], {}, 0)
    for _ in range(2):
        torch.manual_seed(1)
        wanted = model(X)
        torch.manual_seed(1)
        assert torch.equal(piped(X), wanted)


class HoldsFile(Shows):
    """Cannot be copied, so that nobody knows what a second call does; the count is said."""

    def __init__(self, file):
        super().__init__()
        self.file = file


def test_a_module_that_cannot_be_copied_is_captured_with_a_warning(tmp_path, caplog):
    with (tmp_path / "open.txt").open("w") as file:
        export_module(HoldsFile(file), (X,))
    assert "changes calls from call to call" in caplog.text


def test_looking_twice_draws_no_random_numbers():
    model = Shows()
    before = torch.get_rng_state()
    export_module(model, (X,))
    assert torch.equal(torch.get_rng_state(), before)


class KeepsBias(Notes):
    """In eval mode looks up a table of biases once, as attention with relative positions does."""

    def __init__(self):
        super().__init__()
        self.kept = {}
        self.register_buffer("place", torch.arange(6).flip(0), persistent=False)

    def bias(self):
        if self.training:
            return self.a.bias[self.place]
        if "bias" not in self.kept:
            self.kept["bias"] = self.a.bias[self.place]
        return self.kept["bias"]

    def forward(self, x):
        return self.b(self.a(x) + self.bias())


class KeepsWhatChanges(KeepsBias):
    """Keeps something that was made of a buffer which every call changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def bias(self):
        if "bias" not in self.kept:
            self.kept["bias"] = self.a.bias * (self.count + 1)
        self.count.add_(1)
        return self.kept["bias"]


class ChangesWhatIsKept(KeepsBias):
    """Adds to what it keeps, in place."""

    def bias(self):
        if "bias" not in self.kept:
            self.kept["bias"] = self.a.bias.detach() * 2
        return self.kept["bias"].add_(1)


class GivesWhatItCounts(Notes):
    """What changes depends on parameters alone."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x)), self.a.weight * self.calls


def test_what_is_made_of_parameters_alone_may_be_kept():
    module = KeepsBias().eval()
    piped = partita.pipe(module, (X,), devices=2)
    for _ in range(2):
        assert torch.equal(piped(X), module(X))
    with torch.no_grad():
        module.a.weight.mul_(2)
    assert torch.equal(piped(X), module(X))


@pytest.mark.parametrize("kind", [KeepsWhatChanges, ChangesWhatIsKept, GivesWhatItCounts])
def test_what_is_kept_of_parameters_is_refused_where_it_is_another_then(kind):
    with pytest.raises(CaptureError, match="does something else in the second call"):
        export_module(kind().eval(), (X,))
