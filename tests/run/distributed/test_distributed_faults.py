"""A rank that throws, hangs, is killed or out of memory: all ranks end and name it."""

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")

from distributed_models import make  # noqa: E402
from distributed_plans import graph_by_name, pipeline, sgd  # noqa: E402
from distributed_ranks import run_on_ranks  # noqa: E402

from partita.errors import RunError  # noqa: E402
from partita.run.distributed.engine import execute  # noqa: E402
from partita.run.distributed.faults import cause_of  # noqa: E402

TIMEOUT_S = 3.0
WORLD = 2


class Broken:
    """A recorder that breaks its rank at its twentieth task."""

    def __init__(self, rank, how):
        self.rank, self.how, self.count = rank, how, 0

    def start(self, task, name):
        self.count += 1
        if self.rank != 1 or self.count != 20:
            return
        if self.how == "throws":
            raise ValueError("no such thing")
        if self.how == "hangs":
            time.sleep(60)
        if self.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, task, name):
        pass


def run_broken(rank, how, plan):
    module, args = make("mlp")
    engine = execute(
        plan, module, optimizer=sgd, device="cpu", timeout_s=TIMEOUT_S, recorder=Broken(rank, how)
    )
    for _ in range(20):
        engine.step(*args)


@pytest.fixture(scope="module")
def plan():
    return pipeline(graph_by_name("mlp"), WORLD, "1f1b", 4)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("throws", "ValueError: no such thing"),
        ("hangs", "hangs there for"),
        ("is killed", "no sign of life for"),
    ],
)
def test_all_ranks_end_and_name_the_one_that(how, cause, plan, tmp_path):
    ends = run_on_ranks(WORLD, run_broken, how, plan, folder=tmp_path, limit_s=60)
    assert ends[1].code == (-signal.SIGKILL if how == "is killed" else 1)
    assert ends[0].code == 1
    said = [line for line in ends[0].stderr.splitlines() if "rank 1 failed in" in line]
    assert len(said) == 1
    assert cause in said[0]
    assert "stage1" in said[0] or "stage0" in said[0]  # the task
    assert "Traceback" not in ends[0].stderr


def run_without_a_last_word(rank, plan, folder):
    """Rank 1 goes when the others begin to save; the board of rank 0 looks out for it."""
    module, args = make("mlp")
    engine = execute(plan, module, optimizer=sgd, device="cpu", timeout_s=TIMEOUT_S)
    engine.step(*args)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.save(folder / "checkpoint")


def test_a_rank_that_is_lost_while_others_save_is_named(plan, tmp_path):
    ends = run_on_ranks(WORLD, run_without_a_last_word, plan, tmp_path, folder=tmp_path, limit_s=60)
    assert [end.code for end in ends] == [1, -signal.SIGKILL]
    (said,) = ends[0].stderr.strip().splitlines()
    assert said.startswith("rank 1 failed in ")
    assert "no sign of life for" in said
    assert "rank 0 is in saving a checkpoint" in said
    assert not (tmp_path / "checkpoint").exists()


def test_a_cause_is_one_line():
    assert cause_of(ValueError("one\ntwo")) == "ValueError: one"
    assert cause_of(MemoryError()) == "out of memory (no more words)"
    lack = torch.OutOfMemoryError("Tried to allocate 2 GiB")
    assert cause_of(lack) == "out of memory (Tried to allocate 2 GiB)"
    assert cause_of(RunError("said")) == "said"
    assert cause_of(KeyboardInterrupt()) == "interrupted"
