"""Several ranks on this machine: processes that meet at a store, as torchrun lets them.

They are forked off a server that has imported what they need and done once what each would do first
(`distributed_warm.py`), but no more: a process that has used autograd must not be forked.
"""

import atexit
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing import forkserver
from unittest import mock

import torch
from torch.distributed import TCPStore

LIMIT_S = 180.0


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: its exit code, what it gave back, and what it wrote to stderr."""

    code: int | None
    result: object
    stderr: str


def _child(rank, world, port, function, args, folder, pipe):
    with open(folder / f"stderr{rank}", "w") as log:
        os.dup2(log.fileno(), 2)
        sys.stderr = log
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
            WORLD_SIZE=str(world), TORCHELASTIC_USE_AGENT_STORE="True",
        )  # fmt: skip
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        try:
            pipe.send(function(rank, *args))
            log.flush()
            atexit._run_exitfuncs()  # as a process that ends by itself does
            os._exit(0)
        except BaseException as error:
            from partita.errors import PartitaError

            text = str(error) if isinstance(error, PartitaError) else traceback.format_exc()
            print(text, file=log, flush=True)
            os._exit(1)


PRELOADED = ("partita.run.distributed.engine", "distributed_warm")


def run_on_ranks(world, function, *args, folder, limit_s=LIMIT_S, preloaded=PRELOADED):
    """Call `function(rank, *args)` on so many ranks at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    # What the server cannot import it passes over in silence, and it does not know our sys.path.
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_child, args=(rank, world, store.port, function, args, folder, theirs)
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    end = time.monotonic() + limit_s
    ends = []
    for rank, (process, pipe) in enumerate(ranks):
        result = None
        try:
            if pipe.poll(max(0.1, end - time.monotonic())):
                result = pipe.recv()
        except EOFError:
            pass
        process.join(max(0.1, end - time.monotonic()))
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        ends.append(RankEnd(code, result, (folder / f"stderr{rank}").read_text()))
    return ends
