"""A piped module follows what its owner changes in the module, and says what it cannot follow."""

import copy
import functools
import io
import itertools
import random
import types

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import partita  # noqa: E402
from partita.errors import CaptureError  # noqa: E402

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


class Calls(nn.Module):
    """Calls a function with itself; what a case needs is set as its attributes."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(6)
        self.register_buffer("kept", torch.ones(6))
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def chain(m, x):
    return m.c(m.norm(m.drop(m.b(m.a(x)))) * m.kept)


def scheduled(m, x):
    return m.c(F.dropout(m.b(m.a(x)), m.rate, m.training))


def shallow(m, x):
    return m.c(m.a(x)) if m.is_shallow else m.c(m.b(m.a(x)))


def scaled(m, x):
    return m.c(m.b(m.a(x))) * m.config.scale * m.table["scale"][0]


def inner(m, x):
    return m.c(m.layers[0](m.a(x)))


def asks_mode(m, x):
    return m.c(m.a(x)) if torch.is_grad_enabled() else m.c(m.b(m.a(x)))


def asks_argument(m, x):
    return m.c(m.a(x)) if x.is_contiguous() else m.c(m.b(m.a(x)))


def asks_type(m, x):
    return m.c(m.a(x)) if x.dtype == torch.float32 else m.c(m.b(m.a(x.float())))


def asks_gradient(m, x):
    return m.c(m.a(x)) if m.b.weight.requires_grad else m.c(m.b(m.a(x)))


def made(function, **attributes):
    torch.manual_seed(0)
    model = Calls(function, **attributes)
    plain = copy.deepcopy(model)
    return model, plain, partita.pipe(model, (X,), devices=2)


def outcome(module, x):
    torch.manual_seed(2)
    module.zero_grad()
    out = module(x)
    if out.requires_grad:
        out.double().pow(2).sum().backward()
    return out, [p.grad for p in module.parameters()], [b.clone() for b in module.buffers()]


def assert_same(piped, plain, x=X):
    (out, grads, buffers), (own, own_grads, own_buffers) = outcome(piped, x), outcome(plain, x)
    assert out.dtype == own.dtype
    assert torch.equal(out, own)
    assert all(map(torch.equal, buffers, own_buffers))
    for one, other in zip(grads, own_grads, strict=True):
        known = [torch.zeros(1) if each is None else each for each in (one, other)]
        assert torch.allclose(*known, rtol=1e-4, atol=1e-6)


def rate(m):
    m.rate = 0.1


def rate_of_layer(m):
    m.drop.p = 0.1


def momentum(m):
    m.norm.momentum = 0.9


def flag(m):
    m.is_shallow = True


def configuration(m):
    m.config.scale = 3.0


def table(m):
    m.table["scale"][0] = 3.0


def weight(m):
    m.b.weight = nn.Parameter(OTHER.clone())


def buffer(m):
    m.kept = OTHER[0].clone()


def layer(m):
    m.b = nn.Linear(6, 6, bias=False)
    m.b.weight = nn.Parameter(OTHER.clone())


def state(m):
    m.load_state_dict({name: t + t for name, t in m.state_dict().items()}, assign=True)


def hook(m):
    m.b.register_forward_hook(lambda module, args, out: out * 2)


def mode_in_list(m):
    m.layers[0].eval()


def frozen(m):
    m.b.requires_grad_(False)


def forward(m):
    m.forward = types.MethodType(lambda self, x: self.c(self.a(x)), m)


SHARED = {"config": types.SimpleNamespace(scale=1.0), "table": {"scale": [1.0]}}
CHANGES = [
    (scheduled, rate, {"rate": 0.5}), (chain, rate_of_layer, {}), (chain, momentum, {}),
    (shallow, flag, {"is_shallow": False}), (scaled, configuration, SHARED),
    (scaled, table, SHARED), (chain, weight, {}), (chain, buffer, {}), (chain, layer, {}),
    (chain, state, {}), (chain, hook, {}), (inner, mode_in_list, {"layers": [nn.Dropout(0.5)]}),
    (asks_gradient, frozen, {}), (chain, forward, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "change", "attributes"), CHANGES, ids=[change.__name__ for _, change, _ in CHANGES]
)
def test_what_is_changed_in_a_module_is_followed(function, change, attributes):
    model, plain, piped = made(function, **copy.deepcopy(attributes))
    assert_same(piped, plain)
    for each in (model, plain):
        change(each)
    assert_same(piped, plain)


def test_what_is_changed_back_is_not_captured_again():
    model, plain, piped = made(scheduled, rate=0.5)
    programs = []
    for rate in (0.5, 0.1, 0.5):
        model.rate = plain.rate = rate
        assert_same(piped, plain)
        programs.append(piped._now)
    assert programs[0] is programs[2] is not programs[1]


def test_what_nobody_asked_for_may_change():
    model, _, piped = made(chain, steps=0)
    first = piped._now
    model.steps = 1
    piped(X)
    assert piped._now is first


@pytest.mark.parametrize("given", [X.T[:4, :4].repeat(1, 2)[:, :6].T.contiguous().T, X.half()])
def test_type_and_order_of_an_argument_are_those_of_the_call(given):
    for function in (asks_argument, asks_type):
        if given.dtype == torch.half and function is asks_argument:
            continue
        _, plain, piped = made(function)
        assert_same(piped, plain, given)


def test_a_model_that_asks_whether_gradients_are_recorded_gets_the_answer():
    _, plain, piped = made(asks_mode)
    assert_same(piped, plain)
    with torch.no_grad():
        assert_same(piped, plain)


def test_another_type_of_parameters_is_captured_again():
    def made_of_types(m, x):
        return m.c(m.a(x)) + torch.ones(6, dtype=m.a.weight.dtype)

    for who in ("model", "piped"):
        model, plain, piped = made(made_of_types)
        {"model": model, "piped": piped}[who].double()
        assert_same(piped, plain.double(), X.double())


def test_other_parameters_for_one_call_are_used_in_it():
    _, plain, piped = made(chain)
    others = {name: p + p for name, p in plain.named_parameters()}
    outs = []
    for each in (piped, plain):
        torch.manual_seed(0)
        outs.append(torch.func.functional_call(each, others, (X,)))
    assert torch.equal(*outs)
    assert_same(piped, plain)


def test_a_copy_of_a_piped_module_has_tensors_of_its_own():
    _, plain, piped = made(chain)
    copied, other = copy.deepcopy(piped), copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in (*copied.parameters(), *other.parameters()):
            parameter.mul_(2)
    for training in (True, False):
        assert_same(copied.train(training), other.train(training))
        assert_same(piped.train(training), plain.train(training))
    assert_same(copied, other, OTHER)


def test_a_piped_module_may_be_saved_and_piped_again():
    piped = partita.pipe(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), (X,), devices=2)
    file = io.BytesIO()
    torch.save(piped, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), piped(X))
    assert torch.equal(partita.pipe(piped, (X,), devices=2)(X), piped(X))


@pytest.mark.parametrize("kind", ["layer", "parameter"])
def test_parameters_that_nobody_registered_get_their_gradients(kind):
    held = nn.Linear(6, 6, bias=False)
    if kind == "layer":
        _, plain, piped = made(inner, layers=[held])
    else:
        _, plain, piped = made(lambda m, x: m.c(m.a(x) @ m.layers[0]), layers=[held.weight])
    weights = []
    for each in (piped.original, plain):
        own = each.layers[0].weight if kind == "layer" else each.layers[0]
        own.grad = None
        (piped if each is piped.original else plain)(X).pow(2).sum().backward()
        weights.append(own.grad)
    assert torch.allclose(*weights)


KNOWN = {}


@functools.lru_cache
def cosines(count):
    return torch.arange(float(count)).cos()


def tables(m, x):
    if 6 not in KNOWN:
        KNOWN[6] = torch.arange(6.0)
    if not hasattr(m, "late"):
        m.register_buffer("late", torch.ones(6))
    return m.a(x) * cosines(6) + KNOWN[6] * m.late


def test_tables_that_a_first_call_makes_are_left_to_the_module():
    _, plain, piped = made(tables)
    assert KNOWN == {}
    assert cosines.cache_info().currsize == 0
    assert not hasattr(piped.original, "late")
    for _ in range(2):
        assert torch.equal(piped(X), plain(X))
        assert torch.equal(piped.original(X), plain(X))
    KNOWN.clear()


def test_random_numbers_are_drawn_in_the_order_in_memory_that_was_asked_for():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.drop = nn.Conv2d(3, 4, 3), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.conv(x.to(memory_format=torch.channels_last))) + 1

    torch.manual_seed(0)
    model, x = Last(), torch.randn(2, 3, 8, 8)
    plain = copy.deepcopy(model)
    assert_same(partita.pipe(model, (x,), devices=2), plain, x)


def test_a_buffer_may_be_changed_by_its_data():
    def follows(m, x):
        hidden = m.a(x)
        m.kept.data.mul_(0.5).add_(hidden.mean(0))
        return m.c(hidden - m.kept) * m.a.weight.data.abs().mean()

    _, plain, piped = made(follows)
    for _ in range(2):
        assert_same(piped, plain)


def test_a_buffer_that_is_set_anew_is_followed():
    def sets(m, x):
        hidden = m.a(x)
        m.kept = m.kept * 0.5 + hidden.detach().mean(0)
        return m.c(hidden - m.kept)

    _, plain, piped = made(sets)
    for _ in range(2):
        assert_same(piped, plain)


def test_a_model_that_runs_otherwise_where_it_is_exported_is_followed_as_it_runs():
    def asks(m, x):
        return m.b(x) if torch.compiler.is_exporting() else m.a(x)

    _, plain, piped = made(asks)
    assert_same(piped, plain)


def test_a_model_that_can_only_be_exported_openly_is():
    def asks(m, x):
        if torch.compiler.is_exporting():
            return m.a(x)
        return m.a(torch.from_numpy(x.numpy()))

    _, plain, piped = made(asks)
    assert_same(piped, plain)


def test_where_padding_is_zero_without_gradients_is_said(caplog):
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    padding = torch.tensor([[False, False, True]] * 2)
    given = {"src_key_padding_mask": padding}
    partita.pipe(model, (torch.randn(2, 3, 6),), given, devices=2)
    assert "gives zeros for padding where no gradients are recorded" in caplog.text


class Steps:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 0

    def __call__(self):
        self.number += 1
        return self.number


COUNT = {"calls": 0}


def counts_outside(m, x):
    COUNT["calls"] += 1
    return m.a(x) * COUNT["calls"]


@pytest.mark.parametrize(
    ("function", "attributes"),
    [
        (counts_outside, {}),
        (lambda m, x: m.a(x) * next(m.steps), {"steps": itertools.count(1)}),
        (lambda m, x: m.a(x) * m.chance.random(), {"chance": random.Random(0)}),
        (lambda m, x: m.a(x) * m.steps(), {"steps": Steps()}),
    ],
    ids=["global", "iterator", "random", "slots"],
)
def test_what_changes_from_call_to_call_is_refused_wherever_it_is_kept(function, attributes):
    with pytest.raises(CaptureError, match="something else in the second call than in the first"):
        made(function, **attributes)


def test_what_is_left_in_attributes_and_by_hooks_is_said(caplog):
    def leaves(m, x):
        hidden = m.a(x)
        m.shown = hidden
        m.losses.append(hidden.mean())
        return m.b(hidden)

    seen = {}
    model = Calls(leaves, losses=[])
    model.a.register_forward_hook(lambda module, args, out: seen.update(a=out))
    partita.pipe(model, (X,), devices=2)
    assert f"{__file__}:" in caplog.text
    assert (
        "`m.shown = hidden` leaves a tensor in shown; captured, it is not put there" in caplog.text
    )
    assert "what the model collects in losses" in caplog.text
    assert "what hooks of the model keep" in caplog.text
    assert seen == {}
    assert model.losses == []


def test_classes_may_be_given_back_before_scores():
    def classes(m, x):
        scores = m.b(m.a(x))
        return scores.argmax(-1), scores

    _, plain, piped = made(classes)
    for one, other in zip(piped(X), plain(X), strict=True):
        assert torch.equal(one, other)
    assert piped.prediction.step_s > 0


def test_a_model_in_training_may_give_nothing_to_train():
    _, plain, piped = made(lambda m, x: m.b(m.a(x)).argmax(-1))
    assert torch.equal(piped(X), plain(X))


def test_distributions_are_sampled_from():
    def samples(m, x):
        normal = torch.distributions.Normal(m.a(x), F.softplus(m.b(x)) + 0.1)
        chosen = torch.distributions.Categorical(logits=m.c(x)).sample()
        return normal.rsample() + F.one_hot(chosen, 6)

    _, plain, piped = made(samples)
    assert_same(piped, plain)


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # PyTorch says it once in a process
def test_a_projection_of_a_recurrent_layer_is_carried():
    torch.manual_seed(0)
    model = nn.LSTM(6, 8, proj_size=4)
    plain = copy.deepcopy(model)
    piped = partita.pipe(model, (X,), devices=2)
    assert torch.equal(piped(X)[0], plain(X)[0])
