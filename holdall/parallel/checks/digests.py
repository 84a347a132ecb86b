"""What modules return, one number for each position of a sequence: to compare a divided model with what it computed before.

A loss need not show that it is another. A model that numbers positions itself, by the length of what it is given, begins at 0
on every rank that has a part of the sequence, and with random weights its loss hardly depends on positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from holdall.sharded import local_of

_LEAST = 3  # dimensions: rows, positions and numbers
Key = tuple[str, int, int]  # a module, the number of its call, the number of a tensor among its results
Own = Callable[[torch.Tensor, int], torch.Tensor]
"""This rank's positions of a tensor of the whole sequence, which lies along a dimension."""


@dataclass(frozen=True)
class Digest:
    values: torch.Tensor  # a weighted sum over the last dimension
    last: int
    dtype: torch.dtype


@contextmanager
def digests(model: torch.nn.Module, paths: Collection[str]) -> Iterator[dict[Key, Digest]]:
    """Of all that these modules return inside, but for logits that are not computed yet."""
    found: dict[Key, Digest] = {}
    calls: Counter[str] = Counter()

    def hook(path: str) -> Callable[..., None]:
        def see(_module: torch.nn.Module, _args: Any, out: Any) -> None:
            calls[path] += 1
            for n, t in enumerate(tree_iter(out)):
                if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.dim() < _LEAST:
                    continue
                if type(own := local_of(t)) in (torch.Tensor, torch.nn.Parameter):  # others may stand for what is not there
                    found[path, calls[path], n] = _digest(own.detach())

        return see

    some = [(path, module) for path, module in model.named_modules() if path in paths]
    hooks = [module.register_forward_hook(hook(path)) for path, module in some]
    try:
        yield found
    finally:
        for registered in hooks:
            registered.remove()


def _digest(t: torch.Tensor) -> Digest:
    weights = torch.arange(1, t.shape[-1] + 1, device=t.device, dtype=torch.float32).mul(2.4).cos().to(t.dtype)
    values = t @ weights
    return Digest(values.to(torch.promote_types(t.dtype, torch.float32)), t.shape[-1], t.dtype)


def first_difference(
    before: Mapping[Key, Digest], after: Mapping[Key, Digest], own: Own, allowed: Callable[[torch.dtype], float]
) -> tuple[str, float] | None:
    """(module, relative error) of the first result that is not this rank's part of what the whole model had; None: all are."""
    for key, part in after.items():
        whole = before.get(key)
        if whole is None or whole.last != part.last or whole.values.dim() != part.values.dim():
            continue
        differ = [n for n, (a, b) in enumerate(zip(whole.values.shape, part.values.shape, strict=True)) if a != b]
        expected = own(whole.values, differ[0]) if len(differ) == 1 else whole.values
        if expected.shape != part.values.shape:
            continue
        largest = whole.values.abs().max().item()
        error = (expected - part.values).abs().max().item() / max(largest, torch.finfo(part.values.dtype).tiny)
        if not error <= max(allowed(whole.dtype), allowed(part.dtype)):
            return key[0], error
    return None
