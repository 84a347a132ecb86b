"""Collectives over nodes in two stages, so that little crosses from node to node (MiCS, arXiv 2205.00119; the order of parts is
that of ZeRO++'s qgZ, arXiv 2306.10209).

Rank j k + i is member i of node j, of n nodes with k ranks. An all-gather of n k parts:

    across   members i of all nodes gather their parts: n of them
    inside   for each node, the ranks of this one gather its k parts, which are neighbours in the result

A reduce-scatter is the reverse: the ranks of a node sum the parts of members i of all nodes for each i, then members i sum over
the nodes. Between nodes, a rank sends 1 / k of what it would in one ring over all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from holdall.parallel.exchanges import gather_into, reduce_into


class _Allocating:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class HierarchicalGather(_Allocating, AllGather):
    """For `fully_shard` over all ranks of a mesh of nodes."""

    def __init__(self, device_mesh: Any) -> None:
        self.across, self.inside = device_mesh.get_group(0), device_mesh.get_group(1)
        self.nodes, self.members = self.across.size(), self.inside.size()

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> None:  # noqa: ARG002
        if group.size() == self.members * self.nodes:
            self._gather(output_tensor, input_tensor)
        else:  # from a second copy inside the node
            gather_into(output_tensor, input_tensor, group)

    def _gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        parts = own.new_empty(self.nodes * own.numel())
        gather_into(parts, own, self.across)
        for there, part in zip(whole.chunk(self.nodes), parts.chunk(self.nodes), strict=True):
            gather_into(there, part, self.inside)


class HierarchicalReduce(_Allocating, ReduceScatter):
    """The same for gradients."""

    def __init__(self, device_mesh: Any) -> None:
        self.across, self.inside = device_mesh.get_group(0), device_mesh.get_group(1)
        self.nodes, self.members = self.across.size(), self.inside.size()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,  # noqa: ARG002
        op: Any,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        parts = self.by_member(input_tensor)
        own = parts.new_empty(self.nodes * output_tensor.numel())
        reduce_into(own, parts, self.inside, op)
        reduce_into(output_tensor, own, self.across, op)

    def by_member(self, whole: torch.Tensor) -> torch.Tensor:
        """Parts in the order of members, then nodes; they come in that of nodes, then members."""
        return whole.view(self.nodes, self.members, -1).transpose(0, 1).reshape(-1)


def use_hierarchy(model: torch.nn.Module, gather: AllGather, reduce: ReduceScatter) -> None:
    """Have all modules under `fully_shard` use these collectives."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
