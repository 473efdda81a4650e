"""The processes that answer, lent out one question at a time.

Each question has a process of its own while it is answered, so that no browser waits for another,
a search can be ended at any moment, and what goes wrong in one is seen by one. Idle ones are kept
warm. They end when their input does, so that none outlives the server, however that ends.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from partita.errors import RunError
from partita.serve.asks import ASKS, Ask

LONGEST_LINE = 256 * 2**20  # bytes: the page of a large plan
GRACE_S = 5.0  # for a search that was told to end, before its process is ended

Message = dict[str, Any]


class Worker:
    """One process and the line to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.ready = False
        self.is_free = True  # has it answered all that it was asked?

    @classmethod
    async def start(cls) -> "Worker":
        """A new process; it loads what it needs while nobody waits."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "partita.serve.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE, start_new_session=True, env=_environment(),
        )  # fmt: skip
        return cls(process)

    @property
    def alive(self) -> bool:
        """Does the process still run?"""
        return self.process.returncode is None

    async def answer(self, ask: Ask) -> AsyncIterator[Message]:
        """What the process says to a question, up to `done` or `refused`."""
        kind = next(name for name, record in ASKS.items() if type(ask) is record)
        self.is_free = False
        await self._tell({"kind": kind, "ask": asdict(ask)})
        async for message in self.messages():
            yield message

    async def messages(self) -> AsyncIterator[Message]:
        """What is left to be said to the question that was asked."""
        assert self.process.stdout is not None
        while not self.is_free:
            line = await self.process.stdout.readline()
            if not line:
                code = await self.process.wait()
                yield {"refused": f"the process that searched has ended (code {code}); ask again"}
                return
            message = json.loads(line)
            if "ready" in message:
                self.ready = True
                continue
            self.is_free = "done" in message or "refused" in message
            yield message

    async def stop(self) -> None:
        """Ask a search to end with the best so far."""
        await self._tell({"stop": True})

    async def end(self) -> None:
        """End the process, and wait for its end."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()

    async def _tell(self, message: Message) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            await self.process.stdin.drain()


class Workers:
    """At most so many processes; those that are free are lent, others are started when needed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.all: set[Worker] = set()
        self._free: list[Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._given_back = asyncio.Condition()

    async def warm(self) -> None:
        """Start one before anyone asks."""
        self._free.append(await self._start())

    async def borrow(self, patience_s: float) -> Worker:
        """A process that is free, at the latest after so long; else a refusal."""
        try:
            async with asyncio.timeout(patience_s), self._given_back:
                while True:
                    while self._free:
                        worker = self._free.pop()
                        if worker.alive:
                            return worker
                        self.all.discard(worker)
                    if len(self.all) < self.most:
                        return await self._start()
                    await self._given_back.wait()
        except TimeoutError:
            count = f"{self.most} question" + "s" * (self.most > 1)
            raise RunError(f"{count} are being answered; stop one, or wait for its end") from None

    def give_back(self, worker: Worker) -> None:
        """Take a process back; one that still works is told to end, and ended if it does not."""
        task = asyncio.create_task(self._take(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(worker.end() for worker in self.all))
        self.all.clear()
        self._free.clear()

    async def _start(self) -> Worker:
        worker = await Worker.start()
        self.all.add(worker)
        return worker

    async def _take(self, worker: Worker) -> None:
        if not worker.is_free:
            with contextlib.suppress(TimeoutError):
                await worker.stop()
                async with asyncio.timeout(GRACE_S):
                    async for _ in worker.messages():
                        pass
        if not worker.is_free or not worker.alive:
            await worker.end()
            self.all.discard(worker)
        async with self._given_back:
            if worker in self.all:
                self._free.append(worker)
            self._given_back.notify()


def _environment() -> dict[str, str]:
    """One thread each for what is compiled: several searches share this machine."""
    return {"OMP_NUM_THREADS": "1", **os.environ}
