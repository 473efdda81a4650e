"""The world of a run: one process per device of the plan, brought together by torchrun."""

import contextlib
import datetime
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from partita.errors import InputError, PlanError, RunError

MEET_S = 300.0  # a machine that starts many processes takes its time
BACKENDS = ("gloo", "nccl")
PATIENCE_S = 15.0  # after so long it is said who is missing

log = logging.getLogger("partita")
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """All ranks at one store; `is_open` says that a script has made its process group itself."""

    store: Any
    rank: int
    is_open: bool


def meet(num_ranks: int, meet_s: float = MEET_S) -> World:
    """Bring all ranks together at a store, unless the script has done so."""
    if dist.is_initialized():
        check_world(num_ranks, dist.get_world_size())
        return World(dist.distributed_c10d._get_default_store(), dist.get_rank(), True)
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise PlanError(
            f"this process is none of several ({missing[0]} is not set)",
            fix=f"start it with: torchrun --nproc-per-node {num_ranks} ...",
            field="launch",
        )
    check_world(num_ranks, int(os.environ["WORLD_SIZE"]))
    store, rank = _meet(num_ranks, meet_s)
    return World(store, rank, False)


def open_world(
    world: World, num_ranks: int, device: torch.device, timeout_s: float,
    backend: str | None = None,
) -> None:  # fmt: skip
    """Make the process group of all ranks, unless there is one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.is_open:
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    check_backend(backend, device)
    if backend == "nccl":
        check_gpus(world, num_ranks, device, timeout_s)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend, store=world.store, rank=world.rank, world_size=num_ranks, timeout=timeout
    )


def check_backend(backend: str, device: torch.device) -> None:
    """NCCL is for GPUs, and not in every build of torch."""
    if backend not in BACKENDS:
        raise InputError(
            f"{backend!r} is no backend that plans run on", fix=f"choose one of {BACKENDS}",
            field="backend",
        )  # fmt: skip
    if backend == "nccl" and device.type != "cuda":
        raise PlanError(
            f"NCCL sends between GPUs, and the plan is run on the {device.type}",
            fix="leave --backend away, or run on GPUs with --device cuda",
            field="backend",
        )
    if backend == "nccl" and not dist.is_nccl_available():
        raise PlanError(
            f"torch {torch.__version__} was built without NCCL",
            fix="install a torch with it, or let messages go through the host with --backend gloo",
            field="backend",
        )


def check_gpus(world: World, num_ranks: int, device: torch.device, timeout_s: float) -> None:
    """NCCL takes no two ranks on one GPU; all tell each other theirs and refuse alike."""
    gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))
    world.store.set(f"gpu/{world.rank}", f"{socket.gethostname()} {gpu}")
    keys = [f"gpu/{rank}" for rank in range(num_ranks)]
    world.store.wait(keys, datetime.timedelta(seconds=timeout_s))
    check_own_gpus([world.store.get(key).decode() for key in keys])


def check_own_gpus(gpus: Sequence[str]) -> None:
    """Every rank has a GPU that no other has; `gpus` are the machine and GPU of each."""
    for gpu, ranks in _by_gpu(gpus).items():
        if len(ranks) > 1:
            raise PlanError(
                f"processes {', '.join(map(str, ranks))} share a GPU of {gpu.split()[0]}, and NCCL "
                "takes one process on each",
                fix="start no more processes on a machine than it has GPUs, or let messages go "
                "through the host with --backend gloo",
                field="device",
            )


def _by_gpu(gpus: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu, []).append(rank)
    return ranks


def check_world(num_ranks: int, world: int) -> None:
    """A plan for so many devices runs on as many processes."""
    if world != num_ranks:
        raise PlanError(
            f"the plan is for {num_ranks} device{'s' * (num_ranks != 1)} and {world} "
            f"process{'es were' if world != 1 else ' was'} started",
            fix=f"start it with --nproc-per-node {num_ranks} (times --nnodes), or plan for {world}",
            field="world size",
        )


def _meet(num_ranks: int, timeout_s: float) -> tuple[Any, int]:
    """The store that all ranks share; who does not come is named."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank = int(os.environ["RANK"])
    try:
        store = _store(rank, num_ranks, timeout_s)
    except (RuntimeError, ValueError, OSError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise InputError(
                f"the port of {place} is in use", field="launch",
                fix="choose another: torchrun --master-port PORT, or --standalone",
            ) from None  # fmt: skip
        raise InputError(
            f"the other ranks cannot be reached at {place} ({text.splitlines()[0][:200]})",
            fix="start all ranks, with the same --master-addr and --master-port",
            field="launch",
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        # A world that is opened again, by a restart or in one process, must not read old addresses.
        number = store.add(f"partita/{attempt}/opened/{rank}", 1)
        shared = PrefixStore(f"partita/{attempt}/{number}", store)
        _wait_for_all(shared, rank, num_ranks, timeout_s)
    except dist.DistError as error:
        raise RunError(
            f"rank {rank} lost the others before they had met ({str(error).splitlines()[0][:160]})"
        ) from None
    return shared, rank


def _store(rank: int, num_ranks: int, timeout_s: float) -> Any:
    """The store, held by torchrun or by rank 0; nobody waits for others inside of it.

    PyTorch's own rendezvous does, without a word until its timeout.
    """
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master, patience_s = rank == 0 and not held, min(PATIENCE_S, timeout_s)

    def made(seconds: float) -> Any:
        timeout = datetime.timedelta(seconds=seconds)
        return TCPStore(
            host, port, num_ranks, is_master, timeout, wait_for_workers=False, multi_tenant=True
        )

    if not is_master and not _answers(host, port, patience_s):
        log.warning("waiting for rank 0 at %s:%d", host, port)
        if not _answers(host, port, timeout_s - patience_s):
            raise InputError(
                f"rank 0 did not open {host}:{port} within {timeout_s:g} s",
                fix="start all ranks, with the same --master-addr and --master-port",
                field="launch",
            )
    store = made(patience_s)
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _answers(host: str, port: int, seconds: float) -> bool:
    """Does somebody listen there, now or soon? PyTorch's store would ask with a stack of frames."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=max(0.1, min(seconds, 5.0))).close()
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def _wait_for_all(store: Any, rank: int, num_ranks: int, timeout_s: float) -> None:
    store.set(f"here/{rank}", "1")
    end, say = time.monotonic() + timeout_s, time.monotonic() + PATIENCE_S
    while absent := [r for r in range(num_ranks) if not store.check([f"here/{r}"])]:
        if time.monotonic() > say:
            say = end + 1.0
            log.warning("waiting for rank %s of %d", ", ".join(map(str, absent)), num_ranks)
        if time.monotonic() > end:
            who = ", ".join(map(str, absent))
            raise InputError(
                f"rank{'s' * (len(absent) > 1)} {who} did not come within {timeout_s:g} s",
                fix=f"start all {num_ranks} ranks; look at what those that are missing printed",
                field="launch",
            )
        time.sleep(0.05)
