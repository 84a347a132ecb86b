"""Thin adapters: one added line in a script of `transformers.Trainer`, `accelerate`, Lightning or Fabric.

All of them plan at the first training step, from the arguments that the loop passes to the model (`_fitting.py`), so no data is
read early. Each module imports its framework when it is imported itself, and says how to install it if it is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdall.integrations import accelerate, hf_trainer, lightning
    from holdall.integrations.hf_trainer import HoldallCallback

__all__ = ["HoldallCallback", "accelerate", "hf_trainer", "lightning"]


def __getattr__(name: str) -> Any:
    """Import a module on first access: few users need every framework."""
    if name == "HoldallCallback":
        return import_module("holdall.integrations.hf_trainer").HoldallCallback
    if name in __all__:
        return import_module(f"holdall.integrations.{name}")
    raise AttributeError(f"module 'holdall.integrations' has no attribute {name!r}")
