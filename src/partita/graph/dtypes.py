"""Names of element types and their sizes."""

from partita.errors import GraphError

BYTES: dict[str, int] = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "f8": 1,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "bool": 1,
}
FLOATS = ("f64", "f32", "f16", "bf16", "f8")


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element."""
    try:
        return BYTES[dtype]
    except KeyError:
        raise GraphError(
            f"unknown dtype {dtype!r}", fix=f"use one of {', '.join(BYTES)}", field="dtype"
        ) from None
