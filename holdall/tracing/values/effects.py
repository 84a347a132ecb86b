"""What a forward leaves behind in Python attributes, so that a second run of it, or of its ops alone, differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdall.attributes import Attributes
from holdall.types import Kind, Op, Phase
from holdall.units import format_bytes

if TYPE_CHECKING:
    from holdall.tracing.calls import Call
    from holdall.tracing.recorder import TensorRecord

CONSTANT = "constant"  # the name of a tensor that is neither a parameter nor a buffer, and was there before the step
_SMALL = 2**16  # bytes of a tensor that may be held besides what is planned


class Effects(NamedTuple):
    alters: tuple[str, ...] = ()  # attributes that it changes, which can be put back
    once: str = ""  # why it must not run a second time
    apart: str = ""  # why its ops alone are not all that it does


NONE = Effects()


def effects_of(before: Attributes, ids: Mapping[int, int], ops: Sequence[Op]) -> Effects:
    """`ids`: the recorded tensor of each storage. `ops`: of the forward."""
    alters, once, apart = [], "", ""
    for name, (was, now) in before.changed().items():
        apart = apart or f"it sets the attribute `{name}`"
        index = ids.get(was.untyped_storage()._cdata) if isinstance(was, torch.Tensor) else None
        if isinstance(was, torch.Tensor) and not any(index in op.reads for op in ops):
            continue  # only ever written
        alters.append(name)
        size = max((_bytes(value) for value in (was, now)), default=0)
        if size > _SMALL and not once:
            once = f"it keeps {format_bytes(size)} in the attribute `{name}`"
    return Effects(tuple(alters), once, apart)


def find_effects(calls: Sequence[Call], ops: Iterable[Op], tensors: Sequence[TensorRecord]) -> Effects:
    """Of the whole forward, with names in the model."""
    found = [(call.path, call.effects) for root in calls for call in root.walk()]
    names = dict.fromkeys(f"{path}.{name}" if path else name for path, effects in found for name in effects.alters)
    once = next((effects.once for _, effects in found if effects.once), "")
    return Effects(tuple(names), once or _changed_in_place(ops, tensors))


def _changed_in_place(ops: Iterable[Op], tensors: Sequence[TensorRecord]) -> str:
    for op in ops:
        for x in op.mutates if op.site.phase is Phase.FORWARD else ():
            info = tensors[x]
            if info.born < 0 and (info.kind is Kind.PARAM or info.name == CONSTANT):
                what = "a tensor that is not a buffer" if info.name == CONSTANT else f"the parameter `{info.name}`"
                return f"it changes {what} in place"
    return ""


def _bytes(value: Any) -> int:
    return int(value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else 0
