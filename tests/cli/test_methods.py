import pytest

from partita.search import KINDS, searches


def test_every_kind_lists_its_methods_the_default_first(run_json):
    answer = run_json("methods")
    assert answer["format"] == "partita/methods@1"
    assert list(answer["kinds"]) == list(KINDS)
    for kind, methods in answer["kinds"].items():
        assert [method["name"] for method in methods] == list(searches(kind))
        assert [method["default"] for method in methods] == [True] + [False] * (len(methods) - 1)


def test_every_method_says_what_it_does(run_json):
    for kind, methods in run_json("methods")["kinds"].items():
        for method in methods:
            assert method["summary"].endswith("."), (kind, method)


def test_people_see_the_same(run):
    result = run("methods")
    assert result.exit_code == 0
    for kind in KINDS:
        assert kind in result.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_by_itself(run_json, kind):
    assert list(run_json("methods", kind)["kinds"]) == [kind]


def test_an_unknown_kind_is_answered_with_the_nearest(run):
    result = run("methods", "shardin")
    assert result.exit_code == 2
    assert result.stderr == "error: KIND: found 'shardin'; did you mean sharding?\n"
