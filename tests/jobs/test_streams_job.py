import json

import pytest
from click.testing import CliRunner

from partita.cli import partita
from partita.errors import InputError
from partita.jobs.streams import METHODS, streams_by_costs, timeline_of
from partita.problems.streams import StreamsSolution, evaluate
from partita.search.base import Stop
from partita.search.streams import SEARCHES
from partita.verify import check_timeline


@pytest.mark.parametrize("method", METHODS)
def test_every_answer_has_a_timeline_of_its_length(method):
    streams = streams_by_costs("squeezenet", method=method)
    mine = next(each for each in streams.results if each.method == method)
    timeline = timeline_of(streams.model.problem, mine.solution)
    assert timeline.makespan == pytest.approx(mine.objective * 1e-6)
    check_timeline(timeline.program, timeline)


def test_the_best_of_all_methods_is_kept():
    streams = streams_by_costs("squeezenet")
    assert {each.method for each in streams.results} == set(METHODS)
    assert streams.best.objective == min(each.objective for each in streams.results)
    problem = streams.model.problem
    assert evaluate(problem, streams.best.solution) == pytest.approx(streams.best.objective)


def test_unknown_names_are_refused_with_a_hint():
    with pytest.raises(InputError, match="did you mean exact"):
        streams_by_costs("squeezenet", method="exakt")
    with pytest.raises(InputError, match="H300"):
        streams_by_costs("squeezenet", "H300")


def call(*words):
    return CliRunner().invoke(partita, ["streams", *words])


def test_the_command_draws_the_timeline():
    done = call("squeezenet", "--device", "analytic", "--gpu", "A100", "--quiet")
    assert done.exit_code == 0
    assert "barrier-free" in done.stdout
    assert "stream 1 │" in done.stdout


def test_the_command_gives_one_json_object(tmp_path):
    path = tmp_path / "answer.json"
    done = call(
        "squeezenet", "--device", "analytic", "--json", "--method", "exact", "-o", str(path)
    )
    data = json.loads(done.stdout)
    assert data == json.loads(path.read_text())
    assert data["method"] == "exact"
    problem = streams_by_costs("squeezenet", method="exact").model.problem
    solution = StreamsSolution.from_json(data["solution"])
    assert evaluate(problem, solution) == pytest.approx(data["objective"])
    assert SEARCHES["exact"](problem).objective == pytest.approx(data["objective"])


def test_without_a_gpu_the_command_offers_the_analytic_mode():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = call("squeezenet")
    assert done.exit_code == 2
    assert "no CUDA device here" in done.stderr
    assert "--device analytic" in done.stderr


def test_a_batch_that_is_none_is_refused():
    done = call("squeezenet", "--device", "analytic", "--batch", "1,x")
    assert done.exit_code == 2
    assert "sizes like 1 or 1,16,32 are needed" in done.stderr


def test_several_methods_are_told_of_as_one_search():
    told = []
    stop = Stop(progress=told.append)
    found = streams_by_costs("squeezenet1_1@64", stop=stop)
    bests = [step.objective for step in told if step.objective is not None]
    assert bests == sorted(bests, reverse=True)
    assert bests[-1] == found.best.objective
    assert all(step.lower_bound is None or step.lower_bound <= bests[-1] for step in told)
