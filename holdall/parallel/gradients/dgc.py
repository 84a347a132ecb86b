"""Deep Gradient Compression (Lin et al., ICLR 2018): ranks exchange the largest of their accumulated gradients alone.

    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum: it is part of the compression
    DGC(model, optimizer, keep=0.001, momentum=0.9)

Lossy. For every matrix, each rank keeps its own momentum u and what it has not sent yet, v:

    u = momentum u + gradient;  v = v + u;  send the `keep` largest of |v|, and set u and v to zero there

and every rank takes the mean of what was sent (values and places, by an all-gather). Vectors, and all tensors where `keep` is
1, are all-reduced whole, and their momentum is that of the mean: the bits of `torch.optim.SGD(momentum=...)`.

Bytes: u and v are 2x the parameters on every rank, so that this saves messages and costs memory. An all-gather grows with the
ranks: with k of x elements sent, it has fewer bytes than an all-reduce while k ranks < x.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from holdall.cost.collectives import sent_bytes
from holdall.errors import InvalidInput, Unsupported
from holdall.parallel.exchanges import gather_into

PLACE = 4  # bytes of an index


class DGC:
    """The compression of one `DistributedDataParallel` model, as its communication hook; for good, as hooks are.

    `keep`: share of a matrix's elements that a rank sends in a step. `clip`: a local gradient is scaled down to a norm of
    `clip` / sqrt(ranks), tensor by tensor. `warm_up`: steps in each of the stages before `keep` is reached, an epoch in the
    paper: a quarter of the elements in the first, a quarter of those in the next, and so on; 0: none.
    """

    def __init__(
        self,
        model: torch.nn.parallel.DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        keep: float = 0.001,
        momentum: float = 0.9,
        clip: float | None = None,
        warm_up: int = 0,
    ) -> None:
        _check(model, optimizer, keep, momentum, clip, warm_up)
        self.keep, self.momentum, self.clip, self.warm_up = keep, momentum, clip, warm_up
        self.steps = 0
        self._group = model.process_group
        self._ranks = dist.get_world_size(self._group)
        self._own = [p for p in model.parameters() if p.requires_grad]
        self.momenta = {p: _flat_zeros(p) for p in self._own}
        self.unsent = {p: _flat_zeros(p) for p in self._own if _is_matrix(p)}
        model.register_comm_hook(self, _hook)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that a rank holds for this besides its gradients."""
        return sum(t.numel() * t.element_size() for held in (self.momenta, self.unsent) for t in held.values())

    def kept(self, step: int) -> float:
        """The share of elements that is sent in a step, counted from 0."""
        stage = step // self.warm_up + 1 if self.warm_up else None
        return self.keep if stage is None else max(self.keep, 0.25**stage)

    def wire_bytes(self, step: int) -> int:
        """Bytes that one rank sends in a step."""
        whole, messages = 0, 0
        for p in self._own:
            count = self._count(p, self.kept(step))
            whole += p.numel() * p.element_size() if count is None else 0
            messages += (count or 0) * (PLACE + p.element_size())
        ranks = self._ranks
        return sent_bytes("all_reduce", whole, ranks) + sent_bytes("all_gather", ranks * messages, ranks)

    def _count(self, p: torch.nn.Parameter, share: float) -> int | None:
        """Elements that are sent; None: all of them, by an all-reduce."""
        count = ceil(share * p.numel())
        return None if not _is_matrix(p) or count >= p.numel() else count

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        share = self.kept(self.steps)
        self.steps += bucket.is_last()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        if self.clip is not None:
            for _, grad in pairs:
                grad.mul_(torch.clamp(self.clip * self._ranks**-0.5 / (grad.norm() + 1e-12), max=1.0))
        counts = [self._count(p, share) for p, _ in pairs]
        sparse = [(p, g, k) for (p, g), k in zip(pairs, counts, strict=True) if k is not None]
        whole = [(p, g) for (p, g), k in zip(pairs, counts, strict=True) if k is None]
        buffer: torch.Tensor = bucket.buffer()
        dense = torch.cat([g.reshape(-1) for _, g in whole]) if whole else buffer.new_empty(0)
        messages, under_way = self._gather([self._largest(p, g, k) for p, g, k in sparse])
        if whole:
            under_way.append(dist.all_reduce(dense.div_(self._ranks), group=self._group, async_op=True))

        def finish(_: Any) -> torch.Tensor:
            for handle in under_way[:-1]:
                handle.wait()
            for (p, grad), mean in zip(whole, dense.split([g.numel() for _, g in whole]), strict=True):
                grad.copy_(self.momenta[p].mul_(self.momentum).add_(mean).view(grad.shape))
            if sparse:
                self._add_up(sparse, messages)
            return buffer

        done: torch.futures.Future[torch.Tensor] = under_way[-1].get_future().then(finish)
        return done

    def _largest(self, p: torch.nn.Parameter, grad: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(places, values) of what this rank sends; the rest stays for later steps."""
        momentum, unsent = self.momenta[p], self.unsent[p]
        unsent.add_(momentum.mul_(self.momentum).add_(grad.reshape(-1)))
        places = unsent.abs().topk(count, sorted=False).indices
        values = unsent[places]
        unsent[places] = 0
        momentum[places] = 0
        return places.int(), values

    def _gather(self, sent: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, list[Any]]:
        """The messages of all ranks, as bytes, and torch's handle of their collective, if there is one."""
        if not sent:
            return torch.empty(0), []
        message = torch.cat([t.view(torch.uint8) for pair in zip(*sent, strict=True) for t in pair])
        gathered = message.new_empty(self._ranks * message.numel())
        return gathered, [gather_into(gathered, message, self._group, async_op=True)]

    def _add_up(self, sparse: Sequence[tuple[torch.nn.Parameter, torch.Tensor, int]], messages: torch.Tensor) -> None:
        """The mean of what all ranks sent, added up in the order of the ranks, so that all have the same bits."""
        counts = [k for _, _, k in sparse]
        sums = [torch.zeros_like(self.unsent[p]) for p, _, _ in sparse]
        for message in messages.view(self._ranks, -1):
            places = message[: PLACE * sum(counts)].clone().view(torch.int32).split(counts)
            values = message[PLACE * sum(counts) :].clone().view(sums[0].dtype).split(counts)
            for total, at, some in zip(sums, places, values, strict=True):
                total.index_add_(0, at, some)
        for (_, grad, _), total in zip(sparse, sums, strict=True):
            grad.copy_(total.div_(self._ranks).view(grad.shape))


def _hook(compression, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are texts
    return compression._reduce(bucket)


def _is_matrix(p: torch.Tensor) -> bool:
    return p.dim() > 1


def _flat_zeros(p: torch.Tensor) -> torch.Tensor:
    return torch.zeros(p.numel(), dtype=p.dtype, device=p.device)


def _check(
    model: Any, optimizer: torch.optim.Optimizer, keep: float, momentum: float, clip: float | None, warm_up: int
) -> None:
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise InvalidInput(
            f"gradients of a {type(model).__name__} are not summed by DistributedDataParallel",
            hint="wrap the model first: model = torch.nn.parallel.DistributedDataParallel(model)",
        )
    if type(optimizer) is not torch.optim.SGD or any(group["momentum"] for group in optimizer.param_groups):
        raise InvalidInput(
            "DGC has the momentum in its compression, so that the optimizer is SGD without momentum",
            hint="use torch.optim.SGD(model.parameters(), lr=...) and DGC(..., momentum=0.9)",
        )
    if not 0 < keep <= 1 or not 0 <= momentum < 1 or warm_up < 0 or (clip is not None and clip <= 0):
        raise InvalidInput(
            f"keep={keep}, momentum={momentum}, clip={clip}, warm_up={warm_up} are not options of DGC",
            hint="use a share such as keep=0.001, momentum=0.9, a norm for `clip` and steps for `warm_up`",
        )
    if any(p.numel() >= 2**31 for p in model.parameters()):
        raise Unsupported("a tensor has 2^31 elements or more, and places are sent as 32-bit integers", hint="divide it")
