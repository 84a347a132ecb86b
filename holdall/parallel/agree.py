"""Ranks never change a plan alone: they compare what they are about to do, and either all do it or all refuse.

Those that divide tensors or the sequence draw the same random numbers, too: between divided layers each computes with the whole
activations, and with another dropout on every rank, sums would be of what was computed from different inputs; and models skip
layers by chance. Many loops seed every process by its rank. Python's numbers are shared as well.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from holdall.errors import HoldallError, TraceMismatch, Unsupported
from holdall.parallel.groups import ranks_here
from holdall.types import Mesh, Plan, _json

T = TypeVar("T")
_PIECE = 1 << 24  # elements that are added up at a time
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
    with _saying_timeouts():
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
    if ranks_here() == 1:
        return
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
            for piece in p.detach().flatten().split(_PIECE):
                wide = piece.double()
                sums.update(repr((wide.sum().item(), wide.square().sum().item())).encode())
    return sums.hexdigest()


def _exchange(value: Any) -> list[Any]:
    """The values of all ranks."""
    if ranks_here() == 1:
        return [value]
    found: list[Any] = [None] * ranks_here()
    with _saying_timeouts():
        dist.all_gather_object(found, value)
    return found


@contextmanager
def _saying_timeouts() -> Iterator[None]:
    """Say of an exchange that failed how long this rank waited for the others."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        raise lost_ranks(error, time.monotonic() - began) from error


def lost_ranks(error: BaseException, waited: float, group: Any = None, where: str = "") -> Unsupported:
    """What a rank says that failed to talk to others. `where`: what it was doing."""
    limit = timeout_of(group)
    lost = f"waited {waited:.0f} s for the others{where}, as long as the group's timeout ({limit:.0f} s)"
    if waited < 0.9 * limit:
        lost = (
            f"lost another rank{where} after {waited:.0f} s, before the group's timeout ({limit:.0f} s): {_first_line(error)}"
        )
    return Unsupported(
        f"rank {dist.get_rank()} {lost}, so it does not go on",
        hint="see the output of the other ranks; init_process_group(timeout=...) says how long ranks wait",
    )


def _first_line(error: BaseException) -> str:
    """Without the place in gloo's source, and its advice."""
    return re.sub(r"^\[\S+\] ", "", str(error).strip().partition("\n")[0]).partition(". ")[0]


def timeout_of(group: Any = None) -> float:
    """Seconds that ranks of a group, by default all of this run, wait for each other."""
    group = group or dist.distributed_c10d._get_default_group()
    kind = next((d for d in ("cpu", "cuda") if torch.device(d) in getattr(group, "_device_types", [])), "cpu")
    options = getattr(group._get_backend(torch.device(kind)), "options", None)
    limit = getattr(options, "_timeout", None) or dist.distributed_c10d.default_pg_timeout
    return float(limit.total_seconds())


def share_at_first_forward(
    model: torch.nn.Module, mesh: Mesh, device: torch.device, note: Callable[[str], None]
) -> Callable[[], None]:
    """Before the first forward in training every rank takes the state of the first of those that have its batch. Returns what
    undoes this."""

    def share(module: torch.nn.Module, _args: Any) -> None:
        if module is model and module.training:  # no copy of it
            registered.remove()
            with _disable_current_modes():
                share_random_numbers([mesh.first_with_batch(rank) for rank in range(mesh.ranks)], device, note)

    registered = model.register_forward_pre_hook(share)
    return registered.remove


def share_random_numbers(firsts: Sequence[int], device: torch.device, note: Callable[[str], None]) -> None:
    """Every rank takes the state of another, or its own. Notes those whose states of torch's generators were other ones."""
    ours = _state(device)
    said: list[Any] = [None] * len(firsts)
    dist.all_gather_object(said, [hashlib.sha256(repr(part).encode()).hexdigest() for part in ours])
    others = [rank for rank, first in enumerate(firsts) if said[rank][:2] != said[first][:2]]
    if others:
        note(f"rank {', '.join(map(str, others))} draws the random numbers of the first rank with its batch")
    if any(said[rank] != said[first] for rank, first in enumerate(firsts)):
        dist.all_gather_object(said, ours)
        _restore(said[firsts[dist.get_rank()]], device)


def _state(device: torch.device) -> tuple[Any, ...]:
    on_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else []
    return torch.get_rng_state().tolist(), on_device, random.getstate()


def _restore(state: tuple[Any, ...], device: torch.device) -> None:
    host, on_device, python = state
    torch.set_rng_state(torch.tensor(host, dtype=torch.uint8))
    if on_device:
        torch.cuda.set_rng_state(torch.tensor(on_device, dtype=torch.uint8), device)
    random.setstate(python)
