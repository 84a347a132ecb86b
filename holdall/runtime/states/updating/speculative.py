"""Speculative updates: begun in backward, assuming that the loop will not clip, if it did not in the previous step.

The host computes them next to the old values (`out_of_place.py`). At the step, the speculation is either right, and its values
become the parameters, or it is dropped and the update is made from the old values. Both give the same bits.
"""

from __future__ import annotations

import torch

from holdall.runtime.states.gradients.entry import GradEntry
from holdall.runtime.states.unit import HOST
from holdall.runtime.states.updating.out_of_place import OutOfPlaceUpdate
from holdall.runtime.states.updating.updater import Order
from holdall.updates.parts import snapshot


class Ahead:
    """Begins speculative updates, and learns from every step whether they pay. `is_on`: the plan asks for them."""

    def __init__(self, beside: OutOfPlaceUpdate, optimizer: torch.optim.Optimizer, *, is_on: bool) -> None:
        self._beside = beside
        self._optimizer = optimizer
        self._is_on = is_on  # the plan asks for speculative updates
        self._is_plain = False  # the last step did not clip, so the next may speculate
        self._tried = self._right = 0  # speculative updates of this step, and those that were right
        self.were_right: list[bool] = []  # per step: were all speculative updates right?

    # in backward

    def begin(self, held: GradEntry) -> None:
        """Begin the update if the previous step was not clipped."""
        if not self._is_on or held.unit.update != HOST:
            return
        if not self._is_plain:
            return
        held.attempt = self._beside.attempt(held.unit, snapshot(self._optimizer), held.which, held.on_host)

    def give_up(self, held: GradEntry) -> None:
        """Gradients are accumulated: the speculation is wrong; stop speculating."""
        if held.attempt is not None and held.attempt.done is not None:
            held.attempt.done.result()  # it reads the buffer that the next gradient is copied to
            held.attempt, self._is_on = None, False

    # at the step

    def begin_step(self) -> None:
        self._tried = self._right = 0
        self._is_plain = True

    def judge(self, held: GradEntry, order: Order) -> bool:
        """Was the speculation right? Records the answer."""
        is_right = _is_right(held, order)
        self._tried += held.attempt is not None
        self._right += is_right
        is_vain = held.attempt is not None and not is_right
        self._is_plain &= not is_vain and held.sum is None and (order.scale is None or float(order.scale) == 1.0)
        return is_right

    def end_step(self) -> None:
        self.were_right.append(0 < self._tried == self._right)


def wait_for_attempt(held: GradEntry) -> None:
    """Wait until a speculative update no longer reads these gradients."""
    if held.attempt is not None and held.attempt.done is not None:
        held.attempt.done.result()


def _is_right(held: GradEntry, order: Order) -> bool:
    attempt = held.attempt
    if attempt is None or held.sum is not None or attempt.which != order.which or held.unit.was_written():
        return False
    plain = all(not isinstance(v, torch.Tensor) for g in (*attempt.groups, *order.groups) for v in g.values())
    return plain and attempt.groups == order.groups and (order.scale is None or float(order.scale) == 1.0)
