"""Ranks never change a plan alone: they compare what they are about to do, and either all do it or all refuse."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from holdall.errors import HoldallError, TraceMismatch, Unsupported
from holdall.parallel.groups import ranks_here
from holdall.types import Plan, _json

T = TypeVar("T")
ALIKE = "make the plan once and load its file on every rank, or pass the same arguments and batch shapes on all"


def together(make: Callable[[], T]) -> T:
    """Make something on all ranks. Where it fails on one, all raise an error that names the rank."""
    made: T | None = None
    error: Exception | None = None
    try:
        made = make()
    except Exception as raised:  # whatever it is, the others must not wait for this rank
        error = raised
    failed = _exchange(None if error is None else error.fact if isinstance(error, HoldallError) else repr(error))
    if error is not None:
        raise error
    for rank, fact in enumerate(failed):
        if fact is not None:
            raise Unsupported(f"rank {rank} failed, so no rank goes on: {fact}", hint="see the error of that rank")
    return made  # type: ignore[return-value]


def from_first(make: Callable[[], T]) -> T:
    """What rank 0 makes, on all ranks; where it fails, all raise its error."""
    if ranks_here() == 1:
        return make()
    made: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            made[0] = make()
        except HoldallError as error:
            made[1] = error
        except Exception as error:  # the others must not wait for this rank
            made[1] = Unsupported(f"rank 0 failed, so no rank goes on: {error!r}", hint="see the error of that rank")
    dist.broadcast_object_list(made, src=0)
    if made[1] is not None:
        raise made[1]
    return made[0]  # type: ignore[no-any-return]


def refuse_other(what: str, value: Any, hint: str) -> None:
    """Refuse, on all ranks, a value in which they differ."""
    said = _exchange(value)
    other = [rank for rank, told in enumerate(said) if told != said[0]]
    if other:
        ranks = ", ".join(map(str, other))
        raise TraceMismatch(f"the {what} of rank {ranks} differs from that of rank 0, so no rank goes on", hint=hint)


def agree(plan: Plan, model: torch.nn.Module) -> None:
    """Refuse, on all ranks, a plan in which they differ, and models with other weights."""
    refuse_other("plan", digest(plan), ALIKE)
    refuse_other(
        "weights",
        weights_digest(model),
        "build the model alike on every rank, as by torch.manual_seed(0) before, or load the same checkpoint",
    )


def digest(plan: Plan) -> str:
    """Of what a plan does; predictions may differ from rank to rank."""
    about = plan.about
    actions = [{"action": a.name, **_json.pack(a)} for a in plan.actions]
    does = [plan.signature, actions, about.device, about.precision, about.recipe, about.autocast]
    return hashlib.sha256(json.dumps(does, sort_keys=True).encode()).hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """Of the values of an unsharded model; a sharded one has other values on every rank, and none are compared."""
    from holdall.sharded import is_shard

    sums = hashlib.sha256()
    for p in model.parameters():
        if not is_shard(p) and p.device.type != "meta":
            flat = p.detach().double()
            sums.update(repr((flat.sum().item(), flat.square().sum().item())).encode())
    return sums.hexdigest()


def _exchange(value: Any) -> list[Any]:
    """The values of all ranks."""
    if ranks_here() == 1:
        return [value]
    found: list[Any] = [None] * ranks_here()
    dist.all_gather_object(found, value)
    return found
