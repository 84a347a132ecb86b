"""Collectives that autograd sees, each with the one that its backward needs (Megatron-LM's f and g, arXiv 1909.08053, and
those of sequence parallelism, arXiv 2205.05198)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer and older names
_reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Copied(torch.autograd.Function):
    """f: every rank goes on with the same tensor; backward sums what the ranks' parts say of it.

    The gradient is summed in place: what is given to `apply` may only be read by ops that make gradients of their own.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # collectives are not
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Averaged(torch.autograd.Function):
    """Every rank goes on with the same parameter; backward takes the mean of what the ranks' batches say of it, in float32 or
    wider, and in place if it is that. Without a group, this rank already has the sum over all batches; `ranks` may be 1 where
    the sum is meant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, ranks: int) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # collectives are not
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        total = grad.contiguous()
        if ctx.group is not None:
            total = total.to(torch.promote_types(grad.dtype, torch.float32))
            dist.all_reduce(total, group=ctx.group)
        return (total.div_(ctx.ranks) if ctx.ranks > 1 else total).to(grad.dtype), None, None


class Sent(torch.autograd.Function):
    """All-to-all of rows: `there[j]` of them go to rank j, in order, and `here[j]` come from it. Backward sends them back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, here: list[int], there: list[int], group: Any) -> torch.Tensor:
        ctx.here, ctx.there, ctx.group = here, there, group
        return _send_rows(x, here, there, group)

    @staticmethod
    @once_differentiable  # collectives are not
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _send_rows(grad, ctx.there, ctx.here, ctx.group), None, None, None


class Summed(torch.autograd.Function):
    """g: the sum of the ranks' tensors, in place; backward hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        if x._is_view():  # autograd would keep the view's history, and copy gradients around this
            x = x.detach()
        else:
            ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable  # collectives are not
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]  # noqa: ARG004
        return grad, None


class Gathered(torch.autograd.Function):
    """The parts of all ranks, one after the other along `dim`. Backward: this rank's part of the sum over ranks (`partial`), or
    of the gradient, where that is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Any, partial: bool) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.partial = dim, group, partial
        return all_gather(x, dim, group)

    @staticmethod
    @once_differentiable  # collectives are not
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        part = reduce_scatter if ctx.partial else own_part
        return part(grad, ctx.dim, ctx.group), None, None, None


class Scattered(torch.autograd.Function):
    """This rank's part along `dim` of the sum over ranks (`partial`), or of a tensor that all ranks have. Backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Any, partial: bool) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.partial = dim, group, partial
        return (reduce_scatter if partial else own_part)(x, dim, group)

    @staticmethod
    @once_differentiable  # collectives are not
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return all_gather(grad, ctx.dim, ctx.group), None, None, None


class Exchanged(torch.autograd.Function):
    """All-to-all: rank j gets part j along `cut`, and the parts that arrive are joined along `join`. Backward returns them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: int, join: int, group: Any) -> torch.Tensor:
        ctx.cut, ctx.join, ctx.group = cut, join, group
        return all_to_all(x, cut, join, group)

    @staticmethod
    @once_differentiable  # collectives are not
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return all_to_all(grad, ctx.join, ctx.cut, ctx.group), None, None, None


class Words:
    """The words of a vocabulary, in equal parts over ranks: what a loss needs of the others' logits without gathering them
    (Megatron-LM's vocabulary-parallel cross entropy)."""

    def __init__(self, group: Any, own: int) -> None:
        """`own`: words of each rank."""
        self.group = group
        self.first = dist.get_rank(group) * own
        self.total = dist.get_world_size(group) * own
        self._own = own

    def __deepcopy__(self, _: object) -> Words:
        """Copies of a divided model are over the same ranks."""
        return self

    def most(self, of_rows: torch.Tensor) -> None:
        dist.all_reduce(of_rows, dist.ReduceOp.MAX, group=self.group)

    def sum(self, of_rows: torch.Tensor) -> None:
        dist.all_reduce(of_rows, group=self.group)

    def part(self, t: torch.Tensor) -> torch.Tensor:
        return t.narrow(-1, self.first, self._own)

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        return Gathered.apply(own, own.dim() - 1, self.group, False)  # type: ignore[no-any-return]


def gather_into(whole: torch.Tensor, own: torch.Tensor, group: Any, *, async_op: bool = False) -> Any:
    """Returns torch's handle of the collective where that goes on by itself."""
    return _gather(whole, own, group=group, async_op=async_op)


def reduce_into(own: torch.Tensor, whole: torch.Tensor, group: Any, op: Any) -> None:
    _reduce(own, whole, op, group)


def all_gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    x = x.contiguous()
    whole = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    _gather(whole, x, group=group)
    return whole if dim == 0 else _joined(whole.view(ranks, *x.shape), dim)


def reduce_scatter(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    x = _cut(x, dim, dist.get_world_size(group))
    part = x.new_empty(x.shape[1:])
    _reduce(part, x.flatten(0, 1), group=group)
    return part


def own_part(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """Its own bytes: a view would keep the whole tensor alive."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)


def all_to_all(x: torch.Tensor, cut: int, join: int, group: Any) -> torch.Tensor:
    parts = _cut(x, cut, dist.get_world_size(group))
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return _joined(arrived, join)


def _send_rows(x: torch.Tensor, here: list[int], there: list[int], group: Any) -> torch.Tensor:
    arrived = x.new_empty((sum(here), *x.shape[1:]))
    dist.all_to_all_single(arrived, x.contiguous(), here, there, group=group)
    return arrived


def _cut(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """Equal parts along `dim`, one after the other in memory."""
    return x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()  # type: ignore[no-any-return]


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """The reverse of `_cut`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)
