"""Context: divide the sequence over ranks; attention is computed by all of them together.

After Li et al. (ring self-attention, ACL 2023), DeepSpeed-Ulysses (arXiv 2309.14509) and the zigzag order of LoongTrain (arXiv
2406.18485). The trace is taken with the sequence divided, as one rank; `parallel/context.py` has all of it. All ranks are
given the same batch. Model states are whole on every rank, so only activations are divided; on a mesh of `cp` and `ep` the
experts of mixtures are divided too, as by the action `experts`, and ranks along `ep` have batches of their own.

Not the bits of one process: sums over positions are taken in parts (1e-15 in float64).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from holdall.actions.shard import Shard, of_step
from holdall.types import Trace

if TYPE_CHECKING:
    import torch

    from holdall.parallel.parts import Division


@dataclass(frozen=True, kw_only=True)
class Context(Shard):
    experts: tuple[str, ...] = ()  # stacks of experts that are divided too

    name: ClassVar[str] = "context"

    @staticmethod
    def samples(trace: Trace) -> list[Shard]:
        """The division of the trace, if it has one."""
        shards = trace.about.shards
        if shards is None or shards.mesh.division != Context.name:
            return []
        return [Context(**of_step(shards), experts=shards.experts)]

    def divide(self, model: torch.nn.Module, meshes: Mapping[str, Any], ways: Sequence[str]) -> Division:
        from holdall.parallel.ways import divide_by

        return divide_by(ways, model, meshes, attention=self.groups, experts=self.experts, readers=self.readers)
