"""Ops split along a dim that they need statistics over: the numbers of one process, few bytes."""

import functools
import math
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from distributed_plans import (  # noqa: E402
    apart,
    exported_once,
    graph_of,
    in_one_process,
    plan_of,
    sgd,
)
from distributed_ranks import run_on_ranks  # noqa: E402
from torch import nn  # noqa: E402

from partita.capture import export_module  # noqa: E402
from partita.graph.loops import loop_nest  # noqa: E402
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage  # noqa: E402
from partita.run.distributed import engine as engines  # noqa: E402
from partita.run.distributed.comm import Communicator  # noqa: E402
from partita.run.distributed.opwise import Frame  # noqa: E402
from partita.run.distributed.statistics import (  # noqa: E402
    ClassLossRule,
    NormRule,
    StatisticExchange,
    StatisticRule,
    StatisticSite,
    forward,
    rule_of,
)

CLOSE = 1e-5
HALF_CLOSE = 0.05
COUNT = 2  # micro-batches
IGNORED = 3


class Rows(nn.Module):
    """Norms and softmaxes over the last dims and the one before, and a loss of many classes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(16, eps=1e-3), nn.LayerNorm((16, 16), bias=False)
        self.third, self.plain = nn.RMSNorm(16), nn.LayerNorm(16, elementwise_affine=False)
        self.head = nn.Linear(16, 12)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, 0.2, 1.0)

    def forward(self, x, y):
        x = self.second(x + self.first(x + 3))
        x = self.plain(x * F.softmax(x, -1) + F.log_softmax(x, 1)) + self.third(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)


class Images(nn.Module):
    """Norms over samples, over groups of channels and over single ones."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(4, momentum=0.3), nn.GroupNorm(2, 4, eps=1e-3)
        self.third, self.whole = nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(1, 4)
        self.last = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.head = nn.Linear(128, 8)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, 0.2, 1.0)

    def forward(self, x, y):
        x = x * self.third(x + torch.tanh(self.second(x * self.first(x + 3))))
        x = torch.tanh(self.last(x + self.whole(x)))
        return F.cross_entropy(self.head(x.flatten(1)), y)


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    if name == "rows":
        classes = torch.randint(4, 12, (8, 16))
        classes[:, ::5] = IGNORED  # as many in each share of the rows
        module, args = Rows(), (torch.randn(8, 16, 16), classes)
    else:
        module, args = Images(), (torch.randn(8, 4, 4, 8), torch.randint(8, (8,)))
    args = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)
    return module.to(dtype), args


@functools.cache
def graph_in(model, dtype):
    return graph_of(*make(model, dtype))


def split_of(call, axes, turn):
    """Dims that statistics are over, for all axes; the others in the op's usual first dim."""
    nest = loop_nest(call)
    cut = [dim.name for dim in nest.dims if not dim.whole]
    stats = [stat.dim for stat in nest.stats if stat.dim in cut]
    if not stats:
        return ("",) * len(axes)
    free = [name for name in cut if name not in stats]
    second = free[0] if turn % 2 and free else stats[-1]
    return (stats[turn % len(stats)], second)[: len(axes)]


def planned(graph, axes, turn, schedule="1f1b", **settings):
    ops = [op for op in graph.ops if op.phase == "forward"]
    splits = tuple(OpSplit(op.name, split_of(graph.call(op), axes, turn)) for op in ops)
    mesh = Mesh(axes, tuple(range(math.prod(axis.size for axis in axes))))
    return plan_of(graph, [Stage("all", mesh, splits, **settings)], Schedule(schedule, COUNT))


