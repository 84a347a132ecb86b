"""Ops on unknown values whose result sizes follow from known ones: masked selection, counts of numbers below a bound, sums over
targets by their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

Known = Callable[[torch.Tensor], "torch.Tensor | None"]


def choose(func: Any, args: Any, known: Known) -> Any:
    """The result of `func` on fake tensors, from the values of its masks; None: another op, or values unknown."""
    rule = _RULES.get(str(func))
    return rule(func, args, known) if rule is not None else None


def deciding(func: Any, args: Any) -> Iterator[torch.Tensor]:
    """The arguments whose values decide the size."""
    if str(func) == "aten.index.Tensor":
        yield from (t for t in args[1] if _is_mask(t))
    elif str(func) == "aten.masked_select.default":
        yield args[1]
    elif str(func) == "aten._ctc_loss.Tensor":
        yield args[3]


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _index(func: Any, args: Any, known: Known) -> Any:
    places: list[torch.Tensor | None] = []
    for index in args[1]:
        if not _is_mask(index):
            places.append(index)
            continue
        mask = known(index)
        if mask is None:
            return None
        with _disable_current_modes():
            count, axes = int(mask.count_nonzero()), mask.dim()
        places += [torch.empty(count, dtype=torch.int64, device=args[0].device) for _ in range(axes)]
    return func(args[0], places)


def _masked_select(func: Any, args: Any, known: Known) -> Any:  # noqa: ARG001
    mask = known(args[1])
    if mask is None:
        return None
    with _disable_current_modes():
        shape = torch.broadcast_shapes(mask.shape, args[0].shape)
        count = int(mask.expand(shape).count_nonzero())
    return args[0].new_empty(count)


def _bincount(func: Any, args: Any, known: Known) -> Any:  # noqa: ARG001
    """A call with `minlength` has no larger number: experts, codes."""
    least = args[2] if len(args) > 2 else 0
    if not least:
        return None
    weights = args[1] if len(args) > 1 else None
    dtype = torch.int64 if weights is None else weights.dtype if weights.dtype == torch.float32 else torch.float64
    return args[0].new_empty(least, dtype=dtype)


def _ctc_loss(func: Any, args: Any, known: Known) -> Any:  # noqa: ARG001
    """Per row and step, sums over the longest target with a blank before, between and after its letters."""
    scores, lengths = args[0], known(args[3])
    if lengths is None:
        return None
    with _disable_current_modes():
        longest = int(lengths.max())
    steps, rows = (scores.shape[0], scores.shape[1]) if scores.dim() == 3 else (scores.shape[0], 1)
    return scores.new_empty(rows), scores.new_empty(rows, steps, 2 * longest + 1)


_RULES: dict[str, Callable[[Any, Any, Known], Any]] = {
    "aten.index.Tensor": _index,
    "aten.masked_select.default": _masked_select,
    "aten.bincount.default": _bincount,
    "aten._ctc_loss.Tensor": _ctc_loss,
}
