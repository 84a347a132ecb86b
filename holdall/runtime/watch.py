"""Does the loop still do what was traced? Another shape or branch may cost memory or time, never correctness; it is said
once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdall.errors import Unsupported
from holdall.types import Plan


class Watch:
    def __init__(self, plan: Plan, note: Callable[[str], None], *, any_size: bool = False) -> None:
        self._note = note
        self._any_size = any_size  # the plan is for batches up to its own
        self._expected = [(name, shapes) for name, shapes in plan.about.get("blocks", ())]
        self._batch = plan.about.get("batch")
        self._counts: dict[str, int] = {}
        self._next = 0

    def begin(self, args: Any, kwargs: Any) -> None:
        """A step begins."""
        self.again()
        shapes = [list(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not self._any_size and self._batch is not None and shapes and sorted(shapes) != sorted(self._batch):
            self._note(f"the loop left the trace: a batch of {shapes} where {self._batch} was planned")

    def again(self) -> None:
        """Another forward: calls are counted anew."""
        self._counts = {}
        self._next = 0

    def called(self, path: str, args: Any, kwargs: Any) -> str:
        """The name of this call of a block; notes when it is not the expected one."""
        nth = self._counts.get(path, 0)
        self._counts[path] = nth + 1
        name = path if nth == 0 else f"{path}#{nth}"
        if not torch.is_grad_enabled():
            return name
        if self._next < len(self._expected):
            expected, shapes = self._expected[self._next]
            if name != expected:
                self._note(f"the loop left the trace: `{name}` ran where `{expected}` was planned")
            elif not self._any_size:
                seen = [list(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                if seen != [list(s) for s in shapes]:
                    self._note(f"the loop left the trace: `{name}` got {seen} where {shapes} was planned")
        self._next += 1
        return name

    def end(self) -> None:
        """A step is over."""
        if self._next < len(self._expected):
            self._note(
                f"the loop left the trace: {self._next} of {len(self._expected)} blocks ran in the last forward of a step"
            )


def refuse_compiled(path: str, module: torch.nn.Module) -> None:
    """A plan that is on cannot be compiled into kernels. Whoever puts it on looks before; this is for what comes after."""
    if module._compiled_call_impl is not None:
        where = f"`{path}`" if path else "the model"
        raise Unsupported(
            f"{where} was compiled by torch.compile while a plan is on it",
            hint="leave it uncompiled until the harness is closed: under a plan it runs op by op",
        )
