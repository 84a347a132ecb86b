"""Expert ranks: the experts of mixtures are divided by `parallel/experts.py`, and tokens travel inside a stage.

Expert ranks have batches of their own, as replicas of a pipeline have. Experts get the gradients of all ranks' tokens in every
backward; the means of all other gradients are taken after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdall.errors import Unsupported
from holdall.parallel.experts import divide_experts, find_experts
from holdall.pipelines.running.mesh import PipeMesh
from holdall.pipelines.running.stage_ranks.divided import Divider, Sample


class ByExperts(Divider):
    """Divides the stacks of experts in this rank's stages."""

    def __init__(
        self,
        pieces: Sequence[torch.nn.Module],
        sample: Sample | None,  # noqa: ARG002
        before: Sequence[Any] | None,
        loss: Any,  # noqa: ARG002
        mesh: PipeMesh,
    ) -> None:
        self._on, self._ranks = mesh.on["ep"], mesh.parts
        super().__init__(before, self._on.get_group())
        if not any(find_experts(piece, self._ranks) for piece in pieces):
            raise Unsupported(
                f"no piece of the model has experts that can be divided over {self._ranks} ranks",
                hint='leave `ep` out of the mesh, and use {"pp": ..., "dp": ...}',
            )

    def _divide(self, module: torch.nn.Module, low: int, high: int) -> None:  # noqa: ARG002
        divide_experts(module, find_experts(module, self._ranks), self._on, means=False)
