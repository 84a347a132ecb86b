"""PowerSGD (Vogels et al., NeurIPS 2019): ranks exchange a low-rank approximation of every gradient matrix.

    model = DistributedDataParallel(model)
    PowerSGD(model, rank=4)

Lossy. What is approximated is the gradient plus what earlier steps left out (error feedback). The compression is torch's own
hook (`powerSGD_hook`); here are its options, and what it costs: of an n x m matrix a rank sends (n + m) `rank` elements, twice
(ranks - 1) / ranks of them, as in any all-reduce. Matrices for which that is not `min_rate` times fewer than all elements are
sent whole, and vectors are.

Bytes: the error has the size of the gradients, and the factors are kept, on every rank. While a bucket is compressed, torch
copies it once more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from holdall.cost.collectives import sent_bytes
from holdall.errors import InvalidInput


class PowerSGD:
    """The compression of one `DistributedDataParallel` model, as its communication hook; for good, as hooks are.

    `rank`: of the approximation. `start`: the steps before it that sum gradients whole; torch needs two. `feedback`: add what
    one step leaves out to the next. `epsilon`: is added to norms of columns, so that a gradient of zeros stays one. `seed`: of
    the first factors, which must be the same on all ranks.
    """

    def __init__(
        self,
        model: torch.nn.parallel.DistributedDataParallel,
        *,
        rank: int = 1,
        start: int = 1000,
        min_rate: float = 2.0,
        feedback: bool = True,
        epsilon: float = 1e-8,
        seed: int = 0,
    ) -> None:
        _check(model, rank, start, min_rate)
        self.rank, self.start, self.min_rate, self.feedback = rank, start, min_rate, feedback
        self._own = [p for p in model.parameters() if p.requires_grad]
        self._ranks = dist.get_world_size(model.process_group)
        self.state: PowerSGDState = PowerSGDState(
            process_group=model.process_group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start,
            min_compression_rate=min_rate,
            use_error_feedback=feedback,
            orthogonalization_epsilon=epsilon,
            random_seed=seed,
        )
        model.register_comm_hook(self.state, powerSGD_hook)

    def _factors(self, p: torch.nn.Parameter) -> int | None:
        """Elements of both factors; None: the tensor is sent whole."""
        n, m = p.shape[0] if p.dim() else 1, p[0].numel() if p.dim() else 1
        both = (n + m) * min(n, m, self.rank)
        return both if both * self.min_rate < n * m else None

    def wire_bytes(self, step: int) -> int:
        """Bytes that one rank sends in a step, counted from 0."""
        factors = [self._factors(p) if step >= self.start else None for p in self._own]
        reduced = sum((f or p.numel()) * p.element_size() for p, f in zip(self._own, factors, strict=True))
        return sent_bytes("all_reduce", reduced, self._ranks)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that a rank holds for this between steps, besides its gradients, once the compression has begun."""
        error = sum(p.numel() * p.element_size() for p in self._own) if self.feedback else 0
        return error + sum((self._factors(p) or 0) * p.element_size() for p in self._own)


def _check(model: Any, rank: int, start: int, min_rate: float) -> None:
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise InvalidInput(
            f"gradients of a {type(model).__name__} are not summed by DistributedDataParallel",
            hint="wrap the model first: model = torch.nn.parallel.DistributedDataParallel(model)",
        )
    if rank < 1 or start < 2 or min_rate <= 0:
        raise InvalidInput(
            f"rank={rank}, start={start}, min_rate={min_rate} are not options of PowerSGD",
            hint="use a rank of 1 or more, 2 whole steps or more (torch sorts its buckets in the first), and a rate over 0",
        )
