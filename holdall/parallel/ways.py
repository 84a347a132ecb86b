"""What the dimensions of a mesh are for, by their names, and the ways there are for each.

    tp   tensors: linear layers in halves ("tensor"; "sequence": activations between them too); see `tensor.py`
    cp   context: the sequence ("ulysses", "ring", "zigzag", "balanced", "queries"); see `context.py`
    ep   experts: of mixtures of experts ("experts"); see `experts.py`

Any other name is a dimension of data: every rank has its own batch, and model states may be in shards; see `sharding`. Before
it there may be one of two:

    replicate   ranks with the same shards
    nodes       ranks with more shards, which are farther from each other

A dimension of data may also come before one that divides: {"dp": 2, "tp": 2}. The way is then that of both, "fsdp+tensor".
Several may divide at once, {"tp": 2, "cp": 2}: "tensor+ring"; also after data: "fsdp+tensor+ring".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdall.errors import Unsupported, unknown_name
from holdall.parallel.context import divide_context
from holdall.parallel.experts import divide_experts
from holdall.parallel.groups import BOTH
from holdall.parallel.parts import Division, let_read
from holdall.parallel.sharding.build import WAYS, check_way
from holdall.parallel.tensor import divide
from holdall.types.info import TensorRegion
from holdall.types.mesh import Mesh

DIVIDED = {
    "tp": ("tensor", "sequence"),
    "cp": ("ulysses", "ring", "zigzag", "balanced", "queries"),
    "ep": ("experts",),
}  # the first is the default


DIVISIONS = tuple(way for ways in DIVIDED.values() for way in ways)
BESIDE = ("fsdp", "ddp", "zero2", "zero3")  # ways over data of a model that is divided too


def way_for(mesh: Mesh, way: str) -> str:
    """The way that is meant by `shard=way` on this mesh; of several dimensions, one that is left out is the first there is."""
    if not mesh.dividing:
        check_way(way, mesh)
        return way
    data, given = split_way(way)
    found, left = [], list(given)
    for dim in mesh.dividing:
        own = next((w for w in left if w in DIVIDED[dim.name]), None)
        found.append(own or DIVIDED[dim.name][0])
        if own is not None:
            left.remove(own)
    names = " and ".join(f"`{dim.name}`" for dim in mesh.dividing)
    ways = [w for dim in mesh.dividing for w in DIVIDED[dim.name]]
    if left:
        raise unknown_name(f"way to divide a model over {names}", left[0], ways)
    if "+" in data and data not in WAYS:
        raise unknown_name(f"way to divide a model over {names}", data.rpartition("+")[2], ways)
    if mesh.data is not None:
        return "+".join((_beside(data or BESIDE[0], mesh, found), *found))
    if data and (data != "fsdp" or given):  # the default of `fit`
        raise unknown_name(f"way to divide a model over {names}", data, ways)
    return "+".join(found)


def _beside(data: str, mesh: Mesh, division: list[str]) -> str:
    """A way over data of a model that is divided too."""
    assert mesh.data is not None
    over, names = mesh.data.dims[-1].name, " and ".join(f"`{dim.name}`" for dim in mesh.dividing)
    if data not in BESIDE and (data in WAYS or data == "auto"):
        what = f'shard="{data}" is not for models that are divided over {names} too'
        raise Unsupported(what, hint=f'use shard="{"+".join(("zero2", *division))}", or a mesh of `{over}` alone')
    if data not in BESIDE:
        raise unknown_name(f"way to shard over `{over}`", data, BESIDE)
    check_way(data, mesh.data)
    return data


def split_way(way: str) -> tuple[str, tuple[str, ...]]:
    """(how model states are over ranks with other data, how the model is divided over the others); empty: not at all."""
    parts = way.split("+")
    return "+".join(p for p in parts if p not in DIVISIONS), tuple(p for p in parts if p in DIVISIONS)


def is_divided(way: str) -> bool:
    """Do ranks have parts of the model or of its sequence, so that it computes otherwise than whole?"""
    return bool(split_way(way)[1])


def is_one_batch(way: str) -> bool:
    """Do the ranks that divide the model have the same batch?"""
    return bool({*DIVIDED["tp"], *DIVIDED["cp"]} & {*split_way(way)[1]})


def is_in_parts_of_sequence(way: str) -> bool:
    """Do calls of the model compute a part of the sequence, and return that?"""
    return bool({*DIVIDED["cp"]} & {*split_way(way)[1]})


def divide_by(
    ways: Sequence[str],
    model: torch.nn.Module,
    meshes: Mapping[str, Any],
    *,
    regions: Sequence[TensorRegion] = (),
    vocabulary: Sequence[str] = (),
    stack: Sequence[str] = (),
    attention: Sequence[str] = (),
    experts: Sequence[str] = (),
    readers: Sequence[tuple[str, str]] = (),
) -> Division:
    """Divide a model in place in these ways, over torch's meshes as `split_mesh` has them. The others say what is divided, as
    `divide`, `divide_context` and `divide_experts` have it. `readers`: modules that read parameters of one inside of them."""
    made: Division | None = None
    if "tp" in meshes:
        made = divide(model, regions, vocabulary, meshes["tp"], stack=stack, apart=experts, whole=meshes.get(BOTH))
    if "ep" in meshes:
        made = divide_experts(model, experts, meshes["ep"], beside=made)
    if "cp" in meshes:
        made = divide_context(model, attention, meshes["cp"], ways, beside=made)
    assert made is not None
    for reader, owner in readers:
        let_read(model.get_submodule(reader), model.get_submodule(owner), made)
    return made
