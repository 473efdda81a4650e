"""Many tasks on all cores: the answers of one process, kept in a file, whoever dies on the way.

    sweep(work, tasks)      work(task) for each task, in the order of the tasks

`work` is a function of a module, a task a frozen record, an answer what JSON can hold. With
`results` each answer is appended to a file, a line each, as soon as it is there; a sweep that is
started again reads it and goes on with the rest. A process that dies takes along what others
were doing at that moment: those tasks are done again, one at a time in a process of its own, and
the one that dies again has cost itself alone. An exception is the outcome of its task. Processes
end when this one does, however that happens: those of a pool would wait for ever for work from one
that was killed. With `dask` the workers of a Dask cluster take the place of processes
(`dask_sweep`).
"""

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from partita import __version__
from partita.errors import FileError, PartitaError
from partita.files import read_bytes
from partita.jobs.dask_sweep import DaskPool

log = logging.getLogger("partita")

Answer = dict[str, Any]
Work = Callable[[Any], Answer]


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """What became of a task: an answer, or one sentence of why there is none."""

    answer: Answer | None
    why: str = ""
    is_known: bool = False  # it was in the file already


@dataclass(frozen=True)
class Sweeper:
    """How a sweep runs; one worker means this process."""

    workers: int = 0  # 0: as many as there are cores
    results: Path | None = None
    interrupted: Callable[[], bool] = lambda: False
    told: Callable[[int, SweepOutcome], None] = lambda place, outcome: None
    poll_s: float = 0.2
    fewest: int = 2  # tasks for which other processes are started
    dask: str = ""  # address or file of a scheduler

    def __call__(self, work: Work, tasks: Sequence[Any]) -> list[SweepOutcome]:
        """The outcomes of tasks, in their order; what was not reached says so."""
        keys = [task_key(work, task) for task in tasks]
        known = {} if self.results is None else read_results(self.results)
        outcomes: dict[int, SweepOutcome] = {}
        for place, key in enumerate(keys):
            if key in known:
                outcomes[place] = SweepOutcome(known[key], is_known=True)
                self.told(place, outcomes[place])
        left = [place for place in range(len(tasks)) if place not in outcomes]
        count = min(self.workers or os.cpu_count() or 1, max(1, len(left)))
        run = self._here if count == 1 or len(left) < self.fewest else self._beside
        if self.dask:
            run = self._on_dask
        for place, outcome in run(work, tasks, left, count):
            outcomes[place] = outcome
            if self.results is not None and outcome.answer is not None:
                self._kept(self.results, keys[place], outcome.answer)
            self.told(place, outcome)
        missing = SweepOutcome(None, "not reached")
        return [outcomes.get(place, missing) for place in range(len(tasks))]

    def _kept(self, results: Path, key: str, answer: Answer) -> None:
        """Add an answer to the file; a full disk costs what another run could go on from."""
        try:
            append_result(results, key, answer)
        except OSError as error:
            log.warning("%s: a point is not kept: %s", results, error.strerror)

    def _here(
        self, work: Work, tasks: Sequence[Any], left: list[int], count: int
    ) -> Iterator[tuple[int, SweepOutcome]]:
        for place in left:
            if self.interrupted():
                return
            yield place, _outcome(lambda task=tasks[place]: work(task))  # type: ignore[misc]

    def _on_dask(
        self, work: Work, tasks: Sequence[Any], left: list[int], count: int
    ) -> Iterator[tuple[int, SweepOutcome]]:
        if not left:
            return
        with DaskPool(self.dask) as pool:
            for place, answer in pool.run(work, tasks, left, self.interrupted, self.poll_s):
                died = SweepOutcome(None, "its worker died, twice")
                yield place, died if answer is None else _outcome(answer)

    def _beside(
        self, work: Work, tasks: Sequence[Any], left: list[int], count: int
    ) -> Iterator[tuple[int, SweepOutcome]]:
        """In processes; those that were at work when one died come again, each alone."""
        suspects = yield from self._pool(work, tasks, left, count)
        while suspects and not self.interrupted():
            again = yield from self._pool(work, tasks, suspects[:1], 1)
            if again:
                yield suspects[0], SweepOutcome(None, "its process died, twice")
            suspects = suspects[1:]

    def _pool(
        self, work: Work, tasks: Sequence[Any], left: list[int], count: int
    ) -> Generator[tuple[int, SweepOutcome], None, list[int]]:
        """Yields outcomes; returns the tasks that have none because a process died."""
        context = multiprocessing.get_context("spawn")  # no threads or locks of this one
        with ProcessPoolExecutor(count, mp_context=context, initializer=end_with_parent) as pool:
            with _deaf_children():
                waiting: dict[Future[Answer], int] = {
                    pool.submit(work, tasks[place]): place for place in left
                }
            lost: list[int] = []
            while waiting and not self.interrupted():
                done, _ = wait(waiting, timeout=self.poll_s, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda one: waiting[one]):
                    place = waiting.pop(future)
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        lost.append(place)
                    elif not isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches all of them
                        yield place, _outcome(future.result)
            if waiting:
                _end(pool)
        return sorted(lost)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that are started here never hear Ctrl-C: who started them ends them.

    It would hit them while they import, with a stack of frames for each. One that comes now waits.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """In a process of the pool: end as soon as who started it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process of the pool was started by one"

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end(pool: ProcessPoolExecutor) -> None:
    """Let go of what was not begun, and end what was: nobody waits for it."""
    running = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in running:
        process.terminate()


def _outcome(make: Callable[[], Answer]) -> SweepOutcome:
    try:
        return SweepOutcome(make())
    except PartitaError as error:
        return SweepOutcome(None, str(error))
    except Exception as error:  # one task must not end the others
        return SweepOutcome(None, f"{type(error).__name__}: {error}")


def task_key(work: Work, task: Any) -> str:
    """By which a task is known again: what is done, with what, by which version."""
    text = f"{__version__} {work.__module__}.{work.__qualname__} {task!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def append_result(path: Path, key: str, answer: Answer) -> None:
    """One line at the end of a file, forced to disk."""
    line = json.dumps({"format": "partita/sweep@1", "key": key, "answer": answer})
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())


def read_results(path: Path) -> dict[str, Answer]:
    """The answers of a file by key; a last line that was cut off is left out."""
    if not path.exists():
        return {}
    answers: dict[str, Answer] = {}
    lines = read_bytes(path).decode(errors="replace").splitlines()
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            answers[entry["key"]] = entry["answer"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines) - 1:
                break
            raise FileError(
                f"line {number + 1} is no answer of a sweep",
                fix="name a file that a sweep has written, or a new one",
                file=str(path),
            ) from None
    return answers
