"""The randomised run of the property tests, on small test files in a folder of its own."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import randomised

HERE = Path(__file__).parent

TESTS = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_small_numbers_are_small(number):
    with open({log!r}, "a") as file:
        print("small", number, file=file)

class TestPairs:
    @settings(max_examples=5, derandomize=True)
    @given(st.integers(0, 10**6))
    def test_a_number_is_itself(self, number):
        with open({log!r}, "a") as file:
            print("pair", number, file=file)

def test_no_property():
    raise AssertionError("this is no property test")
"""
FAILING = """
from hypothesis import given, strategies as st

@given(st.integers(0, 10**6))
def test_no_number_is_large(number):
    assert number < 1000
"""
SLOW = """
import time
from hypothesis import given, strategies as st

@given(st.data())
def test_every_example_takes_a_while(data):
    data.draw(st.integers(0, 10**6))
    time.sleep(1)
"""


class Folder:
    """A project with the settings of this one and tests of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log"
        (root / "tests").mkdir()
        for name in ("conftest.py", "randomised.py"):
            shutil.copy(HERE / name, root / "tests" / name)

    def write(self, text: str) -> None:
        text = text.replace("{log!r}", repr(str(self.log)))
        (self.root / "tests" / "test_it.py").write_text(text)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def tried(self, kind: str) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith(kind)]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_fresh_runs_try_other_examples_and_the_same_seed_the_same(folder):
    folder.write(TESTS)
    runs = []
    for words in ((), ("--seed", "8"), ("--seed", "8")):
        result = folder.run("--random", "6", "tests/test_it.py::TestPairs", *words)
        assert result.returncode == 0, result.stdout
        runs.append(folder.tried("pair"))
    fresh, once, twice = runs
    assert len(once) > 10, "a test is run again and again"
    assert len(set(once)) > 10, "and on other examples each time"
    common = min(len(once), len(twice))
    assert once[:common] == twice[:common]
    assert fresh[:5] != once[:5]
    assert not (folder.root / ".hypothesis").exists()


def test_the_seed_is_printed_first_and_only_property_tests_run(folder):
    folder.write(TESTS)
    result = folder.run("--random", "2")
    seed = re.match(r"seed (\d+); to repeat: scripts/test --random 2 --seed (\d+)\n", result.stdout)
    assert seed is not None, result.stdout
    assert seed[1] == seed[2]
    assert f"randomised, seed {seed[1]}" in result.stdout
    assert "test_no_property" not in result.stdout
    assert "1 deselected" in result.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "two-workers"])
def test_a_failure_comes_with_the_command_that_repeats_it(folder, workers):
    folder.write(FAILING)
    result = folder.run("-x", "--random", "60", *workers)
    assert result.returncode != 0, result.stdout
    command = re.search(
        r"to repeat: scripts/test (--random 60 --seed \d+) '(tests/test_it.py::\w+)'", result.stdout
    )
    assert command is not None, result.stdout
    assert "number=1000" in result.stdout, "the failing example is made small"
    again = folder.run("-x", *command[1].split(), command[2])
    assert again.returncode == 1
    assert command[0] in again.stdout, "the first run of the test fails, so with the same seed"


def test_the_time_is_kept_in_the_middle_of_a_test(folder):
    folder.write(SLOW)
    start = time.time()
    result = folder.run("--random", "2")
    assert result.returncode == 0, result.stdout
    assert "1 skipped" in result.stdout
    assert time.time() - start < 60, "its hundred examples would take longer"


def test_the_fixed_run_tries_the_same_examples_whatever_was_imported(folder):
    folder.write(TESTS)
    folder.run("--deselect", "tests/test_it.py::test_no_property")
    alone = folder.tried("small")
    (folder.root / "tests" / "test_ahead.py").write_text(
        "CONSTANTS = [" + ", ".join(str(7 * i) for i in range(100_000)) + "]\n"
    )
    folder.run("--deselect", "tests/test_it.py::test_no_property")
    assert folder.tried("small") == alone
    assert len(alone) == 10  # half of those that are asked for


@pytest.mark.parametrize(
    ("seconds", "seed", "message"),
    [
        (None, 3, "--seed is for the randomised run: add --random SECONDS"),
        (0, None, "--random 0: give a number of seconds above 0"),
        (-1, 3, "--random -1: give a number of seconds above 0"),
        (float("inf"), None, "--random inf: give a number of seconds above 0"),
        (float("nan"), None, "--random nan: give a number of seconds above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(seconds, seed, message):
    config = SimpleNamespace(option=SimpleNamespace(random=seconds, seed=seed))
    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        randomised.pytest_configure(config)
