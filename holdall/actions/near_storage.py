"""Near storage: processes that own files of masters and moments update them there; gradients go out, new masters come back.

Smart-Infinity (Jang et al., HPCA 2024) does this in drives that compute. Here a process for each drive stands for one
(`updates/drive.py`), and `runtime/near_storage.py` talks to it. They serve the units that `place` updates on the host. What
passes between the host and the drives in a step is a gradient and a master for each parameter, never a moment.

Exact: the drives run torch's Adam or AdamW. While it is on, optimizer states are with the drives; `state_dict` brings a copy,
`load_state_dict` sends them there, and closing brings them back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from holdall.errors import InvalidInput
from holdall.types import Facts, Problem, Run, Schedule, Trace

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness


@dataclass(frozen=True, kw_only=True)
class NearStorage(Facts):
    drives: int = 1  # processes
    folders: tuple[str, ...] = ()  # where they keep their files, by turns; empty: the system's folder for temporary files

    name: ClassVar[str] = "near_storage"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 40  # after `place`, whose updates it takes over
    what: ClassVar[str] = "optimizer states are updated by processes that own their files"

    @property
    def share(self) -> float:
        """Of a gradient's entries that are sent."""
        return 1.0

    @staticmethod
    def samples(trace: Trace) -> list[Any]:
        return [NearStorage()] if trace.units else []

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        """States leave for the farthest tier; an update takes as long as its messages, or the drives' files."""
        if self.drives < 1:
            raise InvalidInput(f"`drives` is {self.drives}", hint="use 1 or more")
        others, units = problem.hardware.others, {f"update of {u.name}": u for u in problem.trace.units}
        if not others:
            return schedule
        schedule = schedule.copy()
        disk, rate = others[-1], problem.hardware.bandwidth
        for steps in schedule.after.values():
            for n, step in enumerate(steps):
                if isinstance(step, Run) and step.stream == "host" and step.name in units:
                    unit = units[step.name]
                    both = 12 * unit.numel
                    files = both / disk.read + both / disk.write
                    messages = (4 + 4 * min(1.0, 2 * self.share)) * unit.numel / rate
                    steps[n] = replace(step, seconds=max(messages, max(files, step.seconds) / self.drives))
                    for x in unit.states:
                        schedule.start[x] = disk.name
        return schedule

    def install(self, harness: Harness) -> None:
        if harness.optimizer is None:
            return
        from holdall.runtime.near_storage import Near

        near = Near(harness, drives=self.drives, folders=self.folders, share=self.share)
        near.watch(harness.optimizer)
