"""Nop: plain training, the reference of every comparison. Raises if plain training does not fit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from holdall.planning.finish import finish
from holdall.types import Plan, Problem


@dataclass(frozen=True, kw_only=True)
class Nop:
    name: ClassVar[str] = "nop"
    paper: ClassVar[str] = "none: plain training"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        return finish(self, problem, [], why=["everything is kept, as in plain training"], began=time.perf_counter())
