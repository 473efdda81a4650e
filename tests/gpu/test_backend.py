"""`torch.compile(module, backend="partita")` without a GPU: what is ours, what is PyTorch's."""

import copy
from importlib.metadata import entry_points

import pytest
import torch
from test_accelerate import fastest_is, no_trials, on_cpu
from torch import nn

from partita.errors import InputError
from partita.gpu.accelerate import backend
from partita.gpu.accelerate.backend import GraphCall, GraphFunctions, backend_options, compile_graph

__all__ = ["on_cpu"]  # a fixture
QUICK = {"compile": False, "otherwise": "eager"}  # and no trial answers


class Net(nn.Module):
    """A norm that is folded away, a buffer, a graph break if asked for."""

    def __init__(self, broken=False):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.broken = broken

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        if self.broken:
            torch._dynamo.graph_break()
        return {"y": self.second(x), "size": x.shape[0]}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def ours(on_cpu, monkeypatch):
    """The CPU stands for the GPU: graphs made so far, as functions."""
    no_trials(monkeypatch)
    fastest_is(monkeypatch, "sequential graph")
    made = []

    def compile_on_cpu(graph, example, *, options=None):
        function = GraphFunctions(graph, example, backend_options(QUICK | (options or {})))
        made.append(function)
        return function

    return compile_on_cpu, made


def kept(function):
    return [each and each.fast.report().kept for each in function.made.values()]


def test_pytorch_finds_the_backend_by_its_name():
    (entry,) = entry_points(group="torch_dynamo_backends", name="partita")
    assert entry.load() is compile_graph


@pytest.mark.parametrize("broken", [False, True])
def test_every_graph_between_breaks_is_accelerated_and_right(ours, broken):
    compile_on_cpu, made = ours
    net = Net(broken).eval()
    fast = torch.compile(net, backend=compile_on_cpu)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, 4)
            assert torch.allclose(fast(x)["y"], net(x)["y"], atol=1e-6)
    assert [kept(each) for each in made] == [["sequential graph"]] * (2 if broken else 1)


def test_several_shapes_are_functions_of_their_own_up_to_a_number(ours):
    compile_on_cpu, made = ours
    net = Net().eval()
    fast = torch.compile(net, backend=compile_on_cpu, options={"shapes": 2})
    with torch.no_grad():
        for size in (3, 5, 7, 5, 9):
            x = torch.randn(size, 4)
            answer, wanted = fast(x), net(x)
            assert answer["size"] == size
            assert torch.allclose(answer["y"], wanted["y"], atol=1e-6)
    fixed, any_size = made  # PyTorch compiles the second size for any
    assert kept(fixed) == ["sequential graph"]
    assert kept(any_size) == ["sequential graph", "sequential graph", None]


@pytest.mark.parametrize("change", ["in place", "replaced", "loaded"])
def test_changed_weights_are_never_stale(ours, change):
    compile_on_cpu, _ = ours
    net = Net().eval()
    fast = torch.compile(net, backend=compile_on_cpu)
    x = torch.randn(3, 4)
    with torch.no_grad():
        fast(x)
        if change == "in place":
            net.first.weight.mul_(3)
        elif change == "replaced":
            net.first.weight = nn.Parameter(torch.randn(4, 4))
        else:
            net.load_state_dict(copy.deepcopy(Net()).state_dict())
        with pytest.warns(UserWarning, match="the weights have changed since"):
            answer = fast(x)["y"]
        assert torch.allclose(answer, net(x)["y"], atol=1e-6)
        assert torch.allclose(fast(x)["y"], net(x)["y"], atol=1e-6)


def test_a_graph_that_changes_its_inputs_or_buffers_changes_them_once(ours):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x, cache):
            cache.add_(x)
            self.count.add_(1)
            return cache * self.count

    compile_on_cpu, made = ours
    net = Counter().eval()
    fast = torch.compile(net, backend=compile_on_cpu)
    cache = torch.zeros(4)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="it changes what it is given: eager compiles it"),
    ):
        answer = fast(torch.ones(4), cache)
    assert torch.equal(answer, torch.ones(4))
    assert torch.equal(cache, torch.ones(4))
    assert torch.equal(net.count, torch.ones(4))
    assert kept(made[0]) == [None]


def test_weights_and_numbers_of_a_graph_are_inside_its_module():
    graph = torch.fx.symbolic_trace(_scaled)
    weight, x = nn.Parameter(torch.ones(2)), torch.ones(2)
    module = GraphCall(graph, (3, weight, x))
    assert module.given == [2]
    assert dict(module.named_parameters()) == {"weight_1": weight}
    (answer,) = module(x)
    assert torch.equal(answer, torch.full((2,), 3.0))


def _scaled(number, weight, x):
    return (x * weight * number, number)


def test_on_the_cpu_the_graph_runs_as_it_is():
    net = Net().eval()
    fast = torch.compile(net, backend=compile_graph)
    x = torch.randn(3, 4)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="not accelerated: it is on cpu: the graph runs as it is"),
    ):
        assert torch.equal(fast(x)["y"], net(x)["y"])


def test_training_is_left_to_the_other_compiler(monkeypatch):
    real = backend.on_one_gpu
    monkeypatch.setattr(backend, "on_one_gpu", lambda tensors: real(tensors) or True)
    net = Net().train()
    fast = torch.compile(net, backend=compile_graph, options={"otherwise": "aot_eager"})
    with pytest.warns(UserWarning, match="gradients are asked for: aot_eager compiles it"):
        fast(torch.randn(3, 4))["y"].sum().backward()
    assert net.first.weight.grad is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"times": 3.0}, "options: there is no option 'times'; did you mean time_s?"),
        ({"time_s": "3"}, "options: time_s: found '3'; give a float"),
        ({"compile": 1}, "options: compile: found 1; give a bool"),
    ],
)
def test_bad_options_are_refused_with_what_there_is(options, said):
    with pytest.raises(InputError) as caught:
        backend_options(options)
    assert str(caught.value) == said


def test_modes_of_other_backends_are_refused():
    with pytest.raises(InputError, match="mode='max-autotune' is of another backend"):
        compile_graph(torch.fx.symbolic_trace(_scaled), (), mode="max-autotune")
