"""Plans kept between processes: the same problem gets the same tiles, so its kernel is there too.

A search that a clock cuts short may end elsewhere the next time, and another choice of tiles is
another kernel to compile. So what was found is kept under the user's cache folder, by a hash of the
problem, and read again only if it is a valid schedule of that problem.
"""

import hashlib
from pathlib import Path

from partita import files
from partita.errors import PartitaError
from partita.gpu.rtasks.generate import cache_folder
from partita.problems.rtasks import RtasksProblem, RtasksSolution, evaluate
from partita.search.base import Result, Status

FORMAT = "rtasks-plan"
MOST_KEPT = 200  # the oldest make room


def plan_path(problem: RtasksProblem, method: str, seed: int) -> Path:
    """Where the plan of a problem is kept."""
    text = files.encode_json({"problem": problem.to_json(), "method": method, "seed": seed})
    return cache_folder() / f"plan_{hashlib.sha256(text).hexdigest()[:20]}.json"


def read_plan(problem: RtasksProblem, method: str, seed: int) -> Result[RtasksSolution] | None:
    """The plan that was kept, if it is one for this problem."""
    path = plan_path(problem, method, seed)
    if not path.exists():
        return None
    try:
        value = files.decode_json(files.read_bytes(path), str(path))
        files.check_format(value, FORMAT, file=str(path))
        solution = RtasksSolution.from_json(value["solution"], str(path))
        objective = evaluate(problem, solution)
        bound = float(value["lower_bound"])
    except (PartitaError, KeyError, TypeError, ValueError):
        return None  # as good as not there
    return Result(
        method,
        Status.FEASIBLE,
        solution,
        objective,
        bound,
        "kept from an earlier search",
        0.0,
        seed,
    )


def keep_plan(problem: RtasksProblem, result: Result[RtasksSolution], method: str) -> None:
    """Keep a plan; a folder that cannot be written is none of the caller's concern."""
    if result.solution is None:
        return
    path = plan_path(problem, method, result.seed)
    value = {
        "format": f"partita/{FORMAT}@1",
        "lower_bound": result.lower_bound or 0.0,
        "solution": result.solution.to_json(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, files.encode_json(value), overwrite=True)
        kept = sorted(path.parent.glob("plan_*.json"), key=lambda each: each.stat().st_mtime)
        for old in kept[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
    except (OSError, PartitaError):
        return
