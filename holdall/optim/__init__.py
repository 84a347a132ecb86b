"""Low-memory optimizers: a file is a member, its class a plain `torch.optim.Optimizer` that works alone, without holdall.

    from holdall.optim.galore import GaLore
    optimizer = GaLore(GaLore.groups(model, rank=128), lr=1e-2)

Beside torch's interface each class has `name`, `paper`, `exact` (the same numbers as the torch optimizer it stands for),
`consumes_gradients` (it updates in backward, and leaves no gradient behind) and `state_bytes(param)`: the bytes of state it
allocates for a parameter, known before the first step. Files with an underscore are shared parts and the engine's own.

`in_backward(optimizer)` lets any optimizer that treats each parameter by itself update during backward.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "in_backward":  # looked for only where it is asked for: the list of members is read without torch
        from holdall.optim._in_backward.in_backward import in_backward

        return in_backward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
