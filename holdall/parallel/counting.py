"""Recognises torch's collectives among ops, and counts their bytes in a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from holdall.cost.collectives import sent_bytes
from holdall.sharded import has_shards

_KINDS = {  # op -> (kind, the argument that is the whole buffer)
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::send": ("shift", 0),
}


class FoundCollective(NamedTuple):
    kind: str
    nbytes: int  # of the whole buffer


def collective_of(func: Any, args: Any) -> FoundCollective | None:
    """The collective that an op is; None: it is none."""
    kind, place = _KINDS.get(func._schema.name, ("", 0))
    if not kind:
        return None
    return FoundCollective(kind, sum(t.numel() * t.element_size() for t in _tensors(args[place])))


def group_of(args: Any) -> str:
    """The name of the process group that a collective is over."""
    from torch.distributed import ProcessGroup

    boxed = next(a for a in args if isinstance(a, torch.ScriptObject))  # the kind of a sum, another, comes after it
    return str(ProcessGroup.unbox(boxed).group_name)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return (t for t in tree_iter(value) if isinstance(t, torch.Tensor))


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives: over the ranks of one dimension, or over those of `groups`, as
    `groups.group_dims` names them."""

    def __init__(self, dim: str, ranks: int, groups: Mapping[str, tuple[str, int]] | None = None) -> None:
        super().__init__()
        self._all, self._groups = (dim, ranks), groups
        self.sent: dict[str, int] = {}  # as in an outcome's traffic -> bytes so far

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_shards(types):
            return NotImplemented
        found = collective_of(func, args)
        if found is not None:
            dim, ranks = self._all if self._groups is None else self._groups.get(group_of(args), self._all)
            link = f"{dim} {found.kind}"
            self.sent[link] = self.sent.get(link, 0) + sent_bytes(found.kind, found.nbytes, ranks)
        return func(*args, **(kwargs or {}))
