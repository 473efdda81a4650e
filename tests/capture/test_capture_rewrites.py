"""In-place operations, regions and recurrent layers are rewritten without changing a bit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from partita.capture import capture, export_module  # noqa: E402
from partita.errors import CaptureError  # noqa: E402
from partita.graph.files import check_graph  # noqa: E402
from tests.capture.compare import differences, ran  # noqa: E402


class Around(nn.Module):
    """A function of (self, x) between two linear layers, with a buffer or two."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.parts = nn.ModuleList(parts)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(4, 6))

    def forward(self, x):
        return self.function(self, self.a(x))


def made(function, *parts):
    torch.manual_seed(0)
    return Around(function, *(part() for part in parts)), (torch.randn(4, 6),), {}


def agrees(function, *parts, exact_gradients=True):
    captured = export_module(*made(function, *parts))
    check_graph(captured.graph)
    wanted = ran(*made(function, *parts))
    _, args, kwargs = made(function, *parts)
    assert differences(ran(captured.program.module(), args, kwargs), wanted, exact_gradients) == []
    return captured


def changed_slice(m, y):
    v = y[:, 1:3]
    v.mul_(2)
    return m.b(y) + v.sum()


def changed_whole(m, y):
    v, w = y[0], y.view(-1)
    y.add_(1)
    return v * 2 + w[:6] + m.b(y)


def changed_twice(m, y):
    v = y.view(2, 2, 6)
    v[0] = 0.0
    y[:, 2] *= 3
    v[1, :, 3:].add_(1.0)
    return m.b(y) + v.flatten(0, 1)


def changed_steps(m, y):
    y.view(-1)[::5] = 0.0
    y.transpose(0, 1)[1] += 1
    y.t().permute(1, 0).sub_(0.5)
    y.diagonal().zero_()
    return m.b(y)


def changed_piece(m, y):
    z = torch.arange(24.0).view(4, 6)  # with a gradient PyTorch itself refuses this
    p, q = z.chunk(2, dim=1)
    p.add_(q)
    rows = z.unbind(0)
    rows[2].mul_(2)
    return m.b(y) * z + rows[2] + torch.cat([p, q], 1)


def split_pieces(m, y):
    z = torch.arange(24.0).view(4, 6)
    p, q, r = torch.split(z, [1, 2, 3], -1)
    q.mul_(p)
    return m.b(y) * z + r.sum()


def chosen(m, y):
    y[y > 0] = 0.25
    y[torch.tensor([0, 2])] = 1.0
    y.masked_fill_(y < -1, -1.0)
    y.clamp_(max=0.5)
    return m.b(y)


def wider(m, y):
    half = y.to(torch.bfloat16)
    half += y
    return m.b(half.float())


def filled(m, y):
    out = torch.empty_like(y)
    out.copy_(y[0])
    out.fill_(2.0)
    out[1].copy_(y[2].double())
    return m.b(out) * y


def accumulated(m, y):
    total = torch.zeros(6)
    for row in y:
        total += row
    return m.b(total)


def counted(m, y):
    m.count += 1
    m.count.mul_(2)
    return m.b(y) * m.count


def cached(m, y):
    with torch.no_grad():
        m.cache[1:3].copy_(y[:2])
        m.cache.mul_(0.5).add_(y, alpha=0.5)
    return m.b(y) + m.cache


def kept(m, y):
    m.cache[:, 0] = y[:, 0].detach()
    return m.b(y) * m.cache.sum()


def in_modules(m, y):
    for part in m.parts:
        y = part(y)
    return m.b(y)


def changed_eval_dropout(m, y):
    z = F.dropout(y, 0.5, training=False)
    z += 1
    return m.b(y) + z


def frozen(m, y):
    with torch.no_grad():
        z = m.a(y) * 2
        z.relu_()
        with torch.enable_grad():
            w = z + 1
    return m.b(y) * z + w


def seen_detached(m, y):
    z = y.detach()
    y.mul_(2)
    return m.b(y) + z


def detached(m, y):
    z = y + m.b.weight[0]
    y = y.detach()
    y.mul_(2)
    return z + y


IN_PLACE = [
    changed_slice, changed_whole, changed_twice, changed_steps, changed_piece, split_pieces, chosen,
    wider, filled, accumulated, counted, cached, kept, changed_eval_dropout, frozen, seen_detached,
    detached,
]  # fmt: skip


@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_operations_in_place_become_functional(function):
    agrees(function)


def test_modules_that_work_in_place_become_functional():
    agrees(in_modules, lambda: nn.ReLU(True), lambda: nn.Linear(6, 6),
           lambda: nn.Dropout(0.5, True), lambda: nn.Linear(6, 6),
           lambda: nn.Hardtanh(inplace=True))  # fmt: skip


VIEWS = {
    "rows": lambda t: t[1:],
    "row": lambda t: t[-1],
    "steps": lambda t: t[..., ::2],
    "turned": lambda t: t.transpose(0, -1),
    "flat": lambda t: t.reshape(-1),
    "wide": lambda t: t.unsqueeze(1),
    "split": lambda t: t.view(2, -1) if t.is_contiguous() and t.numel() % 2 == 0 else t[:],
}
CHANGES = {
    "add": lambda t: t.add_(0.5),
    "scale": lambda t: t.mul_(1.5),
    "fill": lambda t: t[:1].fill_(2.0),
    "copy": lambda t: t.copy_(t.detach().clone().sin()),
    "move": lambda t: t[0].sub_(t[-1].detach().clone()),
}
STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([*VIEWS, *CHANGES])), min_size=2, max_size=9
)


