"""A process that answers one question after another: JSON lines in, JSON lines out.

    in    {"kind": "plan", "ask": {...}}      a question
          {"stop": true}                      end the search, keep the best
          end of file                         whoever asked has gone: end at once
    out   {"ready": true}                     once, when everything is loaded
          {"better": {...}}                   a search's best answer and bound so far
          {"done": {...}} or {"refused": "sentence"}

It is started by `workers.py` as `python -m partita.serve.worker`.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from typing import IO, Any

from partita.errors import PartitaError
from partita.search.base import Improvement, Stop, relative_gap

EVERY_S = 0.1  # at most so often a search tells its best


class Talk:
    """The two ends of the line, and what was asked but not yet taken."""

    def __init__(self, given: IO[bytes], told: IO[bytes]) -> None:
        self.questions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self._given, self._told = given, told
        self._lock = threading.Lock()
        self._next_at = 0.0
        self._waiting: Improvement | None = None

    def tell(self, message: dict[str, Any]) -> None:
        """Send a line."""
        line = json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._told.write(line)
            self._told.flush()

    def better(self, step: Improvement) -> None:
        """Tell how far a search is; not more often than anyone can read."""
        self._waiting = step
        self._tick()

    def must_end(self) -> bool:
        """Was the search told to end? Asked between its steps, where what waits is told, too."""
        self._tick()
        return self.stopped.is_set()

    def _tick(self) -> None:
        step, now = self._waiting, time.monotonic()
        if step is None or now < self._next_at:
            return
        self._next_at, self._waiting = now + EVERY_S, None
        self.tell({"better": {
            "seconds": step.seconds, "objective": step.objective, "bound": step.lower_bound,
            "gap": relative_gap(step.objective, step.lower_bound),
            "evaluations": step.evaluations,
        }})  # fmt: skip

    def forget(self) -> None:
        """The search has ended: its answer says more than what waits."""
        self._waiting = None

    def listen(self) -> None:
        """Read lines until there are no more; then nobody needs this process."""
        for line in self._given:
            message = json.loads(line)
            if "stop" in message:
                self.stopped.set()
            else:
                self.stopped.clear()  # here, so that a stop that follows at once is not lost
                self.questions.put(message)
        os._exit(0)


def serve(talk: Talk) -> None:
    """Answer questions for ever."""
    from partita.serve.answers import answer, warm_up
    from partita.serve.asks import ASKS

    warm_up()
    talk.tell({"ready": True})
    while True:
        message = talk.questions.get()
        try:
            ask = ASKS[message["kind"]](**message["ask"])
            made = answer(ask, Stop(interrupted=talk.must_end, progress=talk.better))
            talk.forget()
            talk.tell({"done": made})
        except PartitaError as error:
            talk.tell({"refused": " ".join(str(error).split("\n"))})
        except Exception as error:
            what = f"{type(error).__name__}: {error}".split("\n")[0]
            talk.tell({"refused": f"a mistake in partita itself ({what}); please report it"})


def main() -> None:
    """Keep the line to ourselves: what a library prints goes to stderr."""
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    talk = Talk(sys.stdin.buffer, told)
    threading.Thread(target=talk.listen, daemon=True).start()
    serve(talk)


if __name__ == "__main__":
    main()
