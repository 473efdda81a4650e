import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from partita.cli import partita

Partita = Callable[..., Result]


@pytest.fixture
def run() -> Partita:
    """Run one command line in this process, as `partita ...` would."""

    def run(*words: str) -> Result:
        return CliRunner().invoke(partita, list(words))

    return run


@pytest.fixture
def run_json(run: Partita) -> Callable[..., dict[str, Any]]:
    """Run with --json; stdout must be exactly one JSON object."""

    def run_json(*words: str, code: int = 0) -> dict[str, Any]:
        result = run(*words, "--json")
        assert result.exit_code == code, result.output
        value = json.loads(result.stdout)
        assert isinstance(value, dict)
        assert value["format"].startswith("partita/")
        return value

    return run_json


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one command line in a process of its own."""

    def process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "partita", *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **options,
        )

    return process
