"""Arbitrary JSON in place of any part of a valid file, to try readers with."""

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from partita.errors import InputError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.sampled_from([10**30, 10**400, -(10**400), 1e308])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def attempt(read: Callable[..., Any], *args: Any) -> Any:
    """What was read, or the refusal; any other error is a failure."""
    try:
        return read(*args)
    except InputError as refusal:
        return refusal


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every part of a JSON value is."""
    places = [here]
    if isinstance(value, dict):
        for key, inner in value.items():
            places += paths(inner, (*here, key))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            places += paths(inner, (*here, index))
    return places


@st.composite
def mutated(draw: st.DrawFn, valid: dict[str, Any]) -> dict[str, Any]:
    """The valid object with one part replaced or left out."""
    result = copy.deepcopy(valid)
    path = draw(st.sampled_from(paths(valid)[1:]))
    parent: Any = result
    for step in path[:-1]:
        parent = parent[step]
    if isinstance(parent, dict) and draw(st.booleans()):
        del parent[path[-1]]
    else:
        parent[path[-1]] = draw(JSON)
    return result
