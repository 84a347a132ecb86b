"""Detects steps that differ from the trace. Another shape or branch may cost memory or time, never correctness; each kind is
reported once.

A step may call the model several times before its backward, also without gradients, or call submodules directly: calls of a
block are counted from one backward to the next, separately with and without gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdall.errors import Unsupported
from holdall.runtime.notes import Notes
from holdall.types import Plan
from holdall.types.info import Shapes


class Watch:
    def __init__(self, plan: Plan, note: Notes, *, any_size: bool = False) -> None:
        self._note = note
        self._any_size = any_size  # the plan covers batches up to its own size
        quiet = set(plan.about.quiet)  # calls that were traced without gradients
        self._expected = [(name, _lists(shapes)) for name, shapes in plan.about.blocks if name not in quiet]
        self._names = {True: _by_path(name for name, _ in self._expected), False: _by_path(sorted(quiet, key=_count))}
        self._known = {name for names in self._names.values() for some in names.values() for name in some}
        self._batch = None if plan.about.batch is None else _lists(plan.about.batch)
        self._counts: dict[tuple[bool, str], int] = {}
        self._next = 0
        self._went_back = False
        self.hears_backward = False  # a backward of the counted forward has a hook

    def begin(self, args: Any, kwargs: Any) -> None:
        """A step begins with a call of the model."""
        self.again()
        shapes = [list(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not self._any_size and self._batch is not None and shapes and sorted(shapes) != sorted(self._batch):
            self._left("a batch", f" of {shapes} instead of the planned {self._batch}")

    def again(self) -> None:
        """Restart the counts."""
        self._counts = {}
        self._next = 0
        self._went_back = self.hears_backward = False

    def go_on(self) -> None:
        """Another forward of the same step: continue the counts, unless the traced forwards are over."""
        if self.is_over:
            self.again()

    @property
    def is_over(self) -> bool:
        """Are the traced forwards over? All blocks ran, or a backward has begun."""
        return self._went_back or self._next >= len(self._expected)

    def backward_began(self) -> None:
        self._went_back = True

    def called(self, path: str, args: Any, kwargs: Any) -> str:
        """The name of this call of a block; adds a note if it is not the expected one."""
        trained = torch.is_grad_enabled()
        nth = self._counts.get((trained, path), 0)
        self._counts[trained, path] = nth + 1
        name = self._name(path, nth, trained=trained)
        if not trained:
            return name
        if self._next < len(self._expected):
            expected, shapes = self._expected[self._next]
            if name != expected:
                self._left("another block ran", f": `{name}` instead of the planned `{expected}`")
            elif not self._any_size:
                seen = [list(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                if seen != shapes:
                    self._left("other inputs", f": `{name}` got {seen} where {shapes} was planned")
        self._next += 1
        return name

    def _name(self, path: str, nth: int, *, trained: bool) -> str:
        names = self._names[trained].get(path, ())
        if nth < len(names):
            return names[nth]
        if not trained and not self._names[False]:  # an evaluation: its calls are numbered as those of a step
            return path if nth == 0 else f"{path}#{nth}"
        while (name := path if nth == 0 else f"{path}#{nth}") in self._known:  # the name of another call
            nth += 1
        return name

    def end(self) -> None:
        """A step is over."""
        if self._next < len(self._expected):
            self._left("fewer blocks ran", f": {self._next} of {len(self._expected)} in the last forward of a step")

    def _left(self, kind: str, how: str) -> None:
        """Report each kind once: a loop that leaves the trace does so repeatedly."""
        begins = f"the loop left the trace: {kind}"
        self._note(f"{begins}{how}", kind=begins)


def _lists(shapes: Shapes) -> list[list[int]]:
    return [list(shape) for shape in shapes]


def _by_path(names: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition("#")[0], []).append(name)
    return found


def _count(name: str) -> tuple[str, int]:
    path, _, nth = name.partition("#")
    return path, int(nth or 0)


def refuse_compiled(path: str, module: torch.nn.Module) -> None:
    """Refuse a module compiled by torch.compile after the plan was applied (`fit` and `apply` check before)."""
    if module._compiled_call_impl is not None:
        where = f"`{path}`" if path else "the model"
        raise Unsupported(
            f"{where} was compiled by torch.compile while a plan is on it",
            hint="call `harness.close()` first; to compile blocks under a plan, use fit(..., compile=True)",
        )
