import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_mutations import attempt

from partita.errors import FileError, InputError
from partita.problems import sharding
from partita.problems.sharding import ShardingProblem, ShardingSolution

DATA = Path(__file__).parent.parent / "data" / "sharding"


def valid() -> dict[str, Any]:
    """The arrays of a problem of two ops with 2 and 3 choices."""
    return {
        "K": np.array([2, 3], np.int32),
        "voff": np.array([0, 2, 5], np.int64),
        "vcost": np.array([1.0, 2, 3, 4, 5]),
        "edges": np.array([[0, 1]], np.int32),
        "emat": np.array([0], np.int32),
        "mat_0": np.zeros((2, 3)),
        "cfg_0": np.array([[1], [2]], np.int32),
        "cfg_1": np.array([[1, 1], [1, 2], [2, 1]], np.int32),
        "opt_cost": np.array(4.0),
        "opt_cfg": np.array([0, 0], np.int32),
        "meta": np.array('{"ops": ["conv", "fc"]}'),
    }


def packed(content: dict[str, Any], **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **content, **options)
    return buffer.getvalue()


def test_numpys_own_files_are_read() -> None:
    problem = sharding.from_npz(packed(valid()))
    assert problem.num_choices == (2, 3)
    assert problem.names == ("conv", "fc")
    assert problem.known == ShardingSolution((0, 0))
    assert problem.splits[1].tolist() == [[1, 1], [1, 2], [2, 1]]


def test_what_is_optional_may_be_missing() -> None:
    needed = {
        key: value for key, value in valid().items() if key in ("K", "voff", "vcost", "mat_0")
    }
    needed |= {"edges": valid()["edges"], "emat": valid()["emat"]}
    problem = sharding.from_npz(packed(needed))
    assert problem.known is None
    assert problem.names == problem.splits == ()


def test_column_order_and_foreign_byte_order_mean_the_same() -> None:
    content = valid() | {"mat_0": np.asfortranarray([[0.0, 1, 2], [3, 4, 5]]).astype(">f8")}
    problem = sharding.from_npz(packed(content))
    assert problem.matrices[0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_file_goes_both_ways_and_its_bytes_are_always_the_same(tmp_path: Path) -> None:
    for number, file in enumerate(sorted(DATA.glob("*_p4.npz"))):
        problem = sharding.read(file)
        written = sharding.write_npz(problem, tmp_path / f"{number}.npz")
        assert sharding.read(written) == problem
        again = sharding.write_npz(problem, tmp_path / f"{number}b.npz")
        assert written.read_bytes() == again.read_bytes()
    assert number == 3


def test_names_and_nothing_else_survive_writing(tmp_path: Path) -> None:
    problem = ShardingProblem(costs=(np.array([1.0, np.inf]),), names=("only",))
    assert sharding.read(sharding.write_npz(problem, tmp_path / "one.npz")).names == ("only",)


def test_writing_keeps_what_is_there_already(tmp_path: Path) -> None:
    problem = ShardingProblem(costs=(np.array([1.0]),))
    sharding.write_npz(problem, tmp_path / "one.npz")
    with pytest.raises(FileError, match="exists already"):
        sharding.write_npz(problem, tmp_path / "one.npz")
    sharding.write_npz(problem, tmp_path / "one.npz", overwrite=True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("K", None, "K: is missing; the file needs an array K"),
        ("K", np.array([2.0, 3.0]), "K: has the type float64; integers are needed"),
        ("K", np.array([[2, 3]]), "K: has the shape (1, 2); 1 dims are needed"),
        ("K", np.array([5, 0]), "K: holds 0 to 5 where vcost has 5 entries"),
        ("K", np.array([2, 2**62]), "K: holds 2 to"),
        ("K", np.array([2, 2**64 - 1], np.uint64), "K: holds 18446744073709551615"),
        ("voff", np.array([0, 3, 5]), "voff: is not the running sum of K"),
        ("vcost", np.zeros(6), "vcost: has 6 entries where K adds up to 5"),
        ("vcost", np.full(5, np.nan), "vcost[op 0]: holds NaN"),
        ("vcost", np.zeros(5, complex), "vcost.npy: has the type complex128"),
        ("edges", np.zeros((1, 3), int), "edges: has the shape (1, 3)"),
        ("emat", np.array([1]), "emat[0]: names matrix 1"),
        ("mat_0", np.full((2, 3), np.nan), "mat_0: holds NaN"),
        ("mat_0", np.zeros((3, 2)), "edges[0]: joins ops 0 and 1 of 2 and 3 choices"),
        ("mat_2", np.zeros((2, 3)), "mat_1: is missing"),
        ("mat_x", np.zeros((2, 3)), "mat_x: is no array of a sharding problem"),
        ("a{b}[0]", np.zeros(1), "a{b}[0]: is no array of a sharding problem"),
        ("extra", np.zeros(1), "extra: is no array of a sharding problem"),
        ("cfg_1", None, "cfg: has 1 entries for 2 ops"),
        ("cfg_1", np.zeros((3, 1), int), "cfg_1: holds 0; split factors start at 1"),
        ("cfg_1", np.array([["a"]]), "cfg_1: has the type <U1"),
        ("opt_cfg", np.array([0, 9]), "opt_cfg: op 1 (fc) is given choice 9 of 3"),
        ("opt_cost", np.array(5.0), "opt_cost: is 5 where the recorded assignment costs 4"),
        ("meta", np.array("{"), "meta: is not JSON"),
        ("meta", np.frombuffer(b"\xff\xff\xff\x7f", "<U1").reshape(()), "meta: is not text"),
        ("meta", np.array(3), "meta: has the type int64; text is needed"),
    ],
)
def test_a_wrong_array_is_refused_by_name(key: str, value: Any, message: str) -> None:
    content = valid() | {key: value}
    if value is None:
        del content[key]
    with pytest.raises(InputError) as caught:
        sharding.from_npz(packed(content), "f.npz")
    assert str(caught.value).startswith("f.npz: ")
    assert message in str(caught.value)


