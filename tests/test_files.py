"""Reading and writing: every refusal says the file, the field and the fix; nothing is lost."""

import math
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita import files
from partita.errors import FileError, InputError
from partita.files import decode_config


class TestReading:
    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(FileError, match=r"nowhere\.json: no such file"):
            files.read_bytes(tmp_path / "nowhere.json")

    def test_a_folder_is_not_a_file(self, tmp_path):
        with pytest.raises(FileError, match="is a folder; name a file in it"):
            files.read_bytes(tmp_path)

    def test_garbage_is_not_json(self):
        with pytest.raises(FileError, match="f: is not JSON"):
            files.decode_json(b"\x00\x01garbage", "f")

    def test_deep_nesting_is_refused_without_a_crash(self):
        with pytest.raises(FileError, match="nested too deeply"):
            files.decode_json(b"[" * 1_000_000, "f")

    def test_a_list_is_not_an_object(self):
        with pytest.raises(FileError, match="holds a JSON list; a JSON object is needed"):
            files.decode_json(b"[1]", "f")

    def test_nan_is_not_json(self):
        with pytest.raises(FileError, match="is not JSON"):
            files.decode_json(b'{"a": NaN}')

    @given(st.binary(max_size=200))
    def test_any_bytes_are_read_or_refused(self, data):
        try:
            files.decode_json(data, "f")
        except InputError as error:
            assert str(error).startswith("f: ")


class TestFormat:
    def test_the_right_format_passes(self):
        files.check_format({"format": "partita/graph@1"}, "graph")

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({}, 'format: is missing; needs "format": "partita/graph@1"'),
            ({"format": 3}, "format: is number, not text"),
            ({"format": "partita/plan@1"}, 'found "partita/plan@1"; "partita/graph@1" is needed'),
            ({"format": "partita/graph@2"}, "written by a newer partita"),
            ({"format": "partita/graph@0"}, "versions start at 1"),
            ({"format": "partita/graph@" + "9" * 40}, "is needed here"),
        ],
    )
    def test_another_format_is_refused_with_the_fix(self, value, message):
        with pytest.raises(FileError) as caught:
            files.check_format(value, "graph", 1, "f.json")
        assert message in str(caught.value)
        assert str(caught.value).startswith("f.json: format: ")

    @given(st.one_of(st.none(), st.integers(), st.text(), st.lists(st.text())))
    def test_the_kind_is_found_or_refused(self, value):
        try:
            assert files.format_kind({"format": value})
        except FileError as error:
            assert error.field == "format"

    def test_a_wrong_field_is_named_by_its_path(self):
        with pytest.raises(FileError, match=r"f: \[1\]: Expected `int`, got `str`"):
            files.convert([1, "x"], list[int], "f")


class TestWriting:
    def test_what_was_written_is_read(self, tmp_path):
        path = files.write_atomically(tmp_path / "a.json", files.encode_json({"b": [1, 2.5]}))
        assert files.decode_json(files.read_bytes(path)) == {"b": [1, 2.5]}

    def test_an_existing_file_is_kept_unless_asked(self, tmp_path):
        target = tmp_path / "a"
        target.write_text("old")
        with pytest.raises(FileError, match="exists already; choose another name or add --force"):
            files.write_atomically(target, "new")
        assert target.read_text() == "old"
        files.write_atomically(target, "new", overwrite=True)
        assert target.read_text() == "new"
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_a_missing_folder_is_said(self, tmp_path):
        with pytest.raises(FileError, match="cannot be written"):
            files.write_atomically(tmp_path / "no" / "a", "x")

    def test_others_may_read_what_was_written(self, tmp_path):
        path = files.write_atomically(tmp_path / "a", "x")
        assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR
        assert not path.stat().st_mode & stat.S_IXUSR

    def test_nan_is_never_written(self):
        with pytest.raises(ValueError, match="not JSON compliant"):
            files.encode_json({"a": float("nan")})


@pytest.mark.parametrize(
    "text", ['{"limit": [0.0, Infinity]}', '{"limit": [0.0, {"__float__": "Infinity"}]}']
)
def test_configurations_say_infinity_as_python_does(text):
    assert decode_config(text.encode()) == {"limit": [0.0, math.inf]}


@pytest.mark.parametrize(
    ("text", "why"), [("[1]", "a JSON list"), ("{", "is not JSON"), ('{"a": NaN}', "is not JSON"),
                      ("[" * 100_000, "is not JSON|too deeply")],
)  # fmt: skip
def test_a_configuration_that_is_none_is_refused(text, why):
    with pytest.raises(FileError, match=why):
        decode_config(text.encode(), "config.json")
