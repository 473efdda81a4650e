"""What commands share: one JSON object, one output file, one way to stop."""

import json
import logging
import os
import signal
import threading
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from partita.cli import Partita
from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.errors import FileError
from partita.search.base import Improvement, Run, Status


def one_command(command: click.Command) -> Partita:
    """A group that holds only `command`, called `it`."""

    class One(Partita):
        def list_commands(self, ctx: click.Context) -> list[str]:
            return ["it"]

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            return command

    return One("partita")


def invoke(body, *words, output=False):
    command = common_options(body)
    if output:
        command = output_option("Where to.")(command)
    return CliRunner().invoke(one_command(click.command()(command)), ["it", *words])


class TestCommonOptions:
    def test_people_get_the_text(self):
        def body(out):
            out.show("hello")
            out.result({"format": "partita/test@1"})

        result = invoke(body)
        assert (result.exit_code, result.stdout) == (0, "hello\n")

    def test_programs_get_the_object_and_nothing_else(self):
        def body(out):
            out.note("on the side")
            out.show("hello")
            out.result({"format": "partita/test@1", "value": 1})
            out.show("bye")

        result = invoke(body, "--json")
        assert json.loads(result.stdout) == {"format": "partita/test@1", "value": 1}
        assert result.stderr == "on the side\n"

    def test_quiet_silences_notes(self):
        def body(out):
            out.note("on the side")
            out.show("hello")

        result = invoke(body, "--quiet")
        assert result.output == "hello\n"

    def test_what_the_library_says_and_warns_of_is_a_note(self):
        def body(out):
            logging.getLogger("partita").warning("kind %r is unknown", "x")
            logging.getLogger("partita").info("runs %s", "model.py")
            logging.getLogger("partita").debug("not shown")

        before = list(logging.getLogger("partita").handlers)
        assert invoke(body).stderr == "warning: kind 'x' is unknown\nruns model.py\n"
        assert invoke(body, "--quiet").stderr == ""
        assert logging.getLogger("partita").handlers == before

    @pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (2, 2)])
    def test_what_a_command_returns_is_its_exit_code(self, returned, code):
        assert invoke(lambda out: returned).exit_code == code

    def test_an_error_after_the_result_still_leaves_one_object(self):
        def body(out):
            out.result({"format": "partita/test@1"})
            raise FileError("is full", file="x")

        result = invoke(body, "--json")
        assert json.loads(result.stdout)["format"] == "partita/error@1"
        assert result.exit_code == 2

    def test_the_seed_is_0_unless_given(self):
        seen = []
        invoke(lambda out: seen.append(out.seed))
        invoke(lambda out: seen.append(out.seed), "--seed", "7")
        assert seen == [0, 7]

    @pytest.mark.parametrize("seed", ["-1", "4294967296", "x", "1.5", ""])
    def test_a_seed_that_is_none_is_refused(self, seed):
        result = invoke(lambda out: None, "--seed", seed)
        assert result.exit_code == 2
        assert "'--seed'" in result.stderr

    @pytest.mark.parametrize(
        "body",
        [
            lambda out: None,
            lambda out: out.result({"no": "format"}),
            lambda out: [out.result({"format": "a"}), out.result({"format": "b"})],
            lambda out: out.result({"format": "a", "value": float("nan")}),
        ],
        ids=["no result", "no format", "two results", "nan"],
    )
    def test_a_command_that_breaks_the_rules_of_json_is_our_mistake(self, body):
        assert invoke(body, "--json").exit_code == 70