def allowed(graph):
    """Bytes that an op may exchange at once: what the plan counts for it, in f64."""
    known = {}
    for op in graph.ops:
        nest = loop_nest(graph.call(op))
        for stat in nest.stats:
            extent = {dim.name: dim.extent for dim in nest.dims}
            rows = math.prod(extent.get(name, 1) for name in stat.over)
            is_of_batch = any("b" in stat.over for stat in nest.stats)
            known[op.name] = 8 * stat.values * (rows // COUNT if is_of_batch else rows)
    return known


class Counted:
    """Bytes that ops give to collectives while they are computed."""

    def __init__(self):
        self.sent, self.op = {}, None

    def watch(self):
        stack = [mock.patch.object(Frame, "_op", self._named(Frame._op))]
        for name in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
            method = self._counting(getattr(Communicator, name))
            stack.append(mock.patch.object(Communicator, name, method))
        return stack

    def _named(self, method):
        def named(frame, position, number, work):
            self.op = work.op
            try:
                return method(frame, position, number, work)
            finally:
                self.op = None

        return named

    def _counting(self, method):
        def counting(comm, given, *args, **kwargs):
            if self.op is not None:
                parts = [given] if isinstance(given, torch.Tensor) else given
                size = sum(part.numel() * part.element_size() for part in parts)
                self.sent.setdefault(self.op, []).append(size)
            return method(comm, given, *args, **kwargs)

        return counting


def run_case(rank, model, axes, turn, dtype=torch.float32, **settings):
    module, args = make(model, dtype)
    graph = graph_in(model, dtype)
    plan = planned(graph, axes, turn, **settings)
    counted = Counted()
    engine = engines.execute(plan, module, optimizer=sgd, device="cpu", keep_gradients=True)
    patches = [*counted.watch(), mock.patch.object(engines, "RunModel", exported_once)]
    for patch in patches:
        patch.start()
    losses = [engine.step(*args) for _ in range(2)]
    for patch in patches:
        patch.stop()
    state, gradients = engine.full_state_dict(), engine.full_gradients()
    engine.board.close()
    if rank:
        return None
    wanted, grads, after = in_one_process(make(model, dtype)[0], args, COUNT, 2, sgd)
    off = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    errors = {"loss": off, "gradients": apart(gradients, grads), "state": apart(state, after)}
    return errors, counted.sent, allowed(graph)


def run_cases(rank, cases):
    return {name: run_case(rank, *args, **settings) for name, (args, settings) in cases.items()}


TWO = (Axis("x", 2),)
HALF = {"dtype": torch.bfloat16}
ON_TWO = {
    "rows": (("rows", TWO, 0), {}),
    "rows, shares of 1 to 3": (("rows", (Axis("x", 2, (1, 3)),), 0), {}),
    "rows, weight gradients apart": (("rows", TWO, 0), {"schedule": "zb-h1"}),
    "rows again": (("rows", TWO, 0), {"checkpointing": "full"}),
    "rows in bf16": (("rows", TWO, 0), HALF),
    "images": (("images", TWO, 0), {}),
    "images, shares of 1 to 3, other dims": (("images", (Axis("x", 2, (1, 3)),), 1), {}),
    "images again, other dims": (("images", TWO, 2), {"checkpointing": "full"}),
}
ON_FOUR = {
    f"{model}, {turn}": ((model, (Axis("x", 2), Axis("y", 2)), turn), {})
    for model in ("rows", "images")
    for turn in range(2)
}
ON_THREE = {"rows": (("rows", (Axis("x", 3, (1, 2, 1)),), 1), {})}


@functools.cache
def ran(world, folder):
    cases = {2: ON_TWO, 3: ON_THREE, 4: ON_FOUR}[world]
    ends = run_on_ranks(world, run_cases, cases, folder=folder)
    assert [end.code for end in ends] == [0] * world, "\n".join(end.stderr for end in ends)
    return ends[0].result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ops_that_exchange_statistics_give_the_numbers_of_one_process(world, folder):
    for name, (errors, _, _) in ran(world, folder).items():
        assert max(errors.values()) <= (HALF_CLOSE if "bf16" in name else CLOSE), (name, errors)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_statistics_cross_ranks_and_rows_do_not(world, folder):
    for name, (_, sent, most) in ran(world, folder).items():
        assert len(sent) > 5, name
        for op, sizes in sent.items():
            assert max(sizes) <= most[op], (name, op)


def test_a_row_far_from_zero_has_the_variance_that_pytorch_gives_it():
    x = 3e3 + torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    rule = StatisticRule(NormRule("last", 1, 1e-5), (("x", 0),))
    got, _ = forward(rule, StatisticSite(32, 0, 32, 1.0), [x], StatisticExchange(None, ()))
    exact = F.layer_norm(x.double(), (32,))
    usual = float((F.layer_norm(x, (32,)) - exact).abs().max())
    assert float((got - exact).abs().max()) <= 2 * usual


class Losses(nn.Module):
    """Norms and losses with settings of their own."""

    def forward(self, x, y):
        x = F.rms_norm(F.layer_norm(x, (16,), eps=0.25), (16,))
        return F.cross_entropy(x, y) + F.cross_entropy(x, y, label_smoothing=0.1)


def test_settings_are_those_of_the_call_and_what_has_more_of_them_has_no_rule():
    captured = export_module(Losses(), (torch.randn(4, 16), torch.randint(16, (4,))))
    rules = {}
    for op in captured.graph.ops:
        node, call = captured.record.node[captured.node_of(op)], captured.graph.call(op)
        rule = rule_of(call, node, op.inputs, captured.places.get)
        rules.setdefault(op.kind, []).append(rule and rule.settings)
    eps = torch.finfo(torch.float32).eps
    assert rules["layer_norm"] == [NormRule("last", 1, 0.25)]
    assert rules["rms_norm"] == [NormRule("last", 1, eps, is_centred=False)]
    assert rules["cross_entropy"] == [ClassLossRule(), None]
    assert rules["elementwise"] == [None]
