"""Every error that holdall raises on purpose. One line that states the fact, and a hint that says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class HoldallError(Exception):
    """Base of all. `str(error)` is one line; `error.hint` is what to try next, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\nhint: {self.hint}" if self.hint else message

    @property
    def fact(self) -> str:
        """The message without the hint."""
        return super().__str__()


class InvalidInput(HoldallError, ValueError):
    """An argument, a file or a name that cannot be used."""


class Infeasible(HoldallError):
    """No plan fits. `smallest` is the least budget for which one was found, in bytes; None: none was found."""

    def __init__(self, message: str, *, hint: str = "", smallest: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.smallest = smallest


class TraceMismatch(HoldallError):
    """A plan does not belong to this model, optimizer or trace."""


class Unsupported(HoldallError):
    """Something holdall cannot do with this model or on this machine."""


class OverBudget(HoldallError, MemoryError):
    """The run went over its budget, and was stopped at the op that did it."""


class DiskError(HoldallError, OSError):
    """A disk that bytes were to leave for is full, cannot be read or written, or returned other bytes than were written."""


class MissingExtra(HoldallError, ImportError):
    """An optional dependency is not installed."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> InvalidInput:
    """The error for a name that is not one of `known`; offers the closest."""
    names = sorted(known)
    close = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    listed = ", ".join(names) if len(names) <= 40 else ", ".join(names[:40]) + ", ..."
    hint = f"did you mean `{close[0]}`? " if close else ""
    return InvalidInput(f"unknown {what} `{name}`", hint=f"{hint}known: {listed}")
