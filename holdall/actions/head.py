"""Head: compute the loss of a large vocabulary a few rows at a time, so that the whole logits never exist.

A chunked head has other ops, so the trace is already taken with the head chunked (`about.head` names it). The schedule needs
no change; installing the action chunks the head of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from holdall.errors import Unsupported
from holdall.types import Facts, Problem, Schedule, Trace

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness


@dataclass(frozen=True, kw_only=True)
class Head(Facts):
    module: str  # path of the head
    rows: int  # rows per chunk

    name: ClassVar[str] = "head"
    exact: ClassVar[bool] = False  # the tolerance is in runtime/head/chunked_loss.py
    rank: ClassVar[int] = 5
    by_default: ClassVar[bool] = True

    @staticmethod
    def samples(trace: Trace) -> list[Head]:
        traced = _of(trace)
        return [] if traced is None else [traced]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        traced = _of(problem.trace)
        if traced != self:
            how = "whole" if traced is None else f"as `{traced.module}` in chunks of {traced.rows} rows"
            raise Unsupported(
                f"the plan chunks `{self.module}` by {self.rows} rows, but the trace has its head {how}",
                hint=f"trace with the head chunked alike: holdall.trace(..., head={self.rows})",
            )
        return schedule

    def install(self, harness: Harness) -> None:
        from holdall.runtime.head.lazy_logits import chunk_head  # planning needs no torch

        try:
            head = harness.model.get_submodule(self.module)
        except AttributeError:
            raise Unsupported(f"the model has no module `{self.module}`", hint="plan again for this model") from None
        harness.on_close(chunk_head(head, rows=self.rows))


def _of(trace: Trace) -> Head | None:
    """The chunked head of the trace, if it has one."""
    head = trace.about.head
    return None if head is None else Head(module=head.module, rows=head.rows)
