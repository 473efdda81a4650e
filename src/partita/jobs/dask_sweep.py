"""A sweep on a Dask cluster that somebody has started: its workers do what processes do here.

    with DaskPool("tcp://10.0.0.1:8786") as pool:
        pool.run(work, tasks, places, interrupted)     # (place, answer or exception) as they come

Tasks and answers are pickled by name, so every worker needs this version of partita, and files that
tasks name must be there under the same path. A worker that dies is Dask's to replace; a task whose
workers died as often as the scheduler allows is handed back, and tried once more alone: what only
sat on the same worker is done then.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from partita import __version__
from partita.errors import FileError, InputError, MissingExtraError

CONNECT_S = 10.0


class DaskPool:
    """The connection to a scheduler; refuses an address where none answers."""

    def __init__(self, address: str, connect_s: float = CONNECT_S) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise MissingExtraError("distributed", "dask", "a sweep on a Dask cluster") from None
        if "://" not in address and not Path(address).is_file():  # Dask would wait for the file
            raise FileError(
                "is no scheduler file, and no address such as tcp://host:8786",
                fix="start one with: dask scheduler --scheduler-file FILE",
                file=address,
            )
        try:
            if "://" in address:
                self.client = Client(address, timeout=connect_s, set_as_default=False)
            else:
                self.client = Client(
                    scheduler_file=address, timeout=connect_s, set_as_default=False
                )
        except (OSError, ValueError) as error:
            raise InputError(
                f"no Dask scheduler answers at {address!r} ({error or type(error).__name__})",
                fix="start one (dask scheduler; dask worker ADDRESS) and give its tcp://HOST:8786",
                field="--dask",
            ) from None

    def __enter__(self) -> "DaskPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def run(
        self, work: Callable[[Any], dict[str, Any]], tasks: Sequence[Any], left: Sequence[int],
        interrupted: Callable[[], bool], poll_s: float,
    ) -> Iterator[tuple[int, Callable[[], dict[str, Any]] | None]]:  # fmt: skip
        """Each place with what gives its answer or raises; None where its workers died, twice."""
        suspects = yield from self._batch(work, tasks, left, interrupted, poll_s)
        while suspects and not interrupted():
            again = yield from self._batch(work, tasks, suspects[:1], interrupted, poll_s)
            if again:
                yield suspects[0], None
            suspects = suspects[1:]

    def _batch(
        self, work: Callable[[Any], dict[str, Any]], tasks: Sequence[Any], left: Sequence[int],
        interrupted: Callable[[], bool], poll_s: float,
    ) -> Generator[tuple[int, Callable[[], dict[str, Any]]], None, list[int]]:  # fmt: skip
        from distributed import wait
        from distributed.scheduler import KilledWorker

        waiting = {
            self.client.submit(checked, work, __version__, tasks[place], pure=False): place
            for place in left
        }
        lost: list[int] = []
        while waiting and not interrupted():
            try:
                with self.client.as_current():
                    ended = wait(list(waiting), timeout=poll_s, return_when="FIRST_COMPLETED")
            except TimeoutError:
                continue
            for future in sorted(ended.done, key=lambda one: waiting[one]):
                place = waiting.pop(future)
                if isinstance(future.exception(), KilledWorker):
                    lost.append(place)
                else:
                    yield place, future.result
        if waiting:
            self.client.cancel(list(waiting), force=True)
        return sorted(lost)


def checked(work: Callable[[Any], dict[str, Any]], version: str, task: Any) -> dict[str, Any]:
    """On a worker: the answer, if this is the partita that asks."""
    if version != __version__:
        raise InputError(
            f"a worker has partita {__version__}, this is {version}",
            fix="install the same version on all workers",
            field="--dask",
        )
    return work(task)
