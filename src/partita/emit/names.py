"""Names in emitted code: identifiers always, never keywords, never what Python or torch owns."""

import builtins
import keyword
import re
from collections.abc import Iterable

from torch import nn

MOST = 32  # characters of a variable's name
POOL = ("x", "y", "z", "u", "v", "w")
_OWN = {
    "torch", "nn", "Tensor", "F", "self", "stages", "state_dict", "constants", "checkpoint",
    "CheckpointPolicy", "threading", "contextlib", "RunAgain", "CountedOnce",
}  # fmt: skip
_SPOKEN_FOR = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *_OWN}
_AMBIGUOUS = {"l", "O", "I"}  # ruff's E741
# Attributes that a module cannot have as children without hiding its own.
RESERVED = {*dir(nn.Module()), "takes", "gives"}


def variable(text: str, fallback: str = "x") -> str:
    """A lower-case variable name made of a text; `fallback` where nothing is left of it."""
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    if name and name[0].isdigit():
        name = f"{fallback}_{name}"
    name = name[-MOST:].strip("_") if len(name) > MOST else name
    name = name.lstrip("0123456789_") or fallback
    return f"{name}_" if name in _SPOKEN_FOR or name in _AMBIGUOUS else name


def class_name(text: str, fallback: str = "Block") -> str:
    """A class name in CapWords made of a text."""
    words = re.split(r"[^A-Za-z0-9]+", text)
    name = "".join(word[:1].upper() + word[1:] for word in words)[:MOST].lstrip("0123456789")
    return f"{fallback}{name}" if not name or name in _SPOKEN_FOR else name


def is_attribute(name: str) -> bool:
    """True where `module.name` means the child of that name and nothing else."""
    plain = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    return plain and name not in RESERVED and not name.startswith("__")


def unused(name: str, taken: Iterable[str], between: str = "_") -> str:
    """The name, numbered where it is taken."""
    used = set(taken)
    if name not in used:
        return name
    number = 2
    while f"{name}{between}{number}" in used:
        number += 1
    return f"{name}{between}{number}"
