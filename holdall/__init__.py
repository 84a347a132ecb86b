"""Train any model in the memory you have: trace -> plan -> apply -> report."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdall.api import apply, fit, plan, trace
    from holdall.checkpoints import load_checkpoint, save_checkpoint
    from holdall.errors import HoldallError, Infeasible, InvalidInput, OverBudget, TraceMismatch, Unsupported
    from holdall.machine.probe import probe
    from holdall.reporting import Report
    from holdall.runtime.harness import Harness
    from holdall.types import Hardware, Outcome, Plan, Tier, Trace

__version__ = "0.1.0"

__all__ = [
    "Hardware",
    "Harness",
    "HoldallError",
    "Infeasible",
    "InvalidInput",
    "Outcome",
    "OverBudget",
    "Plan",
    "Report",
    "Tier",
    "Trace",
    "TraceMismatch",
    "Unsupported",
    "apply",
    "fit",
    "load_checkpoint",
    "plan",
    "probe",
    "save_checkpoint",
    "trace",
]

_WHERE = {
    "holdall.api": ("apply", "fit", "plan", "trace"),
    "holdall.checkpoints": ("load_checkpoint", "save_checkpoint"),
    "holdall.errors": ("HoldallError", "Infeasible", "InvalidInput", "OverBudget", "TraceMismatch", "Unsupported"),
    "holdall.reporting": ("Report",),
    "holdall.runtime.harness": ("Harness",),
    "holdall.machine.probe": ("probe",),
    "holdall.types": ("Hardware", "Outcome", "Plan", "Tier", "Trace"),
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Public names are imported when asked for: `holdall --help` need not wait for torch."""
    if name == "integrations":
        return import_module("holdall.integrations")
    if name not in _HOME:
        raise AttributeError(f"module 'holdall' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
