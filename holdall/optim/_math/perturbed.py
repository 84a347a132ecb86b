"""A model that computes with perturbed parameters while the parameters themselves never change.

While the mode is on, every op that reads one of the parameters gets a perturbed copy, which is made for that op and freed after
it. So the extra memory is that of one parameter whatever the size of the model, nothing has to be restored, and an error in the
middle of a forward leaves the parameters unchanged. Views made of a parameter before the mode was on are handled too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Perturbed(TorchDispatchMode):
    """`make(n, param)` returns the perturbed copy of parameter number n: a new tensor of its shape, dtype and strides."""

    supports_higher_order_operators = True

    def __init__(self, params: Iterable[tuple[int, Tensor]], make: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self._make = make
        self._of: dict[int, list[tuple[int, Tensor]]] = {}
        for n, param in params:
            self._of.setdefault(param.untyped_storage()._cdata, []).append((n, param))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places, names = _written(func) if isinstance(func, torch._ops.OpOverload) else ((), ())
        given = [x if n in places else self._stand_in(x) for n, x in enumerate(args)]
        named = {k: x if k in names else self._stand_in(x) for k, x in (kwargs or {}).items()}
        return func(*given, **named)

    def _stand_in(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._replace(argument)
        if isinstance(argument, (list, tuple)):
            made = [self._stand_in(x) for x in argument]
            return made if isinstance(argument, list) else tuple(made)
        return argument

    def _replace(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor
        for n, param in self._of.get(tensor.untyped_storage()._cdata, ()):
            offset = int(tensor.storage_offset()) - int(param.storage_offset())
            if 0 <= offset <= offset + _extent(tensor) <= _extent(param):
                made = self._make(n, param)
                return (
                    made
                    if made.stride() == tensor.stride() and made.shape == tensor.shape
                    else _view(made, tensor, offset, param)
                )
        return tensor


@lru_cache(maxsize=1024)
def _written(func: torch._ops.OpOverload) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that an op writes to: those are not replaced."""
    written = [(n, a.name) for n, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(n for n, _ in written), tuple(name for _, name in written)


def _extent(tensor: Tensor) -> int:
    """Elements of storage from the tensor's first to its last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


def _view(made: Tensor, tensor: Tensor, offset: int, param: Tensor) -> Tensor:
    """The view of the perturbed copy that corresponds to the view `tensor` of the parameter."""
    if made.stride() != param.stride():  # the parameter has gaps, which a new tensor does not
        made = torch.empty_strided(param.shape, param.stride(), dtype=made.dtype, device=made.device).copy_(made)
    return made.as_strided(tensor.shape, tensor.stride(), offset)
