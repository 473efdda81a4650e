"""Models that nobody here wrote, planned: does every command end, and is the emitted code right?

    python benchmarks/wild_plan.py [timm:NAME | torchvision:NAME | transformers:NAME ...]
        [--packages timm,transformers] [--every N] [--pin pp=2] [--batch 4] [--search-s 2]
        [--limit-s 300] [--lines FILE]

Models are those of `wild.py`. Each is a file with a function that makes it, as a user would write
one; then, as on the command line:

    plan FILE:make      for four A100, with what is pinned, and `verify`, `report`, `explain`,
                        `simulate`, `emit` of that plan
    GRAPH               `simulate`, `shard`, `partition`, `compare` of the captured graph
    run                 the emitted stages in turn, on the micro-batch they are written for, and
                        the module from the same seed: outputs bit for bit, gradients to rounding

A command is right if it ends with 0, or with 1 or 2 and a sentence (`refused`); anything else is a
crash.
"""

import argparse
import collections
import importlib.util
import multiprocessing
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent))

import wild

CLUSTER = "4xA100"
SEARCH_S = ["2"]  # what each search may take
OF_PLAN = ("verify", "report", "explain", "simulate", "emit")
OF_GRAPH = ("simulate", "shard", "partition", "compare")
SEARCHES = ("explain", "shard", "partition", "compare")
FILE = """
import sys
sys.path.insert(0, {folder!r})
import wild

def make(batch={batch}):
    return wild.made({name!r}, batch)
"""


