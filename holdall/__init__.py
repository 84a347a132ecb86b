"""Train any model in the memory you have: trace -> plan -> apply -> report."""

from holdall.api import apply, fit, plan, trace
from holdall.errors import HoldallError, Infeasible, InvalidInput, OverBudget, TraceMismatch, Unsupported
from holdall.reporting import Report
from holdall.runtime.harness import Harness
from holdall.runtime.probe import probe
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
    "plan",
    "probe",
    "trace",
]
