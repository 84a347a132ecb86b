"""Smart-Infinity: weights on the host; masters and moments with drives that update them, so that no moment crosses the bus.

Jang et al., HPCA 2024, arXiv 2403.06664. Placement and recomputation are ZeRO-Infinity's with weights in host memory. What the
paper's drives do on an FPGA, a process for each drive does here, on files of its own: the rule and its traffic are the paper's,
the speed is that of the host's processors. Traffic between host and drives falls from 28 bytes for each parameter (states read
and written, gradients) to 8: the gradient out, the new master back. `keep` below 1 is SmartComp: only the largest entries of a
gradient are sent, the rest is added to the next one. That is not exact.

`seconds` is the comparison of the paper: with more drives, an update is faster until the bus is the limit.

Not here: sub-groups of 4e7 elements in a drive's buffers (a file is mapped as memory, and the system reads and writes it),
masters that are needed first written first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.near_storage import NearStorage
from holdall.actions.near_storage_compressed import NearStorageCompressed
from holdall.actions.place import Place, streamable
from holdall.errors import InvalidInput
from holdall.planners.l2l import layers
from holdall.planning.finish import finish
from holdall.planning.state_planners import movable, places_states
from holdall.types import Action, Plan, Problem


@dataclass(frozen=True, kw_only=True)
class SmartInfinity:
    drives: int = 1  # processes that own files of states
    folders: str = ""  # of the drives, by turns, separated by commas; empty: the system's folder for temporary files
    keep: float = 1.0  # share of a gradient's entries that are sent; below 1 it is not exact
    streamed: bool = True  # weights are fetched from the host for each use; else they stay
    recompute: bool = True  # every block

    name: ClassVar[str] = "smart_infinity"
    paper: ClassVar[str] = "Jang et al., HPCA 2024, arXiv 2403.06664"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.drives < 1 or not 0 < self.keep <= 1:
            raise InvalidInput(
                f"`drives` is {self.drives} and `keep` {self.keep}", hint="use 1 drive or more, and a share up to 1"
            )
        actions: list[Action] = layers(problem, on_host=False) if self.recompute else []
        why = []
        if places_states(problem):
            trace = problem.trace
            can = streamable(trace) if self.streamed else set()
            rows = {u.name: ("streamed" if u.name in can else "resident", "host") for u in movable(trace)}
            overlap = problem.hardware.overlap
            place = Place.of(trace, rows, when="step", share=problem.accumulate == 1, overlap=overlap)
            folders = tuple(filter(None, self.folders.split(",")))
            near = NearStorage(drives=self.drives, folders=folders)
            if self.keep < 1:
                near = NearStorageCompressed(drives=self.drives, folders=folders, keep=self.keep)
            actions = [place, near, *actions]
            count = sum(u.numel for u in movable(trace))
            why.append(
                f"{self.drives} drives update {count:,} parameters; {bus_bytes(1, self.keep):g} bytes of each cross the bus"
            )
        return finish(self, problem, actions, why=why, began=began)


def bus_bytes(parameters: float, keep: float = 1.0) -> float:
    """Bytes between host and drives in a step: gradients out (or positions and values of some entries), masters back."""
    return parameters * (4 + (4 if keep >= 1 else 8 * keep))


def seconds(parameters: float, drives: int, *, internal: float, bus: float, keep: float = 1.0) -> float:
    """Of an update by drives: each reads and writes 12 bytes of states inside, and all share the bus."""
    return max(24 * parameters / (drives * internal), bus_bytes(parameters, keep) / bus)


def seconds_by_host(parameters: float, drives: int, *, internal: float, bus: float) -> float:
    """Of an update by the host (ZeRO-Infinity): states and gradients cross the bus both ways."""
    moved = 28 * parameters
    return max(moved / (drives * internal), moved / bus)
