"""Recognises torch's collectives among ops, and counts their bytes in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

from holdall.cost.collectives import sent_bytes

_METHODS = {  # of a group of processes; the first three are named otherwise in older versions of torch
    "all_gather_single": ("all_gather", 0),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
    "_allgather_base": ("all_gather", 0),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "alltoall_base": ("all_to_all", 1),
    "allreduce": ("all_reduce", 0),
    "send": ("shift", 0),
}
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
    return FoundCollective(kind, _nbytes(args[place]))


def group_of(args: Any) -> str:
    """The name of the process group that a collective is over."""
    from torch.distributed import ProcessGroup

    boxed = next(a for a in args if isinstance(a, torch.ScriptObject))  # the kind of a sum, another, comes after it
    return str(ProcessGroup.unbox(boxed).group_name)


def _nbytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_iter(value) if isinstance(t, torch.Tensor))


class CollectiveBytes:
    """Counts the bytes that this rank sends in collectives while it is entered: over the ranks of one dimension, or over those
    of `groups`, as `groups.group_dims` names them."""

    def __init__(self, dim: str, ranks: int, groups: Mapping[str, tuple[str, int]] | None = None) -> None:
        self._all, self._groups = (dim, ranks), groups
        self.sent: dict[str, int] = {}  # as in an outcome's traffic -> bytes so far

    def __enter__(self) -> CollectiveBytes:
        if not _counters:
            _watch()
        _counters.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _counters.remove(self)
        if not _counters:
            _leave()

    def add(self, found: FoundCollective, group: str) -> None:
        dim, ranks = self._all if self._groups is None else self._groups.get(group, self._all)
        link = f"{dim} {found.kind}"
        self.sent[link] = self.sent.get(link, 0) + sent_bytes(found.kind, found.nbytes, ranks)


_counters: list[CollectiveBytes] = []  # those that are entered
_plain: dict[str, Any] = {}  # methods of torch's groups of processes, while others stand in their place


def _watch() -> None:
    """Have the calls by which Python starts collectives counted, in whichever thread; no other op costs anything."""
    from torch.distributed import ProcessGroup

    for name, (kind, place) in _METHODS.items():
        if name in ProcessGroup.__dict__:
            _plain[name] = ProcessGroup.__dict__[name]
            setattr(ProcessGroup, name, _counted(_plain[name], kind, place))


def _leave() -> None:
    from torch.distributed import ProcessGroup

    while _plain:
        setattr(ProcessGroup, *_plain.popitem())


def _counted(plain: Any, kind: str, place: int) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        found = FoundCollective(kind, _nbytes((*args, *kwargs.values())[place]))
        for counter in _counters:
            counter.add(found, str(group.group_name))
        return plain.__get__(group)(*args, **kwargs)

    return call
