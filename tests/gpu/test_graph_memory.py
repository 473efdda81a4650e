"""A CUDA graph knows addresses, not tensors: what a graph reads must be held for as long as it is.

Without a GPU a graph is watched instead: `Watched` runs once, notes the memory that it reads and
did not make, and every replay asks whether all of it is still held by somebody.
"""

import pytest
import torch
from decoder_modules import decoder
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.costs.measured import Environment
from partita.gpu import graphs, measure
from partita.gpu.step_times import StepTimes
from partita.gpu.streams import bound, choose, replay, tune
from partita.gpu.streams.candidates import Options
from partita.gpu.streams.choose import Chooser

HERE = Environment("here", "2.11.0", False, "none")


class Reads(TorchDispatchMode):
    """The memory that operators read and none of them made."""

    def __init__(self):
        super().__init__()
        self.read, self.made = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for each in tree_leaves((args, kwargs or {})):
            if isinstance(each, torch.Tensor):
                ref = StorageWeakRef(each.untyped_storage())
                if ref.cdata not in self.made:
                    self.read[ref.cdata] = ref
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, torch.Tensor):
                ref = StorageWeakRef(each.untyped_storage())
                if ref.cdata not in self.read:
                    self.made[ref.cdata] = ref
        return results


class Watched:
    """What stands for a captured graph: a replay runs nothing and reads what it read before."""

    replays = 0

    def __init__(self, run, warm_up=1, holds=None):
        for _ in range(warm_up):
            run()
        self.held = None if holds is None else holds()
        with Reads() as self.reads:
            run()

    def replay(self):
        Watched.replays += 1
        gone = [ref for ref in self.reads.read.values() if ref.expired()]
        assert not gone, f"{len(gone)} tensors are read by a graph and held by nobody"


@pytest.fixture
def watched(monkeypatch):
    """Every graph is watched."""
    for module in (graphs, measure, bound, replay):
        if hasattr(module, "capture"):
            monkeypatch.setattr(module, "capture", Watched)
    Watched.replays = 0


def test_a_graph_that_is_not_held_is_noticed(watched):
    values = [torch.ones(3)]
    graph = graphs.capture(lambda: values[0] + 1)
    graph.replay()
    values[0] = torch.ones(3)
    with pytest.raises(AssertionError, match="held by nobody"):
        graph.replay()


def timed(bound, step, way):
    """As on a GPU, where attention over a long cache takes longest: it reads what others make."""
    bound.run(step, way)
    return 50.0 if "attention" in step.target else 5.0


def test_every_graph_of_a_search_over_a_decoder_reads_memory_that_is_held(watched, monkeypatch):
    monkeypatch.setattr(choose, "STAGES_S", 60.0)
    monkeypatch.setattr(choose, "IMPROVE_S", 0.3)
    monkeypatch.setattr(tune, "step_us", timed)
    module, inputs = decoder(layers=1)
    options = Options(time_s=300.0, streams=(2,), compile=False)
    mine = Chooser(module, inputs, options, StepTimes(on=HERE), lambda text: None)
    _, schedule = mine.choose()
    assert any("stages" in label for label, _ in schedule.times_us)
    assert Watched.replays > 100
