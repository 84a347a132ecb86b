"""Checks the arguments of `holdall.fit` before anything slow: types, names and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdall import optim
from holdall.errors import InvalidInput, unknown_name
from holdall.fitting.request import FitRequest
from holdall.precision import Recipe
from holdall.problem import resolve_allow, resolve_budget, resolve_hardware, resolve_layout, resolve_recipe
from holdall.registry import build_member, member_names
from holdall.types import Hardware
from holdall.units import TiB, parse_bytes

_CALL = 'call `holdall.fit(model, optimizer, batch, budget="24GiB")`'


def check_arguments(model: Any, optimizer: Any, batch: Any, request: FitRequest) -> None:
    """Raise for the first invalid argument."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidInput(f"`model` is {_kind(model)}, not a torch.nn.Module", hint=_CALL)
    if isinstance(optimizer, str):
        optim.read(optimizer)
    elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput(f"`optimizer` is {_kind(optimizer)}, not a torch.optim.Optimizer", hint=_CALL)
    if isinstance(batch, (torch.optim.Optimizer, torch.nn.Module)) or not _tensors(batch):
        raise InvalidInput(f"`batch` is {_kind(batch)} and holds no tensor", hint=f"{_CALL} with a batch from the loader")
    _check_planner(request.planner, request.options)
    _check_budget(request.budget, request.hardware)
    _check_precision(request.precision)
    _check_head(request.head)
    resolve_allow(request.allow)
    resolve_layout(request.layout)
    loss, accumulate, lengths = request.loss, request.accumulate, request.lengths
    if loss is not None and not callable(loss):
        raise InvalidInput(
            f"`loss` is {_kind(loss)}, which cannot be called", hint="pass a function: loss=lambda model, batch: ..."
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InvalidInput(f"`accumulate` is {accumulate!r}", hint="use the number of backwards per step, such as accumulate=4")
    if lengths is not None and lengths != "auto" and (isinstance(lengths, str) or not isinstance(lengths, Iterable)):
        raise InvalidInput(f"`lengths` is {lengths!r}", hint='use lengths="auto", or a list such as lengths=[512, 2048]')
    for name in ("reads_gradients", "enforce", "repeat"):
        if not isinstance(value := getattr(request, name), bool):
            raise InvalidInput(f"`{name}` is {value!r}", hint=f"use {name}=True or {name}=False")


def _check_planner(planner: Any, options: Mapping[str, Any]) -> None:
    if not isinstance(planner, str):
        raise InvalidInput(
            f"`planner` is {_kind(planner)}, not a name", hint='use planner="auto"; `holdall planners` lists all'
        )
    if planner not in member_names("planners"):
        raise unknown_name("planner", planner, member_names("planners"))
    build_member("planners", planner, dict(options), f"planner {planner}")


def _check_budget(budget: Any, hardware: Any) -> None:
    """Check the sizes, and their tiers if the machine is already known."""
    if isinstance(hardware, str) and not hardware.endswith(".json"):
        hardware = resolve_hardware(hardware, "cuda")
    elif hardware is not None and not isinstance(hardware, (Hardware, str, Path)):
        raise InvalidInput(f"`hardware` is {_kind(hardware)}", hint='name a GPU, as in hardware="rtx-4090", or leave it out')
    if isinstance(hardware, Hardware):
        resolve_budget(budget, hardware)
    for size in budget.values() if isinstance(budget, Mapping) else [budget]:
        if size != "auto":
            parse_bytes(size, total=TiB)


def _check_precision(precision: Any) -> None:
    if precision is not None and not isinstance(precision, (str, torch.dtype, Recipe)):
        raise InvalidInput(f"`precision` is {precision!r}", hint='use precision="bf16", or leave it out')
    resolve_recipe(precision)


def _check_head(head: Any) -> None:
    if isinstance(head, str):
        if head not in ("auto", "whole"):
            raise unknown_name("head", head, ("auto", "whole"))
    elif isinstance(head, bool) or not isinstance(head, int) or head < 1:
        raise InvalidInput(f"`head` is {head!r}", hint='use head="auto", head="whole", or rows at a time, such as head=1024')


def _tensors(batch: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch))


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
