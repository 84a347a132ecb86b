"""Stages that several ranks divide among them, in one of the ways of `parallel/ways.py`: what the ways have in common.

    tp   the linear layers inside each piece of the model; what stages send is whole (`by_tensors.py`)
    cp   the sequence; stages send each rank's part of it (`by_context.py`)
    ep   the experts; every rank has a batch of its own (`by_experts.py`)

and, where stages have different numbers of ranks, the rows of micro-batches (`unequal.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter, tree_leaves

from holdall.errors import InvalidInput, Unsupported
from holdall.parallel.checks.values import SMALLEST
from holdall.pipelines.running.undone import as_if_not_run

Sample = tuple[torch.Tensor, torch.Tensor]  # inputs and targets of a micro-batch


class Divider:
    """Divides this rank's stages, and compares what they compute on the sample with what they did before."""

    fused = ""  # a layer that holds several matrices side by side, which were divided each

    def __init__(self, before: Sequence[Any] | None, group: Any) -> None:
        """`before`: what the pieces of the model get on this rank, and what the last returns; None: there is no sample."""
        self.before, self._group = before, group

    def divide(self, module: torch.nn.Module, low: int, high: int) -> None:
        """Divide a stage, of pieces `low` to `high`, in place."""
        self._divide(module, low, high)
        if self.before is None:
            return
        after = evaluated(list(module.children()), self.before[low])[-1]
        error = _largest_error(self.before[high], after)
        dist.all_reduce(error, dist.ReduceOp.MAX, self._group)  # some ranks may have computed the same
        if not error.item() <= 1:
            raise Unsupported(
                f"pieces {low} to {high - 1} compute something else when they are divided: the error is {error.item():.1e} "
                "times what is allowed",
                hint='use {"pp": ..., "dp": ...}, which leaves computation as it is; Hugging Face\'s models divide attention '
                'with attn_implementation="sdpa"',
            )

    def _divide(self, module: torch.nn.Module, low: int, high: int) -> None:
        """In place."""


def sample_of(sample: Any, micro_batches: int, device: torch.device) -> Sample:
    """The first micro-batch of a batch that was given for a trace."""
    if not (isinstance(sample, (tuple, list)) and len(sample) == 2 and all(isinstance(t, torch.Tensor) for t in sample)):
        raise InvalidInput(
            "tensor ranks, context ranks and budgets need a batch to look at",
            hint="pass sample=(inputs, targets), as `step` takes them",
        )
    inputs, targets = (t.to(device) for t in sample)
    return inputs[: max(1, len(inputs) // micro_batches)], targets[: max(1, len(targets) // micro_batches)]


def evaluated(pieces: Sequence[torch.nn.Module], inputs: Any) -> list[Any]:
    """What every piece gets, and what the last returns, without dropout; nothing of the model is changed."""
    modes = {m: m.training for piece in pieces for m in piece.modules()}
    found = [inputs]
    try:
        for piece in pieces:
            piece.eval()
        with torch.no_grad(), as_if_not_run(pieces, tree_leaves(inputs)[0].device):
            for piece in pieces:
                found.append(piece(found[-1]))
    finally:
        for m, was in modes.items():
            m.training = was
    return found


def _largest_error(before: Any, after: Any) -> torch.Tensor:
    """Of what is allowed for the dtype: more than 1 is too much."""
    worst = torch.zeros(())
    for a, b in zip(_floats(before), _floats(after), strict=True):
        if a.shape != b.shape:
            return torch.full((), float("inf"), device=a.device)
        allowed = max(torch.finfo(a.dtype).eps ** 0.6, SMALLEST) * a.abs().max().clamp(min=torch.finfo(a.dtype).tiny)
        worst = torch.fmax(((a - b).abs().max() / allowed).nan_to_num(nan=float("inf")).float(), worst.to(a.device))
    return worst


def _floats(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_iter(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]
