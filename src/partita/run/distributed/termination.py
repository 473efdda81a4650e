"""SIGTERM, heard at once: torchrun ends all ranks with it as soon as it misses one of them.

A handler written in Python runs only when the main thread is back in Python, which may sit in a
collective. So the interpreter is asked to write the number of the signal into a pipe, which a
thread listens to. A program that has a handler, or listens to signals, of its own keeps it.
"""

import os
import select
import signal
import socket
import threading
from typing import Any


class Termination:
    """Tells a thread that this process was asked to end."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.ours: socket.socket | None = None
        self.theirs: socket.socket | None = None

    def listen(self) -> None:
        """Hear the signal from now on, where nobody else does."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        before = signal.set_wakeup_fd(self.theirs.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            self._drop()
            return
        signal.signal(signal.SIGTERM, self._handle)

    def wait(self, closed: threading.Event, seconds: float) -> bool:
        """Wait for a while, or until it is closed; was this process asked to end?"""
        ours = self.ours
        if ours is None:
            closed.wait(seconds)
            return False
        try:
            if not select.select([ours], [], [], seconds)[0]:
                return False
            return signal.SIGTERM in ours.recv(64)
        except (OSError, ValueError):  # it was closed meanwhile
            return False

    def wake(self) -> None:
        """Let whoever waits look up."""
        if self.theirs is not None:
            self.theirs.send(b"\0")

    def stop(self) -> None:
        """Leave the signal to the interpreter again."""
        if self.ours is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
        self._drop()

    def _drop(self) -> None:
        for end in (self.ours, self.theirs):
            if end is not None:
                end.close()
        self.ours = self.theirs = None

    def _handle(self, number: int, frame: Any) -> None:
        """Nothing here: the thread acts. In a process forked off this one nobody listens."""
        if os.getpid() != self.pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
