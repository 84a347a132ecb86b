"""One step of Adam or AdamW on host memory by torch's own fused kernel, slice by slice: its bits on any CPU, no compiler.

A low-precision gradient is cast into a small fp32 scratch buffer. If old values must stay, the kernel runs on copies.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SLICE = 1 << 21  # elements per call: the scratch of 8 MiB stays in the cores' caches
_scratch = threading.local()  # one per calling thread


@dataclass(frozen=True, slots=True)
class Rule:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW; otherwise the decay is added to the gradient, as in Adam
    maximize: bool
    scale: float  # multiplies the gradient


class Arrays(NamedTuple):
    """The arrays of one tensor, each contiguous."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    grad: Tensor
    out: Tensor | None
    new: tuple[Tensor, Tensor, Tensor] | None = None  # where the new param, exp_avg and exp_avg_sq go; None: in place
    is_peek: bool = False  # compute only `out`


Step = Callable[[Sequence[Arrays], Rule, int], None]


def step_by_torch(arrays: Sequence[Arrays], rule: Rule, threads: int) -> None:
    fused = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    arrays = [_in_new_place(a) for a in arrays]
    with _torch_threads(threads):
        for cut in _batches(arrays, SLICE):
            batch = [_copied(a) for a in cut]
            params = [a.param for a in batch]
            fused(
                params,
                _full_gradients(batch, rule.scale),
                [a.exp_avg for a in batch],
                [a.exp_avg_sq for a in batch],
                [],
                [a.step.view(()) for a in batch],
                amsgrad=False,
                lr=rule.lr,
                beta1=rule.beta1,
                beta2=rule.beta2,
                weight_decay=rule.weight_decay,
                eps=rule.eps,
                maximize=rule.maximize,
                grad_scale=None,
                found_inf=None,
            )
            outs = [a.out for a in batch if a.out is not None]
            if outs:
                torch._foreach_copy_(outs, params)


def _batches(arrays: Sequence[Arrays], most: int) -> Iterator[list[Arrays]]:
    """Batches of at most `most` elements. Cuts are at multiples of 16 elements from a tensor's start, as torch's own between
    its threads: elsewhere the scalar tail of the vector loop would run, which may round differently.
    """
    batch: list[Arrays] = []
    free = most
    for a in arrays:
        begin, size = 0, a.param.numel()
        while begin < size:
            length = min(size - begin, free)
            if begin + length < size:
                length -= length % 16
            if length == 0:
                yield batch
                batch, free = [], most
                continue
            batch.append(_piece(a, slice(begin, begin + length)))
            begin += length
            free -= length
    if batch:
        yield batch


def _in_new_place(a: Arrays) -> Arrays:
    """The same arrays with the old values copied to where the new ones go."""
    if a.new is None:
        return a
    torch._foreach_copy_(list(a.new), [a.param, a.exp_avg, a.exp_avg_sq])
    return a._replace(param=a.new[0], exp_avg=a.new[1], exp_avg_sq=a.new[2], new=None)


def _copied(a: Arrays) -> Arrays:
    """The same on copies, if its own values must stay."""
    if not a.is_peek:
        return a
    return a._replace(param=a.param.clone(), exp_avg=a.exp_avg.clone(), exp_avg_sq=a.exp_avg_sq.clone())


def _piece(a: Arrays, piece: slice) -> Arrays:
    param, exp_avg, exp_avg_sq, grad = (t.view(-1)[piece] for t in (a.param, a.exp_avg, a.exp_avg_sq, a.grad))
    out = None if a.out is None else a.out.view(-1)[piece]
    return a._replace(param=param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, out=out)


def _full_gradients(batch: Sequence[Arrays], scale: float) -> list[Tensor]:
    """The gradients in fp32 and scaled: themselves if they already are, otherwise in the scratch buffer."""
    grads = [a.grad for a in batch]
    if scale == 1.0 and all(g.dtype == torch.float32 for g in grads):
        return grads
    room: Tensor | None = getattr(_scratch, "room", None)
    if room is None or room.numel() < SLICE:
        room = _scratch.room = torch.empty(SLICE, dtype=torch.float32, device="cpu")
    ends = list(itertools.accumulate(g.numel() for g in grads))
    full = [room[end - g.numel() : end] for g, end in zip(grads, ends, strict=True)]
    torch._foreach_copy_(full, grads)
    if scale != 1.0:
        room[: ends[-1]].mul_(scale)
    return full


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads for the calling thread, and restore it."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
