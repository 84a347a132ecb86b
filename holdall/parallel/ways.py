"""What the dimensions of a mesh are for, by their names, and the ways there are for each.

    tp   tensors: linear layers in halves ("tensor"; "sequence": activations between them too); see `tensor.py`
    cp   context: the sequence ("ulysses", "ring", "zigzag", "balanced", "queries"); see `context.py`
    ep   experts: of mixtures of experts ("experts"); see `experts.py`

Any other name is a dimension of data: every rank has its own batch, and model states may be in shards; see `sharding`. Before
it there may be one of two:

    replicate   ranks with the same shards
    nodes       ranks with more shards, which are farther from each other

A dimension of data may also come before one that divides: {"dp": 2, "tp": 2}. The way is then that of both, "fsdp+tensor".
"""

from __future__ import annotations

from holdall.errors import Unsupported, unknown_name
from holdall.parallel.sharding.build import WAYS, check_way
from holdall.types.mesh import Mesh

DIVIDED = {
    "tp": ("tensor", "sequence"),
    "cp": ("ulysses", "ring", "zigzag", "balanced", "queries"),
    "ep": ("experts",),
}  # the first is the default


DIVISIONS = tuple(way for ways in DIVIDED.values() for way in ways)
BESIDE = ("fsdp", "ddp", "zero2", "zero3")  # ways over data of a model that is divided too


def way_for(mesh: Mesh, way: str) -> str:
    """The way that is meant by `shard=way` on this mesh."""
    dim = mesh.dividing
    if dim is None:
        check_way(way, mesh)
        return way
    ways = DIVIDED[dim.name]
    if mesh.data is not None:
        return _way_of_both(mesh.data.dims[-1].name, dim.name, way)
    if way == "fsdp":  # the default of `fit`
        return ways[0]
    if way not in ways:
        raise unknown_name(f"way to divide a model over `{dim.name}`", way, ways)
    return way


def _way_of_both(over: str, name: str, way: str) -> str:
    """One that is left out is the first that there is."""
    ways = DIVIDED[name]
    data, division = split_way(way)
    if not division and "+" in way:
        raise unknown_name(f"way to divide a model over `{name}`", way.rpartition("+")[2], ways)
    data, division = data or BESIDE[0], division or ways[0]
    if division not in ways:
        raise unknown_name(f"way to divide a model over `{name}`", division, ways)
    if data not in BESIDE:
        if data in WAYS or data == "auto":
            what = f'shard="{data}" is not for models that are divided over `{name}` too'
            raise Unsupported(what, hint=f'use shard="zero2+{division}", or a mesh of `{over}` alone')
        raise unknown_name(f"way to shard over `{over}`", data, BESIDE)
    return f"{data}+{division}"


def split_way(way: str) -> tuple[str, str]:
    """(how model states are over ranks with other data, how the model is divided over the others); empty: not at all."""
    data, _, division = way.rpartition("+")
    return (data, division) if division in DIVISIONS else (way, "")


def is_divided(way: str) -> bool:
    """Do ranks have parts of the model or of its sequence, so that it computes otherwise than whole?"""
    return bool(split_way(way)[1])


def is_one_batch(way: str) -> bool:
    """Do the ranks that divide the model have the same batch?"""
    return split_way(way)[1] in (*DIVIDED["tp"], *DIVIDED["cp"])
