"""Divides the layers of stages over tensor ranks, by `parallel/tensor.py`: regions are found in a trace of the whole model.

A region (columns and their row) lies inside one piece of the model. Activations between pieces are whole on all tensor ranks,
so a stage receives what a pipeline without them would send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from holdall.errors import InvalidInput, Unsupported
from holdall.parallel.agree import from_first
from holdall.parallel.checking import SMALLEST
from holdall.parallel.groups import among
from holdall.parallel.tensor import divide
from holdall.pipelines.running.mesh import PipeMesh
from holdall.types.mesh import Mesh, MeshDim

Sample = tuple[torch.Tensor, torch.Tensor]  # inputs and targets of a micro-batch


class Divider:
    """Finds what can be divided, divides this rank's stages, and compares what they compute with what they did before."""

    def __init__(
        self, pieces: Sequence[torch.nn.Module], sample: Sample, before: Sequence[Any], loss: Any, mesh: PipeMesh
    ) -> None:
        """`before`: what the pieces get, whole, and the last returns."""
        from holdall.tracing import trace_sharded

        self._on = mesh.on["tp"]
        rows = mesh.on.mesh.reshape(-1, mesh.parts).tolist()  # `tp` is the last dimension
        whole = torch.nn.Sequential(*pieces)

        def step(model: torch.nn.Module, batch: Sample) -> Any:
            return loss(model(batch[0]), batch[1])

        asked = Mesh(dims=(MeshDim(name="tp", size=mesh.parts),))
        with among(rows):
            found = from_first(lambda: trace_sharded(whole, sample, asked, "tensor", loss=step).about.shards)
        assert found is not None
        self._regions = [r for r in found.regions if len({_piece(path) for path in (*r.columns, r.row)}) == 1]
        self._vocabulary = found.vocabulary
        if not self._regions:
            raise Unsupported(
                f"no piece of the model has linear layers that can be divided over {mesh.parts} ranks",
                hint='leave `tp` out of the mesh, and use {"pp": ..., "dp": ...}',
            )
        self.fused = next((r.columns[0] for r in self._regions if r.parts > 1), "")  # several matrices side by side
        if self.fused and mesh.shard != "ddp":
            raise Unsupported(
                f"`{self.fused}` is several matrices side by side, and torch cannot shard what tensor ranks have of them",
                hint='use shard="ddp"',
            )
        self._before = before

    def divide(self, module: torch.nn.Module, low: int, high: int) -> None:
        """Divide a stage, of pieces `low` to `high`, in place."""

        def own(path: str) -> str:
            first, _, rest = path.partition(".")
            return f"{int(first) - low}.{rest}" if rest else str(int(first) - low)

        regions = [
            replace(r, columns=tuple(map(own, r.columns)), row=own(r.row)) for r in self._regions if low <= _piece(r.row) < high
        ]
        words = [own(path) for path in self._vocabulary if low <= _piece(path) < high]
        if regions or words:
            divide(module, regions, words, self._on)
        self._compare(module, low, high)

    def _compare(self, module: torch.nn.Module, low: int, high: int) -> None:
        found = evaluated(list(module.children()), self._before[low])[-1]
        for a, b in zip(_floats(self._before[high]), _floats(found), strict=True):
            error = (a - b).abs().max().item() / max(a.abs().max().item(), torch.finfo(a.dtype).tiny)
            if not error <= max(torch.finfo(a.dtype).eps ** 0.6, SMALLEST):
                raise Unsupported(
                    f"pieces {low} to {high - 1} compute something else when they are divided (relative error {error:.1e})",
                    hint='leave `tp` out of the mesh, and use {"pp": ..., "dp": ...}',
                )


def sample_of(sample: Any, micro_batches: int) -> Sample:
    """The first micro-batch of a batch that was given for a trace."""
    if not (isinstance(sample, (tuple, list)) and len(sample) == 2 and all(isinstance(t, torch.Tensor) for t in sample)):
        raise InvalidInput(
            "tensor ranks and budgets need a batch to look at",
            hint="pass sample=(inputs, targets), as `step` takes them",
        )
    inputs, targets = sample
    return inputs[: max(1, len(inputs) // micro_batches)], targets[: max(1, len(targets) // micro_batches)]


def _piece(path: str) -> int:
    return int(path.partition(".")[0])


def evaluated(pieces: Sequence[torch.nn.Module], inputs: Any) -> list[Any]:
    """What every piece gets, and what the last returns, without dropout; nothing of the model is changed."""
    modes = {m: m.training for piece in pieces for m in piece.modules()}
    found = [inputs]
    try:
        for piece in pieces:
            piece.eval()
        with torch.no_grad():
            for piece in pieces:
                found.append(piece(found[-1]))
    finally:
        for m, was in modes.items():
            m.training = was
    return found


def _floats(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_iter(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]
