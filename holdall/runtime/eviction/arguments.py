"""Flattens and rebuilds the arguments and results of an aten op; faster than a general pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Spec = tuple[tuple[Any, ...], tuple[str, ...]]  # per argument None, or (type, length) of a list; names of keyword arguments


def flatten(args: Any, kwargs: Any) -> tuple[list[Any], Spec]:
    flat: list[Any] = []
    shape: list[Any] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, (list, tuple)) and type(a) in (list, tuple):
            shape.append((type(a), len(a)))
            flat.extend(a)
        else:
            shape.append(None)
            flat.append(a)
    return flat, (tuple(shape), tuple(kwargs))


def unflatten(flat: list[Any], spec: Spec) -> tuple[list[Any], dict[str, Any]]:
    shape, names = spec
    values = []
    at = 0
    for part in shape:
        if part is None:
            values.append(flat[at])
            at += 1
        else:
            kind, count = part
            values.append(kind(flat[at : at + count]))
            at += count
    first = len(values) - len(names)
    return values[:first], dict(zip(names, values[first:], strict=True))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(each, change) for each in value])
    return value
