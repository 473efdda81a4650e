"""The walk of one `plan` through the source: which files call which, and does it go one way?

    python benchmarks/plan_walk.py [MODEL] [CLUSTER] [--batch N] [--edges] [--json]

Runs a plan under a profiler that sees every call, and counts the files of `partita` that run and
the edges between them: (file of the caller, file of the called), each once however often it is
taken. Parts (`costs`, `search`, ...) stand in the order of `tests/test_imports.py`, in which a
module imports only from its left. A call that goes to the left, or stays in its part, is a use; one
that goes to the right must have been handed in (a simulator, a table that is made when asked for),
since it cannot have been imported. What goes both ways between two parts is said with both counts.
"""

import argparse
import collections
import json
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import partita
from partita.search.base import Stop
from tests.test_imports import ORDER, component

SOURCE = Path(partita.__file__).parent
Edge = tuple[str, str]


class Walk:
    """Calls between files of the package, counted; begin with `start`."""

    def __init__(self) -> None:
        self.calls: collections.Counter[Edge] = collections.Counter()
        self._place: dict[str, str] = {}  # file -> its path in the package, "" outside

    def place(self, file: str) -> str:
        """A file as the package calls it; empty where it is none of the package."""
        if file not in self._place:
            inside = file.startswith(str(SOURCE))
            self._place[file] = str(Path(file).relative_to(SOURCE)) if inside else ""
        return self._place[file]

    def seen(self, frame: FrameType, event: str, _: Any) -> None:
        """What the profiler is told of."""
        if event != "call":
            return
        called = self.place(frame.f_code.co_filename)
        if not called:
            return
        caller: FrameType | None = frame.f_back
        while caller is not None and not self.place(caller.f_code.co_filename):
            caller = caller.f_back  # through sorted(), functools.cache and their like
        if caller is not None:
            self.calls[self.place(caller.f_code.co_filename), called] += 1


def summary(calls: collections.Counter[Edge]) -> dict[str, Any]:
    """Files, edges, and which way they go."""
    files = {file for edge in calls for file in edge}
    edges = {edge for edge in calls if edge[0] != edge[1]}
    rank = {name: i for i, name in enumerate(ORDER)}
    parts = [(component(Path(a)), component(Path(b))) for a, b in edges]
    parts = [(a, b) for a, b in parts if a in rank and b in rank]  # not partita/__init__.py
    right = collections.Counter((a, b) for a, b in parts if rank[b] > rank[a])
    left = collections.Counter((a, b) for a, b in parts if rank[b] < rank[a])
    both = {
        f"{a} <> {b}": [left[b, a], count]
        for (a, b), count in sorted(right.items())
        if left[b, a]
    }  # fmt: skip
    return {
        "files": len(files),
        "files by part": dict(collections.Counter(component(Path(file)) for file in sorted(files))),
        "edges": len(edges),
        "inside a part": sum(a == b for a, b in parts),
        "to the left": left.total(),
        "to the right": right.total(),
        "both ways, left and right": both,
    }


def main() -> None:
    """Plan, and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="gpt2")
    parser.add_argument("cluster", nargs="?", default="8xA100")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--edges", action="store_true", help="list edges that go to the right")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    partita.plan  # noqa: B018  what importing calls is not part of the walk
    walk, began = Walk(), time.process_time()
    sys.setprofile(walk.seen)
    try:
        # No time limit: a slow machine must not change the walk.
        partita.plan(args.model, args.cluster, batch=args.batch, stop=Stop(gap=0.05))
    finally:
        sys.setprofile(None)
    counted = {**summary(walk.calls), "CPU s": round(time.process_time() - began, 1)}
    if args.json:
        print(json.dumps(counted))
        return
    for name, value in counted.items():
        print(f"{name:28} {value}")
    if args.edges:
        rank = {name: i for i, name in enumerate(ORDER)}
        for (a, b), count in sorted(walk.calls.items()):
            if rank.get(component(Path(b)), -1) > rank.get(component(Path(a)), 99):
                print(f"{a:40} {b:40} {count}")


if __name__ == "__main__":
    main()
