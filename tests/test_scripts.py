"""The scripts people start with, run against a Python that only writes down what it was asked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "dirname", "cat", "env", "mkdir", "cp", "chmod")

# Stands in for python: answers the questions of the scripts and logs every other call.
FAKE = """#!/bin/bash
here=$(dirname "$0")
case "$*" in
    *"import sys; print"*) echo "${FAKE_VERSION:-3.12}" ;;
    *"< (3, 11)"*) exit "${FAKE_TOO_OLD:-0}" ;;
    *"import venv"*) exit "${FAKE_NO_VENV:-0}" ;;
    *"--version"*) echo "Python ${FAKE_VERSION:-3.12}.0" ;;
    *"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && cp "$0" "$4/bin/partita" ;;
    *"import pip"* | *"import xdist"*) ;;
    -\\ *) echo "fingerprint ${FAKE_FILES:-1}" ;;
    *) echo "${0##*/} $*" >>"$FAKE_LOG"
       case "$*" in
           *"-m pip"*) exit "${FAKE_PIP_CODE:-0}" ;;
           *"-m pytest"*) echo "=== 3 passed ==="; exit "${FAKE_TEST_CODE:-0}" ;;
           *"-m ruff check"*) exit "${FAKE_LINT_CODE:-0}" ;;
       esac ;;
esac
"""


class Clone:
    """A fresh clone with nothing on the PATH but a few tools and, if asked for, a Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.log = folder / "log"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in TOOLS:
            tool = shutil.which(name)
            assert tool is not None
            (self.bin / name).symlink_to(tool)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")

    def add_python(self, name: str = "python3") -> None:
        (self.bin / name).write_text(FAKE)
        (self.bin / name).chmod(0o755)

    def run(self, script: str, *words: str, **fake: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        return subprocess.run(
            [str(self.root / "scripts" / script), *words],
            env={"PATH": str(self.bin), "FAKE_LOG": str(self.log), **fake},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    @property
    def installs(self) -> list[str]:
        return [call for call in self.calls if " -m pip install " in call]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.fixture
def ready(clone: Clone) -> Clone:
    clone.add_python()
    return clone


def test_without_python_it_says_what_to_install(clone):
    result = clone.run("demo")
    assert result.returncode == 2
    assert result.stderr == (
        "error: no Python 3.11 or newer was found; install Python 3.12 and run this again\n"
    )


def test_an_old_python_does_not_count(ready):
    result = ready.run("demo", FAKE_VERSION="3.10", FAKE_TOO_OLD="1")
    assert result.returncode == 2
    assert "no Python 3.11 or newer was found" in result.stderr


def test_a_python_without_venv_is_named_with_the_package_to_install(ready):
    result = ready.run("demo", FAKE_VERSION="3.11", FAKE_NO_VENV="1")
    assert result.returncode == 2
    assert "Python 3.11 is here without the module venv" in result.stderr
    assert "apt install python3.11-venv" in result.stderr
    assert not (ready.root / ".venv").exists()


def test_a_name_on_the_path_that_does_not_run_is_passed_over(ready):
    (ready.bin / "python3.12").write_text("#!/bin/bash\nexit 127\n")
    (ready.bin / "python3.12").chmod(0o755)
    assert ready.run("demo").returncode == 0


def test_the_demo_plans_reports_and_says_what_is_next(ready):
    result = ready.run("demo")
    assert result.returncode == 0, result.stderr
    assert ready.calls[-2:] == [
        "partita plan gpt2-medium --cluster 4xV100+8xP100 --batch 96 --dtype f16"
        " -o plan.json --force",
        "partita report plan.json -o report.html --force",
    ]
    assert "report.html" in result.stdout.splitlines()[-1]
    assert "partita --help" in result.stdout.splitlines()[-1]


def test_the_first_run_installs_with_every_version_pinned(ready):
    ready.run("demo")
    assert len(ready.installs) == 2
    constraints = str(ready.root / "constraints.txt")
    assert all(f"--constraint {constraints}" in call for call in ready.installs)
    assert ready.installs[1].endswith("--no-build-isolation --editable .")


@pytest.mark.parametrize("script", ["demo", "test", "check"])
def test_the_second_run_does_not_call_pip(ready, script):
    ready.run(script)
    assert ready.installs
    result = ready.run(script)
    assert result.returncode == 0
    assert ready.installs == []


def test_changed_files_are_installed_again(ready):
    ready.run("demo")
    ready.run("demo", FAKE_FILES="2")
    assert ready.installs


def test_a_larger_environment_serves_the_smaller_scripts(ready):
    ready.run("check")
    for script in ("test", "demo"):
        ready.run(script)
        assert ready.installs == []


def test_a_smaller_environment_is_extended(ready):
    ready.run("demo")
    ready.run("test")
    assert ready.installs[1].endswith("--editable .[test]")
    ready.run("check")
    assert ready.installs[1].endswith("--editable .[dev]")


def test_a_failed_installation_is_said_and_tried_again(ready):
    result = ready.run("test", FAKE_PIP_CODE="1")
    assert result.returncode == 2
    assert "error: installing failed" in result.stderr
    ready.run("test")
    assert ready.installs


def test_the_tests_get_the_arguments_and_end_with_what_is_next(ready):
    result = ready.run("test", "tests/cli", "-k", "two words")
    assert ready.calls[-1] == "python -m pytest -n 2 tests/cli -k two words"
    closing, after = result.stdout.splitlines()[-2:]
    assert closing == "=== 3 passed ==="
    assert "Next: scripts/demo" in after


def test_failing_tests_give_their_exit_code(ready):
    result = ready.run("test", FAKE_TEST_CODE="5")
    assert result.returncode == 5
    assert result.stdout.splitlines()[-1].startswith("Not passed. Next: ")


def test_the_check_runs_all_three_whatever_the_first_finds(ready):
    result = ready.run("check", FAKE_LINT_CODE="1")
    assert result.returncode == 1
    assert [call.split(" -m ")[1] for call in ready.calls[-3:]] == [
        "ruff check .",
        "ruff format --check .",
        "mypy",
    ]
    assert result.stdout.splitlines()[-1] == "Not clean: ruff check"


@pytest.mark.parametrize("script", ["demo", "check"])
def test_arguments_that_would_be_ignored_are_refused(ready, script):
    result = ready.run(script, "--fast")
    assert result.returncode == 2
    assert "takes no arguments" in result.stderr


def test_ci_runs_what_people_run():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-2:] == ["scripts/check", "scripts/test"]
    assert all(os.access(ROOT / line, os.X_OK) for line in (*lines[-2:], ".ci/run", "scripts/demo"))


def test_every_package_of_pyproject_is_pinned():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(line for name in ("torch", "test", "dev") for line in extras[name]),
    ]
    pinned = {
        line.split("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    names = {line.split(">")[0].lower() for line in wanted if not line.startswith("partita[")}
    assert names <= pinned
