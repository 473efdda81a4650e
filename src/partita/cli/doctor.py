"""`partita doctor`: what is installed, what works, and what each missing package would add."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from typing import Any

import click

from partita import __version__
from partita.cli.base import Output, common_options
from partita.units import seconds, size, table

REQUIRED = ("click", "msgspec", "numba", "numpy", "ortools", "rich")


@dataclass(frozen=True, slots=True)
class Extra:
    """A package that partita can do without, what it is for and how to get it."""

    package: str
    purpose: str
    install: str


EXTRAS = (
    Extra(
        "torch",
        "sees the GPUs here; for capturing and running models",
        "pip install 'partita[torch]'",
    ),
    Extra("onnx", "for reading models from .onnx files", "pip install 'partita[onnx]'"),
    Extra("pymetis", "for the partition method metis", "pip install 'partita[metis]'"),
    Extra("uvicorn", "for the live page, partita serve", "pip install 'partita[serve]'"),
    Extra("distributed", "for sweeps on a Dask cluster", "pip install 'partita[dask]'"),
    Extra("altair", "for result.plot() in notebooks", "pip install 'partita[notebook]'"),
    Extra("polars", "for tables as polars", "pip install 'partita[notebook]'"),
    Extra("triton", "for kernels of plans within one GPU", "pip install triton"),
)


@click.command()
@common_options
def command(out: Output) -> int:
    """Say what is installed, what works, and what each missing package would add.

    Exit code 1 if something that partita needs does not work.
    """
    machine = _machine()
    packages = {name: version_of(name) for name in REQUIRED}
    extras = {extra.package: version_of(extra.package) for extra in EXTRAS}
    gpus = find_gpus(extras["torch"] is not None)
    jit = try_jit()
    problems = [f"{name} is not installed" for name, version in packages.items() if not version]
    problems += [] if jit["works"] else [f"compiling does not work: {jit['error']}"]

    out.show(_as_text(machine, packages, extras, gpus, jit, problems))
    out.result(
        {
            "format": "partita/doctor@1",
            "partita": __version__,
            **machine,
            "packages": packages,
            "extras": [{**asdict(extra), "version": extras[extra.package]} for extra in EXTRAS],
            "gpus": gpus,
            "jit": jit,
            "problems": problems,
        }
    )
    return 1 if problems else 0


def version_of(package: str) -> str | None:
    """The installed version; None if it is not installed. Nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_gpus(has_torch: bool) -> dict[str, Any]:
    """The GPUs seen, and by what: torch if it is installed and sees any, else `nvidia-smi`."""
    error = None
    if has_torch:
        try:
            import torch

            names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        except Exception as failure:  # a broken installation fails in many ways
            error = f"torch does not work here ({failure})".split("\n")[0]
        else:
            if names:
                return {"names": names, "seen_by": "torch", "error": None}
    return {"names": _names_from_driver(), "seen_by": "nvidia-smi", "error": error}


def _names_from_driver() -> list[str]:
    """What `nvidia-smi` lists; nothing where there is no such program or no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.strip().splitlines()


def try_jit() -> dict[str, Any]:
    """Compile a loop, then load it again from the cache, as every later process does."""
    state: dict[str, Any] = {"works": False, "cached": False, "error": None}
    try:
        import numba

        started = time.perf_counter()
        first = numba.njit(cache=True)(_loop)
        first(3)
        loading = time.perf_counter()
        second = numba.njit(cache=True)(_loop)
        state["works"] = second(3) == 3
        state["cached"] = bool(second.stats.cache_hits)
        state["first_call_s"] = round(loading - started, 4)
        state["cached_call_s"] = round(time.perf_counter() - loading, 4)
        state["cache"] = second.stats.cache_path
    except Exception as error:  # whatever it is, it is the answer to the question
        state["error"] = f"{type(error).__name__}: {error}".split("\n")[0]
    return state


def _loop(number: int) -> int:
    total = 0
    for value in range(number):
        total += value
    return total


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
    }


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _as_text(
    machine: dict[str, Any],
    packages: dict[str, str | None],
    extras: dict[str, str | None],
    gpus: dict[str, Any],
    jit: dict[str, Any],
    problems: list[str],
) -> str:
    memory = machine["memory_bytes"]
    lines = [
        f"partita   {__version__}",
        f"python    {machine['python']} on {machine['platform']}",
        f"machine   {machine['cores']} cores, {size(memory) if memory else 'unknown'} of memory",
        f"gpus      {_gpu_text(gpus)}",
        f"compiler  {_jit_text(jit)}",
        "needed    " + ", ".join(f"{name} {version or '-'}" for name, version in packages.items()),
        "",
        table(
            ("optional", "version", "what it adds", "get it with"),
            [
                (
                    extra.package,
                    extras[extra.package] or "-",
                    extra.purpose,
                    "" if extras[extra.package] else extra.install,
                )
                for extra in EXTRAS
            ],
        ),
        "",
    ]
    lines += [f"problem: {problem}" for problem in problems] or ["Everything needed works."]
    return "\n".join(lines)


def _gpu_text(gpus: dict[str, Any]) -> str:
    names = ", ".join(gpus["names"])
    seen = f"{names} (seen by {gpus['seen_by']})" if names else "none seen"
    return f"{seen}; {gpus['error']}" if gpus["error"] else seen


def _jit_text(jit: dict[str, Any]) -> str:
    if not jit["works"]:
        return f"does not work ({jit['error']})"
    cached = (
        f"then {seconds(jit['cached_call_s'])} from its cache"
        if jit["cached"]
        else "but it cannot be kept, so every start compiles again"
    )
    return f"works: first call after {seconds(jit['first_call_s'])}, {cached}"
