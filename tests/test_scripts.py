"""The scripts people start with, run against a Python that only writes down what it was asked."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "dirname", "cat", "env", "mkdir", "cp", "chmod")

# Stands in for python: answers the questions of the scripts and logs every other call.
FAKE = """#!/bin/bash
here=$(dirname "$0")
case "$*" in
    *"import sys; print"*) echo "${FAKE_VERSION:-3.12}" ;;
    *"<= sys.version_info"*) exit "${FAKE_NOT_THIS:-0}" ;;
    *"import venv"*) exit "${FAKE_NO_VENV:-0}" ;;
    *"--version"*) echo "Python ${FAKE_VERSION:-3.12}.0" ;;
    *"-m venv"*) mkdir -p "$4/bin" && : >"$4/pyvenv.cfg" &&
        cp "$0" "$4/bin/python" && cp "$0" "$4/bin/partita" ;;
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
        "error: no Python from 3.11 to 3.14 was found; install Python 3.13 and run this again\n"
    )


@pytest.mark.parametrize("version", ["3.10", "3.15"])
def test_a_python_without_wheels_does_not_count(ready, version):
    result = ready.run("demo", FAKE_VERSION=version, FAKE_NOT_THIS="1")
    assert result.returncode == 2
    assert "no Python from 3.11 to 3.14 was found" in result.stderr


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_every_python_that_is_declared_is_looked_for(clone, version):
    clone.add_python(f"python{version}")
    assert clone.run("demo", FAKE_VERSION=version).returncode == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]


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
    assert ready.calls[-1] == "python -m pytest -n 3 --dist worksteal tests/cli -k two words"
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


def test_failing_randomised_tests_point_to_the_commands_that_repeat_them(ready):
    result = ready.run("test", "--random", "9", FAKE_TEST_CODE="1")
    assert ready.calls[-1] == "python -m pytest -n 2 --dist each --random 9"
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1].startswith("Not passed. Next: the commands above")


# Where the environment is.


def test_the_environment_is_made_where_it_is_asked_for(ready, tmp_path):
    asked = tmp_path / "an environment"
    for script in ("test", "demo", "check"):
        result = ready.run(script, PARTITA_VENV=str(asked))
        assert result.returncode == 0, result.stderr
    assert (asked / "pyvenv.cfg").exists()
    assert not (ready.root / ".venv").exists()


def test_a_folder_that_is_no_environment_is_left_alone(ready, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one").write_text("Dear")
    result = ready.run("demo", PARTITA_VENV=str(tmp_path / "letters"))
    assert result.returncode == 2
    assert "letters is there and no Python environment; remove it or set" in result.stderr
    assert (tmp_path / "letters" / "one").read_text() == "Dear"


# What continuous integration runs.


def test_ci_runs_the_commands_of_the_readme_in_environments_that_only_they_have_made(
    ready, tmp_path
):
    shutil.copytree(ROOT / ".ci", ready.root / ".ci")
    ready.run("demo")  # an environment that somebody left behind
    for name in ("mktemp", "rm"):
        (ready.bin / name).symlink_to(str(shutil.which(name)))
    result = ready.run("../.ci/run", TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    pytest_calls = [call for call in ready.calls if " -m pytest" in call]
    assert pytest_calls == [
        "python -m pytest -n 3 --dist worksteal",
        "python -m pytest -n 2 --dist worksteal --durations=5 tests/every_doc_command.py",
        "python -m pytest -n 2 --dist each --random 240 --seed 8230",  # there is no repository here
    ]
    targets = [call.rsplit(" ", 1)[1] for call in ready.installs if "--editable" in call]
    assert targets == [".[test]", ".[dev]", ".[docs]", "."]
    assert "python -m mkdocs build --strict --quiet" in ready.calls
    assert ready.calls[-1].startswith("partita report")
    first, *_ = ready.installs
    assert ready.calls.index(first) < ready.calls.index(pytest_calls[0])
    assert not list(tmp_path.glob("partita-*"))


def test_ci_calls_the_two_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = re.findall(r"^(scripts/\w+)", readme.split("```")[1], flags=re.MULTILINE)
    assert commands == ["scripts/demo", "scripts/test"]
    started = (*commands, "scripts/doc-commands", "scripts/check", "scripts/docs")
    assert set(started) <= set(ci)
    assert all(os.access(ROOT / name, os.X_OK) for name in (*started, ".ci/run"))


def test_ci_ends_with_the_first_command_that_fails(ready, tmp_path):
    shutil.copytree(ROOT / ".ci", ready.root / ".ci")
    for name in ("mktemp", "rm"):
        (ready.bin / name).symlink_to(str(shutil.which(name)))
    result = ready.run("../.ci/run", TMPDIR=str(tmp_path), FAKE_TEST_CODE="1")
    assert result.returncode == 1
    assert result.stdout.splitlines()[-2] == "=== 3 passed ==="


# The pinned versions.


def pinned() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    lines = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(line for lines in extras.values() for line in lines),
    ]
    return [Requirement(line) for line in lines if not line.startswith("partita[")]


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_every_package_of_pyproject_is_pinned_to_a_version_that_satisfies_it(requirement):
    assert pinned()[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_pins_are_those_that_torch_with_cuda_requires():
    pins = pinned()
    assert (str(pins["torch"]), str(pins["triton"])) == ("2.13.0", "3.7.1")


def needed_by(name: str, extras: frozenset[str]) -> list[Requirement]:
    """What an installed package needs here, with these extras of it."""
    lines = importlib.metadata.requires(name) or []
    return [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""}))
    ]


def test_every_package_that_is_needed_by_those_is_pinned_too_and_satisfied():
    pins = pinned()
    waiting, seen = [(r.name, frozenset(r.extras)) for r in declared() if is_here(r.name)], set()
    while waiting:
        name, extras = waiting.pop()
        for requirement in needed_by(name, extras):
            if requirement.name not in seen and is_here(requirement.name):
                seen.add(requirement.name)
                assert pins[canonicalize_name(requirement.name)] in requirement.specifier, name
                waiting.append((requirement.name, frozenset(requirement.extras)))
    assert {"llvmlite", "sympy", "pluggy"} <= {canonicalize_name(name) for name in seen}


def is_here(name: str) -> bool:
    """Is it installed, and not one of the libraries of CUDA that torch pins by itself?"""
    if name.startswith("nvidia-") or name == "cuda-toolkit":
        return False
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
