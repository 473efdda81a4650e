"""Ranks on a GPU: plans against the model in one process on the same GPU.

One rank on NCCL, and two that share the GPU, on gloo, whose messages go through the host. With
`device="cpu"` the latter runs on any machine, to try this file.

python tests/run/distributed/distributed_gpu.py
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from distributed_models import make
from distributed_plans import (
    apart,
    graph_of,
    in_one_process,
    pipeline,
    random_plan_on,
    sgd,
)
from torch import multiprocessing
from torch.distributed import TCPStore

PLANS = {
    "1F1B": {"groups": 1, "name": "1f1b", "count": 2},
    "ZB-H1, checkpointing": {"groups": 1, "name": "zb-h1", "count": 2, "checkpointing": "full"},
}
SHARED = {
    "1F1B": {"groups": 2, "name": "1f1b", "count": 4},
    "ZB-H1": {"groups": 2, "name": "zb-h1", "count": 4},
    "interleaved": {"groups": 2, "name": "interleaved", "count": 4, "chunks": 2},
    "data parallel": {"groups": 1, "name": "1f1b", "count": 2, "data_parallel": 2},
    "ZeRO 3": {"groups": 1, "name": "1f1b", "count": 2, "data_parallel": 2, "zero": 3},
}
RANDOM = (1, 2, 3, 4)  # seeds of random plans, with splits of ops


def run_on_gpu(models=("mlp", "gpt", "gpt-dropout", "resnet", "t5", "lstm")):
    """The largest error of losses, gradients and parameters after two steps, by model and plan."""
    from partita.run.distributed.engine import execute

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", LOCAL_RANK="0",
        WORLD_SIZE="1", TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    torch.backends.cudnn.allow_tf32 = False
    for model in models:
        graph = graph_of(*make(model))
        for name, settings in PLANS.items():
            module, args = make(model)
            plan = pipeline(graph, **settings)
            args = tuple(arg.cuda() for arg in args)
            engine = execute(
                plan, module.cuda(), optimizer=sgd, device="cuda", keep_gradients=True,
                example=args,
            )  # fmt: skip
            losses = [engine.step(*args) for _ in range(2)]
            state, gradients = engine.full_state_dict(), engine.full_gradients()
            engine.board.close()
            if "dropout" in model:  # other random numbers than one process draws
                yield (model, name), 0.0 if losses[1] < losses[0] else float("inf")
                continue
            count = plan.schedule.num_microbatches
            alone = make(model)[0].cuda()
            wanted, grads, after = in_one_process(alone, args, count, 2, sgd)
            yield (
                (model, name),
                max(
                    apart(state, {key: value.cpu() for key, value in after.items()}),
                    apart(gradients, {key: value.cpu() for key, value in grads.items()}),
                    *(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
                ),
            )


def run_shared(models=("mlp", "gpt", "resnet", "t5"), device="cuda"):
    """The same of two ranks that share the GPU."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "errors"
        multiprocessing.spawn(_rank, (store.port, models, device, path), nprocs=2)
        return torch.load(path)


def _rank(rank, port, models, device, path):
    sys.path.insert(0, str(Path(__file__).parents[3]))  # random plans are in the package of tests
    from partita.run.distributed.engine import execute

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    torch.backends.cudnn.allow_tf32 = False
    errors = {}
    for model in models:
        graph = graph_of(*make(model))
        plans = {name: pipeline(graph, **settings) for name, settings in SHARED.items()}
        plans |= {f"random {seed}": random_plan_on(2, seed, graph) for seed in RANDOM}
        for name, plan in plans.items():
            module, args = make(model)
            args = tuple(arg.to(device) for arg in args)
            engine = execute(
                plan, module.to(device), optimizer=sgd, device=device, keep_gradients=True,
                example=args, backend="gloo",
            )  # fmt: skip
            losses = [engine.step(*args) for _ in range(2)]
            state, gradients = engine.full_state_dict(), engine.full_gradients()
            engine.board.close()
            if rank == 0:
                count = plan.schedule.num_microbatches
                alone = make(model)[0].to(device)
                wanted, grads, after = in_one_process(alone, args, count, 2, sgd)
                after = {key: v.cpu() for key, v in after.items() if "running_" not in key}
                errors[model, name] = max(
                    apart(state, after),
                    apart(gradients, {key: value.cpu() for key, value in grads.items()}),
                    *(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
                )
    if rank == 0:
        torch.save(errors, path)
    os._exit(0)  # after the file: threads of several engines' groups end with the process


def by_command(folder, *words):
    """What `torchrun -m partita run` on two ranks ends with: its exit code and what it said."""
    plan = pipeline(graph_of(*make("mlp")), groups=2, name="1f1b", count=2)
    file, model = Path(folder) / "plan.json", Path(folder) / "model.py"
    file.write_bytes(plan.to_json())
    here = str(Path(__file__).parent)
    model.write_text(
        f"import sys\n\nsys.path.insert(0, {here!r})\n\n\n"
        "def mlp():\n    from distributed_models import make\n\n    return make('mlp')\n"
    )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "partita", "run", str(file), "--steps", "2", "--model", f"{model}:mlp", *words,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    return ended.returncode, ended.stdout + ended.stderr


def tell(errors, before=""):
    for (model, name), error in errors:
        sys.stdout.write(f"{before}{model:12} {name:22} {error:.2g}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.stdout.write(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    tell(run_on_gpu(("mlp", "gpt", "gpt-dropout", "resnet", "t5")))
    with tempfile.TemporaryDirectory() as place:
        for words in (("--device", "cuda"), ("--device", "cuda", "--backend", "gloo")):
            code, said = by_command(place, *words)
            sys.stdout.write(f"two ranks, {' '.join(words)}: exit code {code}\n{said}\n")
    tell(run_shared().items(), "two ranks: ")
    tell(run_on_gpu(("lstm",)))  # on a store of its own, as the process group of before is gone
