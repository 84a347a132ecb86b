"""Every rank updates its own part of parameters that all ranks have, and they exchange the results (ZeRO, arXiv 1910.02054,
stage 1).

Parameters and gradients are whole on every rank; what the optimizer holds are parts, one per rank, of each flattened parameter,
and so are its states: DTensors, which checkpoints save as one tensor. Gradients are summed by all-reduces, so that loops may
clip and log them as they are; the paper scatters them, which is two thirds of these bytes.

`triples.py` does so over the ranks of two dimensions.
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
        check_elementwise(optimizer)
        self._mesh, self._group = device_mesh, device_mesh.get_group(0)
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

    def _here(self, p: torch.Tensor) -> torch.Tensor:
        """A parameter or a gradient, in the shape in which it is cut into parts."""
        return local_of(p).detach().view(-1)

    def _own(self, here: torch.Tensor) -> torch.Tensor:
        parts = here.chunk(self._ranks)
        return parts[self._rank] if self._rank < len(parts) else here[:0]

    def _spread(self, p: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Shard

        here = self._here(p)
        own = self._own(here)
        return DTensor.from_local(own, self._mesh, [Shard(0)], run_check=False, shape=here.shape, stride=(1,))

    def _part(self, p: torch.nn.Parameter) -> torch.nn.Parameter:
        part = torch.nn.Parameter(self._spread(p), requires_grad=p.requires_grad)
        part.holdall_whole = p  # type: ignore[attr-defined]  # see `sharded.part_of_parameter`
        return part

    def _before(self, *_: Any) -> None:
        for p, part in self._pairs:
            self._follow(p, part)
            part.grad = None if p.grad is None else self._spread(p.grad)

    def _follow(self, p: torch.nn.Parameter, part: torch.nn.Parameter) -> None:
        """torch's engine may have put a shard elsewhere, with padding, before the first forward."""
        own = self._own(self._here(p))
        if own.untyped_storage()._cdata != local_of(part).untyped_storage()._cdata:
            part._local_tensor = own  # type: ignore[attr-defined]

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
            bucket.append(self._here(p))
        if bucket:
            self._exchange(bucket)

    def _exchange(self, tensors: list[torch.Tensor]) -> None:
        """Have the parts of all ranks in these parameters."""
        parts = [t.chunk(self._ranks) for t in tensors]
        sizes = [some[0].numel() for some in parts]
        mine = tensors[0].new_zeros(sum(sizes))
        for t, place in zip(tensors, mine.split(sizes), strict=True):
            own = self._own(t)
            place[: own.numel()].copy_(own.reshape(-1))
        whole = mine.new_empty(self._ranks * mine.numel())
        gather_into(whole, mine, self._group)
        for rank, row in enumerate(whole.view(self._ranks, -1)):
            for some, place in zip(parts, row.split(sizes), strict=True):
                if rank < len(some):
                    some[rank].copy_(place[: some[rank].numel()].view_as(some[rank]))

    def _zero_grad(self, set_to_none: bool = True) -> None:
        for p, part in self._pairs:
            part.grad = None
            if p.grad is not None and not set_to_none:
                p.grad.detach_().zero_()
            else:
                p.grad = None


def check_elementwise(optimizer: torch.optim.Optimizer, *, why: str = "in stage 1 of ZeRO", otherwise: str = "ddp") -> None:
    """Refuse a rule that may not update a parameter in parts."""
    kind = type(optimizer)
    if kind.__name__ not in ELEMENTWISE_NAMES or not kind.__module__.startswith("torch.optim"):
        raise Unsupported(
            f"{kind.__name__} may not update a parameter in parts, which every rank does {why}",
            hint=f'use an elementwise rule of torch.optim, such as AdamW, or shard="{otherwise}"',
        )