def command(name: str, *words: str) -> wild.Check:
    """One command line in this process."""
    from partita.cli import partita

    start = time.monotonic()
    result = CliRunner().invoke(partita, [*words, "--quiet"])
    verdict = {0: "right", 1: "refused", 2: "refused"}.get(result.exit_code, "crash")
    said = (result.stderr.strip() or result.stdout.strip()).splitlines()
    why = "" if verdict == "right" else (said or [""])[-1][:300]
    where = ""
    if verdict == "crash" and result.exc_info is not None:
        error = result.exc_info[1]
        frames = traceback.extract_tb(result.exc_info[2])
        if error is not None and error.__cause__ is not None:
            frames = traceback.extract_tb(error.__cause__.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        why = f"{why} {error!r}"[:400]
    return wild.Check(name, words[0], verdict, why, where, time.monotonic() - start)


def checks(name: str, pins: list[str], batch: int) -> Iterator[wild.Check]:
    """Everything that is asked of one model, in a folder of its own."""
    folder = Path(tempfile.mkdtemp())
    file, plan, graph = folder / "model.py", folder / "plan.json", folder / "graph.json"
    benchmarks = str(Path(__file__).parent)
    file.write_text(FILE.format(folder=benchmarks, batch=batch, name=name))
    try:
        wild.made(name, batch)
    except Exception as error:
        yield wild.Check(name, "", "unbuilt", f"{type(error).__name__}: {error}"[:300])
        return
    try:
        words = [word for pin in pins for word in ("--pin", pin)]
        planned = command(
            name, "plan", f"{file}:make", "-c", CLUSTER, "--batch", str(batch), *words,
            "--time-limit", SEARCH_S[0], "-o", str(plan),
        )  # fmt: skip
        yield planned
        if planned.verdict != "right":
            return
        written = {"report": folder / "report.html", "emit": folder / "stages.py"}
        for verb in OF_PLAN:
            more = ["-o", str(written[verb])] if verb in written else []
            yield command(name, verb, str(plan), *more, *_limit(verb))
        yield ran(name, plan)
        _write_graph(plan, graph)
        for verb in OF_GRAPH:
            outcome = command(name, verb, str(graph), "-c", CLUSTER, *_limit(verb))
            yield wild.Check(**{**vars_of(outcome), "check": f"{verb} of the graph"})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _limit(verb: str) -> list[str]:
    return ["--time-limit", SEARCH_S[0]] if verb in SEARCHES else []


def vars_of(check: wild.Check) -> dict[str, Any]:
    """The fields of a check."""
    return {key: getattr(check, key) for key in check.__dataclass_fields__}


def _write_graph(plan: Path, graph: Path) -> None:
    from partita.graph.backward import forward_part
    from partita.graph.files import write_graph
    from partita.jobs.workload import load_model
    from partita.plans import read_plan

    write_graph(graph, forward_part(load_model(read_plan(plan)).graph))


def ran(name: str, path: Path) -> wild.Check:
    """The plan's stages emitted and run, compared with the module."""
    start = time.monotonic()
    try:
        verdict, why, line = "right", _difference(name, path), ""
        verdict = "wrong" if why else "right"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict, why = "crash", f"{type(error).__name__}: {error}"[:300]
        line = f"{where.filename}:{where.lineno}"
    return wild.Check(name, "run", verdict, why, line, time.monotonic() - start)


def _difference(name: str, path: Path) -> str:
    from partita.capture import export_module
    from partita.emit.plans import emit_plan
    from partita.plans import read_plan
    from partita.run.sequential import load_source, run_stages

    plan = read_plan(path)
    emitted = emit_plan(plan)
    module, args, kwargs = wild.made(name, plan.model.batch // plan.schedule.num_microbatches)
    module.train()
    other = wild.made(name, plan.model.batch // plan.schedule.num_microbatches)[0].train()
    held: dict[str, Any] = dict(module.named_buffers(remove_duplicate=False))
    held |= dict(module.named_parameters(remove_duplicate=False))
    if any(constant not in held for constant in emitted.constants):
        held |= export_module(module, args, kwargs).program.constants
    stages = load_source(emitted.source).build_stages(held)
    flat, _ = pytree.tree_flatten((args, kwargs))
    given = {
        name: value for name, value in zip(emitted.inputs, flat, strict=True) if name is not None
    }

    class Stages(torch.nn.Module):
        def forward(self) -> list[Any]:
            known = run_stages(stages, given)
            return [known[out] if isinstance(out, str) else out[0] for out in emitted.outputs]

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return module.named_parameters(*args, **kwargs)

        def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
            return module.named_buffers(*args, **kwargs)

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = other

        def forward(self) -> list[Any]:
            return pytree.tree_flatten(self.inner(*args, **kwargs))[0]

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return other.named_parameters(*args, **kwargs)

        def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
            return other.named_buffers(*args, **kwargs)

    return wild.difference(wild.observed(Stages(), (), {}), wild.observed(Flat(), (), {}))


def child(name: str, pins: list[str], batch: int, end: Connection) -> None:
    """Run one model and send each check through the pipe."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for check in checks(name, pins, batch):
        end.send(check)
    end.close()


def one(name: str, pins: list[str], batch: int, limit_s: float) -> list[wild.Check]:
    """The checks of a model, in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, pins, batch, there), daemon=True)
    process.start()
    there.close()
    known: list[wild.Check] = []
    deadline = time.monotonic() + limit_s
    while True:
        if not here.poll(max(0.0, deadline - time.monotonic())):
            process.kill()
            known.append(wild.Check(name, "", "timeout"))
            break
        try:
            known.append(here.recv())  # type: ignore[arg-type]
        except EOFError:
            process.join()
            if process.exitcode:
                known.append(wild.Check(name, "", "crash", f"exit code {process.exitcode}"))
            break
    return known


def main() -> None:
    """Plan the models asked for and print what each command came to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="package:model; else all of --packages")
    parser.add_argument("--packages", default=",".join(wild.PACKAGES))
    parser.add_argument("--every", type=int, default=1, help="only each so-many-th model")
    parser.add_argument("--pin", action="append", default=[], help="what the plan keeps to: pp=2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--search-s", default="2", help="what each search may take")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--lines", type=Path, help="a line for each check; models in it are kept")
    options = parser.parse_args()
    SEARCH_S[0] = options.search_s
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    packages = options.packages.split(",")
    every = [f"{p}:{name}" for p in packages for name in wild.PACKAGES[p][1].split()]
    names = options.names or every[:: options.every]
    for package in sorted({name.partition(":")[0] for name in names}):
        wild.import_package(package)
    importlib.util.find_spec("partita.cli")
    results = wild.read_lines(options.lines)
    before = {check.model for check in results}
    for name in (name for name in names if name not in before):
        known = one(name, options.pin, options.batch, options.limit_s)
        results += known
        wild.append_lines(options.lines, known)
        for check in known:
            if check.verdict != "right":
                print(f"{check.verdict:8} {name} [{check.check}] {check.why} {check.line}")
        counts = collections.Counter(check.verdict for check in known)
        seconds = sum(check.seconds for check in known)
        print(f"{name}: {dict(counts)} {seconds:.0f} s", flush=True)
    print("| command | right | refused | wrong | crash |")
    print("|---|---|---|---|---|")
    for verb in dict.fromkeys(check.check for check in results if check.check):
        counts = collections.Counter(check.verdict for check in results if check.check == verb)
        print(f"| {verb} | " + " | ".join(str(counts[v]) for v in wild.VERDICTS[:4]) + " |")


if __name__ == "__main__":
    main()
