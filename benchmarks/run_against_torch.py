"""Plans on partita's runtime against torch's own runtimes, on CPU ranks with one thread each.

    python benchmarks/run_against_torch.py --ranks 2
    python benchmarks/run_against_torch.py --ranks 8 --layers 16 --microbatches 16

Pipelines: the same stages (those that `partita emit` writes) under torch.distributed.pipelining's
1F1B, interleaved 1F1B and ZBV, and as a plan under `partita.execute`. ZeRO 3: the same model under
torch's `fully_shard` of every layer, and as a plan. Both do the whole step, SGD included. They are
measured in turn, in one run: a ratio is of two measurements next to each other, and the spread is
over all such pairs. Then the seconds that the executor itself takes for a task, and the speed-up
over one process against the one that the order predicts from the measured times of the stages.
"""

import argparse
import hashlib
import os
import statistics
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import multiprocessing, nn

from partita.capture import capture
from partita.cluster import resolve
from partita.graph import training_graph
from partita.jobs.strategies import STRATEGIES
from partita.jobs.workload import load
from partita.plans import (
    ClusterRef,
    Mesh,
    OpSplit,
    Origin,
    Plan,
    Prediction,
    Schedule,
    Stage,
    device_groups,
)

VOCABULARY, POSITIONS = 512, 64
SPEC = f"{Path(__file__)}:make"
NAMES = {"1f1b": 1, "interleaved": 2, "zb-v": 2}  # how many stages a rank has


class Layer(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, positions, width] in and out."""
        batch, positions, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            part(y).view(batch, positions, self.heads, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Layers between an embedding and a loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make(batch: int = 16) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model of this run, always with the same weights, and its arguments."""
    torch.manual_seed(0)
    width, layers = int(os.environ.get("WIDTH", "256")), int(os.environ.get("LAYERS", "8"))
    model = Model(width, layers)
    ids = torch.randint(VOCABULARY, (batch, POSITIONS + 1))
    return model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def plan_of(graph, stages, schedule, batch):
    """A plan of this file's model."""
    spec = f"{len({d for s in stages for d in s.mesh.devices})}xA100"
    cluster, own = resolve(spec), hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return Plan(
        replace(load(graph, optimizer="sgd", spec=SPEC).ref(), batch=batch, sha256=own),
        ClusterRef(spec, cluster.num_devices, cluster.fingerprint()),
        tuple(stages), Prediction(1.0, 1.0, 1.0, 1.0, (1.0,), (1.0,)),
        Origin("benchmark", "feasible", "", 0, 0.0, ""), schedule,
    )  # fmt: skip


