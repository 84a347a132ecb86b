"""Experts: put the experts of a mixture on different ranks, to which tokens travel by all-to-all exchanges.

After GShard, Switch Transformer (JMLR 2022) and DeepSpeed-MoE (ICML 2022), without capacities: no token is dropped. The trace
is taken with the experts divided, as one rank; `parallel/experts.py` has all of it. Every rank has a batch of its own, and
gradients are means over the ranks. All else in the model is whole on every rank.

Not the bits of one process: sums over tokens and experts are taken in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from holdall.actions.shard import Shard
from holdall.types import Trace
from holdall.types.mesh import DIVIDING

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
        over = shards.mesh.dividing if shards is not None else None
        if shards is None or over is None or DIVIDING[over.name] != Experts.name:
            return []
        mesh = tuple((d.name, d.size) for d in shards.mesh.dims)
        return [
            Experts(
                mesh=mesh,
                way=shards.way,
                groups=shards.groups,
                data_groups=shards.data_groups,
                precision=shards.precision,
                casts=shards.casts,
            )
        ]

    def divide(self, model: torch.nn.Module, device_mesh: Any, way: str) -> Division:  # noqa: ARG002
        from holdall.parallel.experts import divide_experts

        return divide_experts(model, self.groups, device_mesh)
