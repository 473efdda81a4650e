"""Random plans of small models: any cut, mesh, split, ZeRO level, checkpointing and schedule."""

from dataclasses import dataclass, replace

from partita.cluster import resolve
from partita.costs.layouts import token_groups
from partita.costs.sharding import dims_of
from partita.graph.rebatch import batch_of, rebatch
from partita.graph.splits import routed_pairs
from partita.lower.orders import refusal
from partita.plans import ZERO_STAGES, Axis, Mesh, OpSplit, Schedule, Stage, device_groups

CLUSTERS = ("8xA100", "4xV100+4xP100", "2x4xA100")
SHAPES = ((), (2,), (2,), (2, 2), (4,), (3,), (2, 2, 2), (1, 2), (2, 4))
WEIGHTS = {2: ((1, 3), (3, 1), (1, 2), (3, 5)), 3: ((1, 2, 1), (2, 1, 3)), 4: ((1, 1, 2, 4),)}
REPLICATES = 0.3  # of the axes
LAYOUTS = {"line": (1,), "looped": (2, 3), "wave": (2,)}
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved", "looped-bfs", "zb-v", "hanayo")


@dataclass(frozen=True)
class RandomPlan:
    """A plan, and the model and machine it is for."""

    graph: object
    cluster: object
    stages: tuple
    schedule: Schedule


def axes_of(random, shape, replicas=True):
    """Axes of a shape; some give their places uneven shares, some keep replicas (HSDP)."""
    axes = []
    for i, size in enumerate(shape):
        weights = ()
        if size in WEIGHTS and random.random() < 0.2:
            weights = random.choice(WEIGHTS[size])
        axes.append(Axis("xyz"[i], size, weights, _keeps(random, size, replicas)))
    return tuple(axes)


def _keeps(random, size, replicas):
    return replicas and size > 1 and random.random() < REPLICATES


