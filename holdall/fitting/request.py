"""The arguments of `fit`, from a raw loop or a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from holdall.fitting.mesh import Ranks
from holdall.problem import Budget, Precision
from holdall.tracing.autocast import Autocast
from holdall.types import Hardware, Plan, Progress


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """The arguments of `holdall.fit`, explained there; `options` go to the planner."""

    budget: Budget = "auto"
    planner: str = "auto"
    loss: Any = None
    hardware: Hardware | str | Path | None = None
    allow: Iterable[str] | None = None
    device: str | torch.device | None = None
    precision: Precision = None
    autocast: Autocast = None
    head: str | int = "auto"
    reads_gradients: bool = True
    accumulate: int = 1
    layout: str | None = None
    enforce: bool = True
    lengths: str | Iterable[Any] | None = None
    repeat: bool = True
    record: str | Path | None = None
    compile: bool | str = False
    progress: Progress | None = None
    plan: Plan | str | Path | None = None
    mesh: Ranks | str = None
    shard: str = "fsdp"
    options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(**arguments: Any) -> FitRequest:
        """From keyword arguments of `holdall.fit`: unknown ones go to the planner."""
        if "clips" in arguments:  # its older name
            arguments["reads_gradients"] = arguments.pop("clips")
        named = {f.name for f in fields(FitRequest)} - {"options"}
        own = {name: value for name, value in arguments.items() if name in named}
        return FitRequest(**own, options={name: value for name, value in arguments.items() if name not in named})

    @property
    def asked(self) -> dict[str, Any]:
        """Arguments of every planner besides the trace."""
        given = {"budget": self.budget, "hardware": self.hardware, "allow": self.allow}
        return {**given, "accumulate": self.accumulate, "layout": self.layout}
