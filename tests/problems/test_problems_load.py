import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita import problems
from partita.errors import FileError, InputError, ProblemError
from partita.problems.sharding import ShardingProblem

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize(
    ("file", "options", "kind"),
    [
        ("sharding/alexnet_p4.npz", {}, "sharding"),
        ("partition/mlp.json", {"num_devices": 4}, "partition"),
        ("partition/mlp.json", {"num_devices": 4, "bandwidth": 1e9}, "partition"),
        ("streams/squeezenet.json", {}, "streams"),
        ("streams/squeezenet.json", {"r": 3, "s": None}, "streams"),
    ],
)
def test_a_file_says_which_problem_it_is(file: str, options: dict[str, Any], kind: str) -> None:
    problem = problems.load(DATA / file, **options)
    assert problems.kind_of(problem) == kind
    assert problems.lower_bound(problem) > 0


def test_check_and_evaluate_go_to_the_kind() -> None:
    problem = problems.load(DATA / "sharding/alexnet_p4.npz")
    assert problems.check(problem, problem.known) == ()
    assert problems.evaluate(problem, problem.known) == 148215719552


def test_a_zip_is_read_whatever_its_name(tmp_path: Path) -> None:
    renamed = tmp_path / "problem.data"
    renamed.write_bytes((DATA / "sharding/rnnlm_p4.npz").read_bytes())
    assert isinstance(problems.load(renamed), ShardingProblem)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"hello", "is not JSON"),
        (b"", "is not JSON"),
        (b"[1]", "holds a JSON list"),
        (b"{}", "format: is missing"),
        (b'{"format": 3}', "format: is not text"),
        (b'{"format": "other"}', 'format: found "other"'),
        (b'{"format": "partita/plan@1"}', 'format: found "partita/plan", which is no search'),
        (b'{"format": "partita/sharding@1"}', 'found "partita/sharding", which is no search'),
    ],
)
def test_what_is_no_problem_gets_the_list_of_what_is(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "f.json"
    file.write_bytes(content)
    with pytest.raises(FileError) as caught:
        problems.load(file)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(file))
    for kind in problems.KINDS:
        assert f"partita/{kind}-problem@1" in str(caught.value)
    assert ".npz" in str(caught.value)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_bytes(b'{"format": "partita/streams-problem@2"}')
    with pytest.raises(FileError, match="written by a newer partita"):
        problems.load(file)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(FileError, match="no such file"):
        problems.load("nowhere.json")


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        (
            "sharding/rnnlm_p4.npz",
            {"num_devices": 4},
            "num_devices: a sharding problem has no such",
        ),
        ("streams/squeezenet.json", {"num_devices": 4}, "has no such option; it has r, s"),
        ("partition/mlp.json", {"r": 1}, "has no such option; it has num_devices, bandwidth"),
    ],
)
def test_an_option_of_another_kind_is_refused(
    file: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProblemError) as caught:
        problems.load(DATA / file, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 3, "sharding", object()])
def test_what_is_no_record_is_refused(wrong: object) -> None:
    with pytest.raises(ProblemError, match="which is no problem record; give one of Sharding"):
        problems.kind_of(wrong)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ProblemError, match="choose one of sharding, schedule"):
        problems.module_of("jointly")


@given(data=st.binary(max_size=60))
def test_any_bytes_are_refused_with_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.mktemp("bytes") / "f.json"
    file.write_bytes(data)
    with pytest.raises(InputError):
        problems.load(file)


def test_records_pull_no_heavy_packages() -> None:
    code = (
        "import sys, partita.problems, partita.problems.sharding, partita.problems.partition, "
        "partita.problems.streams; "
        "print({'numba', 'torch', 'ortools', 'scipy'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
