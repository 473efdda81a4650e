"""What numba has kept on disk is used again for the same sources, and never for others."""

import errno
import importlib
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import partita
from partita import compiled as module
from partita.cluster import resolve
from partita.compiled import compiled, fingerprint
from partita.costs.sharding import sharding_model
from partita.engine import run
from partita.engine.events import MODES
from partita.graph import training_graph
from partita.jobs.simulate import simulate
from partita.plans import Axis, Mesh
from partita.problems import load
from partita.search import searches
from partita.search.base import Stop
from partita.search.joint.cuts import LayerRanges
from partita.zoo import build

SOURCE = Path(partita.__file__).parent
DATA = Path(__file__).parent / "data"

MODULE = """
from typing import NamedTuple

from partita.compiled import compiled


class {name}(NamedTuple):
    number: int


@compiled()
def doubled(pair):
    return {factor} * pair.number


def result():
    return doubled({name}(3))
"""


@pytest.fixture
def version(tmp_path, monkeypatch):
    """Writes a version of a module in place of the last one and gives what its function gives."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name, factor):
        sys.modules.pop("upgraded", None)
        (tmp_path / "upgraded.py").write_text(MODULE.format(name=name, factor=factor))
        importlib.invalidate_caches()
        return importlib.import_module("upgraded").result()

    yield write
    sys.modules.pop("upgraded", None)


def kept(folder):
    return {path.name for path in (folder / "__pycache__").glob("*.nbi")}


def test_a_class_that_is_renamed_in_place_does_no_harm(version, tmp_path):
    """numba alone reads the old index first, and fails at the name of the class that is gone."""
    assert version("Old", 2) == 6
    (old,) = kept(tmp_path)
    assert version("New", 2) == 6
    assert len(kept(tmp_path)) == 2
    assert version("Old", 2) == 6
    assert old in kept(tmp_path)
    assert len(kept(tmp_path)) == 2  # what was compiled once is found again


def test_the_name_says_what_a_function_is_made_of(version, tmp_path):
    version("Old", 2)
    (name,) = kept(tmp_path)
    assert fingerprint(tmp_path / "upgraded.py") in name


class TestFingerprint:
    """Of a module and of all that it imports of the package."""

    @pytest.fixture
    def package(self, tmp_path):
        files = {
            "hot.py": "from partita.tables import (\n    A,\n    B,\n)\n\n\ndef f(): ...\n",
            "tables.py": "import os\n\nfrom partita.deep import numbers\n",
            "deep/__init__.py": "",
            "deep/numbers.py": "C = 1\n",
            "other.py": "D = 1\n",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    @pytest.mark.parametrize(
        ("changed", "differs"),
        [("hot.py", True), ("tables.py", True), ("deep/numbers.py", True), ("other.py", False)],
    )
    def test_changes_with_what_can_be_compiled_in(
        self, package, tmp_path_factory, changed, differs
    ):
        again = tmp_path_factory.mktemp("again")
        for path in package.rglob("*.py"):
            copy = again / path.relative_to(package)
            copy.parent.mkdir(exist_ok=True)
            text = path.read_text()
            copy.write_text(text + "E = 2\n" if path == package / changed else text)
        before = fingerprint(package / "hot.py", package)
        assert (fingerprint(again / "hot.py", again) != before) is differs

    def test_a_module_that_is_no_file_has_one_too(self, tmp_path):
        assert len(fingerprint(tmp_path / "nowhere.py")) == 12


def test_functions_of_the_package_are_compiled_in_no_other_way():
    others = [
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        if "import numba" in path.read_text() and path.name != "compiled.py"
    ]
    assert others == ["cli/doctor.py"]  # which tries whether numba can keep anything at all


def test_options_are_those_of_numba():
    @compiled(fastmath=True)
    def half(x):
        return x / 2

    assert half(3.0) == 1.5
    assert half.dispatcher.targetoptions["fastmath"] is True


def test_compiling_is_said_once_and_reading_from_disk_is_not(tmp_path):
    (tmp_path / "hot.py").write_text(
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout)\n"
        "from partita.compiled import compiled\n"
        "@compiled()\ndef double(x):\n    return 2 * x\n"
        "@compiled()\ndef triple(x):\n    return 3 * x\n"
        "print(double(2), triple(2))\n"
    )
    said = []
    for _ in range(2):
        run = [sys.executable, str(tmp_path / "hot.py")]
        said.append(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    line = "compiling for this machine: some seconds, the first time only\n"
    assert said == [line + "4 6\n", "4 6\n"]


@pytest.mark.parametrize("broken", ["load_overload", "save_overload"])
def test_files_of_numba_that_cannot_be_used_cost_no_run(broken, monkeypatch):
    from numba.core.caching import FunctionCache

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FunctionCache, broken, fails)

    @compiled()
    def twice(number):
        return number + number

    assert twice(21) == 42


def test_where_nothing_can_be_kept_functions_are_compiled_all_the_same(monkeypatch, caplog):
    def nowhere(self):
        raise RuntimeError("cannot cache function: no locator available")

    module._say_that_nothing_is_kept.cache_clear()
    monkeypatch.setattr("numba.core.dispatcher.Dispatcher.enable_caching", nowhere)
    with caplog.at_level(logging.INFO, "partita"):

        @compiled()
        def half(x):
            return x / 2

        assert half(3.0) == 1.5
    assert "no folder for compiled code can be written" in caplog.text


class TestSmallProblems:
    """They are interpreted: nothing is compiled for them, and the numbers are the same."""

    @pytest.fixture
    def doubled(self):
        @compiled(small=3)
        def doubled(x):
            return 2 * x

        return doubled

    def test_are_not_compiled(self, doubled):
        assert doubled(np.ones(3)).tolist() == [2, 2, 2]
        assert not doubled.dispatcher.signatures

    def test_end_where_arrays_are_large(self, doubled):
        assert doubled(np.ones(4)).sum() == 8
        assert doubled.dispatcher.signatures
        doubled(np.ones(3, np.int8))  # once compiled, it stays so
        assert len(doubled.dispatcher.signatures) == 2

    def test_end_where_interpreting_took_as_long_as_compiling(self, doubled):
        doubled.interpreted_s = module.PATIENCE_S
        doubled(1.5)
        assert doubled.dispatcher.signatures

    def test_end_in_a_long_run(self, doubled, monkeypatch):
        doubled.interpreted_s = module.GLANCE_S
        monkeypatch.setattr(module._Compiling, "interpreted_s", module.LONG_RUN_S)
        assert not doubled.has_patience()

    def test_end_at_once_where_code_is_on_disk(self, doubled, monkeypatch):
        doubled.interpreted_s = module.GLANCE_S
        monkeypatch.setattr(module._Compiling, "interpreted_s", 0.0)
        assert doubled.has_patience()
        doubled.is_kept = True
        assert not doubled.has_patience()

    def test_what_they_call_is_interpreted_too_in_its_plain_form(self):
        @compiled(plain=lambda x: ("plain", x))
        def inner(x):
            return x

        @compiled(small=1)
        def outer(x):
            return inner(x)

        assert outer(3) == ("plain", 3)
        assert inner(3) == 3


@pytest.fixture
def interpreted(monkeypatch):
    """Calls as they are in a fresh process, however much this one has compiled."""

    def each(call):
        monkeypatch.setattr(module._interpreting, "depth", 1)
        with np.errstate(all="ignore"):
            slow = call()
        monkeypatch.setattr(module._interpreting, "depth", 0)
        monkeypatch.setattr(module.Compiled, "is_small", lambda *_: False)
        return slow, call()

    return each


@pytest.mark.parametrize(
    "name", ["sharding", "placement/alexnet-malvik4-pipeline", "streams/inception_v3"]
)
def test_interpreted_and_compiled_searches_answer_alike(name, interpreted):
    if name == "sharding":
        graph = training_graph(build("alexnet", batch=16))
        mesh = Mesh((Axis("x", 2), Axis("y", 2)), (0, 1, 2, 3))
        problem, kind = sharding_model(graph, resolve("4xA100"), mesh).problem(), name
    else:
        problem, kind = load(str(DATA / f"{name}.json")), name.split("/")[0]
    search = next(iter(searches(kind).values()))
    slow, fast = interpreted(lambda: search(problem, Stop(evaluations=300), 3))
    assert slow.solution == fast.solution
    assert (slow.objective, slow.lower_bound) == (fast.objective, fast.lower_bound)


def test_interpreted_and_compiled_ranges_agree(interpreted):
    draw = np.random.default_rng(0)

    def options(count=5, size=9):
        drawn = draw.integers(0, 9, (count, size, size)) / 7.0
        drawn[0, 2, 5] = np.inf
        return tuple(drawn)

    ranges = LayerRanges(*(options() for _ in range(5)))
    slow, fast = interpreted(lambda: ranges.within(1.5, 3.0, 0.3, s_per_byte=0.1))
    assert len(np.unique(slow[1])) > 2  # several options are taken
    assert all(np.array_equal(a, b) for a, b in zip(slow, fast, strict=True))


def test_interpreted_and_compiled_engines_agree(interpreted):
    program = simulate("squeezenet1_1", "2xV100", batch=4).timeline.program
    slow, fast = interpreted(lambda: [run(program, mode).end.tolist() for mode in MODES])
    assert slow == fast


def test_the_clock_of_limits_stands_still_while_numba_compiles(monkeypatch):
    ticks = iter(range(10))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(module._Compiling, "seconds", 0.0)
    assert module.work_clock() == 0
    monkeypatch.setattr(module._Compiling, "depth", 1)
    monkeypatch.setattr(module._Compiling, "began", 1.0)
    assert module.work_clock() == module.work_clock() == 1
    monkeypatch.setattr(module._Compiling, "depth", 0)
    monkeypatch.setattr(module._Compiling, "seconds", 1.0)
    assert module.work_clock() == 0