def test_a_file_without_ops_is_refused() -> None:
    nothing = {"K": [], "voff": [0], "emat": []}
    content = {key: np.array(value, int) for key, value in nothing.items()}
    content |= {"vcost": np.zeros(0), "edges": np.zeros((0, 2), int)}
    with pytest.raises(InputError, match="vcost: has no ops"):
        sharding.from_npz(packed(content), "f.npz")


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize <= 8, reason="long doubles are doubles here")
def test_long_doubles_are_refused() -> None:
    content = valid() | {"vcost": np.full(5, 1.0, np.longdouble)}
    with pytest.raises(FileError, match=r"vcost\.npy: has the type float128"):
        sharding.from_npz(packed(content), "f.npz")


def test_pickles_are_refused_unopened() -> None:
    content = packed(valid() | {"vcost": np.array([{"a": 1}], dtype=object)}, allow_pickle=True)
    with pytest.raises(FileError, match=r"vcost\.npy: has the type object; plain numbers or text"):
        sharding.from_npz(content, "f.npz")


def test_a_small_file_that_would_unpack_to_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = packed({"vcost": np.zeros(2_000_000)})
    assert len(bomb) < 100_000
    monkeypatch.setattr(sharding, "MAX_ARRAY_BYTES", 1_000_000)
    with pytest.raises(FileError, match="would unpack to 16,000,128 bytes; at most 1,000,000"):
        sharding.from_npz(bomb, "f.npz")


def test_a_header_that_promises_more_than_the_file_has_is_refused() -> None:
    member = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
    np.lib.format.write_array_header_1_0(member, header)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("vcost.npy", member.getvalue() + b"\0" * 80)
    with pytest.raises(FileError, match=r"says the shape \(1099511627776,\) of float64"):
        sharding.from_npz(buffer.getvalue(), "f.npz")


@pytest.mark.parametrize("names", [["K.npy", "K.npy"], ["readme.txt"], ["a/"]])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_that_is_no_npz_is_refused(names: list[str]) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    with pytest.raises(FileError, match=r"is there twice|is no \.npy member"):
        sharding.from_npz(buffer.getvalue(), "f.npz")


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_refused(data: bytes, looks_like_zip: bool) -> None:
    with pytest.raises(FileError, match=r"is not an \.npz file"):
        sharding.from_npz(b"PK\x03\x04" + data if looks_like_zip else data, "f.npz")


STORED = sharding.write_arrays(valid())


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(STORED) - 1), st.integers(0, 255), st.booleans())
def test_a_damaged_file_is_read_or_refused(place: int, byte: int, cut: bool) -> None:
    damaged = STORED[:place] if cut else STORED[:place] + bytes([byte]) + STORED[place + 1 :]
    input_error = attempt(sharding.from_npz, damaged, "f.npz")
    assert (
        input_error.file == "f.npz"
        if isinstance(input_error, InputError)
        else input_error.num_ops == 2
    )


HEADERS = st.sampled_from(
    [b"{'descr': '<f8', 'fortran_order': False, 'shape': %s, }", b"%s", b"{'descr': %s, }"]
)


@given(HEADERS, st.text(alphabet="()[]{}',:-<>fiOU0123456789 ", max_size=20), st.integers(1, 4))
def test_any_header_is_read_or_refused(shape: bytes, text: str, version: int) -> None:
    header = shape % text.encode()
    member = b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2, "little") + header
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("K.npy", member)
    with pytest.raises(InputError):
        sharding.from_npz(buffer.getvalue(), "f.npz")


ARRAYS = st.sampled_from(
    [
        np.array(1),
        np.array(-1),
        np.array([], int),
        np.array([0]),
        np.array([-1, 2**62]),
        np.array([2, 3], np.uint8),
        np.zeros((0, 2), int),
        np.zeros((2, 0)),
        np.full((2, 3), np.inf),
        np.array([np.inf] * 5),
        np.array("text"),
        np.array(b"bytes"),
        np.array(True),
    ]
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*valid(), "mat_1", "cfg_2"]), ARRAYS, max_size=2))
def test_any_arrays_are_read_or_refused(replaced: dict[str, Any]) -> None:
    problem = attempt(sharding.from_npz, sharding.write_arrays(valid() | replaced), "f.npz")
    if isinstance(problem, InputError):
        assert problem.file == "f.npz"
        return
    assert problem.num_ops == 2
