"""Tensor ranks: the linear layers of stages are divided by `parallel/tensor.py`; regions are found in a trace of the model.

A region (columns and their row) lies inside one piece of the model. Activations between pieces are whole on all tensor ranks,
so a stage receives what a pipeline without them would send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from holdall.errors import Unsupported
from holdall.parallel.agree import from_first
from holdall.parallel.groups import among
from holdall.parallel.parts import let_read
from holdall.parallel.tensor import divide
from holdall.pipelines.running.mesh import PipeMesh
from holdall.pipelines.running.stage_ranks.divided import Divider, Sample
from holdall.types.mesh import Mesh, MeshDim


class ByTensors(Divider):
    """Finds what can be divided, and divides this rank's stages."""

    def __init__(
        self, pieces: Sequence[torch.nn.Module], sample: Sample, before: Sequence[Any], loss: Any, mesh: PipeMesh
    ) -> None:
        from holdall.tracing import trace_sharded

        self._on = mesh.on["tp"]
        super().__init__(before, self._on.get_group())
        rows = mesh.on.mesh.reshape(-1, mesh.parts).tolist()  # `tp` is the last dimension
        whole = torch.nn.Sequential(*pieces)

        def step(model: torch.nn.Module, batch: Sample) -> Any:
            return loss(model(batch[0]), batch[1])

        asked = Mesh(dims=(MeshDim(name="tp", size=mesh.parts),))
        with among(rows):
            found = from_first(lambda: trace_sharded(whole, sample, asked, "tensor", loss=step).about.shards)
        assert found is not None
        self._regions = [r for r in found.regions if len({_piece(path) for path in (*r.columns, r.row)}) == 1]
        self._vocabulary, self._readers = found.vocabulary, found.readers
        if not self._regions:
            raise Unsupported(
                f"no piece of the model has linear layers that can be divided over {mesh.parts} ranks",
                hint='leave `tp` out of the mesh, and use {"pp": ..., "dp": ...}',
            )
        self.fused = next((r.columns[0] for r in self._regions if r.parts > 1), "")
        if self.fused and not mesh.sharing.is_whole:
            raise Unsupported(
                f"`{self.fused}` is several matrices side by side, and torch cannot shard what tensor ranks have of them",
                hint='use shard="ddp"',
            )

    def _divide(self, module: torch.nn.Module, low: int, high: int) -> None:
        def own(path: str) -> str:
            first, _, rest = path.partition(".")
            return f"{int(first) - low}.{rest}" if rest else str(int(first) - low)

        regions = [
            replace(r, columns=tuple(map(own, r.columns)), row=own(r.row)) for r in self._regions if low <= _piece(r.row) < high
        ]
        words = [own(path) for path in self._vocabulary if low <= _piece(path) < high]
        if regions or words:
            division = divide(module, regions, words, self._on)
            for reader, owner in self._readers:
                if reader and low <= _piece(reader) < high:
                    let_read(module.get_submodule(own(reader)), module.get_submodule(own(owner)), division)


def _piece(path: str) -> int:
    return int(path.partition(".")[0])