def pipeline_plan(graph, ranks, name, count, batch, layers):
    """As many layers on every stage; the embedding on the first, head and loss on the last."""
    chunks = NAMES[name]
    number = ranks * chunks
    members: list[list[str]] = [[] for _ in range(number)]
    layer = 0
    for op in graph.ops:
        if op.phase != "forward":
            continue
        if "layers." in op.scope:
            layer = int(op.scope.split("layers.")[1].split(".")[0])
        elif layer == layers - 1 and op.scope != "":
            layer = layers
        members[min(layer * number // layers, number - 1)].append(op.name)
    stages = []
    for i, own in enumerate(members):
        chunk, rank = divmod(i, ranks)
        rank = ranks - 1 - rank if name == "zb-v" and chunk % 2 else rank
        splits = tuple(OpSplit(op, (), 0) for op in own)
        stages.append(Stage(f"stage{i}", Mesh((), (rank,)), splits))
    return plan_of(graph, stages, Schedule(name, count), batch)


def zero_plan(graph, ranks, batch):
    """Everything split along the batch, parameters sharded: the plan that is called fsdp."""
    stages = STRATEGIES["fsdp"].stages(graph, ranks)[:1]
    return plan_of(graph, stages, Schedule("1f1b", 1), batch)


# Contenders: functions of no arguments that take one step.


def ours(plan, batch):
    """A plan on partita's runtime."""
    import partita

    module, args = make(batch)
    engine = partita.execute(
        plan, module, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01), device="cpu", example=args
    )
    engine.board.close()  # the watchers of several engines would look at each other's tasks
    return engine, lambda: engine.step(*args)


def torch_pipeline(plan, batch, rank):
    """The same stages in torch's own schedule of that name."""
    from torch.distributed.pipelining import PipelineStage, schedules

    from partita.run.torch_pipelining import TorchPipeline, chain_of_plan

    module, (ids, targets) = make(batch)
    chain = chain_of_plan(plan, module.state_dict())
    local = tuple(i for i, stage in enumerate(plan.stages) if stage.mesh.devices[0] == rank)
    held = [PipelineStage(chain[i], i, len(chain), torch.device("cpu")) for i in local]
    for stage in held:  # torch 2.11 greets neighbours first, itself too, which gloo cannot
        stage._get_init_p2p_neighbors_ops = lambda: []
    kinds = {
        "1f1b": lambda *args, **kw: schedules.Schedule1F1B(held[0], *args, **kw),
        "interleaved": lambda *args, **kw: schedules.ScheduleInterleaved1F1B(held, *args, **kw),
        "zb-v": lambda *args, **kw: schedules.ScheduleZBVZeroBubble(held, *args, **kw),
    }
    runtime = kinds[plan.schedule.name](
        plan.schedule.num_microbatches, loss_fn=lambda loss, target: loss
    )
    pipe = TorchPipeline(runtime, chain, local)
    parameters = [p for i in local for p in chain[i].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    inputs = dict(zip(("ids", "targets"), (ids, targets), strict=True))

    def step():
        optimizer.zero_grad()
        losses = pipe.step(inputs)
        optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None

    return step


def torch_fsdp(batch, rank, ranks):
    """torch's fully_shard of every layer and of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, args = make(batch)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    own = [arg.chunk(ranks)[rank] for arg in args]

    def step():
        optimizer.zero_grad()
        loss = module(*own)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def alone(batch, count):
    """The model in one process, in micro-batches."""
    module, args = make(batch)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        for part in zip(*(arg.chunk(count) for arg in args), strict=True):
            (module(*part) / count).backward()
        optimizer.step()

    return step


# Measuring.


def seconds(step, repeats):
    """Seconds of one step, and of the processors of all ranks; all begin and end together."""
    dist.barrier()
    start, own = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        step()
    used = torch.tensor(time.process_time() - own)
    dist.barrier()
    took = time.perf_counter() - start
    dist.all_reduce(used)
    return took / repeats, float(used) / repeats


def _timed(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def in_turn(contenders, options):
    """Seconds of every contender in every round, after one to warm up."""
    for step in contenders:
        step()
    return [[seconds(step, options.repeats) for step in contenders] for _ in range(options.rounds)]


def told(what, rounds, rank, names):
    """Medians, and the ratio of neighbours with its spread: by the clock and by processor time.

    On a machine that others use, too, the second says more, and of the clock the best rounds.
    """
    for kind, words in enumerate(("", "processors")):
        ratios = sorted(first[kind] / second[kind] for first, second in rounds)
        medians = [statistics.median(pair[kind] for pair in c) for c in zip(*rounds, strict=True)]
        best = [min(pair[kind] for pair in c) for c in zip(*rounds, strict=True)]
        if rank == 0:
            times = ", ".join(
                f"{name} {1e3 * value:.1f} ms" for name, value in zip(names, medians, strict=True)
            )
            print(
                f"{words or what:<12} {times}; {names[0]} / {names[1]} "
                f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, "
                f"{len(ratios)} pairs); of the best rounds {best[0] / best[1]:.3f}",
                flush=True,
            )
    return [min(pair[0] for pair in c) for c in zip(*rounds, strict=True)]


def stage_times(plan, batch, options):
    """Seconds of forward and backward of every emitted stage on one micro-batch, alone."""
    from partita.run.torch_pipelining import chain_of_plan

    module, (ids, targets) = make(batch)
    size = batch // plan.schedule.num_microbatches
    x, named = ids[:size], {"input_targets": targets[:size], "input_ids": ids[:size]}
    times = []
    for part in chain_of_plan(plan, module.state_dict()):
        best = (float("inf"), float("inf"))
        for _ in range(options.rounds):
            given = x.detach().requires_grad_(x.is_floating_point())
            start = time.perf_counter()
            y = part(given, **named)
            middle = time.perf_counter()
            y.backward(torch.ones_like(y))
            best = (
                min(best[0], middle - start),
                min(best[1], time.perf_counter() - middle),
            )
        x = y
        times.append(best)
    return times


def predicted_s(plan, times):
    """The step that the plan's order takes with these times, messages free of cost."""
    from partita.jobs.torch_schedule import order_of

    order = order_of(plan.schedule, device_groups(plan.stages), training=True)
    rows = [[action for action in row if action is not None] for row in order]
    at, free, done = [0] * len(rows), [0.0] * len(rows), {}
    last = len(plan.stages) - 1
    while any(i < len(row) for i, row in zip(at, rows, strict=True)):
        before = list(at)
        for r, row in enumerate(rows):
            while at[r] < len(row):
                action = row[at[r]]
                kind, s, m = str(action.kind)[0].upper(), action.stage, action.microbatch
                need = {
                    "F": [("F", s - 1, m)] if s else [],
                    "W": [("I", s, m)],
                }.get(kind, [("B", s + 1, m)] if s < last else [("F", s, m)])
                need = [n if n[0] != "B" or n in done else ("I", *n[1:]) for n in need]
                if any(n not in done for n in need):
                    break
                share = {"F": times[s][0], "B": times[s][1]}.get(kind, times[s][1] / 2)
                free[r] = max([free[r], *(done[n] for n in need)]) + share
                done[kind, s, m] = free[r]
                at[r] += 1
        assert before != at, "the order waits for itself"
    return max(free)


def run(rank, options, port):
    """All of it, on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.ranks), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    dist.init_process_group("gloo")
    count, batch = options.microbatches, options.batch
    module, args = make(batch)
    graph = training_graph(capture(module, args), "sgd")
    one, whole = alone(batch, count), 0.0
    if rank == 0 and options.schedules:
        one()
        whole = min(_timed(one) for _ in range(3))
    for name in options.schedules:
        plan = pipeline_plan(graph, options.ranks, name, count, batch, options.layers)
        _, step = ours(plan, batch)
        contenders = [step, torch_pipeline(plan, batch, rank)]
        mine, _ = told(name, in_turn(contenders, options), rank, ("partita", "torch"))
        dist.barrier()
        if rank == 0:
            expected = predicted_s(plan, stage_times(plan, batch, options))
            print(
                f"{'':<12} one process {1e3 * whole:.1f} ms, speed-up {whole / mine:.2f}; "
                f"predicted {1e3 * expected:.1f} ms, {whole / expected:.2f}: "
                f"{expected / mine:.0%} of the prediction",
                flush=True,
            )
        dist.barrier()
    if options.fsdp:
        _, step = ours(zero_plan(graph, options.ranks, batch), batch)
        contenders = [step, torch_fsdp(batch, rank, options.ranks)]
        told("ZeRO 3", in_turn(contenders, options), rank, ("partita", "FSDP2"))
    dist.destroy_process_group()


# The executor itself: one rank, ops of almost nothing.


class Tiny(nn.Module):
    """Linear layers so small that their time is that of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.layers(x).square().mean()


def overhead(rank, options, port):
    """Seconds of a task less those of the same ops by themselves: blocks, and ops one by one."""
    import partita

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    count = 64
    module, x = Tiny(), torch.randn(count, 2)
    graph = training_graph(capture(module, (x,)), "sgd")
    names = [op.name for op in graph.ops if op.phase == "forward"]
    stages = [Stage("stage0", Mesh((), (0,)), tuple(OpSplit(op, (), 0) for op in names))]
    for schedule, what in (
        ("1f1b", "in segments"), ("zb-h1", "in segments, gradients apart"), ("zb-h1", "op by op"),
    ):  # fmt: skip
        plan = plan_of(graph, stages, Schedule(schedule, count), count)
        engine = partita.execute(
            plan, module, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0), device="cpu",
            example=(x,),
        )  # fmt: skip
        engine.board.close()
        walk = engine.walk
        walk.in_segments = what != "op by op"
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

        def plain(optimizer=optimizer):
            optimizer.zero_grad()
            for part in x.chunk(count):
                (module(part) / count).backward()
            optimizer.step()

        rounds = in_turn([lambda engine=engine: engine.step(x), plain], options)
        both, own = (min(p[1] for p in c) for c in zip(*rounds, strict=True))
        tasks = sum(1 for task in walk.tasks if walk._is_block(task))
        if not walk.in_segments:  # every op of a block is a task of its own
            body = walk._plan(0, walk.steady[0])
            tasks = sum(1 for n in body.works if body.program.works[n].op) * count
        print(
            f"overhead     {what}: {1e6 * (both - own) / tasks:.0f} us a task ({tasks} tasks)",
            flush=True,
        )
    dist.destroy_process_group()


def main():
    """Read the options, start the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=1, help="steps of one measurement")
    parser.add_argument("--schedules", nargs="*", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--no-fsdp", dest="fsdp", action="store_false")
    parser.add_argument("--no-overhead", dest="overhead", action="store_false")
    options = parser.parse_args()
    os.environ.update(WIDTH=str(options.width), LAYERS=str(options.layers), OMP_NUM_THREADS="1")
    print(
        f"torch {torch.__version__}, {options.ranks} ranks of {os.cpu_count()} cores, one thread "
        f"each, load {os.getloadavg()[0]:.1f}; {options.layers} layers of {options.width}, batch "
        f"{options.batch} in {options.microbatches}",
        flush=True,
    )
    for function, ranks, wanted in (
        (run, options.ranks, options.schedules or options.fsdp),
        (overhead, 1, options.overhead),
    ):
        if wanted:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            multiprocessing.spawn(function, (options, store.port), nprocs=ranks)


if __name__ == "__main__":
    main()
