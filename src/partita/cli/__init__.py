"""The command line: one small file per command, imported only when it is called.

`COMMANDS` is the table behind `partita --help`; it holds the one-line help of each command, so
that showing it imports none of them. The module `partita.cli.<name>` holds a click command called
`command`. What each way of ending means is decided here and nowhere else:

    0 done · 1 infeasible or not verified · 2 bad input · 130 interrupted · 70 a mistake of ours
"""

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import click

from partita import __version__
from partita.errors import PartitaError

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
PIPE_CLOSED = 141  # 128 + SIGPIPE: whoever read our output has gone
OUR_MISTAKE = 70  # EX_SOFTWARE

# section -> command -> one line of help, in the order a newcomer meets them
COMMANDS: dict[str, dict[str, str]] = {
    "Plan": {
        "plan": "Everything at once: splits, stages, devices, micro-batches, schedule.",
        "shard": "Split every op of a model over the devices of a cluster.",
        "partition": "Cut a model into stages, and give each a device.",
        "place": "Choose a device for every op, on heterogeneous devices.",
        "experiment": "Many placement runs from one file: tables, charts, animation.",
        "schedule": "Order the micro-batches of any placement, with a bound.",
        "accelerate": "The fastest way to run a model on this machine's GPU.",
        "streams": "Run the ops of a model side by side on one GPU.",
        "rtasks": "Plan a model as one persistent kernel, tile by tile.",
        "solve": "Solve a saved problem file of any kind.",
    },
    "Look": {
        "profile": "Time every op of a model on this machine.",
        "compare": "Named strategies and our searches in one table.",
        "simulate": "Time, bounds and memory of a model on a cluster.",
        "explain": "What bounds a plan, what would help, why an op is split so.",
        "diff": "What two plans do differently, and what it is worth.",
        "serve": "A live page: move batch, memory, links; the plan follows.",
        "report": "Draw a plan: text here, HTML or a trace in a file.",
        "verify": "Check a plan, program or timeline, whatever made it.",
        "validate": "Predictions against measured runs of a file.",
    },
    "Run": {
        "run": "Run a plan on torch.distributed, under torchrun.",
        "compare-trace": "A traced run beside its prediction; what was assumed wrong.",
        "emit": "Write the stages of a plan as Python source.",
        "export": "Write a plan for torchtitan, Megatron-LM, DeepSpeed or FSDP2.",
    },
    "Know": {
        "models": "The models that come with partita.",
        "clusters": "The machines that come with partita.",
        "methods": "The search methods for each kind of problem.",
        "schema": "JSON Schemas of files and of what --json prints.",
        "doctor": "What is installed, and what each missing package would add.",
    },
}

EXAMPLES = (
    ("partita plan gpt2 --cluster 4xA100 --batch 32 -o plan.json", "plan"),
    ("partita report plan.json -o report.html", "look at it"),
    ("partita simulate llama-7b --cluster 8xH100", "without a plan"),
    ("partita solve problem.json --time-limit 10", "a problem of your own"),
)

WELCOME = f"""\
Partita {__version__} plans, proves and runs the parallel execution of deep-learning models.

Try:         {EXAMPLES[0][0]}
Then:        {EXAMPLES[1][0]}
Everything:  partita --help
"""


class Partita(click.Group):
    """The lazy group of all commands, and the one place where errors become exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All command names, in the order of the help."""
        return [name for section in COMMANDS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None if there is no such command."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = f"partita.cli.{cmd_name.replace('-', '_')}"
        command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, but an unknown command is answered with the nearest one."""
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            from partita.suggest import suggest

            ctx.fail(f"no command {name!r}; {suggest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by section, from the table: nothing is imported for it."""
        width = max(map(len, self.list_commands(ctx)))
        for section, commands in COMMANDS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, one line each, as they would be typed."""
        width = max(len(line) for line, _ in EXAMPLES)
        with formatter.section("Examples"):
            for line, purpose in EXAMPLES:
                formatter.write(f"  {line.ljust(width)}  # {purpose}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with our own words for Ctrl-C and a closed pipe."""
        with _our_endings():
            return super().invoke(ctx)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the command line; `--help` and `--version` print from in here."""
        with _our_endings():
            return super().make_context(*args, **extra)

    def main(  # type: ignore[override]  # never returns: every ending is an exit code
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run one command line and exit with its code."""
        words = list(sys.argv[1:] if args is None else args)
        _never_fail_on_characters()
        extra["standalone_mode"] = False
        try:
            code = super().main(words, prog_name or "partita", **extra)
        except (_ReaderGoneError, BrokenPipeError):
            _silence_output()
            sys.exit(PIPE_CLOSED)
        except Exception as error:
            if "--traceback" in words and not isinstance(error, click.ClickException | click.Abort):
                raise
            sys.exit(_report(error, words))
        sys.exit(code if isinstance(code, int) else 0)


class _ReaderGoneError(Exception):
    """Whoever read our output has closed it."""


@contextlib.contextmanager
def _our_endings() -> Iterator[None]:
    """Turn what click would report in its own way into what `main` reports in ours."""
    try:
        yield
    except BrokenPipeError:
        raise _ReaderGoneError from None
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            click.echo(err=True)  # the terminal has shown ^C on this line
        raise click.Abort from None


def _report(error: Exception, words: list[str]) -> int:
    """Say in one line what went wrong (as JSON too, if asked for); the exit code to end with."""
    message, code = _explain(error, words)
    click.echo(f"error: {message}", err=True)
    if "--json" in words:
        import json

        report = {
            "format": "partita/error@1",
            "error": message,
            "field": getattr(error, "field", "") or None,
            "file": getattr(error, "file", "") or None,
        }
        click.echo(json.dumps(report, indent=1))
    return code


def _explain(error: Exception, words: list[str]) -> tuple[str, int]:
    if isinstance(error, PartitaError):
        return " ".join(str(error).split("\n")), error.exit_code
    if isinstance(error, click.Abort):
        return "interrupted", INTERRUPTED
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "partita"
        text = error.format_message().rstrip(".")
        return f"{text[:1].lower()}{text[1:]} (for help: {where} --help)", error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, MemoryError):
        return "this machine's memory is used up; try a smaller problem", OUR_MISTAKE
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        _silence_output()
        return f"the output cannot be written ({error.strerror})", 2
    what = f"{type(error).__name__}: {error}".split("\n")[0].removesuffix(": ")
    return (
        f"a mistake in partita itself ({what}); please report it with the output of: "
        f"partita --traceback {' '.join(words)}",
        OUR_MISTAKE,
    )


def _never_fail_on_characters() -> None:
    """A terminal that cannot show a character gets a `?`, not a UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _silence_output() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot complain."""
    with contextlib.suppress(OSError, ValueError):  # not a real file: a test's buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(
    cls=Partita,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="partita", message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, hidden=True, expose_value=False)
@click.pass_context
def partita(ctx: click.Context) -> None:
    """Plan, prove and run the parallel execution of deep-learning models."""
    if ctx.invoked_subcommand is None:
        click.echo(WELCOME, nl=False)


def main() -> NoReturn:
    """The `partita` command."""
    partita.main()
