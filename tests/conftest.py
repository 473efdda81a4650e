"""Which examples Hypothesis tries: the same in all runs of the tests, or fresh ones on request.

An oracle that tries everything takes minutes on a rare example; which ones are met should not be a
matter of luck. `scripts/test --random SECONDS` is for finding new ones, see `randomised.py`.

Golden files hold what output is meant to look like. They are written anew with

    pytest TESTS --renew-goldens

and what has changed in them is read before it is committed.
"""

import functools
import gc
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

pytest_plugins = ["tests.randomised"]

# Each worker has one core; more threads of PyTorch than cores spend their time waiting for each
# other. It is read once, when PyTorch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FIXED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fixed", FIXED)
settings.register_profile("random", FIXED, derandomize=False)
settings.load_profile("fixed")

# Hypothesis also tries the constants of all modules that happen to be imported. Which ones those
# are depends on the tests that ran before in the same process, so a run, or one test alone, would
# not try the examples of the run before.
assert callable(providers._get_local_constants)
providers._get_local_constants = providers.Constants

# xdist gives each worker one part of the tests to begin with, equal in number, and lets who is done
# take over what another has at its end. So each part begins with folders that take long and share
# what is dear, and ends with tests of a few milliseconds. In a fresh clone the first use of a
# search compiles it, seconds each, for all processes that come later: one part begins with that.
# Ranks are forked off a server that takes seconds to start, as Triton's interpreter and the browser
# do: one worker has all their tests. Ranks also wait a lot, for each other and for timeouts: three
# workers keep two cores busy.
BEGINNINGS = (
    ("engine", "search", "jobs", "capture"),  # what compiles
    ("run", "emit"),  # ranks
    ("gpu", "cli", "report", "serve", "export"),  # kernels and pages
)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    @functools.cache
    def beginning_of(path: Path) -> tuple[int, int]:
        folder = path.relative_to(HERE).parts[0]
        for number, folders in enumerate(BEGINNINGS):
            if folder in folders:
                return number, folders.index(folder)
        return len(BEGINNINGS), 0

    parts: list[list[pytest.Item]] = [[] for _ in (*BEGINNINGS, "short")]
    for item in sorted(items, key=lambda item: beginning_of(item.path)):  # stable
        parts[beginning_of(item.path)[0]].append(item)
    short, size = parts.pop(), len(items) // len(BEGINNINGS)
    ordered: list[pytest.Item] = []
    for number, part in enumerate(parts):
        room = max(0, (number + 1) * size - len(ordered) - len(part))
        ordered += [*part, *short[:room]]
        del short[:room]
    items[:] = [*ordered, *short]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector look at what tests make, not at modules and collected tests.

    With its own thresholds it walks a million objects that stay, again and again: an eighth of the
    time of the suite.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        silence_traces()  # before pytest hangs its handlers on loggers for all tests


def pytest_sessionfinish() -> None:
    """Nor at what all tests have kept, gigabytes, before the process ends: that takes seconds."""
    gc.collect(1)  # what nobody closed is told of, as far as it is of late
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> None:
    """PyTorch may have been imported, and have put its loggers back, by the test before."""
    silence_traces()


def silence_traces() -> None:
    """Keep pytest away from the logger through which PyTorch writes its traces.

    It does not propagate, so pytest hangs handlers of its own on it; and as soon as it has one,
    PyTorch writes every graph and many stacks of an export into it, pages in front of what a
    failing test has to say.
    """
    logging.getLogger("torch.__trace").propagate = True


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


@pytest.fixture(autouse=True)
def left_out(request: pytest.FixtureRequest) -> Iterator[list[Exception]]:
    """What jobs left out because it failed (`partita.errors`).

    An answer goes on without it, so a test would not notice; one that does not ask for this fixture
    fails.
    """
    errors: list[Exception] = []

    class Failures(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.extend([record.failure] if hasattr(record, "failure") else [])

    log, handler = logging.getLogger("partita"), Failures()
    log.addHandler(handler)
    yield errors
    log.removeHandler(handler)
    if errors and "left_out" not in inspect.signature(request.function).parameters:
        raise errors[0]