def random_plan(random, graph, *, most_groups=4, shared=False, replicas=True):
    """A plan that lowering must be able to carry out; with `shared` some stages are on the devices
    of several others. Without `replicas` ZeRO shards along all axes, as when old seeds were found.
    """
    cluster = resolve(random.choice(CLUSTERS))
    forward = [op.name for op in graph.ops if op.phase == "forward"]
    batch = batch_of(graph)
    count = random.choice([c for c in (1, 1, 2, 4) if batch % c == 0])
    groups = random.randint(1, min(most_groups, len(forward)))
    chunks = random.choice([1, 1, 2]) if groups > 1 and 2 * groups <= len(forward) else 1
    waves = chunks > 1 and random.random() < 0.5
    while True:
        shapes = [random.choice(SHAPES) for _ in range(groups)]
        sizes = [_size(shape) for shape in shapes]
        if sum(sizes) <= 8:
            break
    meshes, first = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        meshes.append(Mesh(axes_of(random, shape, replicas), tuple(range(first, first + size))))
        first += size
    num_stages = groups * chunks
    cuts = sorted(random.sample(range(1, len(forward)), num_stages - 1))
    parts = [forward[a:b] for a, b in zip([0, *cuts], [*cuts, len(forward)], strict=True)]
    micro = rebatch(graph, batch // count)
    stages = []
    for number, ops in enumerate(parts):
        chunk, rank = divmod(number, groups)
        group = groups - 1 - rank if waves and chunk % 2 else rank
        mesh = meshes[group]
        if shared and random.random() < 0.4:
            mesh = _joint_mesh(random, meshes, replicas)
        stages.append(_stage(random, micro, number, mesh, ops, graph.is_training))
    stages = _routed_alike(random, micro, tuple(stages))
    return RandomPlan(graph, cluster, stages, _schedule(random, stages, count, graph.is_training))


def _joint_mesh(random, meshes, replicas):
    """Devices of several meshes, or of parts of them, in any arrangement."""
    every = [device for mesh in meshes for device in mesh.devices]
    size = random.choice([len(every), random.randint(1, len(every))])
    devices = random.sample(every, size) if random.random() < 0.3 else every[:size]
    shapes = [shape for shape in (*SHAPES, (size,)) if _size(shape) == size]
    return Mesh(axes_of(random, random.choice(shapes), replicas), tuple(devices))


def _routed_alike(random, micro, stages):
    """The stages with every combine split so that it routes the groups of its dispatch."""
    where = {split.op: (i, k) for i, s in enumerate(stages) for k, split in enumerate(s.splits)}
    splits = [list(stage.splits) for stage in stages]
    for dispatch, combine in routed_pairs(micro):
        (i, k), (j, n) = where[dispatch.name], where[combine.name]
        ways = [
            {
                dims: token_groups(micro.call(op), dims, axes)
                for dims in dims_of(micro.call(op), axes)
            }
            for op, axes in ((dispatch, stages[i].mesh.axes), (combine, stages[j].mesh.axes))
        ]
        kept, own = splits[i][k].dims, splits[j][n].dims
        if ways[0][kept] not in ways[1].values():  # the other stage's mesh has no such shares
            kept = random.choice([dims for dims, groups in ways[0].items() if len(groups) == 1])
        alike = [dims for dims, groups in ways[1].items() if groups == ways[0][kept]]
        splits[i][k] = replace(splits[i][k], dims=kept)
        splits[j][n] = replace(splits[j][n], dims=own if own in alike else random.choice(alike))
    return tuple(replace(s, splits=tuple(own)) for s, own in zip(stages, splits, strict=True))


def _size(shape):
    size = 1
    for axis in shape:
        size *= axis
    return size


def _stage(random, micro, number, mesh, ops, training):
    # Most plans agree on a dim where they can; some give every op its own.
    likes = [random.choice(["b", "n", "c", "k", "s", "h", ""]) for _ in mesh.axes]
    wild = random.random() < 0.4
    level = random.choice(ZERO_STAGES)
    splits = []
    for name in ops:
        legal = dims_of(micro.call(micro.op(name)), mesh.axes)
        liked = [d for d in legal if all(a in (b, "") for a, b in zip(d, likes, strict=True))]
        dims = max(liked, key=lambda d: sum(map(bool, d)), default=None)
        if wild or dims is None:
            dims = random.choice(legal)
        splits.append(OpSplit(name, dims, random.choice(ZERO_STAGES) if wild else level))
    kind = random.choice(["no", "no", "all", "some", "each"]) if training else "no"
    recompute, checkpoints, again = kind == "all", (), ()
    if kind == "all":
        checkpoints = tuple(op for op in ops if random.random() < 0.3)
    elif kind == "some":
        again = tuple(op for op in ops if random.random() < 0.4)
    elif kind == "each":
        again = tuple(ops)
    prefetch = random.choice([1, 2, 3, 4, 8])
    bucket = random.choice([0, 50, 200, 1000, 25 * 2**20])
    return Stage(
        f"stage{number}",
        mesh,
        tuple(splits),
        "full" if recompute else "selective" if again else "none",
        checkpoints,
        again,
        prefetch,
        bucket,
    )


def _schedule(random, stages, count, training):
    groups = device_groups(stages)
    names = [name for name in SCHEDULES if not refusal(name, groups, count)]
    if not names or random.random() < 0.25:
        return Schedule("listed", count, _listed(random, groups, count, training))
    return Schedule(random.choice(names), count)


def _listed(random, groups, count, training):
    """Rows of an order that somebody could have written: any that does not wait for itself."""
    num_stages = 1 + max(map(max, groups))
    apart = {(s, m): training and random.random() < 0.5 for s in range(num_stages)
             for m in range(count)}  # fmt: skip
    left = {("F", s, m) for s in range(num_stages) for m in range(count)}
    if training:
        left |= {("B", s, m) for s, m in apart} | {("W", s, m) for s, m in apart if apart[s, m]}
    done, order = set(), []
    while left:
        ready = sorted(a for a in left if _needed(a, num_stages) <= done)
        action = random.choice(ready)
        left.remove(action)
        done.add(action)
        order.append(action)
    rows = []
    for own in groups:
        mine = [(kind, s, m) for kind, s, m in order if s in own]
        letters = [("I" if kind == "B" and apart[s, m] else kind, s, m) for kind, s, m in mine]
        rows.append(" ".join(f"{s}{kind}{m}" for kind, s, m in letters))
    return tuple(rows)


def _needed(action, num_stages):
    """Stages hang together as a line at worst."""
    kind, s, m = action
    if kind == "F":
        return {("F", i, m) for i in range(s)}
    if kind == "W":
        return {("B", s, m)}
    return {("F", s, m)} | {("B", i, m) for i in range(s + 1, num_stages)}
