"""ZeRO++ (arXiv 2306.10209) on a mesh of nodes, by the extension points of `fully_shard`: less traffic between nodes.

    hpZ   after forward a rank keeps its part of the weights among the ranks of its node, from which backward gathers. Exact
    qwZ   ranks gather weights as int8 with a scale for every block of 256: each differs by at most 1/254 of its block's
          largest
    qgZ   gradients are reduced by two all-to-alls of 4-bit codes, inside the node and across, with sums in full precision in
          between: each part is coded twice, so that a sum differs by at most the mean over ranks of 1/14 of their blocks'
          largest, twice

The ranks of a node are consecutive. Where only one of them is chosen, the other collectives are those of `hierarchical.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from holdall.codecs.symmetric import decode_symmetric, encode_symmetric, symmetric_bytes
from holdall.errors import Unsupported
from holdall.parallel.sharding.hierarchical import HierarchicalGather, HierarchicalReduce, use_hierarchy

WEIGHT_BITS, GRADIENT_BITS = 8, 4


def use_nodes(model: torch.nn.Module, device_mesh: Any, way: str) -> None:
    """Have a model that is sharded over all ranks of a mesh of nodes use collectives that spare what joins them."""
    if way == "horing":
        from holdall.parallel.sharding.ho_ring import HORingGather, HORingReduce

        use_hierarchy(model, HORingGather(device_mesh), HORingReduce(device_mesh))
        return
    gather = QuantizedGather(device_mesh) if way in ("qwz", "zero++") else HierarchicalGather(device_mesh)
    reduce = QuantizedReduce(device_mesh) if way in ("qgz", "zero++") else HierarchicalReduce(device_mesh)
    use_hierarchy(model, gather, reduce)
    if way in ("hpz", "zero++"):
        reshard_in_node(model, device_mesh)


def reshard_in_node(model: torch.nn.Module, device_mesh: Any) -> None:
    """What `fully_shard(..., reshard_after_forward=k)` does, with the groups of this mesh instead of new ones."""
    from torch.distributed.fsdp import FSDPModule

    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

        near = HSDPMeshInfo(device_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group.post_forward_mesh_info = near
                for param in group.fsdp_params:
                    param.post_forward_mesh_info = near
                    param._init_sharded_post_forward_param_metadata(torch.empty(param._orig_size, device="meta"))
    except (ImportError, AttributeError):
        raise Unsupported("this torch does not keep a second copy inside nodes", hint='use shard="zero3"') from None


class QuantizedGather(HierarchicalGather):
    """qwZ: what crosses from rank to rank are codes and scales; a rank's own part comes back as the others see it."""

    def _gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        size = own.numel()
        coded = encode_symmetric(own, bits=WEIGHT_BITS)
        codes = coded.new_empty(self.nodes * self.members * coded.numel())
        super()._gather(codes, coded)
        for there, code in zip(whole.split(size), codes.split(coded.numel()), strict=True):
            there.copy_(decode_symmetric(code, bits=WEIGHT_BITS, numel=size))


class QuantizedReduce(HierarchicalReduce):
    """qgZ."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,  # noqa: ARG002
        op: Any,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise Unsupported("gradients in 4 bits are sums or means over ranks", hint="leave gradient_divide_factor alone")
        size = output_tensor.numel()
        inside = self._summed(self.by_member(input_tensor), self.nodes * size, self.inside)
        total = self._summed(inside, size, self.across)
        output_tensor.copy_(total.div_(self.nodes * self.members) if op == dist.ReduceOp.AVG else total)

    def _summed(self, parts: torch.Tensor, size: int, group: Any) -> torch.Tensor:
        """The sum over the group of its ranks' parts for this one; a part has `size` elements."""
        ranks = group.size()
        each = symmetric_bytes(size, GRADIENT_BITS)
        codes = torch.cat([encode_symmetric(part, bits=GRADIENT_BITS) for part in parts.split(size)])
        arrived = torch.empty_like(codes)
        dist.all_to_all_single(arrived, codes, group=group)
        del codes
        total = torch.zeros(size, dtype=torch.float32, device=parts.device)
        for n in range(ranks):
            total += decode_symmetric(arrived[n * each : (n + 1) * each], bits=GRADIENT_BITS, numel=size)
        return total
