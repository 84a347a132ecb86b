"""Shards a model by torch's own engine (`fully_shard`, and `replicate` on the same engine). A model stays sharded.

    ddp    every rank has all parameters; gradients are summed by all-reduces
    zero1  optimizer states are in shards: every rank updates its part of the parameters (stage 1 of ZeRO, `own_parts.py`)
    zero2  gradients and optimizer states are in shards; parameters too, but for the time from forward to backward (stage
           2 of ZeRO, arXiv 1910.02054)
    zero3  parameters too, gathered for the forward and again for the backward of each group (stage 3)
    fsdp   zero3, except that the root's own parameters stay from forward to backward, as `fully_shard` has it by default

On a mesh of replicas and shards, zero2, zero3 and fsdp shard over the last dimension and repeat the shards (MiCS, `mics.py`):

    nni nng nii nig ngg iig igg   parameters, gradients and optimizer states in shards of different widths (PaRO, `triples.py`)
    i-nni i-nng i-nii i-nig i-ngg the same, with frozen parameters in shards

On a mesh of nodes they shard over all ranks by collectives in two stages (`hierarchical.py`), and there are (`zeropp.py`):

    hpz    zero3, whose backward gathers from a second copy inside the node
    qwz    zero3, which gathers weights in 8 bits
    qgz    zero3, which reduces gradients in 4 bits
    zero++ all three
    horing zero3, whose collectives are rings inside nodes and across at once (`ho_ring.py`)

Gradients are means over the ranks, as in torch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdall.errors import Unsupported, unknown_name
from holdall.parallel.groups import flat_mesh
from holdall.parallel.parts import is_uncuttable, keep_whole
from holdall.parallel.sharding.one_pool import share_pool
from holdall.types.mesh import NODES, REPLICAS, Mesh

RULED = ("ddp", "fsdp", "zero2", "zero3")  # those that are known by rule, without a trace (`by_rule.py`)
_WHOLE = ("nni", "nng", "nii", "nig", "ngg")  # triples with whole parameters
OVER_REPLICAS = (*_WHOLE, "iig", "igg", *(f"i-{triple}" for triple in _WHOLE))
WHOLE_OVER_NODES = ("hpz", "horing")  # those that send numbers as they are
OVER_NODES = (*WHOLE_OVER_NODES, "qwz", "qgz", "zero++")
WAYS = ("ddp", "fsdp", "zero1", "zero2", "zero3", *OVER_REPLICAS, *OVER_NODES)


def check_way(way: str, mesh: Mesh | None = None) -> None:
    """Refuse a way that there is not, or not over this mesh."""
    if way not in WAYS:
        raise unknown_name("way to shard", way, WAYS)
    if mesh is None:
        return
    first = mesh.dims[0].name
    if len(mesh.dims) > 1 and way in ("ddp", "zero1"):
        raise Unsupported(f"{way} is over one dimension of ranks", hint=f'use mesh={{"dp": {mesh.ranks}}}')
    needs = REPLICAS if way in OVER_REPLICAS else NODES if way in OVER_NODES else first
    hint = f'use mesh={{"{needs}": 2, "dp": {max(1, mesh.ranks // 2)}}}'
    if needs != first:
        raise Unsupported(f"{way} is for a mesh of `{needs}`, not of `{first}`", hint=hint)
    if len(mesh.dims) == 1 and first in (REPLICAS, NODES):
        raise Unsupported(f"a mesh of `{first}` has a dimension of data after it", hint=hint)


def shard_model(model: torch.nn.Module, groups: Sequence[str], device_mesh: Any, way: str, precision: str = "") -> None:
    """Shard a model in place: the modules of `groups` first, each with a collective of its own, then the rest. `precision`: the
    dtype in which parameters are gathered, and gradients are before their means are taken in float32; empty: their own."""
    check_way(way)
    if way in OVER_REPLICAS:
        from holdall.parallel.sharding.triples import Triple

        Triple(model, groups, device_mesh, way)
        return
    modules = [model.get_submodule(path) for path in groups]
    together = (*(m for m in modules if m is not model), model)
    dtype = getattr(torch, precision) if precision else None
    whole = keep_whole(model, device_mesh, flat_mesh(device_mesh), is_cut=way != "ddp", dtype=dtype)
    for module in together:
        _shard(module, flat_mesh(device_mesh), way, whole, precision)
    if flat_mesh(device_mesh) is not device_mesh:
        from holdall.parallel.sharding.zeropp import use_nodes

        use_nodes(model, device_mesh, way)
    elif device_mesh.ndim == 1 and way not in ("ddp", "zero1"):
        share_pool(together)


def _shard(module: torch.nn.Module, device_mesh: Any, way: str, whole: set[torch.nn.Parameter], precision: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if precision:  # inputs are cast as they are in one process (`casts.py`)
        dtype = getattr(torch, precision)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if way in ("ddp", "zero1"):
        try:
            from torch.distributed._composable.replicate_with_fsdp import replicate
        except ImportError:
            raise Unsupported("this torch cannot replicate models by its engine of shards", hint='use shard="zero2"') from None
        replicate(module, mesh=device_mesh, mp_policy=policy, ignored_params=whole or None)
        return
    again = {"fsdp": None, "zero2": False}.get(way, True)
    fully_shard(
        module,
        mesh=device_mesh,
        reshard_after_forward=again,
        shard_placement_fn=_place_of_shards,
        mp_policy=policy,
        ignored_params=whole or None,
    )


def _place_of_shards(p: torch.nn.Parameter) -> Any:
    """The dimension that is cut; None: the first. One with matrices side by side, each of them divided, is not cut again: the
    parts would be none that DTensor can join."""
    from torch.distributed.tensor import Shard

    return Shard(1) if is_uncuttable(p) else None


def divide_update(optimizer: torch.optim.Optimizer, model: torch.nn.Module, device_mesh: Any, way: str) -> None:
    """What a way asks of the optimizer, which holds the parameters of the sharded model."""
    if way == "zero1":
        from holdall.parallel.sharding.own_parts import OwnParts

        OwnParts(optimizer, model, device_mesh)
    if way in OVER_REPLICAS:
        from holdall.parallel.sharding.triples import triple_of

        triple = triple_of(model)
        assert triple is not None
        triple.divide(optimizer)


def put_off_sums(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, backwards: int) -> None:
    """On a mesh of replicas: sum gradients over those in the last of the `backwards` of a step alone."""
    from holdall.parallel.sharding.mics import TwoHops
    from holdall.parallel.sharding.triples import ALL, triple_of

    triple = triple_of(model)
    if triple is None:
        TwoHops(optimizer, backwards, model, model.set_requires_all_reduce)  # type: ignore[arg-type]
    elif triple.grads < ALL:
        TwoHops(optimizer, backwards, model, triple.sum_now)


def follow_parameters(optimizer: torch.optim.Optimizer, before: dict[str, torch.nn.Parameter], model: torch.nn.Module) -> None:
    """Let an optimizer update the sharded parameters in the place of those from before, which it holds."""
    after = dict(model.named_parameters())
    new = {id(p): after[name] for name, p in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(p), p) for p in group["params"]]
