"""Dataclasses that a model takes or gives: made known to PyTorch, which asks for that.

`torch.export` takes apart what it has been told of. A dataclass says itself what is in it, so those
in the arguments, and the one that a first attempt found in the result, are told to it.
"""

import dataclasses
import logging
import re
import sys
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves

log = logging.getLogger("partita")


def know_arguments(given: Any) -> None:
    """Make the dataclasses among arguments known, and those within them."""
    for leaf in tree_leaves(given):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and _know(type(leaf)):
            know_arguments([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def know_result(error: BaseException) -> bool:
    """Make the dataclass known that an export has found in the result; is there one?"""
    name = unknown_type(error)
    cls = _class_of(name) if name else None
    return cls is not None and dataclasses.is_dataclass(cls) and _know(cls)


def unknown_type(error: BaseException) -> str:
    """The name of the type that export could not take apart, if that is what it complains about."""
    match = re.search(
        r"(?:Found <class '([^']+)'> in \w+, which is not a known type"
        r"|Unsupported input type <class '([^']+)'>)",
        str(error),
    )
    return (match[1] or match[2]) if match else ""


def _know(cls: type) -> bool:
    if cls in SUPPORTED_NODES:
        return False
    try:
        torch.export.register_dataclass(cls)
    except Exception:  # fields that cannot be given to it
        log.debug("%s cannot be made known", cls.__name__, exc_info=True)
        return False
    return True


def _class_of(name: str) -> type | None:
    """A class by module and name; one within a function has none that can be looked up."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        place: Any = sys.modules.get(".".join(parts[:length]))
        for part in parts[length:] if place is not None else ():
            place = getattr(place, part, None)
        if isinstance(place, type):
            return place
    return None
