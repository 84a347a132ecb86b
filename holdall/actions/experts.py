"""Experts: put the experts of a mixture on different ranks, to which tokens travel by all-to-all exchanges.

After GShard, Switch Transformer (JMLR 2022) and DeepSpeed-MoE (ICML 2022), without capacities: no token is dropped. The trace
is taken with the experts divided, as one rank; `parallel/experts.py` has all of it. Every rank has a batch of its own, and
gradients are means over the ranks. All else in the model is whole on every rank.

Not the bits of one process: sums over tokens and experts are taken in another order.
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
class Experts(Shard):
    name: ClassVar[str] = "experts"

    @staticmethod
    def samples(trace: Trace) -> list[Shard]:
        """The division of the trace, if it has one."""
        shards = trace.about.shards
        if shards is None or shards.mesh.division != Experts.name:
            return []
        return [Experts(**of_step(shards))]

    def divide(self, model: torch.nn.Module, meshes: Mapping[str, Any], ways: Sequence[str]) -> Division:
        from holdall.parallel.ways import divide_by

        return divide_by(ways, model, meshes, experts=self.groups, readers=self.readers)
