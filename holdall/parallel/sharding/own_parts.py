"""Every rank updates its own part of parameters that all ranks have, and they exchange the results (ZeRO, arXiv 1910.02054,
stage 1).

Parameters and gradients are whole on every rank; what the optimizer holds are parts, one per rank, of each flattened parameter,
and so are its states: DTensors, which checkpoints save as one tensor. Gradients are summed by all-reduces, so that loops may
clip and log them as they are; the paper scatters them, which is two thirds of these bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from holdall.errors import Unsupported
from holdall.parallel.exchanges import gather_into
from holdall.sharded import local_of
from holdall.types.layout import ELEMENTWISE_NAMES

BUCKET = 1 << 24  # elements that are exchanged at a time, unless one parameter has more


class OwnParts:
    """Puts parts of the parameters into an optimizer, and hooks around its steps; for good, as models are divided for good."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, device_mesh: Any) -> None:
        kind = type(optimizer)
        if kind.__name__ not in ELEMENTWISE_NAMES or not kind.__module__.startswith("torch.optim"):
            raise Unsupported(
                f"{kind.__name__} may not update a parameter in parts, which every rank does in stage 1 of ZeRO",
                hint='use an elementwise rule of torch.optim, such as AdamW, or shard="ddp"',
            )
        self._mesh, self._group = device_mesh, device_mesh.get_group()
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        own = {id(p) for p in model.parameters()}
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []  # a parameter, and this rank's part of it
        for group in optimizer.param_groups:
            parts = [self._part(p) if id(p) in own else p for p in group["params"]]
            self._pairs += [(p, part) for p, part in zip(group["params"], parts, strict=True) if part is not p]
            group["params"] = parts
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        parts = flat.chunk(self._ranks)
        return parts[self._rank] if self._rank < len(parts) else flat[:0]

    def _spread(self, flat: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Shard

        own = self._own(flat)
        return DTensor.from_local(own, self._mesh, [Shard(0)], run_check=False, shape=flat.shape, stride=(1,))

    def _part(self, p: torch.nn.Parameter) -> torch.nn.Parameter:
        part = torch.nn.Parameter(self._spread(_flat(p)), requires_grad=p.requires_grad)
        part.holdall_whole = p  # type: ignore[attr-defined]  # see `sharded.part_of_parameter`
        return part

    def _before(self, *_: Any) -> None:
        for p, part in self._pairs:
            part.grad = None if p.grad is None else self._spread(_flat(p.grad))

    def _after(self, *_: Any) -> None:
        bucket: list[torch.Tensor] = []
        for p, part in self._pairs:
            if part.grad is None:
                continue
            part.grad = None
            if bucket and sum(t.numel() for t in bucket) + p.numel() > BUCKET:
                self._exchange(bucket)
                bucket = []
            if bucket and bucket[0].dtype != p.dtype:
                self._exchange(bucket)
                bucket = []
            bucket.append(_flat(p))
        if bucket:
            self._exchange(bucket)

    def _exchange(self, flats: list[torch.Tensor]) -> None:
        """Have the parts of all ranks in these parameters."""
        sizes = [-(-t.numel() // self._ranks) for t in flats]
        mine = flats[0].new_zeros(sum(sizes))
        for t, place in zip(flats, mine.split(sizes), strict=True):
            own = self._own(t)
            place[: own.numel()].copy_(own)
        whole = mine.new_empty(self._ranks * mine.numel())
        gather_into(whole, mine, self._group)
        for rank, row in enumerate(whole.view(self._ranks, -1)):
            for t, place in zip(flats, row.split(sizes), strict=True):
                there = t[rank * place.numel() : (rank + 1) * place.numel()]
                there.copy_(place[: there.numel()])

    def _zero_grad(self, set_to_none: bool = True) -> None:
        for p, part in self._pairs:
            part.grad = None
            if p.grad is not None and not set_to_none:
                p.grad.detach_().zero_()
            else:
                p.grad = None


def _flat(p: torch.Tensor) -> torch.Tensor:
    return local_of(p).detach().view(-1)
