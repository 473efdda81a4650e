"""When a rank fails, all ranks end with one message that names the rank, its task and the cause.

Every rank has a thread that writes a sign of life (its task, and for how long) into the store that
all share, and looks at those of the others. A rank that throws posts what happened before it ends.
A rank whose process is gone, whose signs stop (frozen, or killed on another machine) or that stays
in one task for longer than the timeout while it waits for nobody is blamed by the others. Whoever
reads of a fault ends: its main thread may sit in a collective that never returns, so the process is
ended from the thread, after a moment in which the main thread may end by itself.

The thread has a connection of its own to the store: on a shared one a main thread that waits for
a key would keep it silent. It runs from the moment all ranks have met until the run is closed.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from partita.errors import PartitaError, RunError
from partita.run.distributed.alive import Process, is_gone, this_process
from partita.run.distributed.comm import Waiting
from partita.run.distributed.termination import Termination

BEAT_S = 0.25
GRACE_S = 2.0
ASKED_S = 0.5  # to find out why this process is asked to end
LOST = (
    "closed by peer", "reset by peer", "timed out", "broken pipe", "connection refused",
    "read error", "write error", "aborted", "socket closed", "recv failed", "wait timeout",
    "pair closure", "connection abort", "no route to host", "unreachable", "not connected",
)  # fmt: skip


class FaultBoard:
    """What the ranks of a run know of each other's faults."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        # Every rank makes its engines in the same order: the count tells their keys apart.
        number = store.add(f"partita/engines/{rank}", 1)
        self.store = PrefixStore(f"partita/engine{number}", store.clone())
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self.task = "the start"
        self.waiting = Waiting()
        self.since = time.monotonic()
        self.silence_s = max(2 * GRACE_S, min(timeout_s / 2, 20.0))
        self.is_busy = False  # between steps nobody is late
        self.has_lost = False  # the main thread lost others and waits to hear why
        self.count = 0
        self.agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0  # torchrun's
        self.process = this_process()
        self.processes: dict[int, Process] = {}
        self.seen: dict[int, tuple[str, float]] = {}
        self.fault: str | None = None
        self.error: BaseException | None = None  # and with it the frames and their tensors
        self.closed = threading.Event()
        self.closed.set()
        self.thread: threading.Thread | None = None
        self.termination = Termination()
        self.exit: Callable[[int], None] = os._exit

    def start(self) -> None:
        """Begin to give signs of life, unless it has begun; the first is there at once."""
        if not self.closed.is_set():
            return
        self.store.set(f"process/{self.rank}", json.dumps(astuple(self.process)))
        self._beat()
        self.closed.clear()
        self.termination.listen()
        self.thread = threading.Thread(target=self._watch, name="partita faults", daemon=True)
        self.thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """This rank needs the others no longer.

        The thread is waited for: one that is inside of the store when Python ends, or when the
        process group goes, aborts the process.
        """
        if self.closed.is_set():
            return
        self.closed.set()
        self.termination.wake()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(GRACE_S)
        self.termination.stop()
        if self.fault is None:  # else everybody knows, or who held the store has gone
            with suppress(Exception):
                self._beat(has_left=True)
        atexit.unregister(self.close)

    def note(self, task: str) -> None:
        """What this rank does now."""
        self.task, self.since = task, time.monotonic()

    @contextmanager
    def guard(self, task: str) -> Iterator[None]:
        """What all ranks do together between steps: who is lost meanwhile is named by the rest."""
        self.is_busy = True
        self.tell(task)
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

    def tell(self, task: str) -> None:
        """A task that all hear of at once: who is killed in it is not named with an earlier one."""
        self.note(task)
        if not self.closed.is_set():
            with suppress(Exception):  # a store that is lost is the watcher's to tell
                self._beat()

    @contextmanager
    def own(self, task: str) -> Iterator[None]:
        """What this rank does by itself between steps, the user's part: all hear if it fails."""
        self.note(task)
        try:
            yield
        except PartitaError:
            raise
        except Exception as error:
            fault = self.explain(error)
            self.close()
            raise fault from (error if os.environ.get("PARTITA_TRACEBACK") else None)
        finally:
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
        self.error = error  # the backend may still write into what was on its way
        if not is_lost(error):
            return RunError(self.post(self.rank, self.task, cause_of(error)))
        self.has_lost = self.waiting.now = True
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
        while not self.closed.is_set():
            is_asked_to_end = self.termination.wait(self.closed, BEAT_S)
            if self.closed.is_set():
                return
            fault = self._sought()
            if is_asked_to_end:
                self._end_as_asked(fault)
            if fault is not None:
                self.fault = fault
                self._end(fault)
                return

    def _sought(self) -> str | None:
        """Give a sign of life, and look for a fault of anybody."""
        if self.agent and os.getppid() != self.agent:  # it held the store: do not ask there
            return f"torchrun, which started rank {self.rank}, has gone; it was in {self.task}"
        try:
            self._beat()
            return self.known() or self._late()
        except Exception as error:  # the store is gone, so is the rank that held it
            return f"rank 0 (or what started it) has gone: {str(error).splitlines()[0][:120]}"

    def _beat(self, has_left: bool = False) -> None:
        late = 0.0 if self.waiting.now else time.monotonic() - self.since
        self.count += 1
        sign = json.dumps([self.count, self.task, late, has_left])
        self.store.set(f"life/{self.rank}", sign)

    def _late(self) -> str | None:
        """Who has gone, gives no sign of life, or stays in a task without waiting for anybody."""
        now = time.monotonic()
        for rank in range(self.world):
            if rank == self.rank or not self.store.check([f"life/{rank}"]):
                continue
            text = self.store.get(f"life/{rank}").decode()
            before = self.seen.get(rank)
            if before is None or before[0] != text:
                self.seen[rank] = (text, now)
            _, task, late, has_left = json.loads(text)
            if not self.is_busy or (has_left and not self.has_lost):
                continue
            cause = self._missed(rank, now - self.seen[rank][1], late, has_left)
            if cause is not None:
                return self.post(rank, task, cause)
        return None

    def _missed(self, rank: int, silent_s: float, late_s: float, has_left: bool) -> str | None:
        """What is wrong with a rank as far as this one can see."""
        here = f"rank {self.rank} is in {self.task}"
        if has_left:
            return f"it ended there, and {here}"
        if is_gone(self._process(rank), self.process):
            return f"its process is gone (killed, perhaps for memory); {here}"
        if silent_s > self.silence_s:
            return f"no sign of life for {silent_s:.0f} s (killed?); {here}"
        if late_s > self.timeout_s and self.waiting.now:  # who waits for it may say so
            return f"hangs there for {late_s:.0f} s"
        return None

    def _process(self, rank: int) -> Process:
        if rank not in self.processes:
            text = self.store.get(f"process/{rank}").decode()
            self.processes[rank] = Process(*json.loads(text))
        return self.processes[rank]

    def _end(self, fault: str) -> None:
        if self.closed.wait(GRACE_S):
            return
        self._say(fault)
        self.exit(1)

    def _end_as_asked(self, fault: str | None) -> None:
        """Somebody wants this process to end, most often since another rank has: say which."""
        self.is_busy, end = True, time.monotonic() + ASKED_S
        while fault is None and time.monotonic() < end:
            time.sleep(BEAT_S / 5)
            fault = self._sought()
        self._say(fault or self.post(self.rank, self.task, "ended from outside (SIGTERM)"))
        self.exit(128 + signal.SIGTERM)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"partita: {text}\n")
        sys.stderr.flush()


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
