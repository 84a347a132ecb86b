"""What the dimensions of a mesh are for, by their names, and the ways there are for each.

    tp   tensors: linear layers in halves ("tensor"; "sequence": activations between them too); see `tensor.py`
    cp   context: the sequence ("ulysses", "ring", "zigzag", "balanced", "queries"); see `context.py`
    ep   experts: of mixtures of experts ("experts"); see `experts.py`

Any other name is a dimension of data: every rank has its own batch, and model states may be in shards; see `sharding`. Before
it there may be one of two:

    replicate   ranks with the same shards
    nodes       ranks with more shards, which are farther from each other
"""

from __future__ import annotations

from holdall.errors import unknown_name
from holdall.parallel.sharding.build import WAYS, check_way
from holdall.types.mesh import Mesh

DIVIDED = {
    "tp": ("tensor", "sequence"),
    "cp": ("ulysses", "ring", "zigzag", "balanced", "queries"),
    "ep": ("experts",),
}  # the first is the default


def way_for(mesh: Mesh, way: str) -> str:
    """The way that is meant by `shard=way` on this mesh."""
    ways = DIVIDED.get(mesh.dims[0].name)
    if ways is None:
        check_way(way, mesh)
        return way
    if way == "fsdp":  # the default of `fit`
        return ways[0]
    if way not in ways:
        raise unknown_name(f"way to divide a model over `{mesh.dims[0].name}`", way, ways)
    return way


def is_divided(way: str) -> bool:
    """Do ranks have parts of the model or of its sequence, so that it computes otherwise than whole?"""
    return way not in WAYS


def is_one_batch(way: str) -> bool:
    """Do all ranks have the same batch?"""
    return way in DIVIDED["tp"] or way in DIVIDED["cp"]