@settings(max_examples=12, deadline=None)
@given(steps=STEPS)
def test_any_sequence_of_views_and_changes_is_followed(steps):
    def function(m, y):
        live = [y * 1.0]
        for place, name in steps:
            chosen = live[place % len(live)]
            if name in CHANGES:
                if chosen.dim():
                    CHANGES[name](chosen)
            elif chosen.dim() and chosen.shape[0] > 1 and chosen.numel() > 1:
                live.append(VIEWS[name](chosen))
        return m.b(live[0]) + sum(part.sum() * (i + 1) for i, part in enumerate(live))

    agrees(function, exact_gradients=False)  # several views add up their gradients in any order


def test_an_argument_changed_in_place_is_left_alone_with_a_warning(caplog):
    class Changes(nn.Module):
        def forward(self, x):
            x[:, 0] = 0
            return x + 1

    x = torch.ones(2, 3)
    program = export_module(Changes(), (x,)).program.module()
    assert "changes its argument x in place" in caplog.text
    assert torch.equal(program(x), torch.tensor([[1.0, 2, 2]] * 2))
    assert torch.equal(x, torch.ones(2, 3))


def test_what_cannot_be_made_functional_is_refused_with_the_line():
    class Strided(nn.Module):
        def forward(self, x):
            y = x + 1
            y.unfold(0, 2, 1).mul_(2)
            return y

    with pytest.raises(CaptureError, match=r"y.unfold\(0, 2, 1\).mul_\(2\)` changes"):
        capture(Strided(), (torch.ones(4),))


def test_what_is_changed_behind_its_gradients_back_is_refused():
    def behind(m, y):
        z = m.b(y) * y
        z.detach().mul_(2)
        return z

    with pytest.raises(CaptureError, match="behind the back of its gradient"):
        capture(*made(behind)[:2])


def mixed(m, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = F.linear(y, m.b.weight) @ y.T
        z = torch.softmax(z, -1) @ F.layer_norm(y, (6,)).to(z.dtype)
        z = torch.cat([z, m.b(y)], 1)
        with torch.autocast("cpu", enabled=False):
            w = m.b(y.float())
        loss = F.mse_loss(z, z * 0.5)
    return w, z, loss


def mixed_frozen(m, y):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        z = m.b(y)
        z += 1
    return m.b(y * z.float())


def mixed_attention(m, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = m.b(y).view(1, 2, 4, 3)
        z = F.scaled_dot_product_attention(q, q, q).reshape(4, 6)
        z = F.conv1d(z[None], m.b.weight[:, :4, None]) + torch.einsum("ij,kj->ik", z, y).sum()
    return z.float()


@pytest.mark.parametrize("function", [mixed, mixed_frozen, mixed_attention])
def test_autocast_regions_have_their_casts_as_nodes(function):
    program = agrees(function)
    assert not [node for node in program.program.graph.nodes if "wrap" in str(node.target)]
    assert "bf16" in {tensor.dtype for tensor in program.graph.tensors}


def test_a_region_without_gradients_in_autocast_is_refused():
    def lost(m, y):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            z = m.b(y)
        return m.b(y * z.float())

    with pytest.raises(CaptureError, match=r"torch.no_grad.*switches gradients off within"):
        capture(*made(lost)[:2])


class Recurrent(nn.Module):
    def __init__(self, kind, states, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(6, 5, **options)
        self.states = states

    def forward(self, x):
        y, state = self.layer(x)
        return (y, state) if self.states else y


@pytest.mark.parametrize("states", [False, True], ids=["output", "states"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 3},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"num_layers": 2, "dropout": 0.5, "bias": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_are_one_op_each(kind, options, states):
    def make():
        torch.manual_seed(0)
        return Recurrent(kind, states, **options), (torch.randn(4, 3, 6),), {}

    captured = export_module(*make())
    check_graph(captured.graph)
    layers = [op for op in captured.graph.ops if op.kind == kind.lower()]
    assert len(layers) == options["num_layers"]
    _, args, kwargs = make()
    assert differences(ran(captured.program.module(), args, kwargs), ran(*make())) == []


@pytest.mark.parametrize(
    "draw",
    [
        lambda t: t.bernoulli_(0.7), lambda t: t.bernoulli_(), lambda t: t.uniform_(0, 2),
        lambda t: t.bernoulli_(torch.full((4, 1), 0.3)), lambda t: t.normal_(1, 2),
        lambda t: t.exponential_(), lambda t: t.random_(5), lambda t: t.geometric_(0.3),
    ],
)  # fmt: skip
def test_random_numbers_drawn_in_place_are_those_of_the_module(draw):
    agrees(lambda m, y: m.b(y) * draw(y.new_empty((4, 1))) * torch.rand_like(y))


def test_a_draw_into_elements_out_of_order_is_refused():
    with pytest.raises(CaptureError, match=r"whose elements are not in order in memory"):
        capture(*made(lambda m, y: m.b(y) * torch.empty_like(y.t()).bernoulli_().t())[:2])
