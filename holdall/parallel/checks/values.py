"""Compares a model that was divided over ranks with what it computed before, on the batch that it was planned with.

What is between two layers may not be computable in parts, and no shape need show it: a norm over all heads, a bias that depends
on a head's number. So what modules return is compared before the first step, in an evaluation (`digests.py`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from holdall.attributes import left_as_found
from holdall.errors import TraceMismatch, Unsupported
from holdall.parallel.checks.digests import Own, digests, first_difference
from holdall.parallel.groups import ranks_here
from holdall.sharded import local_of
from holdall.types import Mesh
from holdall.types.mesh import ONE_BATCH

SMALLEST = 1e-6  # relative error that is allowed in any precision: models compute some things in float32

_pending: ContextVar[Callable[[], None] | None] = ContextVar("_pending", default=None)


@contextmanager
def compared(
    model: torch.nn.Module,
    run: Callable[[], Any],
    *,
    modules: Collection[str],
    in_parts: Mesh | None = None,
    own: Own | None = None,
    whole_run: Callable[[], Any] | None = None,
) -> Iterator[None]:
    """Whoever divides the model inside compares the loss, which `run` computes, with the whole model's; all its outputs; and
    what these modules return. `in_parts`: of a mesh whose ranks have parts of the sequence: those that do must have one loss,
    to the bit. `own`: this rank's positions, where calls of the model return those alone. `whole_run`: in the place of `run`
    for the whole model."""
    with digests(model, modules) as whole:
        before = _evaluated(model, whole_run or run, own is None)

    def compare() -> None:
        with digests(model, modules) as part:
            after = _evaluated(model, run, own is None)
        found = first_difference(whole, part, own or (lambda t, _: t), _allowed)
        _refuse_other_results(model, found, own is not None)
        if in_parts is not None:
            _refuse_other_losses(after[0], in_parts)
        for a, b in zip(before, after, strict=True):
            error = (a - b).abs().max().item() / max(a.abs().max().item(), torch.finfo(a.dtype).tiny)
            if not error <= _allowed(a.dtype):
                raise _other(type(model).__name__, error)

    token = _pending.set(compare)
    try:
        yield
    finally:
        _pending.reset(token)


def _allowed(dtype: torch.dtype) -> float:
    return float(max(torch.finfo(dtype).eps ** 0.6, SMALLEST))


def _other(what: str, error: float) -> Unsupported:
    return Unsupported(
        f"{what} computes something else when it is divided over ranks (relative error {error:.1e})",
        hint='use mesh={"dp": ...}, which shards parameters and leaves computation as it is',
    )


def _refuse_other_results(model: torch.nn.Module, found: tuple[str, float] | None, is_in_parts: bool) -> None:
    """On all ranks: the first one may find nothing, as where each numbers its part of the positions from 0."""
    said: list[Any] = [found] * ranks_here()
    dist.all_gather_object(said, found)
    others = [told for told in said if told is not None]
    if not others:
        return
    path, error = max(others, key=lambda told: told[1])
    where = f"`{path}` of {type(model).__name__}" if path else type(model).__name__
    if not is_in_parts:
        raise _other(where, error)
    raise Unsupported(
        f"{where} computes something else where it has a part of the sequence (relative error {error:.1e}), as models do that "
        "number positions themselves, or look at others by more than attention",
        hint='let the forward take `position_ids`, or use mesh={"tp": ...} or {"dp": ...}',
    )


def _refuse_other_losses(loss: torch.Tensor, mesh: Mesh) -> None:
    """A sum over the ranks is the same on all of them; a term that each computes from its part of the sequence is not, and its
    gradients would be added up as if it were."""
    said: list[Any] = [None] * ranks_here()
    dist.all_gather_object(said, loss.tolist())
    other = next((rank for rank, told in enumerate(said) if told != said[mesh.first_with_batch(rank)]), None)
    if other is not None:
        raise Unsupported(
            f"rank {other} has another loss than rank {mesh.first_with_batch(other)}, though they divide one sequence: it has "
            "a term that each computes from its part, such as one that balances the loads of experts",
            hint='leave that term out (output_router_logits=False), or use mesh={"tp": ...} with shard="tensor"',
        )


def compare_if_asked() -> None:
    """To be called when the model has been divided."""
    compare = _pending.get()
    if compare is not None:
        compare()


def _evaluated(model: torch.nn.Module, run: Callable[[], Any], outputs: bool) -> list[torch.Tensor]:
    """The loss and what the model returned, without dropout, and with the same noise each time where it draws some. Logits that
    a chunked head has not computed stay so."""
    found: list[Any] = []
    modes = {m: m.training for m in model.modules()}
    hook = model.register_forward_hook(lambda _m, _args, out: found.append(out))
    try:
        model.eval()
        with torch.no_grad(), left_as_found(model), _same_noise():
            loss = run()
    finally:
        hook.remove()
        for m, was in modes.items():
            m.training = was
    some = [loss, found] if outputs else [loss]
    values = (t for t in tree_iter(some) if isinstance(t, torch.Tensor) and t.is_floating_point())
    return [local_of(t).detach().clone() for t in values if not hasattr(t, "is_spent")]


@contextmanager
def _same_noise() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    before = random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            random.seed(0)
            torch.default_generator.manual_seed(0)
            if devices:
                torch.cuda.manual_seed(0)
            yield
    finally:
        random.setstate(before)


def refuse_other_batches(batch: Any, mesh: Mesh) -> None:
    """Ranks that divide tensors or sequences compute one batch together."""
    said = [batch_digest(batch)] * ranks_here()
    if len(said) > 1:
        dist.all_gather_object(said, said[0])
    firsts = [mesh.first_with_batch(rank) for rank in range(len(said))]
    other = [rank for rank, told in enumerate(said) if told != said[firsts[rank]]]
    if other:
        first = firsts[other[0]]
        raise TraceMismatch(
            f"the batch of rank {', '.join(map(str, other))} differs from that of rank {first}, but they divide one",
            hint=_how_to_share(mesh, firsts),
        )


def _how_to_share(mesh: Mesh, firsts: Sequence[int]) -> str:
    """What to do so that ranks have the batches of these others."""
    if not any(firsts):
        return "give all ranks the same batches, as by a loader with the same seed and no distributed sampler"
    size = len(firsts) // len({*firsts})
    if list(firsts) == [rank - rank % size for rank in range(len(firsts))]:
        return f"give ranks the same batches where `rank // {size}` is the same, as by a sampler with that number as its rank"
    dims = sorted(mesh.dims, key=lambda d: (d in mesh.dividing, d.name in ONE_BATCH))
    named = ", ".join(f'"{d.name}": {d.size}' for d in dims)
    return f"use mesh={{{named}}}, with the same batches where `rank // {size}` is the same"


def batch_digest(batch: Any) -> str:
    """Of the shapes, dtypes and values of a batch's tensors."""
    sums = hashlib.sha256()
    for t in tree_iter(batch):
        if isinstance(t, torch.Tensor) and t.device.type != "meta":
            sums.update(repr((tuple(t.shape), t.dtype)).encode())
            sums.update(t.detach().double().cpu().contiguous().numpy().tobytes())
    return sums.hexdigest()
