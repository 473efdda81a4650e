"""Reading and writing files: formats with versions, atomic writes, nothing overwritten unasked.

Every file of ours says what it is: `"format": "partita/<kind>@<version>"`. Reading one never
executes code; what is malformed gets an `InputError` that names the file, the field and the fix.
"""

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from partita.errors import FileError, InputError

T = TypeVar("T")

MAX_BYTES = 2 * 1024**3
_FORMAT = re.compile(r"partita/(?P<kind>[a-z-]+)@(?P<version>[0-9]{1,6})\Z")


def read_bytes(path: str | Path) -> bytes:
    """The file's bytes; a clear error if it cannot be had or is absurdly large."""
    file = Path(path)
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise FileError(
                f"the file has {size:,} bytes",
                fix=f"at most {MAX_BYTES:,} are read",
                file=str(path),
            )
        return file.read_bytes()
    except FileNotFoundError:
        raise FileError("no such file", fix="check the path", file=str(path)) from None
    except IsADirectoryError:
        raise FileError("is a folder", fix="name a file in it", file=str(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise FileError(
            f"cannot be read ({reason})", fix="check the path", file=str(path)
        ) from None


def decode_json(data: bytes, file: str = "") -> dict[str, Any]:
    """The JSON object in `data`, as plain Python values."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise FileError("is nested too deeply for a file of ours", file=file) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError(
            f"is not JSON ({error})", fix="give a JSON file written by partita", file=file
        ) from None
    if not isinstance(value, dict):
        raise FileError(
            f"holds a JSON {_json_type(value)}", fix="a JSON object is needed", file=file
        )
    return value


def decode_config(data: bytes, file: str = "") -> dict[str, Any]:
    """The same for files of others, where Python's writers say infinity, which JSON cannot.

    `Infinity`, as the standard library has it, and `{"__float__": "Infinity"}`, as `transformers`.
    """

    def number(name: str) -> float:
        if name != "Infinity":
            raise ValueError(name)
        return math.inf

    def plain(fields: dict[str, Any]) -> Any:
        return math.inf if fields == {"__float__": "Infinity"} else fields

    try:
        value = json.loads(data, parse_constant=number, object_hook=plain)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else decode_json(data, file)  # which says what is wrong


def check_format(value: dict[str, Any], kind: str, version: int = 1, file: str = "") -> None:
    """Refuse what is not `partita/<kind>@<version or older>`."""
    needed = f"partita/{kind}@{version}"
    file_format = value.get("format")
    if not isinstance(file_format, str):
        raise FileError(
            "is missing" if file_format is None else f"is {_json_type(file_format)}, not text",
            fix=f'needs "format": "{needed}"',
            field="format",
            file=file,
        )
    match = _FORMAT.match(file_format)
    if match is None or match["kind"] != kind:
        raise FileError(
            f"found {_shown(file_format)}",
            fix=f'"{needed}" is needed here',
            field="format",
            file=file,
        )
    if int(match["version"]) > version:
        raise FileError(
            f"found {_shown(file_format)}, written by a newer partita (this one reads up to "
            f"@{version})",
            fix="upgrade with: pip install -U partita",
            field="format",
            file=file,
        )
    if int(match["version"]) < 1:
        raise FileError(
            f"found {_shown(file_format)}, and versions start at 1", field="format", file=file
        )


def format_kind(value: dict[str, Any], file: str = "") -> str:
    """The `<kind>` of a file that says `partita/<kind>@n`, to choose its reader by."""
    file_format = value.get("format")
    match = _FORMAT.match(file_format) if isinstance(file_format, str) else None
    if match is None:
        raise FileError(
            "is missing" if file_format is None else f"found {_shown(str(file_format))}",
            fix='needs "format": "partita/<kind>@1"',
            field="format",
            file=file,
        )
    return match["kind"]


def convert(value: object, to: type[T], file: str = "") -> T:
    """`value` (plain Python from JSON or TOML) as the typed record `to`, naming the wrong field."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        text = str(error)
        message, _, path = text.rpartition(" - at ")
        field = path.strip("`").removeprefix("$").removeprefix(".") if message else ""
        raise FileError(message or text, fix="correct this field", field=field, file=file) from None


def read_record(path: str | Path, kind: str, to: type[T], version: int = 1) -> T:
    """Read a JSON file of ours: format checked, then every field."""
    return record_of(read_bytes(path), kind, to, version, str(path))


def record_of(data: bytes, kind: str, to: type[T], version: int = 1, file: str = "") -> T:
    """The record in the bytes of a JSON file of ours."""
    value = decode_json(data, file)
    check_format(value, kind, version, file)
    try:
        return convert(value, to, file)
    except InputError as error:
        raise (error if error.file else error.within(file)) from None


def encode_json(value: object, *, indent: int = 1) -> bytes:
    """Plain values and records as JSON text; inf and NaN are our own mistake."""
    plain = msgspec.to_builtins(value)
    return (json.dumps(plain, indent=indent or None, allow_nan=False) + "\n").encode()


def can_hold_files(folder: Path) -> bool:
    """Can a file be made there? Tried, since rights alone do not say it."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def write_atomically(path: str | Path, data: bytes | str, *, overwrite: bool = False) -> Path:
    """Write beside the target, then rename: a reader never sees half a file.

    An existing file is kept unless `overwrite` is asked for.
    """
    target = Path(path)
    content = data.encode() if isinstance(data, str) else data
    try:
        handle, temporary = tempfile.mkstemp(
            dir=target.parent or Path("."), prefix=f".{target.name}."
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(
            f"cannot be written ({reason})", fix="choose another place", file=str(path)
        ) from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        if overwrite:
            os.replace(temporary, target)
        else:
            _name_as(temporary, target)
    except FileExistsError:
        os.unlink(temporary)
        raise FileError(
            "exists already", fix="choose another name or add --force", file=str(path)
        ) from None
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise FileError(
            f"cannot be written ({error.strerror})", fix="choose another place", file=str(path)
        ) from None
    return target


def _name_as(temporary: str, target: Path) -> None:
    """Give a file its name; fails if there is such a file, without a race."""
    try:
        os.link(temporary, target)
        os.unlink(temporary)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: the name is taken first
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(temporary, target)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _json_type(value: object) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "true/false", type(None): "null"}
    return names.get(type(value), "number")


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= 60 else text[:57] + "...")
