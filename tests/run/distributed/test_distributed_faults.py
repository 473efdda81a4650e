"""A rank that throws, hangs, is killed or out of memory: all ranks end and name it."""

import os
import resource
import signal
import subprocess
import time
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from distributed_models import make  # noqa: E402
from distributed_plans import graph_by_name, pipeline, sgd  # noqa: E402
from distributed_ranks import run_on_ranks  # noqa: E402

from partita.errors import RunError  # noqa: E402
from partita.run.distributed import alive  # noqa: E402
from partita.run.distributed.engine import execute  # noqa: E402
from partita.run.distributed.faults import FaultBoard, cause_of, is_lost  # noqa: E402
from partita.run.distributed.termination import Termination  # noqa: E402
from partita.run.distributed.train import TrainSettings, train  # noqa: E402

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
        if self.how == "is frozen":
            subprocess.Popen(["sh", "-c", f"sleep 9; kill -9 {os.getpid()}"])  # not for ever
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "is asked to end":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        if self.how == "has no memory":
            limit = 2**20 + _address_space()
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            self.kept = torch.zeros(2**28)

    def end(self, task, name):
        pass


def _address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


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
        ("is killed", "its process is gone (killed, perhaps for memory); rank 0 is in"),
        ("is frozen", "no sign of life for"),
        ("is asked to end", "ended from outside (SIGTERM)"),
        ("has no memory", "out of memory ("),
    ],
)
def test_all_ranks_end_and_name_the_one_that(how, cause, plan, tmp_path):
    ends = run_on_ranks(WORLD, run_broken, how, plan, folder=tmp_path, limit_s=60)
    codes = {"is killed": -signal.SIGKILL, "is frozen": -signal.SIGKILL, "is asked to end": 143}
    assert ends[1].code == codes.get(how, 1)
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
    assert "its process is gone" in said
    assert "rank 0 is in saving a checkpoint" in said
    assert not (tmp_path / "checkpoint").exists()


def run_lost_after_saving(rank, plan, folder):
    """Rank 1 goes as soon as it has saved."""
    module, args = make("mlp")
    engine = execute(plan, module, optimizer=sgd, device="cpu", timeout_s=TIMEOUT_S)
    engine.step(*args)
    engine.save(folder / "checkpoint")
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.step(*args)


def test_a_rank_that_is_lost_after_saving_is_not_named_with_it(plan, tmp_path):
    ends = run_on_ranks(WORLD, run_lost_after_saving, plan, tmp_path, folder=tmp_path, limit_s=60)
    assert [end.code for end in ends] == [1, -signal.SIGKILL]
    assert ends[0].stderr.startswith("rank 1 failed in between steps: its process is gone")


def run_without_data(rank, plan):
    """The data of rank 1 end at its third step."""
    module, args = make("mlp")

    def batches(step):
        if rank and step == 2:
            raise ValueError("a file is missing")
        return args

    settings = TrainSettings(steps=5, device="cpu", timeout_s=TIMEOUT_S)
    for _ in train(plan, module, args, batches, settings):
        pass


def test_a_rank_whose_data_fail_is_named_with_the_step(plan, tmp_path):
    ends = run_on_ranks(WORLD, run_without_data, plan, folder=tmp_path, limit_s=60)
    assert [end.code for end in ends] == [1, 1]
    for end in ends:
        (said,) = end.stderr.strip().splitlines()
        assert said == "rank 1 failed in the data of step 3: ValueError: a file is missing"


def lost_before_the_first_step(rank, plan, how):
    """Rank 1 goes, or stays, while all get ready."""

    def broken(parameters):
        if rank and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank and how == "hangs":
            time.sleep(60)
        if rank:
            raise ValueError("no such optimizer")
        return sgd(parameters)

    module, args = make("mlp")
    execute(plan, module, optimizer=broken, device="cpu", timeout_s=TIMEOUT_S, example=args)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("is killed", "its process is gone"),
        ("hangs", "hangs there for"),
        ("throws", "ValueError: no such optimizer"),
    ],
)
def test_before_the_first_step_all_end_and_name_the_one_that(how, cause, plan, tmp_path):
    ends = run_on_ranks(
        WORLD, lost_before_the_first_step, plan, how, folder=tmp_path, limit_s=60
    )  # fmt: skip
    assert ends[0].code == 1
    (said,) = ends[0].stderr.strip().splitlines()
    assert "rank 1 failed in preparing the first step: " in said
    assert cause in said


def ends_well_and_alone(rank, plan):
    """Rank 1 ends as a script does; rank 0 works on by itself, and then asks for the others."""
    module, args = make("mlp")
    engine = execute(plan, module, optimizer=sgd, device="cpu", timeout_s=TIMEOUT_S, example=args)
    engine.step(*args)
    if rank:
        return
    time.sleep(1.0)  # nobody is missed where nobody is needed
    engine.full_state_dict()


def test_a_rank_that_has_ended_is_missed_only_where_it_is_needed(plan, tmp_path):
    ends = run_on_ranks(WORLD, ends_well_and_alone, plan, folder=tmp_path, limit_s=60)
    assert [end.code for end in ends] == [1, 0]
    assert (
        "rank 1 failed in between steps: it ended there, and rank 0 is in gathering the state"
        in (ends[0].stderr)
    )


def test_a_process_is_known_by_its_number_and_its_start():
    own = alive.this_process()
    with subprocess.Popen(["sleep", "60"]) as other:
        start = alive._state(other.pid)[1]
        known = replace(own, number=other.pid, started=start)
        assert not alive.is_gone(known, own)
        assert alive.is_gone(replace(known, started=start - 1), own)  # its number is used again
        assert not alive.is_gone(replace(known, home="elsewhere"), own)
        other.kill()
        deadline = time.monotonic() + 10.0
        while not alive.is_gone(known, own) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert alive.is_gone(known, own)  # before anybody has waited for it
    assert alive.is_gone(known, own)
    assert not alive.is_gone(known, replace(own, home=""))


def test_a_program_keeps_its_own_handler_of_signals(monkeypatch):
    handlers = {signal.SIGTERM: lambda *_: None}
    monkeypatch.setattr(signal, "getsignal", handlers.get)
    own = Termination()
    own.listen()
    assert own.ours is None
    own.wake()
    own.stop()


def test_a_cause_is_one_line():
    assert cause_of(ValueError("one\ntwo")) == "ValueError: one"
    assert cause_of(MemoryError()) == "out of memory (no more words)"
    lack = torch.OutOfMemoryError("Tried to allocate 2 GiB")
    assert cause_of(lack) == "out of memory (Tried to allocate 2 GiB)"
    assert cause_of(RunError("said")) == "said"
    assert cause_of(KeyboardInterrupt()) == "interrupted"


def test_what_was_on_its_way_is_kept_whoever_failed():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = FaultBoard(store, 0, 1, timeout_s=1.0)
    error = ValueError("no such thing")
    assert str(board.explain(error)) == "rank 0 failed in the start: ValueError: no such thing"
    assert board.error is error  # its frames hold the tensors that messages still come into


@pytest.mark.parametrize(
    ("text", "lost"),
    [("Connection closed by peer [127.0.0.1]:1", True), ("No route to host", True),
     ("Application timeout caused pair closure", True), ("shapes do not match", False)],
)  # fmt: skip
def test_an_error_of_the_backend_says_that_others_are_lost(text, lost):
    assert is_lost(RuntimeError(text)) is lost
