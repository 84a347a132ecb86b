"""Plain data to JSON and back without loss: tuples, keys that are not text, infinities, small tensors.

Values without a JSON form become an object with one key that begins with `$`. Data only: nothing that is read is executed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from holdall.errors import InvalidInput, Unsupported


def pack(value: Any, where: str, *, tuples: bool = True) -> Any:
    """Turn a value into JSON data. `where`: its name in errors. `tuples=False`: tuples become lists, for other readers of the
    file.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "values": value.detach().reshape(-1).tolist()}}
    if isinstance(value, (list, tuple)):
        packed = [pack(v, f"{where}[{n}]", tuples=tuples) for n, v in enumerate(value)]
        return {"$tuple": packed} if tuples and isinstance(value, tuple) else packed
    if isinstance(value, Mapping):
        return _pack_mapping(value, where, tuples)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return pack(value.item(), where)
    hint = "use numbers, text, lists, mappings or tensors"
    raise Unsupported(f"{where} is a {type(value).__name__}, which a plain file cannot hold", hint=hint)


def _pack_mapping(value: Mapping[Any, Any], where: str, tuples: bool) -> Any:
    if all(isinstance(k, str) and not k.startswith("$") for k in value) and not isinstance(value, Counter):
        return {k: pack(v, f"{where}[{k!r}]", tuples=tuples) for k, v in value.items()}
    pairs = [[pack(k, f"a key of {where}"), pack(v, f"{where}[{k!r}]", tuples=tuples)] for k, v in value.items()]
    return {"$counter" if isinstance(value, Counter) else "$map": pairs}


def unpack(value: Any, where: str) -> Any:
    """The inverse of `pack`."""
    try:
        return _unpack(value)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InvalidInput(f"`{where}` is damaged: {error}", hint="continue from another checkpoint") from None


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (kind, inner), *_ = value.items()
        if kind == "$float":
            return float(inner)
        if kind == "$tuple":
            return tuple(_unpack(v) for v in inner)
        if kind == "$map":
            return {_unpack(k): _unpack(v) for k, v in inner}
        if kind == "$counter":
            return Counter({_unpack(k): _unpack(v) for k, v in inner})
        if kind == "$tensor":
            dtype = getattr(torch, inner["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{inner['dtype']} is no dtype")
            return torch.tensor(inner["values"], dtype=dtype).reshape(inner["shape"])
    return {k: _unpack(v) for k, v in value.items()}
