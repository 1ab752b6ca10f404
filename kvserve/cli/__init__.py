"""The command line: argv -> settings -> one call. One file per sub-command."""

import sys

import typer
from rich.console import Console

import kvserve
from kvserve.cli.bench import bench
from kvserve.cli.care import du, fsck, ls
from kvserve.cli.demo import demo
from kvserve.cli.demo_llm import demo_llm
from kvserve.cli.evict import evict
from kvserve.cli.pins import pin, release, unpin
from kvserve.cli.serve import serve
from kvserve.cli.transfers import delete, get, lookup, put, stat
from kvserve.errors import KvserveError

app = typer.Typer(
    name="kvserve",
    help="KV-cache transfer service for LLM inference.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (serve, put, get, lookup, delete, stat, pin, unpin, release):
    app.command()(command)
for tool in (fsck, du, ls, evict, demo, demo_llm):
    app.command()(tool)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvserve.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    """Runs the command; an error of ours is one clear line and exit status 1, never a stack."""
    try:
        app()
    except KvserveError as error:
        message = f"{type(error).__name__}: {error}"
    except OSError as error:  # a file named on the command line
        message = f"{error.filename or ''}: {error.strerror}"
    else:
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"kvserve: {message}", style="red", markup=False)
    sys.exit(1)
