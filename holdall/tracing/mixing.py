"""Detects ops that need one dtype and got two. A fake op does not fail where the real one would."""

from __future__ import annotations

from typing import Any

import torch

from holdall.errors import InvalidInput

_ONE_DTYPE = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "_grouped_mm"}
_ATTENTION = 3  # queries, keys and values


class MixedDtypes(InvalidInput):
    """`kind`: the class of the module that called the op."""

    def __init__(self, op: str, kind: str, path: str, dtypes: list[str]) -> None:
        self.kind = kind
        where = f"`{path}` ({kind})" if path else kind
        super().__init__(
            f"the model rejected the batch: in {where} `{op}` gets {' and '.join(dtypes)}",
            hint='use precision="bf16-under-autocast"; or call `fit` without `precision=` and use torch.autocast in the loop',
        )


def mixed_dtypes(func: Any, args: Any) -> list[str]:
    """The floating dtypes of the arguments of a matrix product, convolution, attention or layer norm that takes one, if there
    are several; otherwise empty.
    """
    name = func._schema.name.partition("::")[2] if getattr(func, "_schema", None) is not None else ""
    if name in _ONE_DTYPE:
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
    elif name == "native_layer_norm" and args[0].device.type == "cpu" and args[0].dtype == torch.float32:
        tensors = [t for t in args if isinstance(t, torch.Tensor)]  # it takes float32 weights for narrow inputs alone
    elif name.startswith("_scaled_dot_product"):
        tensors = [t for t in args[:_ATTENTION] if isinstance(t, torch.Tensor)]
    else:
        return []
    found = sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()})
    return found if len(found) > 1 else []
