"""Checkpoints: complete or not there, and readable by the plain module and by other plans."""

import errno
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from distributed_models import make  # noqa: E402
from distributed_plans import adamw, graph_by_name, pipeline  # noqa: E402
from distributed_ranks import run_on_ranks  # noqa: E402

from partita.errors import FileError, RunError  # noqa: E402
from partita.run.distributed import checkpoints  # noqa: E402
from partita.run.distributed.engine import execute  # noqa: E402


def engine_of(plan, args):
    return execute(plan, make("mlp")[0], optimizer=adamw, device="cpu", example=args)


def save_and_go_on(rank, plans, folder):
    """Losses after the checkpoint, in the run that wrote it and in others that read it."""
    _, args = make("mlp")
    zero, pipe = plans
    first = engine_of(zero, args)
    for _ in range(2):
        first.step(*args)
    first.save(folder / "saved")
    state = first.full_state_dict()
    wanted = [first.step(*args) for _ in range(2)]
    first.board.close()
    again = engine_of(zero, args)
    taken = again.load(folder / "saved")
    same = [again.step(*args) for _ in range(2)]
    again.board.close()
    other = engine_of(pipe, args)
    other.load(folder / "saved")
    elsewhere = [other.step(*args) for _ in range(2)]
    full = _disk_full(other, folder)
    other.board.close()
    return {
        "taken": taken, "wanted": wanted, "same": same, "elsewhere": elsewhere, "full": full,
        "state": None if state is None else {k: v.numpy() for k, v in state.items()},
    }  # fmt: skip


def _disk_full(engine, folder):
    before = sorted(str(each) for each in (folder / "saved").iterdir())
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(checkpoints, "write_tensors", side_effect=full):
        try:
            engine.save(folder / "saved")
        except RunError as error:
            after = sorted(str(each) for each in (folder / "saved").iterdir())
            assert after == before
            return str(error)
    return ""


def read_alone(rank, plan, folder):
    """One rank reads what two have written."""
    _, args = make("mlp")
    engine = engine_of(plan, args)
    engine.load(folder / "saved")
    losses = [engine.step(*args) for _ in range(2)]
    engine.board.close()
    return losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    graph = graph_by_name("mlp")
    plans = (
        pipeline(graph, 1, "1f1b", 2, data_parallel=2, zero=3),
        pipeline(graph, 2, "1f1b", 2),
    )
    ends = run_on_ranks(2, save_and_go_on, plans, folder, folder=folder)
    assert [end.code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    alone = run_on_ranks(1, read_alone, pipeline(graph, 1, "1f1b", 2), folder, folder=folder)
    assert alone[0].code == 0, alone[0].stderr
    return folder, ends[0].result, alone[0].result


def test_a_run_goes_on_with_the_same_bits(runs):
    _, result, _ = runs
    assert result["taken"] == 2
    assert result["same"] == result["wanted"]


def test_another_plan_goes_on_from_it(runs):
    _, result, _ = runs
    assert result["elsewhere"] == pytest.approx(result["wanted"], rel=1e-5)


def test_another_number_of_ranks_goes_on_from_it(runs):
    _, result, alone = runs
    assert alone == pytest.approx(result["wanted"], rel=1e-5)


def test_the_plain_module_loads_it(runs):
    folder, result, _ = runs
    module = make("mlp")[0]
    module.load_state_dict(checkpoints.read_plain(folder / "saved"), strict=False)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, torch.from_numpy(result["state"][name])), name


def test_a_full_disk_leaves_what_was_there(runs):
    folder, result, _ = runs
    assert "the disk is full" in result["full"]
    assert "what was there before is untouched" in result["full"]
    assert not list(folder.glob(".saved*"))


@pytest.mark.parametrize(
    ("text", "full"),
    [("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", True),
     ("Disk quota exceeded", True), ("permission denied", False)],
)  # fmt: skip
def test_a_full_disk_is_known_by_what_the_writer_says(text, full, tmp_path):
    assert checkpoints.is_full(RuntimeError(text), tmp_path) is full


def test_a_full_disk_is_known_by_its_room(tmp_path):
    none = mock.Mock(free=100)
    with mock.patch.object(checkpoints.shutil, "disk_usage", return_value=none):
        assert checkpoints.is_full(RuntimeError("short write"), tmp_path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileError, match="is no checkpoint"):
        checkpoints.metadata(tmp_path)


def test_the_newest_complete_checkpoint_is_taken(tmp_path):
    for step in (2, 4, 6):
        checkpoints.place_of(tmp_path, step).mkdir()
    Path(tmp_path / ".step-00000008.partial").mkdir()
    assert checkpoints.latest(tmp_path) == tmp_path / "step-00000006"
    checkpoints.drop_old(tmp_path)
    assert sorted(each.name for each in tmp_path.glob("step-*")) == [
        "step-00000004",
        "step-00000006",
    ]
    assert checkpoints.latest(tmp_path / "none") is None
