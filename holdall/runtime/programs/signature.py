"""What a captured graph depends on: arguments, parameters, settings of modules, autocast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdall.attributes import SettingsWatch

_SETTINGS = (bool, int, float, str)


class ModuleTensors:
    """A module and its submodules, found once. Parameters and buffers may be replaced at every call; they are listed in the
    order of `tensors_of`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._all = [(m, [*m._modules.values()]) for m in module.modules()]
        self._nested = SettingsWatch(m for m, _ in self._all)

    def are_of(self, module: torch.nn.Module) -> bool:
        """Are they still the submodules of this module?"""
        return self._all[0][0] is module and all([*m._modules.values()] == children for m, children in self._all)

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parameters and buffers, each once."""
        parameters = {id(p): p for m, _ in self._all for p in m._parameters.values() if p is not None}
        buffers = {id(b): b for m, _ in self._all for b in m._buffers.values() if b is not None}
        return [*parameters.values()], [*buffers.values()]

    def settings(self) -> tuple[Any, ...]:
        """Plain attributes of modules, such as `training`, which a captured graph has fixed; and a count of the changes of what
        is in their containers and objects."""
        return (self._nested.version(), *[v for m, _ in self._all for v in m.__dict__.values() if type(v) in _SETTINGS])


def signature_of(leaves: Sequence[Any], parameters: Sequence[torch.Tensor], settings: tuple[Any, ...]) -> Any:
    """Everything that a captured graph depends on."""
    given = [
        (t.dtype, t.device, t.shape, t.stride(), t.requires_grad) if isinstance(t, torch.Tensor) else repr(t)[:80]
        for t in leaves
    ]
    kinds = [(p.dtype, p.stride(), p.requires_grad) for p in parameters]
    casts = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
    return tuple(given), tuple(kinds), settings, tuple(casts)
