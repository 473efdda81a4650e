"""What is refused before the first step, with what to do."""

import socket
import sys
from dataclasses import replace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from distributed_models import make  # noqa: E402
from distributed_plans import graph_of, pipeline, plan_of, sgd  # noqa: E402
from distributed_ranks import run_on_ranks  # noqa: E402

from partita.errors import InputError, PartitaError, PlanError  # noqa: E402
from partita.plans import Schedule  # noqa: E402
from partita.run.distributed import launch, preflight  # noqa: E402
from partita.run.distributed.engine import execute  # noqa: E402
from partita.run.distributed.launch import check_world, meet  # noqa: E402
from partita.run.distributed.loss import with_loss  # noqa: E402


class Muon(torch.optim.SGD):
    """Looks at whole matrices, as far as anybody knows."""


def test_a_plan_for_another_number_of_devices_is_refused():
    with pytest.raises(PlanError, match=r"for 4 devices and 2 processes .* --nproc-per-node 4"):
        check_world(4, 2)


def test_without_torchrun_the_command_is_said(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PlanError, match="start it with: torchrun --nproc-per-node 2"):
        meet(2)


def test_a_port_in_use_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=rf"port of 127\.0\.0\.1:{port} is in use; choose"):
            meet(2, 2.0)


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_missing_rank_is_named(monkeypatch, caplog, capfd):
    port = str(_free_port())
    names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(launch, "PATIENCE_S", 0.1)
    with pytest.raises(InputError, match=r"rank 1 did not come within 0\.4 s"):
        meet(2, 0.4)
    assert caplog.messages == ["waiting for rank 1 of 2"]
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", str(_free_port()))
    with pytest.raises(InputError, match=r"rank 0 did not open 127\.0\.0\.1:\d+ within 0\.4 s"):
        meet(2, 0.4)
    assert "frame #0" not in capfd.readouterr().err  # of PyTorch's own asking
    assert [text.partition(" at ")[0] for text in caplog.messages] == ["waiting for rank 0"]


def test_nccl_takes_one_process_on_a_gpu():
    launch.check_own_gpus(["a 1", "a 2", "b 1"])
    with pytest.raises(PlanError, match=r"processes 0, 2 share a GPU of a, .*--backend gloo"):
        launch.check_own_gpus(["a 1", "b 1", "a 1"])


@pytest.mark.parametrize(
    ("backend", "message"),
    [("nccl", "NCCL sends between GPUs"), ("mpi", "'mpi' is no backend that plans run on")],
)
def test_a_backend_that_cannot_serve_is_refused(backend, message):
    with pytest.raises(PartitaError, match=message):
        launch.check_backend(backend, torch.device("cpu"))


def refusals(rank):
    """The message of each refusal, from one world of two ranks."""
    module, args = make("mlp")
    graph = graph_of(module, args)
    plan = pipeline(graph, 2, "1f1b", 2)
    said = {}

    def refuse(name, plan, module, args, optimizer=sgd):
        try:
            execute(plan, module, optimizer=optimizer, device="cpu").step(*args)
        except PartitaError as error:
            said[name] = str(error)

    refuse("model", plan, make("mse")[0].to(torch.float32), make("mse")[1])
    other = make("mlp")[0]
    other.layers[0].bias = None
    refuse("fingerprint", plan, other, args)
    refuse("dtype", plan, make("mlp")[0].double(), (args[0].double(), args[1]))
    refuse("argument", plan, make("mlp")[0], (args[0].double(), args[1]))
    refuse("batch", plan, make("mlp")[0], (args[0][:6], args[1][:6]))
    rows = ("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")
    stuck = plan_of(graph, plan.stages, Schedule("mine", 2, rows))
    refuse("circle", stuck, make("mlp")[0], args)
    zero = pipeline(graph, 1, "1f1b", 1, data_parallel=2, zero=1)
    refuse("optimizer", zero, make("mlp")[0], args, lambda ps: Muon(ps, lr=0.1))
    refuse("inference", replace(plan, model=replace(plan.model, training=False)), module, args)
    with mock.patch.object(preflight, "__version__", f"0.{rank}"):
        refuse("version", plan, make("mlp")[0], args)
    engine = execute(plan, make("mlp")[0], optimizer=sgd, device="cpu")
    engine.step(*args)
    try:
        engine.step(args[0][:5], args[1][:5])
    except PartitaError as error:
        said["last batch"] = str(error)
    try:
        engine.step(args[0].double(), args[1])
    except PartitaError as error:
        said["later dtype"] = str(error)
    engine.board.close()
    return said


WORDS = {
    "model": "returns a tensor of [8, 4] first, and no loss; return the loss from the module",
    "fingerprint": "the plan is for another model (fingerprint",
    "dtype": "parameters are f64, and the plan is for f32; cast the module with .to(torch.float32)",
    "argument": "argument x is f64, and the plan is for f32; cast it with .to(torch.float32)",
    "batch": "a batch of 6, and the plan one of 8; give batches of 8 samples",
    "circle": "waits for",
    "optimizer": "the optimizer Muon is not elementwise as far as is known",
    "inference": "the plan is for inference",
    "version": "rank 1 has partita 0.1, and rank 0 has 0.0; give all ranks the same",
    "later dtype": "is of torch.float64, and torch.float32 was planned; cast it with .to(torch.fl",
    "last batch": "is [5, 16], and [8, 16] was planned; give batches of 8 samples",
}


def test_what_does_not_fit_is_refused_by_all_ranks_before_the_first_step(tmp_path):
    ends = run_on_ranks(2, refusals, folder=tmp_path)
    assert [end.code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    for end in ends:
        assert end.result.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in end.result[name], name


def test_a_refusal_that_nobody_catches_is_one_line(capsys, monkeypatch):
    from partita.run.distributed import engine

    tracebacks = []
    monkeypatch.setattr(sys, "excepthook", lambda *each: tracebacks.append(each))
    engine._one_line_errors()
    sys.excepthook(PlanError, PlanError("batch: of 7", fix="give 8"), None)
    assert capsys.readouterr().err == "partita: batch: of 7; give 8\n"
    sys.excepthook(ValueError, ValueError("mine"), None)
    monkeypatch.setenv("PARTITA_TRACEBACK", "1")
    sys.excepthook(PlanError, PlanError("batch: of 7", fix="give 8"), None)
    assert [kind for kind, _, _ in tracebacks] == [ValueError, PlanError]


def test_a_module_with_its_loss_is_one_module():
    module = with_loss(torch.nn.Linear(3, 2), torch.nn.functional.mse_loss)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    assert torch.equal(module(x, y), torch.nn.functional.mse_loss(module.module(x), y))
