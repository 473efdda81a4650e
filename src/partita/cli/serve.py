"""`partita serve`: a live page on this machine."""

from pathlib import Path

import click

from partita.capture.installed import need
from partita.capture.python_file import is_python_spec, python_path
from partita.cli.base import Output, common_options
from partita.errors import FileError
from partita.files import encode_json

MOST_SEARCHES = 4


@click.command()
@click.argument("files", metavar="[FILE]...", nargs=-1)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free one unless given.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Of this machine to itself.")
@click.option(
    "--searches",
    type=click.IntRange(1, 64),
    default=MOST_SEARCHES,
    show_default=True,
    help="How many may run at once.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@common_options
def command(
    files: tuple[str, ...], port: int, host: str, searches: int, opens: bool, out: Output
) -> int:
    """Open a live page: choose model and machine, move what a plan hangs on, see what follows.

    The page is for this machine alone, at the address printed here; its token lets nobody else in.
    It opens no file but each FILE named here: a config.json, file.py:function (which is run), a
    saved graph, an ONNX file, or a cluster.toml. Every answer has the command that gives the same.
    Searches show best and bound and can be stopped. Ctrl-C ends the page and all of its searches.
    """
    for file in files:
        _check_there(file)
    need("starlette", "serve", "the live page")
    need("uvicorn", "serve", "the live page")
    from partita.serve.server import run

    def started(address: str) -> None:
        if out.json:
            answer = {"format": "partita/serve@1", "url": address}
            click.echo(encode_json(answer, indent=0), nl=False)
        else:
            click.echo(address)
        out.note("open it in a browser on this machine; Ctrl-C ends it")
        if opens:
            click.launch(address)

    run(host, port, files, searches, started)
    click.get_current_context().exit(0)


def _check_there(file: str) -> None:
    """A page that would offer a file that is not there is not opened."""
    name = python_path(file) if is_python_spec(file) else file
    if not any(Path(path).exists() for path in (name, name.rpartition("@")[0] or name)):
        raise FileError(
            "does not exist", fix="name files that the page may open; the zoo needs none", file=name
        )
