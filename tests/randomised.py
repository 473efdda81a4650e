"""`scripts/test --random SECONDS [--seed N]`: property tests with fresh examples until time is up.

Only the tests that Hypothesis drives run, in random order, over and over. Every run of a test has a
seed of its own, counted up from that of the whole run, and a failure is shown with the command that
repeats it: there the failing test comes first, with the seed that it failed with, and that run is
whole, however slow the machine. Two runs with one seed try the same examples in the same order, as
far as their time reaches, with the same number of workers that share nothing out (`--dist each`).
"""

import functools
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol
from hypothesis.errors import StopTest, UnsatisfiedAssumption

RUNS_PER_S = 20  # more than any selection of these tests has run; what is left over costs nothing
# All other runs try this part of the examples that a property asks for, the first ones, and all
# that are written down. They try the same ones each time, which tells less with every run; what
# nobody has tried yet is the randomised run's, which tries as many as are asked for, over and over.
FIXED_PART = 0.5
NO_FAILURE = (StopTest, UnsatisfiedAssumption, pytest.skip.Exception, KeyboardInterrupt)


class TimeIsUp(KeyboardInterrupt):
    """Ends a run of examples, as Ctrl-C would: Hypothesis asks nothing about the last of them.

    A test that skips where it drew more before is called inconsistent by it.
    """


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("randomised")
    group.addoption(
        "--random",
        type=float,
        metavar="SECONDS",
        help="run the property tests with fresh examples, over and over, for so long",
    )
    group.addoption(
        "--seed", type=int, metavar="N", help="with --random: the seed of a run to repeat"
    )


def pytest_configure(config: pytest.Config) -> None:
    seconds, seed = config.option.random, config.option.seed
    if seconds is None:
        if seed is not None:
            raise pytest.UsageError(
                "--seed is for the randomised run: add --random SECONDS; all other runs try the "
                "same examples"
            )
        return
    if not 0 < seconds < math.inf:
        raise pytest.UsageError(f"--random {seconds:g}: give a number of seconds above 0")
    hypothesis.settings.load_profile("random")
    repeats = seed is not None and any("::" in str(arg) for arg in config.args)
    if seed is None:
        seed = random.SystemRandom().randrange(10**9)
    worker = getattr(config, "workerinput", {})
    seed, end = worker.get("randomised", (seed, time.time() + seconds))
    number = int(worker.get("workerid", "gw0").removeprefix("gw"))
    count = worker.get("workercount", 1)
    run = Randomised(seed, seconds, end, number, count, whole=repeats)
    config.pluginmanager.register(run, "randomised-run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.random is not None:
        return
    for test in {function_of(item): None for item in items if is_property(item)}:
        asked = test._hypothesis_internal_use_settings
        count = math.ceil(FIXED_PART * asked.max_examples)
        test._hypothesis_internal_use_settings = hypothesis.settings(asked, max_examples=count)


def command(seconds: float, seed: int, *tests: str) -> str:
    """What to type to have this run again."""
    return " ".join([f"scripts/test --random {seconds:g} --seed {seed}", *map(quoted, tests)])


def quoted(test: str) -> str:
    return "'" + test.replace("'", "'\\''") + "'"


class Randomised:
    """One randomised run, or one worker's part of it."""

    def __init__(
        self, seed: int, seconds: float, end: float, number: int, count: int, whole: bool
    ) -> None:
        self.seed = seed
        self.seconds = seconds
        self.end = end
        self.number, self.count = number, count
        self.runs: dict[str, int] = {}
        self.num_tests = 0
        self.whole = whole  # the first run of a test is not cut short
        self.failing = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker the seed and when the time is up: its own clock starts later."""
        node.workerinput["randomised"] = (self.seed, self.end)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        say(session.config, f"seed {self.seed}; to repeat: {command(self.seconds, self.seed)}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the property tests, in random order, often enough to fill the time."""
        chosen = [item for item in items if is_property(item)]
        config.hook.pytest_deselected(items=[item for item in items if not is_property(item)])
        if not chosen:
            items.clear()
            return
        for test in {id(function_of(item)): function_of(item) for item in chosen}.values():
            test.hypothesis.inner_test = self.within_the_time(test.hypothesis.inner_test)
        order = random.Random(self.seed)
        items.clear()
        for _ in range(1 + math.ceil(RUNS_PER_S * self.seconds / len(chosen))):
            items.extend(order.sample(chosen, len(chosen)))

    def within_the_time(self, inner_test: Callable[..., None]) -> Callable[..., None]:
        """The test of one example, which ends a run of examples once the time is up.

        An example that failed is made small first, whatever the time: it is what the run is for.
        """

        @functools.wraps(inner_test)
        def test(*args: Any, **kwargs: Any) -> None:
            if self.time_is_up() and not self.failing:
                raise TimeIsUp
            try:
                inner_test(*args, **kwargs)
            except NO_FAILURE:
                raise
            except BaseException:
                self.failing = True
                raise

        return test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test with its next seed, or nothing once the time is up."""
        if self.time_is_up():
            return True
        run = self.runs.get(item.nodeid, 0)
        self.runs[item.nodeid] = run + 1
        seed = self.seed + run * self.count + self.number
        self.failing = False
        item.user_properties[:] = [("seed", seed)]
        hypothesis.seed(seed)(function_of(item))
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        # A test that follows itself would keep its fixtures.
        runtestprotocol(item, nextitem=item.parent if nextitem is item else nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self.whole = False
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Iterator[None]:
        try:
            return (yield)
        except TimeIsUp:
            pytest.skip("the time is up")

    def time_is_up(self) -> bool:
        return time.time() > self.end and not self.whole

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.num_tests += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        commands = [
            command(self.seconds, dict(report.user_properties)["seed"], report.nodeid)
            for report in failures(terminalreporter)
        ]
        terminalreporter.section(f"randomised, seed {self.seed}")
        terminalreporter.write_line(f"{self.num_tests} runs of property tests")
        for line in dict.fromkeys(commands):
            terminalreporter.write_line(f"to repeat: {line}")


def say(config: pytest.Config, line: str) -> None:
    """Print a line, but not from every worker."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        reporter.write_line(line)


def failures(reporter: Any) -> Iterator[pytest.TestReport]:
    for kind in ("failed", "error"):
        yield from (r for r in reporter.stats.get(kind, []) if isinstance(r, pytest.TestReport))


def function_of(item: pytest.Item) -> Any:
    test = getattr(item, "obj", None)
    return getattr(test, "__func__", test)


def is_property(item: pytest.Item) -> bool:
    return hypothesis.is_hypothesis_test(getattr(item, "obj", None))
