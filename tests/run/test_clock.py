"""The one clock: seconds of every run, by the host or by events of the GPU."""

import pytest

torch = pytest.importorskip("torch")

from partita.run import clock  # noqa: E402


def test_the_host_times_every_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    lengths = iter((2.0, 1.0, 3.0))

    def run():
        now[0] += next(lengths)

    assert clock.run_times_s(run, 3, on_gpu=False) == [2.0, 1.0, 3.0]


def test_the_gpu_is_asked_once_all_runs_are_launched(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(done)
            done.append("event")

        def elapsed_time(self, other):
            assert done[-1] == "waited"
            return 1000.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    assert clock.run_times_s(lambda: done.append("run"), 2, on_gpu=True) == [2.0, 2.0]
    assert done == ["event", "run", "event", "run", "event", "waited"]
