"""Predicts the bytes of an op's results, from the shapes alone, and the op's cost.

Answers are cached by op and shapes. The first time, the op runs on the meta device, which takes no memory. Where that fails
(shapes that depend on values), the answer is None and room is made afterwards.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from holdall.ops import count_flops
from holdall.runtime.eviction.arguments import tensors_in
from holdall.runtime.eviction.storages import Rates
from holdall.types.layout import round_up

_REMEMBERED = 8192


class Nature(NamedTuple):
    """Properties of an op, from its schema."""

    is_view: bool  # every result shares memory with an argument
    only_looks: bool  # returns no tensor
    is_random: bool
    is_batch_norm: bool
    changed: tuple[tuple[int, str], ...]  # (position, name) of arguments that it changes in place


@lru_cache(maxsize=4096)
def nature_of(func: Any) -> Nature:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Nature(False, False, False, False, ())
    changed = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    returned = [r for r in schema.returns if "Tensor" in str(r.type)]
    aliases = [r.alias_info is not None and not r.alias_info.is_write for r in returned]
    is_view = func is torch.ops.aten._unsafe_view.default or (bool(returned) and all(aliases) and not changed)
    is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    is_batch_norm = "batch_norm" in schema.name and "backward" not in schema.name
    return Nature(is_view, not returned, is_random, is_batch_norm, changed)


def changed_arguments(func: Any, nature: Nature, args: Any, kwargs: Any) -> list[Any]:
    """Tensors that the op changes in place, including batch norm's running statistics, which its schema omits."""
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in nature.changed]
    if nature.is_batch_norm:
        values = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(func._schema.arguments)}
        if values.get("training") or values.get("train"):
            found += [values.get("running_mean"), values.get("running_var")]
    return list(tensors_in(found))


class Outlook:
    def __init__(self, rates: Rates, *, align: int = 1) -> None:
        self._rates = rates
        self._align = align
        self._sizes: dict[Any, tuple[int, ...] | None] = {}
        self._costs: dict[Any, int] = {}

    def key(self, func: Any, flat: list[Any], split: int) -> Any:
        """The key that an answer is cached under."""
        parts = [
            (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else (x if _is_plain(x) else str(x)) for x in flat
        ]
        return (func, split, *parts)

    def sizes(self, key: Any, func: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
        """Bytes of each storage that the op will make; None: unknown before it runs."""
        if key not in self._sizes:
            if len(self._sizes) > _REMEMBERED:
                self._sizes.clear()
                self._costs.clear()
            self._sizes[key] = self._try(func, args, kwargs)
        return self._sizes[key]

    def learn(self, key: Any, sizes: tuple[int, ...]) -> None:
        if self._sizes.get(key) is not None:
            self._sizes[key] = sizes

    def rounded(self, size: int) -> int:
        return round_up(size, self._align)

    def cost(self, key: Any, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        """The op's cost on the policy's clock."""
        found = self._costs.get(key)
        if found is None:
            tensors = [*tensors_in(args), *tensors_in(list(kwargs.values())), *tensors_in(out)]
            moved = sum(t.numel() * t.element_size() for t in tensors)
            found = self._costs[key] = self._rates.cost(count_flops(func, args, kwargs, out), moved)
        return found

    def _try(self, func: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
        ghosts, named = tuple(_ghost(a) for a in args), {k: _ghost(v) for k, v in kwargs.items()}
        try:
            with torch.no_grad():
                out = func(*ghosts, **named)
        except Exception:  # an op without a meta kernel may raise anything
            return None
        given = {t.untyped_storage()._cdata for t in tensors_in([ghosts, list(named.values())])}
        made = {}
        for t in tensors_in(out):
            storage = t.untyped_storage()
            if storage._cdata not in given:
                made[storage._cdata] = self.rounded(storage.nbytes())
        return tuple(made.values())


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, (int, float, str, bool, torch.dtype))


def _ghost(value: Any) -> Any:
    """The same argument on the meta device."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_ghost(v) for v in value)
    return value
