"""Chooses the plan of a step at the beginning of the model's forward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdall.runtime.patching import put_method
from holdall.runtime.switching.buckets import Bucket, Buckets
from holdall.runtime.switching.retry import Repeat
from holdall.runtime.switching.snapshot import RandomNumbers
from holdall.types import Plan

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

log = logging.getLogger("holdall")


class Choosing:
    """`buckets`: plans for several sizes. `repeat`: retries a step that ran out of memory. Either may be None."""

    def __init__(self, harness: Harness, buckets: Buckets | None, repeat: Repeat | None) -> None:
        self._harness = harness
        self._buckets = buckets
        self._repeat = repeat
        self._is_inside = False
        self._root: Callable[..., Any] | None = None  # the model's own forward, while ours replaces it
        self._undo: Callable[[], None] | None = None
        if repeat is not None:
            repeat.run, repeat.adopt = self.run_root, self.adopt

    def call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the model: choose the plan before any hook runs, since some hooks belong to the plan.

        The model's current forward is replaced for this call only. A forward with `is_detour` calls the model again itself:
        that inner call is the step's.
        """
        if not torch.is_grad_enabled() or self._is_inside:
            return call(*args, **kwargs)
        self.choose(args, kwargs)
        if self._repeat is None or getattr(self._harness.model.forward, "is_detour", False):
            return call(*args, **kwargs)
        self._put_on()
        try:
            return call(*args, **kwargs)
        finally:
            self._take_off()

    def _put_on(self) -> None:
        self._root = self._harness.model.forward
        self._undo = put_method(self._harness.model, "forward", self._forward)

    def _take_off(self) -> None:
        undo, self._undo, self._root = self._undo, None, None
        if undo is not None:
            undo()

    def run_root(self, args: Any, kwargs: Any) -> Any:
        """The model's forward under the current plan."""
        root = self._root if self._root is not None else self._harness.model.forward
        return root(*args, **kwargs)

    def adopt(self, plan: Plan) -> None:
        """Switch to another plan, also in the middle of a call: a plan for the whole model replaces its forward."""
        is_on = self._undo is not None
        self._take_off()
        try:
            self._harness.adopt(plan)
        finally:
            if is_on:
                self._put_on()

    def use(self, buckets: Buckets | None) -> None:
        """Replace the plans for several sizes."""
        self._buckets = buckets

    def choose(self, args: Any, kwargs: Any) -> None:
        """Switch to the plan for a step of this size under this autocast."""
        self._harness.follow_autocast()
        plan: Plan = self._harness.regular
        if self._buckets is not None:
            plan = (self._buckets.find(args, kwargs) or self._meet(self._buckets, args, kwargs)).plan
        if self._repeat is not None:
            plan = self._repeat.instead_of(plan)
        if plan is not self._harness.plan:
            self._harness.adopt(plan)
            log.debug("holdall: %s", plan.summary())

    def _meet(self, buckets: Buckets, args: Any, kwargs: Any) -> Bucket:
        """Plan for a batch larger than all before: trace its step on the model without a plan."""
        numbers = RandomNumbers(self._harness.device)
        with self._harness.bare(), _disable_current_modes():
            try:
                made = buckets.add(args, kwargs)
            finally:
                numbers.put_back()
                torch.clear_autocast_cache()  # it would hold casts that are fake tensors
        self._harness.note()(f"a batch was larger than all planned sizes: made a plan for {made}")
        return made

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._repeat is not None
        self._is_inside = True  # a recursive call belongs to the same step
        try:
            return self._repeat.forward(args, kwargs)
        finally:
            self._is_inside = False
