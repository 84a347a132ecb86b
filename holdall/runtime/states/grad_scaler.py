"""What torch's GradScaler leaves to optimizers that know it: to take its scale out of gradients, and to skip a step.

Where the loop unscales by itself, `Gradient` answers it. Fused optimizers do so inside of their update, and for that the scaler
puts `grad_scale` and `found_inf` on the optimizer for one step. Updates of units never see those two, so they are seen to here,
before the updates are made.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.offloaded_grad import Gradient
from holdall.runtime.states.unit import PlacedUnit


def unscale(optimizer: torch.optim.Optimizer, units: Iterable[PlacedUnit], *, are_used_up: bool) -> bool:
    """Take the scale out of all gradients; true: one of them is not finite, and the step is to do nothing."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is not None and are_used_up:
        raise Unsupported(
            "gradients were used up in backward, before their scale was taken out of them",
            hint="plan with `clips=True` where the loop has a GradScaler",
        )
    if found is not None and found.item():
        return True
    if scale is None:
        return False
    inverse = scale.reciprocal() if torch.frexp(scale).mantissa == 0.5 else None  # of a power of two: exact
    for grad in (m.home.grad for u in units if u.needs_work for m in u.trained):
        if isinstance(grad, Gradient) and inverse is not None:
            grad.times(inverse)
        elif grad is not None:
            (grad.value() if isinstance(grad, Gradient) else grad).div_(scale)
    return False
