"""A topological order as close to the order given as can be: depth first, what is needed before.

Problems, which are numbered, take the smallest number first instead (`problems/dag.py`).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


class CycleError(Exception):
    """Items that need each other; `path` begins and ends with the same one."""

    def __init__(self, path: list[Hashable]) -> None:
        self.path = path
        super().__init__(" -> ".join(map(str, path)))


def dependencies_first(
    items: Iterable[Item], needs: Callable[[Item], Iterable[Item]]
) -> list[Item]:
    """The items and whatever they need, each once, after all that it needs."""
    done: dict[Item, None] = {}
    for root in items:
        stack: list[tuple[Item, Iterator[Item]]] = []
        waiting: dict[Item, None] = {}
        if root not in done:
            stack.append((root, iter(needs(root))))
            waiting[root] = None
        while stack:
            item, pending = stack[-1]
            needed = next((each for each in pending if each not in done), None)
            if needed is None:
                done[item] = None
                stack.pop()
                del waiting[item]
            elif needed in waiting:
                path = list(waiting)
                raise CycleError([*path[path.index(needed) :], needed])
            else:
                stack.append((needed, iter(needs(needed))))
                waiting[needed] = None
    return list(done)
