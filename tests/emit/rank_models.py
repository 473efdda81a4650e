"""Small models and plans whose steps are emitted for single ranks, and a way to run the ranks."""

import threading
from collections import defaultdict

import torch

from partita.cluster import resolve
from partita.engine import run
from partita.graph import GraphBuilder, training_graph
from partita.graph.loops import loop_nest
from partita.lower import lower_plan
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.run.local.compute import constant
from partita.run.local.shards import flat_part, places, shard
from partita.run.sequential import load_source


def perceptron():
    g = GraphBuilder("perceptron")
    x = g.relu(g.linear(g.input("x", (8, 16)), 32, "up"))
    return training_graph(g.finish(g.linear(x, 16, "down")))


def block():
    """A layer of a language model with its loss: attention, norms, a residual, ids."""
    g = GraphBuilder("block")
    x = g.embedding(g.input("ids", (4, 8), "i64"), 24, 16, "table")
    n = g.norm(x, "layer_norm", "norm_1")
    q, k, v = (g.linear(n, 16, name, bias=False) for name in ("q", "k", "v"))
    a = g.one("attention", q, k, v, name="attention", heads=4, causal=True)
    x = g.add(x, g.linear(a, 16, "proj"))
    n = g.norm(x, "rms_norm", "norm_2")
    x = g.add(x, g.linear(g.elementwise("gelu", g.linear(n, 32, "up")), 16, "down"), name="sum_2")
    logits = g.linear(x, 24, "head", bias=False)
    return training_graph(g.finish(g.cross_entropy(logits, g.input("targets", (4, 8), "i64"))))


def normal():
    """Norms and softmaxes of rows and of what stands in a dim before."""
    g = GraphBuilder("normal")
    x = g.linear(g.input("x", (4, 8, 16)), 16, "in")
    x = g.add(x, g.norm(x, "layer_norm", "first", eps=1e-3))
    x = g.norm(x, "rms_norm", "second")
    for axis, name in ((-1, "third"), (1, "fourth")):
        x = g.add(x, g.one("softmax", x, name=name, axis=axis), name=f"{name}_sum")
    return training_graph(g.finish(g.one("mse_loss", x, g.input("y", (4, 8, 16)), name="loss")))


def attended(keys=8, **attrs):
    """Attention of 8 positions over some keys, with what it takes and its loss."""
    g = GraphBuilder("attended")
    x = g.linear(g.input("x", (4, 8, 16)), 16, "in")
    memory = x if keys == 8 else g.linear(g.input("memory", (4, keys, 16)), 16, "memory_in")
    mask = [g.parameter("bias", (4, 8, keys))] if attrs.pop("mask", False) else []
    width = 16 // 4 * attrs.get("kv_heads", 4)
    q = g.linear(x, 16, "q", bias=False)
    k, v = (g.linear(memory, width, name, bias=False) for name in ("k", "v"))
    a = g.one("attention", q, k, v, *mask, name="attention", heads=4, **attrs)
    loss = g.one("mse_loss", g.linear(a, 16, "proj"), g.input("y", (4, 8, 16)), name="loss")
    return training_graph(g.finish(loss))


def image():
    """A small net of images: convolutions, norms of channels and groups, pools, and what joins."""
    g = GraphBuilder("image")
    x = g.conv(g.input("x", (4, 4, 8, 8)), 8, 3, padding=1, name="conv_1")
    x = g.relu(g.norm(x, "batch_norm", "norm_1"))
    y = g.pool(x, 2, stride=2)
    a = g.norm(g.conv(y, 8, 1, bias=False, name="conv_2"), "group_norm", "norm_2", groups=4)
    y = g.one("slice", g.concat((y, a)), name="most", axis=3, start=1, stop=4)
    y = g.one("reduce", y, name="mean", fn="mean", axes=(2, 3))
    y = g.linear(y, 12, "head")
    return training_graph(g.finish(g.cross_entropy(y, g.input("targets", (4,), "i64"))))


def dropped():
    g = GraphBuilder("dropped")
    x = g.relu(g.dropout(g.linear(g.input("x", (8, 16)), 32, "up"), name="drop_1"))
    x = g.linear(x, 16, "down")
    loss = g.one("mse_loss", g.dropout(x, name="drop_2"), g.input("y", (8, 16)), name="loss")
    return training_graph(g.finish(loss))


MEGATRON = {
    "q": "n", "k": "n", "v": "n", "attention": "h", "proj": "k", "up": "n", "down": "k",
    "elementwise": "c", "relu": "c", "gelu": "c",
}  # fmt: skip


def lowered(graph, axes, dims_of, zero=lambda: 0):
    """The program of one stage on a mesh; `dims_of(op)` is a loop dim per axis."""
    count = 1
    for axis in axes:
        count *= axis.size
    ops = [op for op in graph.ops if op.phase == "forward"]
    splits = tuple(OpSplit(op.name, dims_of(op), zero=zero()) for op in ops)
    stage = Stage("model", Mesh(tuple(axes), tuple(range(count))), splits)
    return lower_plan((stage,), Schedule(), graph, resolve(f"{count}xA100"), run)


