"""Error messages of the command line, and its exit codes.

0  done                     2  wrong use: an argument, a file, a name, a missing extra
1  the run itself failed    3  no plan fits the budget
"""

from __future__ import annotations

from typing import cast

import typer

from holdall.errors import HoldallError, Infeasible, OverBudget

FAILED, WRONG_USE, INFEASIBLE = 1, 2, 3

USAGE = cast("type[Exception]", typer.BadParameter.__base__)
"""What typer raises for a wrong command line; its module differs between versions, its place above BadParameter does not."""


def exit_code(error: BaseException) -> int | None:
    """The exit code of an expected error; None: an unexpected one."""
    if isinstance(error, Infeasible):
        return INFEASIBLE
    if isinstance(error, (OverBudget, MemoryError)) or _is_device_full(error) or _is_host_full(error):
        return FAILED
    return WRONG_USE if isinstance(error, (HoldallError, USAGE)) else None


def show_error(error: BaseException) -> None:
    """Write the error in one line and the hint in another to stderr."""
    fact, hint = _in_words(error)
    typer.echo(f"error: {fact}", err=True)
    if hint:
        typer.echo(f"\nhint: {hint}", err=True)


def _in_words(error: BaseException) -> tuple[str, str]:
    if isinstance(error, HoldallError):
        return error.fact, error.hint
    if isinstance(error, USAGE):
        return _usage_in_words(error)
    where = "the device" if _is_device_full(error) else "this machine"
    return f"{where} ran out of memory: {first_line(error)}", "plan for a smaller budget, or use a smaller batch"


def _usage_in_words(error: Exception) -> tuple[str, str]:
    context = getattr(error, "ctx", None)
    message = " ".join(getattr(error, "format_message", error.__str__)().split()).rstrip(".")
    command = context.command_path if context is not None else "holdall"
    return message[:1].lower() + message[1:], f"`{command} --help` shows what can be given"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its name where it has none."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def _is_host_full(error: BaseException) -> bool:
    """torch has no error of its own for a full host."""
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _is_device_full(error: BaseException) -> bool:
    """torch's own error, known by its name: errors are shown by verbs that never load torch, too."""
    return type(error).__name__ == "OutOfMemoryError"
