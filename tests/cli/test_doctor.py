import subprocess
import tomllib
from pathlib import Path

import pytest

from partita import __version__
from partita.cli import doctor

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def no_gpus(monkeypatch):
    """Leave torch and the driver alone; they are tested by themselves."""
    monkeypatch.setattr(
        doctor, "find_gpus", lambda has_torch: {"names": [], "seen_by": None, "error": None}
    )


def test_it_knows_every_package_that_partita_needs():
    needed = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert {line.split(">")[0] for line in needed} == set(doctor.REQUIRED)


def test_the_extras_it_names_exist():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for extra in doctor.EXTRAS:
        if "partita[" in extra.install:
            name = extra.install.split("[")[1].split("]")[0]
            assert any(line.startswith(extra.package) for line in extras[name])


def test_it_says_what_is_here(run, no_gpus):
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert f"partita   {__version__}" in result.stdout
    assert "Everything needed works." in result.stdout
    for name in (*doctor.REQUIRED, *(extra.package for extra in doctor.EXTRAS)):
        assert name in result.stdout


def test_as_json(run_json, no_gpus):
    answer = run_json("doctor")
    assert answer["format"] == "partita/doctor@1"
    assert answer["partita"] == __version__
    assert answer["problems"] == []
    assert answer["cores"] >= 1
    assert answer["packages"]["numpy"][0].isdigit()
    assert {extra["package"] for extra in answer["extras"]} == {
        "torch",
        "onnx",
        "pymetis",
        "triton",
        "uvicorn",
        "distributed",
        "altair",
        "polars",
    }
    assert answer["jit"]["works"]


def test_a_missing_extra_comes_with_what_it_adds_and_how_to_get_it(run, no_gpus, monkeypatch):
    known = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "onnx" else known(name))
    line = next(line for line in run("doctor").stdout.splitlines() if line.startswith("onnx"))
    assert "for reading models from .onnx files" in line
    assert "pip install 'partita[onnx]'" in line


def test_a_missing_needed_package_is_a_problem_and_exit_code_1(run_json, no_gpus, monkeypatch):
    known = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "rich" else known(name))
    assert run_json("doctor", code=1)["problems"] == ["rich is not installed"]


def test_a_compiler_that_fails_is_a_problem(run, no_gpus, monkeypatch):
    import numba

    def njit(**options):
        raise RuntimeError("no locator available")

    monkeypatch.setattr(numba, "njit", njit)
    result = run("doctor")
    assert result.exit_code == 1
    assert "problem: compiling does not work: RuntimeError: no locator available" in result.stdout


def test_compiled_code_is_kept():
    outcome = doctor.try_jit()
    assert outcome["works"]
    assert outcome["cached"]
    assert outcome["error"] is None


def test_a_package_that_does_not_exist_has_no_version():
    assert doctor.version_of("no-such-package-as-this") is None


def test_without_torch_the_driver_is_asked(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/bin/" + name)
    answer = subprocess.CompletedProcess([], 0, stdout="NVIDIA A100\nNVIDIA A100\n", stderr="")
    monkeypatch.setattr("subprocess.run", lambda *words, **options: answer)
    gpus = doctor.find_gpus(has_torch=False)
    assert gpus == {"names": ["NVIDIA A100"] * 2, "seen_by": "nvidia-smi", "error": None}


def test_a_driver_that_fails_means_no_gpus(monkeypatch):
    def fail(*words, **options):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr("shutil.which", lambda name: "/bin/" + name)
    monkeypatch.setattr("subprocess.run", fail)
    assert doctor.find_gpus(has_torch=False)["names"] == []


def test_a_torch_that_cannot_be_imported_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    gpus = doctor.find_gpus(has_torch=True)
    assert gpus["names"] == []
    assert gpus["error"].startswith("torch does not work here")


def test_torch_is_asked_first(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    assert doctor.find_gpus(has_torch=True) == {
        "names": ["GPU 0"],
        "seen_by": "torch",
        "error": None,
    }
