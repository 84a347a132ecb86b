"""Evaluates a model that is too large for a device: each module's own tensors are there while its forward runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Bring = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def by_turns(model: torch.nn.Module, bring: Bring) -> Iterator[None]:
    """Inside, modules have their parameters as `bring` returns them while their forward runs, and then as before."""
    depth: Counter[torch.nn.Module] = Counter()
    away: dict[torch.nn.Module, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}

    def enter(module: torch.nn.Module, *_: Any) -> None:
        depth[module] += 1
        if depth[module] == 1:
            own = list(module.parameters(recurse=False))
            away[module] = [(p, p.data) for p in own]
            for p in own:
                p.data = bring(p.data)

    def leave(module: torch.nn.Module, *_: Any) -> None:
        depth[module] -= 1
        if not depth[module]:
            for p, data in away.pop(module):
                p.data = data

    hooks = []
    try:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hooks.append(module.register_forward_pre_hook(enter))
                hooks.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for own in away.values():  # a forward that did not come to its end
            for p, data in own:
                p.data = data