class TestOutputFile:
    def test_without_the_option_there_is_no_file(self):
        seen = []
        invoke(lambda output, out: seen.append(output), output=True)
        assert seen == [None]

    def test_it_is_written(self, tmp_path):
        target = tmp_path / "a.txt"
        result = invoke(
            lambda output, out: output.write("text") and None, "-o", str(target), output=True
        )
        assert result.exit_code == 0, result.output
        assert target.read_text() == "text"

    def test_what_exists_is_kept_and_the_work_does_not_begin(self, tmp_path):
        target = tmp_path / "a.txt"
        target.write_text("old")
        worked = []
        result = invoke(lambda output, out: worked.append(1), "-o", str(target), output=True)
        assert result.exit_code == 2
        assert result.stderr == (
            f"error: {target}: exists already; choose another name or add --force\n"
        )
        assert target.read_text() == "old"
        assert worked == []

    def test_force_overwrites(self, tmp_path):
        target = tmp_path / "a.txt"
        target.write_text("old")
        OutputFile(target, force=True).write("new")
        assert target.read_text() == "new"

    def test_what_appeared_meanwhile_is_kept(self, tmp_path):
        file = OutputFile(tmp_path / "a.txt")
        (tmp_path / "a.txt").write_text("theirs")
        with pytest.raises(FileError, match="exists already"):
            file.write("ours")
        assert (tmp_path / "a.txt").read_text() == "theirs"

    def test_a_folder_is_refused(self, tmp_path):
        with pytest.raises(FileError, match="is a folder; name a file in it"):
            OutputFile(tmp_path, force=True)

    def test_a_missing_folder_is_refused(self, tmp_path):
        with pytest.raises(FileError, match="its folder does not exist; make the folder first"):
            OutputFile(tmp_path / "no" / "a.txt")

    def test_a_dash_is_refused(self):
        with pytest.raises(FileError, match="is not a file; name a file"):
            OutputFile(Path("-"))


class TestStop:
    def test_it_carries_the_limits(self):
        with Output(quiet=True).stop(time_s=2.0, gap=0.1, target=3.0, evaluations=4) as stop:
            assert (stop.time_s, stop.gap, stop.target, stop.evaluations) == (2.0, 0.1, 3.0, 4)
            assert not stop.interrupted()

    def test_the_first_ctrl_c_asks_the_search_to_stop(self):
        out = Output(quiet=True)
        with out.stop() as stop:
            run = Run(stop, "endless", 0)
            run.offer("answer", 1.0)
            os.kill(os.getpid(), signal.SIGINT)
            assert run.done()
            result = run.result()
        assert (result.status, result.why) == (Status.STOPPED, "interrupted")
        assert result.solution == "answer"
        assert out.interrupted

    def test_the_second_ctrl_c_aborts(self):
        with Output(quiet=True).stop():
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)

    def test_the_handler_of_before_is_back_afterwards(self):
        before = signal.getsignal(signal.SIGINT)
        with Output(quiet=True).stop():
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before

    def test_it_works_outside_the_main_thread(self):
        seen = []

        def search():
            with Output(quiet=True).stop() as stop:
                seen.append(stop.interrupted())

        thread = threading.Thread(target=search)
        thread.start()
        thread.join()
        assert seen == [False]

    def test_an_interrupted_command_writes_its_result_and_exits_130(self):
        def body(out):
            with out.stop() as stop:
                os.kill(os.getpid(), signal.SIGINT)
                assert stop.interrupted()
            out.show("best so far")
            out.result({"format": "partita/test@1"})

        result = invoke(body)
        assert (result.exit_code, result.stdout) == (130, "best so far\n")
        result = invoke(body, "--json")
        assert result.exit_code == 130
        assert json.loads(result.stdout) == {"format": "partita/test@1"}

    def test_improvements_go_to_stderr(self):
        def body(out):
            with out.stop() as stop:
                stop.progress(Improvement(0.5, 10.0, 8.0, 1000))

        result = invoke(body)
        assert result.stdout == ""
        assert result.stderr == "500 ms  best 10  bound 8  gap 20.0%  1,000 evaluations\n"

    def test_quiet_shows_no_improvement(self):
        with Output(quiet=True).stop() as stop:
            assert stop.progress is None
