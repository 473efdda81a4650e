"""The group: help without imports, and how every ending becomes an exit code and one line."""

import errno
import json
import os
import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import partita
from partita.cli import COMMANDS, Partita
from partita.cli import partita as group
from partita.errors import FileError, MissingExtraError, VerificationError

NAMES = [name for section in COMMANDS.values() for name in section]


def failing(error: BaseException) -> Partita:
    """A group with one command, `fail`, that raises `error`."""

    class Failing(Partita):
        def list_commands(self, ctx: click.Context) -> list[str]:
            return ["fail"]

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            @click.command()
            @click.option("--json", is_flag=True)
            def fail(json: bool) -> None:
                raise error

            return fail

    return Failing("partita", params=[click.Option(["--traceback"], is_flag=True)])


def test_alone_it_says_what_it_is_and_what_to_type_next(run):
    result = run()
    assert result.exit_code == 0
    assert "plans, proves and runs" in result.stdout
    assert "partita plan gpt2 --cluster 4xA100" in result.stdout
    assert "partita --help" in result.stdout
    assert result.stderr == ""


def test_version(run):
    assert run("--version").stdout == f"partita {partita.__version__}\n"


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_every_command_in_its_section_with_examples(run, option):
    text = run(option).stdout
    titles = "|".join([*COMMANDS, "Examples"])
    sections = re.split(rf"^({titles}):$", text, flags=re.M)
    outcome = dict(zip(sections[1::2], sections[2::2], strict=True))
    for section, commands in COMMANDS.items():
        assert re.findall(r"^  ([\w-]+) ", outcome[section], flags=re.M) == list(commands)
    assert outcome["Examples"].count("  partita ") >= 3


def test_help_imports_no_command_and_nothing_heavy():
    code = (
        "import sys; sys.argv = ['partita', '--help']\n"
        "from partita.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(result.stderr.split())
    assert "partita.cli" in loaded
    assert not loaded & {"numpy", "numba", "torch", "ortools", "rich", "msgspec"}
    assert not loaded & {f"partita.cli.{name}" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_command_has_help_and_the_common_options(run, name):
    result = run(name, "--help")
    assert result.exit_code == 0, result.output
    for option in ("--json", "--seed", "--quiet"):
        assert option in result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_of_any_command_exits_2_and_names_the_help(run, name):
    result = run(name, "--no-such-option")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"(for help: partita {name} --help)" in result.stderr


def test_an_unknown_command_is_answered_with_the_nearest(run):
    result = run("docter")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: no command 'docter'; did you mean doctor? (for help: partita --help)\n"
    )


def test_a_usage_error_under_json_is_one_json_object(run_json):
    answer = run_json("docter", code=2)
    assert answer["format"] == "partita/error@1"
    assert "did you mean doctor?" in answer["error"]
    assert answer["field"] is None
    assert answer["file"] is None


def test_an_input_error_is_one_line_and_exit_code_2():
    error = FileError("is empty", fix="fill it", field="ops[3]", file="a.json")
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "error: a.json: ops[3]: is empty; fill it\n"


def test_an_input_error_under_json_names_field_and_file():
    error = FileError("is empty", fix="fill it", field="ops[3]", file="a.json")
    result = CliRunner().invoke(failing(error), ["fail", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "format": "partita/error@1",
        "error": "a.json: ops[3]: is empty; fill it",
        "field": "ops[3]",
        "file": "a.json",
    }
    assert result.stderr == "error: a.json: ops[3]: is empty; fill it\n"


def test_a_message_of_several_lines_becomes_one():
    result = CliRunner().invoke(failing(FileError("first\nsecond")), ["fail"])
    assert result.stderr == "error: first second\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (VerificationError(("a runs twice",)), 1, "not verified: a runs twice"),
        (MissingExtraError("torch", "torch", "running"), 2, "pip install 'partita[torch]'"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 70, "memory is used up"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
    ],
    ids=["verification", "extra", "ctrl-c", "memory", "disk"],
)
def test_every_ending_has_one_line_and_its_exit_code(error, code, message):
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_mistake_of_ours_asks_to_be_reported_without_a_traceback():
    result = CliRunner().invoke(failing(KeyError("x")), ["fail"])
    assert result.exit_code == 70
    assert "a mistake in partita itself (KeyError: 'x')" in result.stderr
    assert "partita --traceback fail" in result.stderr
    assert "Traceback" not in result.stderr


def test_with_traceback_a_mistake_of_ours_is_not_caught():
    result = CliRunner().invoke(failing(KeyError("x")), ["--traceback", "fail"])
    assert isinstance(result.exception, KeyError)


def test_a_closed_pipe_is_quiet():
    result = CliRunner().invoke(failing(BrokenPipeError(errno.EPIPE, "Broken pipe")), ["fail"])
    assert result.exit_code == 141
    assert result.output == ""


def test_output_into_a_closed_pipe_is_quiet():
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-m", "partita", "--help"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert process.stderr == b""
    assert process.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "partita", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert process.stderr == b"error: the output cannot be written (No space left on device)\n"
    assert process.returncode == 2


def test_a_terminal_without_unicode_gets_question_marks_not_an_error(process):
    result = process("n→", env={**os.environ, "PYTHONIOENCODING": "latin-1:strict"})
    assert result.returncode == 2
    assert "no command 'n?'" in result.stderr


def test_python_m_partita_is_the_same_command(process):
    assert process("--version").stdout == f"partita {partita.__version__}\n"


def test_the_group_is_named_as_people_type_it():
    assert group.name == "partita"
