"""Imports go one way, heavy packages stay where they belong, and starting is fast."""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import partita

SOURCE = Path(partita.__file__).parent

# A module imports only from its left.
ORDER = [
    "errors",
    "showing",
    "suggest",
    "files",
    "units",
    "graph",
    "cluster",
    "meaning",
    "program",
    "timeline",
    "degrees",
    "plans",
    "problems",
    "schedules",
    "zoo",
    "capture",
    "costs",
    "compiled",
    "forecast",
    "search",
    "lower",
    "engine",
    "verify",
    "jobs",
    "export",
    "report",
    "emit",
    "run",
    "gpu",
    "notebook",
    "serve",
    "cli",
]

# The packages that cost time or are optional, and the places that may import them.
HEAVY = {
    "torch": ("capture", "emit", "run", "gpu", "cli/doctor.py"),
    "onnx": ("capture",),
    "triton": ("gpu",),
    "ortools": ("search",),
    "pymetis": ("search",),
    "numba": ("compiled.py", "cli/doctor.py"),
    "rich": ("report", "cli"),
    "click": ("cli",),
    "starlette": ("serve",),
    "distributed": ("jobs",),
    "altair": ("notebook",),
    "pandas": ("notebook",),
    "polars": ("notebook",),
    "uvicorn": ("serve",),
}

# What `import partita` itself must not load.
NOT_AT_START = {
    "torch", "ortools", "numba", "numpy", "onnx", "triton", "rich", "click", "pymetis", "pandas",
    "polars", "altair", "starlette", "uvicorn", "distributed",
}  # fmt: skip

# What `from partita import *` gives; a name is public by standing here.
PUBLIC = [
    "Block", "CaptureError", "Cluster", "Forecast", "Graph", "GraphBuilder", "GreedyDecoder",
    "InputError", "PartitaError", "Placement", "Plan", "Program", "ProgramBuilder", "Result",
    "Stop", "Strategy", "Timeline", "Transformer", "VerificationError", "accelerate", "capture",
    "check_plan", "cluster_from", "compare", "decode_step", "execute", "generate", "model",
    "partition", "persistent", "pipe", "place", "placed_draws", "plan", "read_graph", "read_plan",
    "rtasks", "schedule", "shard", "simulate", "streams", "training_graph", "with_loss",
]  # fmt: skip

MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
INSIDE = [path for path in MODULES if path.name != "__main__.py" and path != Path("__init__.py")]


def component(path: Path) -> str:
    """The part of the package that a file belongs to: `graph/record.py` is of `graph`."""
    return path.parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse((SOURCE / path).read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of its syntax tree that a test here asks for."""
    kinds = (
        ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Name,
        ast.arg, ast.keyword,
    )  # fmt: skip
    return tuple(node for node in ast.walk(parsed(path)) if isinstance(node, kinds))


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Every name that a file imports, wherever in it the import stands: `partita.files.convert`."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    package = ["partita", *path.parts[:-1]]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(above + ([node.module] if node.module else []))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def run(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `code`."""
    return set(json.loads(run(f"{code}\nimport sys, json\nprint(json.dumps(list(sys.modules)))")))


def test_every_file_belongs_to_a_known_part():
    assert {component(path) for path in INSIDE} <= set(ORDER)


# One test for all modules, since there are 500 of them: what is wrong names the module.


def test_a_module_imports_only_from_its_left():
    wrong = []
    for path in INSIDE:
        here = ORDER.index(component(path))
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "partita" and parts[1:] != ["__version__"]:
                if parts[1] not in ORDER:
                    wrong.append(f"{path} imports {name}, which has no place in the order")
                elif ORDER.index(parts[1]) > here:
                    wrong.append(f"{path} imports {name} from its right")
    assert not wrong, "\n".join(wrong)


def test_a_class_name_has_one_meaning():
    homes: dict[str, list[str]] = {}
    for path in INSIDE:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_a_name_says_what_it_holds():
    # `found` said nothing in 2,500 places; of an error it is what was found (errors.py).
    wrong = []
    for path in INSIDE:
        for node in nodes(path):
            name = getattr(node, "id", None) or getattr(node, "arg", None)
            if name == "found" and path != Path("errors.py"):
                wrong.append(f"{path}:{node.lineno}: `found`")
    assert not wrong, "\n".join(wrong)


def is_kernel(function: ast.FunctionDef) -> bool:
    """Is it compiled as one piece, by Triton or numba (`inner` is numba, without a boundary)?"""
    decorators = [ast.unparse(each).split("(")[0] for each in function.decorator_list]
    return bool({"triton.jit", "compiled", "inner"} & set(decorators))


def test_a_function_outside_kernels_has_at_most_80_lines():
    wrong = []
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > 80 and not is_kernel(node):
                    wrong.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_are_imported_only_where_they_belong():
    wrong = []
    for path in MODULES:
        for name in imported(path):
            package = name.split(".")[0]
            allowed = HEAVY.get(package)
            if allowed is not None and not {component(path), path.as_posix()} & set(allowed):
                wrong.append(f"{path} imports {package}")
    assert not wrong, "\n".join(wrong)


def test_importing_partita_loads_nothing_heavy():
    assert not loaded_by("import partita") & NOT_AT_START


def test_the_records_load_without_compiler_or_torch():
    records = ORDER[: ORDER.index("capture")]
    names = [
        ".".join(["partita", *path.with_suffix("").parts]).removesuffix(".__init__")
        for path in INSIDE
        if component(path) in records
    ]
    loaded = loaded_by("\n".join(f"import {name}" for name in names))
    assert set(names) <= loaded
    assert not loaded & {"numba", "torch", "ortools", "onnx", "click"}


def test_the_public_names_are_the_listed_ones():
    assert partita.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(partita))
    kinds = run(f"import partita\nprint(*(type(getattr(partita, n)).__name__ for n in {PUBLIC}))")
    # no module that has taken the name; `partita.capture`, once loaded, is called like its function
    assert set(kinds.split()) <= {"type", "function", "_Callable"}


def test_a_name_that_is_not_public_is_refused():
    with pytest.raises(AttributeError, match="module 'partita' has no attribute 'plann'"):
        _ = partita.plann


def test_importing_partita_takes_less_than_300_ms():
    code = "import time\nt = time.perf_counter()\nimport partita\nprint(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_help_takes_less_than_500_ms():
    code = (
        "import subprocess, sys, time\nt = time.perf_counter()\n"
        "subprocess.run([sys.executable, '-m', 'partita', '--help'], stdout=subprocess.DEVNULL)\n"
        "print(time.perf_counter() - t)"
    )
    assert min(float(run(code)) for _ in range(3)) < 0.5
