"""Does for torch's GradScaler what fused optimizers do: unscales gradients and skips a step.

Where the loop unscales by itself, `Gradient` handles it. Fused optimizers unscale inside their update: the scaler sets
`grad_scale` and `found_inf` on the optimizer for one step. Updates of units do not read those two, so they are handled here,
before the updates.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.gradients.offloaded import Gradient
from holdall.runtime.states.unit import PlacedUnit


def unscale(optimizer: torch.optim.Optimizer, units: Iterable[PlacedUnit], *, are_used_up: bool) -> bool:
    """Unscale all gradients; True: one is not finite, and the step must be skipped."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is not None and are_used_up:
        raise Unsupported(
            "updates were made in backward with gradients that a GradScaler had not unscaled yet",
            hint="a loop with a GradScaler needs fit(..., reads_gradients=True)",
        )
    if found is not None and found.item():
        return True
    if scale is None:
        return False
    inverse = scale.reciprocal() if torch.frexp(scale).mantissa == 0.5 else None  # exact for a power of two
    for grad in (m.master.grad for u in units if u.needs_working for m in u.trained):
        if isinstance(grad, Gradient) and inverse is not None:
            grad.times(inverse)
        elif grad is not None:
            (grad.value() if isinstance(grad, Gradient) else grad).div_(scale)
    return False
