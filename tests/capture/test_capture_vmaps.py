"""What `torch.vmap` maps is captured as the operations on the whole batch that it comes to."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import partita  # noqa: E402
from partita.capture import export_module  # noqa: E402
from partita.errors import CaptureError  # noqa: E402
from partita.graph.files import check_graph  # noqa: E402

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Maps(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.p = nn.Linear(6, 6), nn.Parameter(torch.randn(3, 6, 6))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def mask(m, x):
    """As transformers makes masks: a rule for one query and one key."""
    places = torch.arange(x.shape[0])
    rule = torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))
    return rule(places, places).float() @ m.a(x)


def rows(m, x):
    return torch.vmap(lambda row: m.a(row) * row.sum())(x)


def experts(m, x):
    return torch.vmap(torch.mm, in_dims=(None, 0), out_dims=1)(m.a(x), m.p)


def twice(m, x):
    return torch.vmap(torch.sum)(x) + torch.vmap(torch.vmap(lambda e: e * 2))(m.a(x)).sum(1)


def drawn(m, x):
    drop = nn.functional.dropout
    return torch.vmap(lambda row: drop(m.a(row), 0.5), randomness="different")(x)


def without_gradients(m, x):
    with torch.no_grad():
        weights = torch.vmap(torch.softmax, (0, None))(x, 0)
    return weights * m.a(x)


@pytest.mark.parametrize("function", [mask, rows, experts, twice, drawn, without_gradients])
def test_a_mapped_function_is_piped_with_the_modules_numbers(function):
    model = Maps(function)
    piped = partita.pipe(model, (X,), devices=2)
    ended = []
    for each in (model, piped):
        torch.manual_seed(1)
        model.zero_grad()
        out = each(X)
        out.sum().backward()
        ended.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(ended[0]) == len(ended[1])
    for wanted, own in zip(*ended, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)


def test_no_node_of_a_map_is_left():
    captured = export_module(Maps(twice), (X,))
    check_graph(captured.graph)
    assert all(node.is_operator or node.is_item for node in captured.record.nodes)


def slope(m, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(m.a(x).pow(2).sum(), x, create_graph=True)[0]


def func_slope(m, x):
    return torch.func.grad(lambda given: m.a(given).pow(2).sum())(x)


@pytest.mark.parametrize("function", [slope, func_slope])
def test_a_gradient_taken_within_forward_is_refused_with_its_line(function):
    with pytest.raises(CaptureError, match="take gradients outside the module") as caught:
        export_module(Maps(function), (X,))
    assert "grad(" in caught.value.found
    assert caught.value.file.startswith(f"{__file__}:")


def test_a_gradient_may_be_taken_outside_of_what_is_piped():
    model = Maps(lambda m, x: m.a(x).pow(2).sum())
    piped = partita.pipe(model, (X,), devices=2)
    given = X.clone().requires_grad_()
    (own,), (wanted,) = (
        torch.autograd.grad(each(given), given, create_graph=True) for each in (piped, model)
    )
    torch.testing.assert_close(own, wanted)
