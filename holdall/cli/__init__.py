"""The command line: one file per verb, imported when it is typed.

`holdall --help`, `planners` and `systems` answer without loading torch, so the list of verbs here is written down rather than
gathered from their files.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdall.cli._verbs import VERBS, Verbs

app = typer.Typer(
    name="holdall",
    cls=Verbs,
    help="Train any model in the memory you have: trace -> plan -> apply -> report.",
    epilog="Start with `holdall demo`; `holdall VERB --help` has an example for each verb.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: it reads the same in a pipe and in eighty columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

__all__ = ["VERBS", "app", "main"]


def _show_version(asked: bool) -> None:
    if asked:
        from holdall import __version__

        typer.echo(f"holdall {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[  # noqa: ARG001
        bool, typer.Option("--debug", help="Show the whole traceback of an error; may stand anywhere in the line.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """The entry point of the command `holdall`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a bar in a terminal that knows only ASCII is no reason to fail
    app(prog_name="holdall")
