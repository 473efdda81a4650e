"""Every refusal names the user's line and a change, and the change is tried here: it works.

The kinds of refusals are read off the source, so that a new one needs a case, too.
"""

import ast
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import partita  # noqa: E402
import partita.capture  # noqa: E402
from partita.errors import CaptureError  # noqa: E402

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Calls(nn.Module):
    """Calls a function with itself: layers `a` and `b`, a buffer `kept`, and what a case sets."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, 6), nn.Linear(6, 6), function
        self.register_buffer("kept", torch.zeros(4, 6))
        self.last = torch.zeros(4, 6)
        self.inner = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, *args):
        return self.function(self, *args)


def branch(m, x):
    return m.a(x) if x.sum() > 0 else m.b(x)


def chosen(m, x):
    return torch.where(x.sum() > 0, m.a(x), m.b(x))


def told(m, x, positive):
    return m.a(x) if positive else m.b(x)


def text(m, x):
    y = m.a(x)
    f"mean {y.mean().item():.3f}"
    return y


def text_of_tensor(m, x):
    y = m.a(x)
    f"mean {y.mean():.3f}"
    return y


def told_outside(m, x):
    y = m.a(x)
    f"shape {tuple(y.shape)}"
    return y, y.mean()


def numpy(m, x):
    return m.a(x) + torch.from_numpy(x.numpy().cumsum(0))


def with_torch(m, x):
    return m.a(x) + x.cumsum(0)


def file(m, x):
    return m.a(x) * torch.load(Path(__file__).with_suffix(".missing"))


def argument(m, x, factor):
    return m.a(x) * factor


class Box:
    def __init__(self, value):
        self.value = value


def boxed(m, x):
    return Box(m.a(x))


def in_dict(m, x):
    return {"value": m.a(x)}


def checkpointed(m, x):
    return checkpoint(m.a, x, use_reentrant=False)


def hooked(m, x):
    y = m.a(x)
    y.register_hook(lambda gradient: 2 * gradient)
    return y


def doubled(m, x):
    y = m.a(x)
    return 2 * y - y.detach()


def packed(m, x):
    pack = nn.utils.rnn.pack_padded_sequence
    return pack(m.a(x)[:, None], torch.ones(4).long(), batch_first=True).data


def padded(m, x):
    return m.a(x) * torch.ones(4, 1)


def no_grad_in_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = m.a(x)
    return y.float() + m.b(x)


def detached_in_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = m.a(x).detach()
    return y.float() + m.b(x)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


class Anew(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


def own_function(m, x):
    return InPlace.apply(m.a(x))


def own_function_anew(m, x):
    return Anew.apply(m.a(x))


def drops_layer(m, x):
    return x if torch.rand([]) < 0.5 else m.a(x)


def drops_result(m, x):
    return torch.where(torch.rand([], device=x.device) < 0.5, x, m.a(x))


def python_chance(m, x):
    return m.a(x) * random.random()


def torch_chance(m, x):
    return m.a(x) * torch.rand([])


def keeps(m, x):
    m.last = m.last * 0.5 + m.a(x).detach()
    return m.last + m.b(x)


def keeps_in_buffer(m, x):
    m.kept.mul_(0.5).add_(m.a(x).detach())
    return m.kept + m.b(x)


def sets_data(m, x):
    m.kept.data = m.kept * 0.5 + m.a(x).detach()
    return m.kept + m.b(x)


def sets_in_place(m, x):
    m.kept.data.copy_(m.kept * 0.5 + m.a(x).detach())
    return m.kept + m.b(x)


def changes_mode(m, x):
    m.inner.eval()
    return m.inner(m.a(x))


class KeepsMode(Calls):
    def train(self, mode=True):
        super().train(mode)
        self.inner.eval()
        return self


def averages(m, x):
    return nn.functional.relu(m.norm(m.a(x)))


class Averages(Calls):
    def __init__(self, function, momentum=0.1):
        super().__init__(function)
        self.norm = nn.BatchNorm1d(6, momentum=momentum)


def resizes(m, x):
    if m.kept.shape[0] != 1:
        m.kept = m.a(x).detach()[:1]
    return m.b(x) + m.kept


def replaces(m, x):
    if isinstance(m.inner, nn.Dropout):
        m.inner = nn.Identity()
    return m.inner(m.a(x))


def counts(m, x):
    m.calls += 1
    return m.a(x) * m.calls


def changes_weight(m, x):
    with torch.no_grad():
        m.a.weight.mul_(0.9)
    return m.a(x)


def weight_anew(m, x):
    return nn.functional.linear(x, m.a.weight * 0.9, m.a.bias)


def picks(m, x):
    y = m.a(x)
    return y[y > 0].sum()


def masks(m, x):
    y = m.a(x)
    return torch.where(y > 0, y, 0).sum()


def numbers(m, x):
    return m.a(x) * sum(x[0].tolist())


def sums(m, x):
    return m.a(x) * x[0].sum()


def conditional(m, x):
    y = m.a(x)
    return m.b(torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)))


def where_conditional(m, x):
    y = m.a(x)
    return m.b(torch.where(y.sum() > 0, torch.sin(y), torch.cos(y)))


def slope(m, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(m.a(x).pow(2).sum(), x, create_graph=True)[0]


def energy(m, x):
    return m.a(x).pow(2).sum()


def unusual_type(m, x):
    return m.a(x) + x.to(torch.complex32).real.float()


def usual_type(m, x):
    return m.a(x) + x.to(torch.float16).float()


def fails(m, x):
    if m.calls == 0:
        raise ValueError("call setup() first")
    return m.a(x)


def set_up(m, x):
    return m.a(x)


@dataclass(frozen=True)
class Case:
    """What is refused, the words of the change, and the model with that change."""

    refused: object
    change: str
    changed: object = None
    more: tuple = ()  # further arguments of the changed model
    options: tuple = ()  # of pipe, for the changed model
    is_called_before: bool = False  # the change is to call the module once
    model: type = Calls  # of the changed model


GENERATOR = torch.Generator()


def own_generator(m, x):
    return m.a(x) * torch.rand(x.shape, generator=GENERATOR)


def torch_generator(m, x):
    return m.a(x) * torch.rand(x.shape)


CASES = [
    Case(branch, "torch.where", chosen),
    Case(branch, "decide outside the model and pass the decision", told, (True,)),
    Case(text, "leave texts about values out of forward", told_outside),
    Case(text_of_tensor, "leave texts about values out of forward", told_outside),
    Case(numpy, "compute it with torch", with_torch),
    Case(file, "read it before", argument, (torch.tensor(3.0),)),
    Case(boxed, "use tensors, tuples, lists, dicts", in_dict),
    Case(checkpointed, 'checkpointing="keep"', checkpointed, (), (("checkpointing", "keep"),)),
    Case(checkpointed, '"inline"', checkpointed, (), (("checkpointing", "inline"),)),
    Case(hooked, "change the gradient by an operation", doubled),
    Case(packed, "give the padded batch", padded),
    Case(no_grad_in_autocast, "use .detach()", detached_in_autocast),
    Case(own_function, "let it take and give tensors, and change none", own_function_anew),
    Case(drops_layer, "choose with torch.where(torch.rand([]", drops_result),
    Case(python_chance, "draw them with torch", torch_chance),
    Case(own_generator, "leave the generator out", torch_generator),
    Case(own_generator, "pass what is drawn as an argument", argument, (torch.rand(4, 6),)),
    Case(keeps, "a buffer (register_buffer) and change that in place", keeps_in_buffer),
    Case(changes_mode, "in train() of the model", changes_mode, model=KeepsMode),
    Case(sets_data, "change it in place", sets_in_place),
    Case(resizes, "let it be made before: call the model once", resizes, is_called_before=True),
    Case(replaces, "put it there before: call the model once", replaces, is_called_before=True),
    Case(counts, "or pass it as an argument", argument, (torch.tensor(2.0),)),
    Case(changes_weight, "write it so that it gives a new tensor", weight_anew),
    Case(picks, "mask instead of choosing elements", masks),
    Case(numbers, "compute with operations on tensors", sums),
    Case(conditional, "without torch.cond", where_conditional),
    Case(slope, "take gradients outside the module", energy),
    Case(unusual_type, "use one of", usual_type),
    Case(fails, "change this line, or keep this part outside", set_up),
]
NAMES = [f"{case.refused.__name__}: {case.change[:30]}" for case in CASES]


def lines_of(function):
    """PyTorch notes of an operation only the lines within methods called forward."""
    return [line for _, _, line in function.__code__.co_lines() if line]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_refusal_names_its_line_and_a_change(case):
    with pytest.raises(CaptureError) as caught:
        partita.pipe(Calls(case.refused), (X,), devices=2)
    assert case.change in caught.value.fix
    place, _, number = caught.value.file.rpartition(":")
    assert place == __file__
    assert any(int(number) in lines_of(each) for each in (case.refused, Calls.forward))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_change_works(case):
    model, plain = case.model(case.changed).train(), case.model(case.changed).train()
    plain.load_state_dict(model.state_dict())
    if case.is_called_before:
        for each in (model, plain):
            each(X)
    piped = partita.pipe(model, (X, *case.more), devices=2, **dict(case.options))
    for _ in range(2):
        ended = []
        for each in (plain, piped):
            torch.manual_seed(1)
            out = each(X, *case.more)
            leaves = list(out.values()) if isinstance(out, dict) else out
            ended.append(leaves if isinstance(leaves, list | tuple) else [leaves])
            sum(leaf.sum() for leaf in ended[-1]).backward()
        assert all(torch.equal(a, b) for a, b in zip(*ended, strict=True))
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=1e-5)


def test_a_norm_that_averages_over_all_batches_needs_a_momentum():
    with pytest.raises(CaptureError, match="give the norm a momentum") as caught:
        partita.pipe(Averages(averages, None), (X,), devices=2)
    place, _, number = caught.value.file.rpartition(":")
    assert (place, int(number)) == (__file__, lines_of(averages)[-1])
    plain, model = Averages(averages), Averages(averages)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(partita.pipe(model, (X,), devices=2)(X), plain(X))
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)


def test_backward_hooks_are_refused_and_may_be_removed():
    model = Calls(set_up)
    hook = model.a.register_full_backward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match=r"module 'a': has a backward hook.*remove it"):
        partita.pipe(model, (X,), devices=2)
    hook.remove()
    assert torch.equal(partita.pipe(model, (X,), devices=2)(X), model(X))


# Refusals of how capture is called (tried in test_capture_features.py), of programs that nobody
# captures, of TorchScript (there, too), and of what no model that is known does.
OTHERS = (
    "give a module; wrap a function in one", "give a tuple and a dict", "use one of {...}",
    "give what the module is called with", "remove it before capturing",
    "use the Python module that it was made from", "emit what partita.capture gives",
    "keep parameters, buffers and plain tensors in it", "leave it out of the model",
    "write what it does on the whole batch", "give the norm a momentum",
)  # fmt: skip
SOURCE = Path(partita.capture.__file__).parent
FILES = [
    *(SOURCE / f"{name}.py" for name in (
        "exported", "watch", "attributes", "repeats", "functional", "translate", "vmaps")),
    SOURCE.parent / "emit" / "steps.py",
]  # fmt: skip


def changes_in(path):
    """The beginnings of the changes that refusals in a file ask for."""
    for node in ast.walk(ast.parse(path.read_text())):
        asked = []
        if isinstance(node, ast.Call):
            asked = [word.value for word in node.keywords if word.arg == "fix"]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in (
            "fix",
            "TEXTS",
        ):
            asked = [node.value]
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
            asked = [node.value] if " " in str(node.value.value) else []
        for each in asked:
            for leaf in (each.body, each.orelse) if isinstance(each, ast.IfExp) else (each,):
                first = leaf.values[0] if isinstance(leaf, ast.JoinedStr) else leaf
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


def test_every_change_that_a_refusal_asks_for_is_tried():
    asked = {text for path in FILES for text in changes_in(path)}
    said = set()
    for case in CASES:
        with pytest.raises(CaptureError) as caught:
            partita.pipe(Calls(case.refused), (X,), devices=2)
        said.add(caught.value.fix)
    untried = {
        text for text in asked
        if not any(fix.startswith(text[:25]) for fix in said)
        and not any(text.startswith(other[:20]) for other in OTHERS)
    }  # fmt: skip
    assert len(asked) > 20
    assert untried == set()
