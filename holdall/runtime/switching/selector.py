"""Which plan a step is made under: chosen where the model's forward begins, before anything is computed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdall.runtime.patching import put_method
from holdall.runtime.switching.buckets import Bucket, Buckets
from holdall.runtime.switching.retry import Repeat
from holdall.runtime.switching.snapshot import RandomNumbers
from holdall.types import Plan

log = logging.getLogger("holdall")


class Choosing:
    """`buckets`: plans for several sizes. `repeat`: what to do when one was not enough. Either may be missing."""

    def __init__(self, harness: Any, buckets: Buckets | None, repeat: Repeat | None) -> None:
        self._harness = harness
        self._buckets = buckets
        self._repeat = repeat
        self._is_inside = False
        self._root: Callable[..., Any] | None = None  # the model's own forward, while ours is in its place
        self._undo: Callable[[], None] | None = None
        if repeat is not None:
            repeat.run, repeat.adopt = self.run_root, self.adopt

    def call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the model: the plan is chosen before its hooks, of which some are the plan's own.

        Its forward is replaced for this call alone, whatever it is by now. A forward that says `is_detour` calls the model
        again itself: that call is the step's.
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
        """The model's forward under the present plan."""
        root = self._root if self._root is not None else self._harness.model.forward
        return root(*args, **kwargs)

    def adopt(self, plan: Plan) -> None:
        """Go on under another plan, also in the middle of a call: a plan for the whole model is its forward."""
        is_on = self._undo is not None
        self._take_off()
        try:
            self._harness.adopt(plan)
        finally:
            if is_on:
                self._put_on()

    def use(self, buckets: Buckets | None) -> None:
        """Other plans for several sizes, instead of those that there were."""
        self._buckets = buckets

    def choose(self, args: Any, kwargs: Any) -> None:
        """The plan for a step of this size, under this autocast."""
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
        """A batch larger than all before: its step is traced on the bare model."""
        numbers = RandomNumbers(self._harness.device)
        with self._harness.bare(), _disable_current_modes():
            try:
                made = buckets.add(args, kwargs)
            finally:
                numbers.put_back()
                torch.clear_autocast_cache()  # it would hold copies of stand-ins
        self._harness.note()(f"a batch larger than those planned for was met: made a plan for {made}")
        return made

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._repeat is not None
        self._is_inside = True  # a model that calls itself does so in one step
        try:
            return self._repeat.forward(args, kwargs)
        finally:
            self._is_inside = False
