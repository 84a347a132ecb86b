"""The group of verbs: each is imported only when run, and every expected error is shown in two lines with an exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from holdall.cli._errors import USAGE, exit_code, show_error
from holdall.errors import HoldallError, unknown_name

VERBS = {
    "demo": "Train a tiny GPT in all, half and a quarter of its activation memory, and compare.",
    "estimate": "One line: what training a model takes.",
    "trace": "What one training step does, without needing the memory.",
    "plan": "Decide what to keep, recompute and offload so that a step fits a budget.",
    "explain": "Why a plan does what it does, block by block.",
    "layout": "Where a plan's tensors lie: what each layout and allocator reserves for what is live.",
    "pipeline": "Pipeline schedules: bubble, time and memory of each rank, and a picture.",
    "compare": "Planners against budgets in one table.",
    "ladder": "What each technique gives and costs, added one after the other in real runs.",
    "train": "Train a model under a budget.",
    "probe": "Measure this machine.",
    "doctor": "Check this machine, and say what to change.",
    "cache": "What was measured, traced and planned before; `cache clear` removes it.",
    "planners": "The planners and their options.",
    "actions": "What planners may do, for --allow.",
    "optimizers": "The optimizers and their options.",
    "precisions": "The precision recipes, and the bytes that each takes.",
    "compatible": "What works with what, and whether exactly.",
    "systems": "The published systems, and where each lives here.",
}
"""Verb -> its line in `holdall --help`, in the order in which people meet them. `holdall/cli/VERB.py` defines `VERB`."""


class Verbs(TyperGroup):
    """Lists the verbs by the table above; imports one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """A placeholder with name and help line, enough for listing and completion without an import."""
        return TyperCommand(name=cmd_name, short_help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ARG002
        name = args[0]
        if name not in VERBS:
            raise unknown_name("verb", name, VERBS)
        return name, load_verb(name), args[1:]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        words = [word for word in given if word != "--debug"]
        options = {"prog_name": prog_name, "complete_var": complete_var, "windows_expand_args": windows_expand_args, **extra}
        if not standalone_mode:
            return super().main(words, standalone_mode=False, **options)
        try:
            code = super().main(words, standalone_mode=False, **options)
        except typer.Abort:
            sys.exit(130)
        except (HoldallError, USAGE, MemoryError, RuntimeError) as error:
            code = exit_code(error)
            if code is None or "--debug" in given:
                raise
            show_error(error)
        sys.exit(code or 0)


def load_verb(name: str) -> Any:
    """The command of a verb, from the function of its name in the file of its name."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, context_settings={"help_option_names": ["-h", "--help"]})(
        getattr(importlib.import_module(f"holdall.cli.{name}"), name)
    )
    return get_command(app)
