"""Which plan a step is made under: chosen where the model's forward begins, before anything is computed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdall.runtime.before import RandomNumbers
from holdall.runtime.lengths import Bucket, Buckets
from holdall.runtime.repeat import Repeat
from holdall.types import Plan

log = logging.getLogger("holdall")


class Choosing:
    """`buckets`: plans for several sizes. `repeat`: what to do when one was not enough. Either may be missing."""

    def __init__(self, harness: Any, buckets: Buckets | None, repeat: Repeat | None) -> None:
        self._harness = harness
        self._buckets = buckets
        self._repeat = repeat

    def call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the model: the plan is chosen before its hooks, of which some are the plan's own."""
        if torch.is_grad_enabled():
            self.choose(args, kwargs)
        return call(*args, **kwargs)

    def choose(self, args: Any, kwargs: Any) -> None:
        """The plan for a step of this size."""
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; the one it had when this call began may have been replaced since."""
        if self._repeat is not None:
            return self._repeat.forward(args, kwargs)
        return self._harness.run_root(args, kwargs)
