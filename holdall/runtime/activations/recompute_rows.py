"""Offloads the first rows of matrix products, and puts products together again from these and the rows that are recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdall.runtime.activations.offload import OffloadedEntry, OffloadedGroup, OffloadedPart, OffloadedSaves

_OUT = {torch.ops.aten.mm.default: torch.ops.aten.mm.out, torch.ops.aten.addmm.default: torch.ops.aten.addmm.out}
Verdicts = dict[Any, bool]  # product, shapes and rows -> has the product of the other rows the bits of the whole one?
_verdicts: Verdicts = {}


class RowEntry(OffloadedEntry):
    """The first rows of a product: in its storage, offloaded, or fetched again into a storage of their own."""

    __slots__ = ("rows", "size")

    def __init__(self, product: torch.Tensor, rows: int, group: OffloadedGroup | None) -> None:
        super().__init__(product.untyped_storage(), group)
        self.rows = rows
        self.size = rows * product.shape[1] * product.element_size()

    def leaving(self) -> torch.UntypedStorage:
        first: torch.UntypedStorage = super().leaving()[: self.size]
        return first


@dataclass(frozen=True, kw_only=True)
class RowPart(OffloadedPart):
    """First rows of products that a program recomputes: they are no saved tensors."""

    saves: frozenset[int] | None = frozenset()


def take_heads(saves: OffloadedSaves, divided: Mapping[int, torch.Tensor], rows: Mapping[int, int]) -> dict[int, RowEntry]:
    """Stand for the first rows of these products, by number; they leave with the saves."""
    group = next(g for g in saves.groups if isinstance(g.part, RowPart))
    heads = {n: RowEntry(product, rows[n], group) for n, product in divided.items()}
    for head in heads.values():
        saves.add(head)
    return heads


def fetch_all(heads: Iterable[RowEntry]) -> None:
    """Have these rows on the device; a reference to none of them remains."""
    for head in heads:
        head.fetch()


def with_first_rows(product: Any, args: list[Any], head: RowEntry, known: Verdicts = _verdicts) -> torch.Tensor:
    """The result of a product whose first rows are known: only the others are computed.

    On a CPU, where bits matter, the first call for a shape compares these with the whole product; if they differ, the whole
    product is computed.
    """
    args = list(args)
    left, right = args[-2:]
    if left.device.type == "cpu" and not _has_same_bits(product, args, head.rows, known):
        found: torch.Tensor = product(*args)
        return found
    whole = torch.empty((left.shape[0], right.shape[1]), dtype=left.dtype, device=left.device)
    first = whole[: head.rows]
    first.copy_(torch.empty(0, dtype=left.dtype, device=left.device).set_(head.fetch(), 0, first.shape, first.stride()))
    _OUT[product](*_from_row(args, head.rows), out=whole[head.rows :])
    return whole


def _from_row(args: list[Any], rows: int) -> list[Any]:
    """The arguments of the product of the rows from this one on; a sum of two matrices is cut too."""
    left = args[-2]
    added = [t[rows:] if t.dim() == 2 and t.shape[0] == left.shape[0] else t for t in args[:-2]]
    return [*added, left[rows:], args[-1]]


def _has_same_bits(product: Any, args: list[Any], rows: int, known: Verdicts) -> bool:
    key = (product, rows, torch.get_num_threads(), *((t.shape, t.stride(), t.dtype) for t in args))
    if key not in known:
        with torch._C._DisableTorchDispatch():  # not a part of the step
            whole = product(*args)
            rest = torch.empty_like(whole)[rows:]
            _OUT[product](*_from_row(args, rows), out=rest)
            known[key] = torch.equal(whole[rows:], rest)
    return known[key]
