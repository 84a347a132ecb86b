"""Decides whether the vocabulary head is computed whole or in chunks of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from holdall.actions.head import Head
from holdall.errors import Infeasible, Unsupported, unknown_name
from holdall.runtime.head.lazy_logits import FEWEST, head_of, rows_for
from holdall.types import Plan, Trace
from holdall.units import GiB

T = TypeVar("T")
BIG_LOGITS = GiB  # bytes of float32 logits from which on the head is chunked


def choose_head(model: torch.nn.Module, batch: Any, head: str | int, *, ranks: int = 1) -> tuple[str, int] | None:
    """(path of the vocabulary head, rows per chunk); None: it stays whole. `ranks`: that have equal parts of the rows."""
    if isinstance(head, str) and head not in ("auto", "whole"):
        raise unknown_name("head", head, ("auto", "whole"))
    found = head_of(model) if isinstance(model, torch.nn.Module) and head != "whole" else None
    if found is None:
        if isinstance(head, int):
            raise Unsupported("the model has no vocabulary head to compute in chunks", hint='use head="whole"')
        return None
    path, module = found
    if isinstance(head, int):
        return path, head
    tokens, vocabulary = _rows_of_logits(batch) // ranks, int(module.get_parameter("weight").shape[0])
    return (path, rows_for(tokens, vocabulary)) if tokens * vocabulary * 4 >= BIG_LOGITS else None


def fewest_rows(
    model: torch.nn.Module, batch: Any, head: str | int, allow: Iterable[str] | None, *, ranks: int = 1
) -> int | None:
    """Rows per chunk of the head for a step that does not fit otherwise; None: the caller settled it, or it would not help.

    `head` and `allow`: as given to `fit`; `ranks`: as for `choose_head`. Small logits stay whole as long as they fit, so that
    the loss keeps its bits.
    """
    if head != "auto" or (allow is not None and Head.name not in tuple(allow)) or not isinstance(model, torch.nn.Module):
        return None
    found = choose_head(model, batch, "auto", ranks=ranks)
    rows = _rows_of_logits(batch) // ranks if found is None else found[1]
    is_less = rows > FEWEST if found is not None else rows >= 2 * FEWEST and head_of(model) is not None
    return FEWEST if is_less else None


def or_in_chunks(
    make: Callable[[str | int], tuple[T, bool]], head: str | int, rows: int | None, told: Callable[[str, int, int, str], object]
) -> T:
    """What is made with this head or, where that does not fit, with one of so many rows at a time. `make` also says whether the
    loop can keep what the model returns; where it cannot, the chunks are tried too."""
    try:
        made, has_room = make(head)
    except Infeasible as error:
        if rows is None:
            raise
        told("nothing fits: planning with the vocabulary head in chunks", 0, 0, "")
        try:
            with least_of(error):
                return make(rows)[0]
        except Unsupported:  # the recipe has a head of its own
            raise error from None
    if not has_room and rows is not None:
        told("little room: planning with the vocabulary head in chunks", 0, 0, "")
        with suppress(Infeasible, Unsupported):
            return make(rows)[0]
    return made


@contextmanager
def least_of(first: Infeasible) -> Iterator[None]:
    """Of two refusals, raise the one that names the smaller budget."""
    try:
        yield
    except Infeasible as second:
        raise min(first, second, key=lambda e: math.inf if e.smallest is None else e.smallest) from None


def has_room_for_outputs(plan: Plan, trace: Trace) -> bool:
    """Is there room for what the model returns, which loops often keep until backward is over (`out = model(**batch)`)?"""
    outputs = trace.whole.outputs if trace.whole is not None else ()
    kept = sum(info.nbytes for info in map(trace.tensors.__getitem__, dict.fromkeys(outputs)) if info.freed is not None)
    home = next(iter(plan.budget))
    return plan.predicted.peak[home] + kept <= plan.budget[home]


def _rows_of_logits(batch: Any) -> int:
    """Number of rows of logits: one per label or, without labels, per entry of the batch's largest integer tensor."""
    leaves, _ = tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)
    tables = {keystr(path): t.numel() for path, t in leaves if isinstance(t, torch.Tensor) and t.dim() == 2}
    labels = [numel for name, numel in tables.items() if name.endswith("['labels']")]
    return max(labels or tables.values(), default=0)