def megatron(graph, dp=1, tp=2, zero=0):
    """Batches along dp, columns then rows along tp."""

    def dims(op):
        names = {dim.name for dim in loop_nest(graph.call(op)).dims}
        along_tp = MEGATRON.get(op.name, "")
        return ("b" if "b" in names else "", along_tp if along_tp in names else "")

    return lowered(graph, (Axis("dp", dp), Axis("tp", tp)), dims, lambda: zero)


def at_random(graph, axes, random):
    """Any split of every op that needs no exchange."""

    def dims(op):
        call = graph.call(op)
        nest = loop_nest(call)
        apart = {stat.dim for stat in nest.stats}
        chosen = []
        for axis in axes:
            free = [
                dim.name for dim in nest.dims
                if not dim.whole and dim.name not in apart
                and dim.extent % (axis.size ** (1 + chosen.count(dim.name))) == 0
            ]  # fmt: skip
            chosen.append(random.choice(["", *free]))
        return tuple(chosen)

    return lowered(graph, axes, dims, lambda: random.choice([0, 0, 1, 2, 3]))


class ThreadRanks:
    """`torch.distributed` for ranks that are threads: groups are tuples of ranks."""

    def __init__(self, count):
        self.count = count
        self.lock = threading.Lock()
        self.barriers = {}
        self.boxes = defaultdict(dict)

    def of(self, rank):
        return _RankView(self, rank)

    def exchange(self, group, rank, value):
        with self.lock:
            barrier = self.barriers.setdefault(group, threading.Barrier(len(group), timeout=20))
        self.boxes[group][rank] = value
        barrier.wait()
        values = [self.boxes[group][other] for other in group]
        barrier.wait()
        return values


class _RankView:
    def __init__(self, ranks, rank):
        self.ranks, self.rank = ranks, rank

    def new_subgroups_by_enumeration(self, lists):
        return next(tuple(ranks) for ranks in lists if self.rank in ranks), None

    def get_world_size(self, group):
        return len(group)

    ReduceOp = torch.distributed.ReduceOp

    def all_reduce(self, x, op=ReduceOp.SUM, group=None):
        parts = torch.stack(self.ranks.exchange(group, self.rank, x.clone()))
        x.copy_(parts.sum(0) if op == self.ReduceOp.SUM else parts.amax(0))

    def all_gather(self, parts, x, group):
        for part, value in zip(parts, self.ranks.exchange(group, self.rank, x), strict=True):
            part.copy_(value)

    def reduce_scatter(self, out, parts, group):
        me = group.index(self.rank)
        out.copy_(sum(theirs[me] for theirs in self.ranks.exchange(group, self.rank, parts)))

    def all_to_all_single(self, taken, sent, group):
        me = group.index(self.rank)
        theirs = self.ranks.exchange(group, self.rank, sent)
        taken.copy_(torch.stack([other[me] for other in theirs]))


def run_threads(emitted, inputs, parameters, **more):
    """(outputs, gradients) of every rank, run side by side."""
    ranks = ThreadRanks(len(emitted))
    results, errors = [None] * len(emitted), []

    def one(rank):
        module = load_source(emitted[rank].source, f"rank_{rank}")
        module.dist = ranks.of(rank)
        try:
            groups = module.make_groups()
            results[rank] = module.step(inputs, module.load_shards(parameters), groups, **more)
        except Exception as error:
            errors.append((rank, error))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(emitted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return results


def worst_error(emitted, results, axes, whole):
    """How far what the ranks have is from shards of the whole model's numbers, relatively."""
    return max(
        rank_error(source, result, axes, rank, whole)
        for rank, (source, result) in enumerate(zip(emitted, results, strict=True))
    )


def rank_error(source, result, axes, rank, whole):
    """The same of one rank."""
    place, worst = places(axes)[rank], 0.0
    pairs = ((source.outputs, whole.outputs[0]), (source.gradients, whole.gradients))
    for computed, (values, right) in zip(result, pairs, strict=True):
        assert computed.keys() == values.keys()
        largest = max((tensor.abs().max() for tensor in right.values()), default=0.0)
        for name, value in values.items():
            wanted = shard(right[name], value.layout, axes, place)
            for axis in value.flat:
                wanted = flat_part(wanted, place[axis], axes[axis].size)
            assert computed[name].shape == wanted.shape, name
            # A gradient may be zero but for rounding: that of a bias of keys is.
            scale = max(right[name].abs().max(), 1e-4 * largest)
            worst = max(worst, ((computed[name] - wanted).abs().max() / scale).item())
    return worst


def constants(graph):
    """What constants of a graph hold: `step` is given them with the inputs."""
    ops = [op for op in graph.ops if op.kind == "constant" and op.phase == "forward"]
    return {op.outputs[0]: constant(graph, op) for op in ops}
