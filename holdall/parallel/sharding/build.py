"""Shards a model by torch's own engine (`fully_shard`, and `replicate` on the same engine). One way: a model stays sharded.

    ddp    every rank has all parameters; gradients are summed by all-reduces
    zero1  optimizer states are in shards: every rank updates its part of the parameters (stage 1 of ZeRO, `own_parts.py`)
    zero2  gradients and optimizer states are in shards; parameters too, but for the time from forward to backward (stage
           2 of ZeRO, arXiv 1910.02054)
    zero3  parameters too, gathered for the forward and again for the backward of each group (stage 3)
    fsdp   zero3, except that the root's own parameters stay from forward to backward, as `fully_shard` has it by default

Gradients are means over the ranks, as in torch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdall.errors import Unsupported, unknown_name

WAYS = ("ddp", "fsdp", "zero1", "zero2", "zero3")
RULED = ("ddp", "fsdp", "zero2", "zero3")  # those that are known by rule, without a trace (`by_rule.py`)


def check_way(way: str) -> None:
    if way not in WAYS:
        raise unknown_name("way to shard", way, WAYS)


def shard_model(model: torch.nn.Module, groups: Sequence[str], device_mesh: Any, way: str) -> None:
    """Shard a model in place: the modules of `groups` first, each with a collective of its own, then the rest."""
    check_way(way)
    modules = [model.get_submodule(path) for path in groups]
    for module in (*(m for m in modules if m is not model), model):
        _shard(module, device_mesh, way)


def _shard(module: torch.nn.Module, device_mesh: Any, way: str) -> None:
    if way in ("ddp", "zero1"):
        try:
            from torch.distributed._composable.replicate_with_fsdp import replicate
        except ImportError:
            raise Unsupported("this torch cannot replicate models by its engine of shards", hint='use shard="zero2"') from None
        replicate(module, mesh=device_mesh)
        return
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=device_mesh, reshard_after_forward={"fsdp": None, "zero2": False, "zero3": True}[way])


def divide_update(optimizer: torch.optim.Optimizer, model: torch.nn.Module, device_mesh: Any, way: str) -> None:
    """What a way asks of the optimizer, which holds the parameters of the sharded model."""
    if way == "zero1":
        from holdall.parallel.sharding.own_parts import OwnParts

        OwnParts(optimizer, model, device_mesh)


def follow_parameters(optimizer: torch.optim.Optimizer, before: dict[str, torch.nn.Parameter], model: torch.nn.Module) -> None:
    """Let an optimizer update the sharded parameters in the place of those from before, which it holds."""
    after = dict(model.named_parameters())
    new = {id(p): after[name] for name, p in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(p), p) for p in group["params"]]
