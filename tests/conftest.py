"""All runs of the tests try the same examples, on a continuous-integration machine or not.

A referee that tries everything takes minutes on a rare example; which ones are met should not be a
matter of luck.

Golden files hold what output is meant to look like. They are written anew with

    pytest TESTS --renew-goldens

and what has changed in them is read before it is committed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """One way to renew all golden files."""
    parser.addoption("--renew-goldens", action="store_true", help="write golden files anew")


@pytest.fixture
def is_golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compares a text with a golden file, or writes it there where that is asked for."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--renew-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"renew {path.name} with --renew-goldens?"

    return check
