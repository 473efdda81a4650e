"""When a rank fails, all ranks end with one message that names the rank, its task and the cause.

Every rank has a thread that writes a sign of life (its task, and for how long) into the store that
all share, and looks at those of the others. A rank that throws posts what happened before it ends.
A rank whose signs stop (killed, frozen) or that stays in one task for longer than the timeout while
it waits for nobody is blamed by the others. Whoever reads of a fault ends: its main thread may sit
in a collective that never returns, so the process is ended from the thread, after a moment in which
the main thread may end by itself.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from partita.errors import PartitaError, RunError
from partita.run.distributed.comm import Waiting

BEAT_S = 0.25
GRACE_S = 2.0
LOST = (
    "closed by peer", "reset by peer", "timed out", "broken pipe", "connection refused",
    "read error", "write error", "aborted", "socket closed", "recv failed",
)  # fmt: skip


class FaultBoard:
    """What the ranks of a run know of each other's faults."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        # Every rank makes its engines in the same order: the count tells their keys apart.
        number = store.add(f"partita/engines/{rank}", 1)
        self.store = PrefixStore(f"partita/engine{number}", store)
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self.task = "the start"
        self.waiting = Waiting()
        self.since = time.monotonic()
        self.silence_s = max(2 * GRACE_S, min(timeout_s / 2, 20.0))
        self.is_busy = False  # between steps nobody is late
        self.seen: dict[int, tuple[str, float]] = {}
        self.fault: str | None = None
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="partita faults", daemon=True)
        self.exit: Callable[[int], None] = os._exit

    def start(self) -> None:
        """Begin to give signs of life; the first is there before any step can be."""
        self._beat(0)
        self.thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """The run has ended well.

        The thread is waited for: one that is inside of the store when Python ends, or when the
        process group goes, aborts the process.
        """
        self.closed.set()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(GRACE_S)
        atexit.unregister(self.close)

    def note(self, task: str) -> None:
        """What this rank does now."""
        self.task, self.since = task, time.monotonic()

    @contextmanager
    def guard(self, task: str) -> Iterator[None]:
        """What all ranks do together between steps: who is lost meanwhile is named by the rest."""
        self.is_busy = True
        self.note(task)
        try:
            yield
        except PartitaError:
            raise
        except BaseException as error:
            fault = self.explain(error)
            self.close()
            raise fault from (error if os.environ.get("PARTITA_TRACEBACK") else None)
        finally:
            self.is_busy = False
            self.note("between steps")

    # Posting and reading.

    def post(self, rank: int, task: str, cause: str) -> str:
        """Tell all; the first fault is the one that counts."""
        text = f"rank {rank} failed in {task}: {cause}"
        try:
            self.store.compare_set("fault", "", text)
            return self.store.get("fault").decode()
        except Exception:
            return text

    def known(self) -> str | None:
        """The fault that was posted, if any."""
        if self.fault is None and self.store.check(["fault"]):
            self.fault = self.store.get("fault").decode()
        return self.fault

    def explain(self, error: BaseException) -> RunError:
        """An error of this rank's main thread as the one message of the run."""
        text = str(error)
        if not is_lost(error):
            return RunError(self.post(self.rank, self.task, cause_of(error)))
        end = time.monotonic() + self.timeout_s + self.silence_s
        while time.monotonic() < end:  # someone else is the cause: find out who
            try:
                if (fault := self.known()) is not None:
                    return RunError(fault)
            except Exception:
                break
            time.sleep(BEAT_S)
        return RunError(
            f"rank {self.rank} lost the others in {self.task} ({text.splitlines()[0][:160]})"
        )

    # The thread.

    def _watch(self) -> None:
        count = 0
        while not self.closed.wait(BEAT_S):
            count += 1
            try:
                self._beat(count)
                fault = self.known() or self._late()
            except Exception as error:  # the store is gone, so is the rank that held it
                fault = f"rank 0 (or what started it) has gone: {str(error).splitlines()[0][:120]}"
            if fault is not None:
                self.fault = fault
                self._end(fault)
                return

    def _beat(self, count: int) -> None:
        late = 0.0 if self.waiting.now else time.monotonic() - self.since
        sign = json.dumps([count, self.task, late])
        self.store.set(f"life/{self.rank}", sign)

    def _late(self) -> str | None:
        """Who gives no sign of life, or stays in a task without waiting for anybody."""
        now = time.monotonic()
        limit = self.timeout_s
        for rank in range(self.world):
            if rank == self.rank or not self.store.check([f"life/{rank}"]):
                continue
            text = self.store.get(f"life/{rank}").decode()
            before = self.seen.get(rank)
            if before is None or before[0] != text:
                self.seen[rank] = (text, now)
            _, task, late = json.loads(text)
            if not self.is_busy:
                continue
            silent = now - self.seen[rank][1]
            if silent > self.silence_s:
                cause = f"no sign of life for {silent:.0f} s (killed?); rank {self.rank} is in"
                return self.post(rank, task, f"{cause} {self.task}")
            if late > limit and self.waiting.now:  # who waits for it may say so
                return self.post(rank, task, f"hangs there for {late:.0f} s")
        return None

    def _end(self, fault: str) -> None:
        if self.closed.wait(GRACE_S):
            return
        sys.stderr.write(f"partita: {fault}\n")
        sys.stderr.flush()
        self.exit(1)


def is_lost(error: BaseException) -> bool:
    """Does an error say that another rank does not answer?"""
    text = str(error).lower()
    return isinstance(error, Exception) and any(word in text for word in LOST)


def cause_of(error: BaseException) -> str:
    """The cause of a fault in a few words."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory ({(str(error).splitlines() or ['no more words'])[0][:160]})"
    if "t allocate memory" in str(error) or "cannot allocate memory" in str(error).lower():
        return f"out of memory ({str(error).splitlines()[0][:160]})"
    if isinstance(error, PartitaError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
