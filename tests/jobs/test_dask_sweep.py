"""Sweeps on a Dask cluster: the answers of one process, resumable, a dead worker costs its task."""

import json

import pytest
from click.testing import CliRunner

from partita.cli import partita
from partita.errors import InputError
from partita.graph import GraphBuilder
from partita.graph.files import to_text
from partita.jobs.dask_sweep import DaskPool, checked
from partita.jobs.sweep import Sweeper
from tests.jobs.sweep_work import Square, square

distributed = pytest.importorskip("distributed", reason="needs the extra dask")


@pytest.fixture(scope="module")
def scheduler():
    """Two worker processes of one thread; one that dies is started again."""
    import dask

    quick = {"distributed.scheduler.allowed-failures": 1, "distributed.admin.tick.interval": "1s"}
    with (
        dask.config.set(quick),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
    ):
        yield cluster.scheduler_address


def test_workers_give_the_answers_of_one_process_and_go_on_from_its_file(scheduler, tmp_path):
    tasks = [Square(number, str(tmp_path)) for number in range(4)]
    tasks.append(Square(9, refused=True))
    results = tmp_path / "results.jsonl"
    Sweeper(1, results)(square, tasks[:2])
    outcomes = Sweeper(results=results, dask=scheduler)(square, tasks)
    assert [o.is_known for o in outcomes] == [True, True, False, False, False]
    alone = Sweeper(1)(square, tasks)
    assert [(o.answer, o.why) for o in outcomes] == [(o.answer, o.why) for o in alone]
    again = Sweeper(1, results)(square, tasks[:4])
    assert all(outcome.is_known for outcome in again)


def test_a_worker_that_dies_costs_its_task_alone(scheduler):
    tasks = [Square(0), Square(1, dies=True), Square(2), Square(3)]
    outcomes = Sweeper(dask=scheduler)(square, tasks)
    assert [outcome.answer for outcome in outcomes] == [
        {"square": 0}, None, {"square": 4}, {"square": 9},
    ]  # fmt: skip
    assert outcomes[1].why == "its worker died, twice"


def test_a_curve_is_the_same_on_workers_and_here(scheduler, tmp_path):
    g = GraphBuilder("small")
    x = g.relu(g.linear(g.input("x", (64, 128)), 256, "first"))
    model = tmp_path / "model.txt"
    model.write_text(to_text(g.finish(g.linear(x, 16, "last"))))
    words = ["plan", str(model), "-c", "2xA100", "--gap", "0.9", "--devices", "1,2", "--json", "-q"]
    here, there = (
        CliRunner().invoke(partita, [*words, *more])
        for more in (["--workers", "1"], ["--dask", scheduler])
    )
    assert there.exit_code == here.exit_code == 0, there.output
    points = [[p["step_s"] for p in json.loads(r.output)["points"]] for r in (here, there)]
    assert points[0] == points[1]
    assert len(points[0]) >= 2


def test_an_address_where_no_scheduler_answers_is_refused():
    with pytest.raises(InputError, match="no Dask scheduler answers"):
        DaskPool("tcp://127.0.0.1:9", connect_s=0.2)


def test_a_scheduler_file_that_is_not_there_is_refused(tmp_path):
    address = str(tmp_path / "none.json")
    words = ["compare", "alexnet", "-c", "2xA100", "--devices", "1,2", "--dask", address]
    result = CliRunner().invoke(partita, words)
    assert result.exit_code != 0
    assert "is no scheduler file" in result.output + str(result.exception)


def test_a_worker_of_another_version_is_refused():
    with pytest.raises(InputError, match="install the same version on all workers"):
        checked(square, "0.0.0", Square(1))
