"""PaSE's own interface, for its users: `partita shard --graph transformer --procs 16`."""

import cProfile
import io
import pstats
import statistics
from pathlib import Path
from typing import Any

from partita import units
from partita.cli.base import Output, OutputFile
from partita.costs.pase import describe, pase_problem
from partita.errors import InputError
from partita.files import encode_json, write_atomically
from partita.problems.sharding import ShardingProblem, ShardingSolution, check
from partita.search import searches
from partita.search.base import Result, Stop

ALGORITHMS = {"dp": "pase", "0": "pase", "brute": "brute", "1": "brute"}
SHOWN_FUNCTIONS = 15


def solve_pase(
    out: Output,
    *,
    graph: str,
    procs: int,
    batch: int | None,
    flops: float,
    bw: float,
    algo: str | None,
    costs: str | None,
    measure: bool,
    profile: bool,
    output: OutputFile | None,
    time_limit: float | None,
    dump_graph: Path | None,
) -> int:
    """Build PaSE's problem, solve it, and say the strategy by op and dim name."""
    del costs  # PaSE's graphs have no others
    method = _method(algo)
    problem, ops = pase_problem(graph, procs, batch or 128, flops, bw)
    if dump_graph is not None:
        out.keep(dump_graph, lambda: write_atomically(dump_graph, _dot(graph, problem)))
    with out.stop(time_s=time_limit) as stop:
        if profile:
            result, text = _profiled(problem, method, stop, out.seed)
            out.note(text)
        else:
            result = searches("sharding")[method](problem, stop, out.seed)
        again = (searches("sharding")[method] for _ in range(4 if measure else 0))
        times = [result.seconds, *(search(problem, stop, out.seed).seconds for search in again)]
    if result.solution is not None and (wrong := check(problem, result.solution)):
        raise AssertionError(wrong)
    answer = {
        "format": "partita/result@1",
        "problem": graph,
        "procs": procs,
        "batch": batch or 128,
        "costs": "pase",
        "method": method,
        "status": str(result.status),
        "objective": result.objective,
        "lower_bound": result.lower_bound,
        "seconds": statistics.fmean(times),
        "seed": out.seed,
        "why": result.why,
        "solution": None if result.solution is None else result.solution.to_json(),
    }
    out.show(_text(problem, ops, result, times))
    if output is not None:
        out.save(output, lambda: encode_json(answer))
    out.result({**answer, "plan": None})
    return 0 if result.solution is not None else 1


def _method(algo: str | None) -> str:
    if algo is None:
        return next(iter(searches("sharding")))
    if algo not in ALGORITHMS:
        raise InputError(f"found {algo!r}", fix="use dp (0) or brute (1)", field="--algo")
    return ALGORITHMS[algo]


def _text(
    problem: ShardingProblem, ops: Any, result: Result[ShardingSolution], times: list[float]
) -> str:
    lines: list[str] = []
    if result.solution is not None:
        lines.extend(describe(problem, ops, result.solution))
        lines.append("")
    cost = "none" if result.objective is None else f"{result.objective:,.0f} FLOP"
    lines.append(f"Total cost: {cost}   ({result.status}: {result.why})")
    mean = statistics.fmean(times)
    lines.append(f"search: {units.seconds(mean)}" + (" (mean of 5)" if len(times) > 1 else ""))
    return "\n".join(lines)


def _profiled(
    problem: ShardingProblem, method: str, stop: Stop, seed: int
) -> tuple[Result[ShardingSolution], str]:
    profiler = cProfile.Profile()
    result = profiler.runcall(searches("sharding")[method], problem, stop, seed)
    stream = io.StringIO()
    pstats.Stats(profiler, stream=stream).sort_stats("cumulative").print_stats(SHOWN_FUNCTIONS)
    return result, stream.getvalue()


def _dot(graph: str, problem: ShardingProblem) -> str:
    """The graph in Graphviz's language, as PaSE's option of the same name writes it."""

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    nodes = [
        f"  {i} [label={quoted(f'{name} ({count} choices)')}];"
        for i, (name, count) in enumerate(zip(problem.names, problem.num_choices, strict=True))
    ]
    edges = [f"  {u} -> {v};" for u, v in problem.edges]
    return "\n".join((f"digraph {quoted(graph)} {{", *nodes, *edges, "}", ""))
