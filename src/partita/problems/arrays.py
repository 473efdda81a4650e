"""Arrays in .npz files, read without trust: no pickles, and no more memory than the file deserves.

An .npz file is a zip of .npy members. The sizes in the zip's table, which no member can exceed when
it is unpacked, must stay within `MAX_ARRAY_BYTES` together; then each member's header (type and
shape) must agree with its size before its content is unpacked. So a small file that would unpack to
terabytes is refused while it is still small.
"""

import io
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from partita.errors import FileError

MAX_ARRAY_BYTES = 512 * 1024**2
MAX_MEMBERS = 1_000_000
_PLAIN_KINDS = "biufUS"  # no objects, no records: nothing that could hold more than numbers or text
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    KeyError,
    IndexError,
    OverflowError,
    RecursionError,
    NotImplementedError,  # a compression that this Python does not have
    RuntimeError,  # an encrypted member
)


def read_arrays(data: bytes, file: str = "") -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file by name."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _unpack(archive, file)
    except _UNREADABLE as error:
        reason = str(error).split("\n")[0][:100] or type(error).__name__
        fix = "give an .npz file of plain arrays"
        raise FileError(f"is not an .npz file ({reason})", fix=fix, file=file) from None


def write_arrays(arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """The bytes of an .npz file; the same arrays give the same bytes on any day."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy")  # its date is 1980, not today
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, member.getvalue())
    return buffer.getvalue()


def _unpack(archive: zipfile.ZipFile, file: str) -> dict[str, npt.NDArray[Any]]:
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise FileError(f"holds {len(members):,} arrays", fix=f"at most {MAX_MEMBERS:,}", file=file)
    seen: set[str] = set()
    for member in members:
        if not member.filename.endswith(".npy") or member.filename in seen:
            wrong = "is there twice" if member.filename in seen else "is no .npy member"
            raise FileError(wrong, field=member.filename[:60], file=file)
        seen.add(member.filename)
    total = sum(member.file_size for member in members)
    if total > MAX_ARRAY_BYTES:
        raise FileError(
            f"would unpack to {total:,} bytes", fix=f"at most {MAX_ARRAY_BYTES:,}", file=file
        )
    return {
        member.filename.removesuffix(".npy"): _read_member(archive, member, file)
        for member in members
    }


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: str) -> npt.NDArray[Any]:
    with archive.open(member) as stream:
        shape, by_columns, dtype, header_bytes = _header(stream)
        needed = math.prod(shape) * dtype.itemsize
        too_wide = dtype.kind == "f" and dtype.itemsize > 8  # would overflow where it is used
        if dtype.kind not in _PLAIN_KINDS or dtype.subdtype is not None or too_wide:
            raise FileError(
                f"has the type {str(dtype)[:40]}",
                fix="plain numbers or text are needed",
                field=member.filename[:60],
                file=file,
            )
        if min(shape, default=0) < 0 or needed != member.file_size - header_bytes:
            raise FileError(
                f"says the shape {shape} of {dtype}, {needed:,} bytes, and has "
                f"{member.file_size - header_bytes:,}",
                fix="write the file again",
                field=member.filename[:60],
                file=file,
            )
        content = stream.read(needed)  # reading to the end also compares the checksum
        if len(content) != needed or stream.read(1):
            raise FileError("is cut off", fix="write the file again", field=member.filename[:60])
    array: npt.NDArray[Any] = np.frombuffer(content, dtype=dtype)
    array = array.reshape(shape, order="F" if by_columns else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, column-major or not, type, and how many bytes the header took."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers of Python 2, which are read all the same
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, by_columns, dtype = read(stream)
    return shape, by_columns, dtype, stream.tell()
