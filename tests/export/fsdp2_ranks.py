"""Runs exported FSDP2 code on gloo ranks: one process imports torch, then forks them.

    python fsdp2_ranks.py FOLDER        writes FOLDER/losses.json: file -> losses of rank 0

FOLDER/*.py are exports for four devices of the model in tiny_decoder.py.
"""

import importlib.util
import json
import multiprocessing
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # what the exports import, once for all ranks

from tests.export.tiny_decoder import make

RANKS, STEPS = 4, 2


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses_alone() -> list[float]:
    model, args = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def losses_of(path: Path, rank: int) -> list[float]:
    code = loaded(path)
    model, args = make()
    table = code.STRATEGY
    replica = rank // table["tp"]
    own = [part.chunk(table["dp"])[replica].chunk(table["num_microbatches"]) for part in args]
    model = code.parallelize(model, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    micro_batches = list(zip(*own, strict=True))
    return [code.step(model, optimizer, micro_batches) for _ in range(STEPS)]


def run(rank: int, folder: Path) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    answers = {}
    for path in sorted(folder.glob("*.py")):
        mine = torch.tensor(losses_of(path, rank))
        dist.all_reduce(mine)  # each replica has the loss of its own samples
        answers[path.name] = (mine / RANKS).tolist()
    if rank == 0:
        answers["alone"] = losses_alone()
        (folder / "losses.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    here = Path(sys.argv[1])
    ranks = [context.Process(target=run, args=(rank, here)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in ranks))
