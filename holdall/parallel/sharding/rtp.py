"""RTP, rotated tensor parallelism (arXiv 2311.01635): shards of a linear layer's weight travel round a ring, and every rank
applies the one that it holds to its own batch, so that no rank ever has the whole weight.

Rank r of d begins with shard r, some rows of the weight and of the bias. In forward, shards move from rank to rank d - 1 times:

    turn i    compute the outputs of shard r + i, while it goes on to rank r - 1 and shard r + i + 1 comes from rank r + 1

In backward they move the other way, with their gradients, to which every rank adds its part; after d - 1 turns both are home.
Gradients are means over the ranks. Out of place, a shard arrives in a second buffer while the first is in use; in place, the
one buffer is replaced after it was used, piece by piece. Between forward and backward shards are not at home.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from holdall.errors import InvalidInput, Unsupported

PIECE = 1 << 14  # elements that are replaced at a time, in place


class RotatedLinear(torch.nn.Module):
    """A linear layer whose shards rotate. Its parameter is this rank's shard: rows of the weight, with the bias as the last
    column."""

    def __init__(self, linear: torch.nn.Linear, group: Any = None, *, in_place: bool = False) -> None:
        super().__init__()
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.ranks, self.in_place = dist.get_rank(self.group), dist.get_world_size(self.group), in_place
        self.in_features, self.out_features = linear.in_features, linear.out_features
        if linear.out_features % self.ranks:
            raise Unsupported(
                f"a layer with {linear.out_features} outputs has no equal parts on {self.ranks} ranks",
                hint="rotate layers whose outputs are a multiple of the ranks",
            )
        rows = slice(self.rank * linear.out_features // self.ranks, (self.rank + 1) * linear.out_features // self.ranks)
        whole = linear.weight.detach()
        bias = linear.bias.detach()[rows, None] if linear.bias is not None else whole.new_empty(0)
        self.has_bias = linear.bias is not None
        self.shard = torch.nn.Parameter(torch.cat([whole[rows], bias], dim=1) if self.has_bias else whole[rows].clone())
        self._is_away = False  # between forward and backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_away:
            raise InvalidInput(
                "a rotated layer is called again before its backward, when its shards are on other ranks",
                hint="run a backward after each forward, or evaluate in torch.no_grad()",
            )
        self._is_away = torch.is_grad_enabled() and (x.requires_grad or self.shard.requires_grad)
        return _Rotated.apply(x, self.shard, self, self._is_away)  # type: ignore[no-any-return, no-untyped-call]

    def block(self, number: int) -> slice:
        """Output features of a shard."""
        size = self.out_features // self.ranks
        return slice(number % self.ranks * size, (number % self.ranks + 1) * size)

    def came_home(self) -> None:
        self._is_away = False

    def passing(self, held: torch.Tensor, into: torch.Tensor | None, step: int) -> _Passing:
        """Send what is held to the rank `step` places on, and receive the other neighbour's."""
        ranks = dist.get_process_group_ranks(self.group)
        to, source = ranks[(self.rank + step) % self.ranks], ranks[(self.rank - step) % self.ranks]
        return _Passing(held, into, to, source, self.group)


class _Passing:
    """A shard on its way; in place (`into` is None) only `arrived` moves it."""

    def __init__(self, held: torch.Tensor, into: torch.Tensor | None, to: int, source: int, group: Any) -> None:
        self._held, self._into, self._way = held, into, (to, source, group)
        self._works = [] if into is None else self._sent(held, into)

    def _sent(self, held: torch.Tensor, into: torch.Tensor) -> list[Any]:
        to, source, group = self._way
        return [dist.isend(held, to, group=group), dist.irecv(into, source, group=group)]

    def arrived(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(what is held now, the buffer that is free)."""
        if self._into is None:
            for piece in self._held.view(-1).split(PIECE):
                for work in self._sent(piece.clone(), piece):
                    work.wait()
            return self._held, None
        for work in self._works:
            work.wait()
        return self._into, self._held


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: torch.Tensor, layer: RotatedLinear, comes_back: bool) -> torch.Tensor:
        rows, n = x.reshape(-1, x.shape[-1]), layer.in_features
        out = rows.new_empty(rows.shape[0], layer.out_features)
        held, spare = shard.detach(), None if layer.in_place else torch.empty_like(shard)
        for turn in range(layer.ranks):
            goes_on = turn + 1 < layer.ranks or not comes_back  # without a backward, until it is home
            passing = layer.passing(held, spare, -1) if goes_on else None
            torch.mm(rows, held[:, :n].t(), out=out[:, layer.block(layer.rank + turn)])
            if layer.has_bias:
                out[:, layer.block(layer.rank + turn)] += held[:, n]
            if passing is not None:
                held, spare = passing.arrived()
        if not comes_back and held.data_ptr() != shard.data_ptr():
            shard.detach().copy_(held)
        ctx.save_for_backward(x)
        ctx.layer, ctx.buffers = layer, (held, spare)
        return out.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:  # type: ignore[override]
        if ctx.buffers is None:
            raise InvalidInput("a second backward through a rotated layer", hint="run its forward again")
        (x,) = ctx.saved_tensors
        layer, (held, spare) = ctx.layer, ctx.buffers
        ctx.buffers = None
        rows, grads, n = x.reshape(-1, x.shape[-1]), grad.reshape(-1, layer.out_features), layer.in_features
        to_input = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        total = torch.zeros_like(held) if layer.in_place else None
        coming: _Passing | None = None  # the gradient of the next shard
        for turn in range(layer.ranks):
            is_last = turn + 1 == layer.ranks
            passing = None if is_last else layer.passing(held, spare, 1)
            mine = grads[:, layer.block(layer.rank - 1 - turn)]
            if to_input is not None:
                to_input.addmm_(mine, held[:, :n])
            part = total if total is not None else torch.zeros_like(held)
            part[:, :n].addmm_(mine.t(), rows)
            if layer.has_bias:
                part[:, n] += mine.sum(0)
            if passing is not None:
                held, spare = passing.arrived()
            if layer.in_place:
                if not is_last:
                    layer.passing(part, None, 1).arrived()
                continue
            if coming is not None:
                part += coming.arrived()[0]
            coming = None if is_last else layer.passing(part, torch.empty_like(part), 1)
            total = None
        layer.came_home()
        return None if to_input is None else to_input.view_as(x), part.div_(layer.ranks), None, None


def rotate_linears(model: torch.nn.Module, group: Any = None, *, in_place: bool = False) -> list[str]:
    """Replace the linear layers of a model, all of which have the same weights on all ranks, where their outputs divide among
    the ranks; returns their paths. The gradients of other parameters stay each rank's own."""
    ranks = dist.get_world_size(group)
    found = [path for path, m in model.named_modules() if type(m) is torch.nn.Linear and m.out_features % ranks == 0]
    for path in found:
        parent, _, name = path.rpartition(".")
        linear = model.get_submodule(path)
        assert isinstance(linear, torch.nn.Linear)
        setattr(model.get_submodule(parent), name, RotatedLinear(linear, group, in_place=in_place))
    return found
