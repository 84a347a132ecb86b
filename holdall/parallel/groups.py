"""Groups of ranks: the real one of a run, and a fake one in which a single process stands for one of many ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from holdall.errors import InvalidInput, Unsupported
from holdall.types.mesh import DIVIDING, NODES, REPLICAS, Mesh

BOTH = "tp+ep"
_numbers = itertools.count()
_fake: ContextVar[Any] = ContextVar("_fake", default=None)  # the fake group that stands for all


def ranks_here() -> int:
    """Ranks of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def device_mesh(mesh: Mesh, device: str) -> Any:
    """torch's mesh over the ranks of this run."""
    from torch.distributed.device_mesh import init_device_mesh

    _check(mesh)
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidInput(
            f"the mesh has {mesh.ranks} ranks, but there is no process group",
            hint=f'start with `torchrun --nproc-per-node {mesh.ranks}` and `torch.distributed.init_process_group("gloo")`',
        )
    if ranks_here() != mesh.ranks:
        raise InvalidInput(
            f"the mesh has {mesh.ranks} ranks, but the process group {ranks_here()}",
            hint=f'use mesh={{"{mesh.dims[-1].name}": {ranks_here()}}}',
        )
    made = init_device_mesh(device, tuple(d.size for d in mesh.dims), mesh_dim_names=tuple(d.name for d in mesh.dims))
    return _with_flat(made, mesh)


def flat_mesh(on: Any) -> Any:
    """One dimension with all ranks of a mesh that was made here."""
    return getattr(on, "holdall_flat", on)


def split_mesh(on: Any, mesh: Mesh) -> tuple[Any, dict[str, Any]]:
    """The part of torch's mesh that is over data (None: there is none), and those that divide the model, by the names of their
    dimensions; `BOTH`: the one on which parameters lie where tensors and experts are divided."""
    if not mesh.dividing:
        return on, {}
    if len(mesh.dims) == 1:
        return None, {mesh.dims[0].name: on}
    count = len(mesh.dims) - len(mesh.dividing)
    data = on.mesh_dim_names[:count]
    dividing = {dim.name: on[name] for dim, name in zip(mesh.dividing, on.mesh_dim_names[count:], strict=True)}
    if {"tp", "ep"} <= dividing.keys():
        dividing[BOTH] = on[
            tuple(name for dim, name in zip(mesh.dims, on.mesh_dim_names, strict=True) if dim.name in ("tp", "ep"))
        ]
    return (on[data if count > 1 else data[0]] if data else None), dividing


def group_dims(on: Any, mesh: Mesh) -> dict[str, tuple[str, int]]:
    """Name of a process group -> (the dimensions of the mesh that its ranks are of, joined by "+"; its ranks)."""
    found = {str(on.get_group(n).group_name): (dim.name, dim.size) for n, dim in enumerate(mesh.dims)}
    if flat_mesh(on) is not on:
        found[str(flat_mesh(on).get_group().group_name)] = ("+".join(d.name for d in mesh.dims), mesh.ranks)
    return found


def _with_flat(on: Any, mesh: Mesh) -> Any:
    if mesh.dims[0].name == NODES:
        on.holdall_flat = on._flatten()
    return on


def connect(device: str) -> None:
    """Have the ranks of this run meet on GPUs: what NCCL takes there at its first collective is then there before a plan."""
    if device == "cuda" and dist.get_backend() == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()


@contextmanager
def among(rows: Sequence[Sequence[int]]) -> Iterator[None]:
    """Inside, a fake mesh is of the row of ranks that this one is in, a dimension of a larger mesh; all ranks must come here,
    but need not all make meshes inside."""
    own = _own_group(rows)
    token = _fake.set(own)
    try:
        yield
    finally:
        _fake.reset(token)
        dist.destroy_process_group(own)


@contextmanager
def fake_mesh(mesh: Mesh, device: str) -> Iterator[Any]:
    """torch's mesh over ranks of which this process is one and the others do not exist: collectives return at once.

    Without a process group this is rank 0; in a run it is its own rank, and all ranks of the run must come here.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _check(mesh)
    number = next(_numbers)  # meshes of equal names are equal to torch, and share what it remembers of ops on DTensors
    names = tuple(f"{d.name}_fake_{number}" for d in mesh.dims)
    if dist.is_initialized():
        if _fake.get() is not None and len(mesh.dims) == 1:
            yield DeviceMesh.from_group(_fake.get(), device, mesh_dim_names=names)
            return
        if ranks_here() != mesh.ranks:
            raise InvalidInput(
                f"the mesh has {mesh.ranks} ranks, but the process group {ranks_here()}",
                hint=f'use mesh={{"{mesh.dims[-1].name}": {ranks_here()}}}, or trace without a process group',
            )
        group = dist.new_group(backend="fake")
        groups = [group]
        try:
            flat = DeviceMesh.from_group(group, device, mesh_dim_names=("_".join(names),))
            if len(names) == 1:
                yield flat
                return
            ranks = torch.arange(mesh.ranks).view([d.size for d in mesh.dims])
            mine = [_fake_group(ranks, dim) for dim in range(len(names))]
            groups += mine
            on: Any = DeviceMesh.from_group(mine, device, ranks, mesh_dim_names=names)
            if mesh.dims[0].name == NODES:
                on.holdall_flat = flat
            yield on
        finally:
            for one in groups:
                dist.destroy_process_group(one)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.ranks)
    try:
        yield _with_flat(init_device_mesh(device, tuple(d.size for d in mesh.dims), mesh_dim_names=names), mesh)
    finally:
        dist.destroy_process_group()


def _fake_group(ranks: torch.Tensor, dim: int) -> Any:
    """The group along a dimension that this rank is of."""
    return _own_group(ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist())


def _own_group(rows: Sequence[Sequence[int]]) -> Any:
    """The fake group of the row that this rank is in; all ranks make all groups, in one order."""
    own = None
    for row in rows:
        made = dist.new_group(list(row), backend="fake")
        if dist.get_rank() in row:
            own = made
    return own


def _check(mesh: Mesh) -> None:
    over = [d.name for d in mesh.data.dims] if mesh.data is not None else []
    if _is_data(over, bool(mesh.dividing)):
        return
    hint = f'use mesh={{"dp": 4}}, {{"dp": 2, "tp": 2}}, {{"{REPLICAS}": 2, "dp": 2}} or {{"{NODES}": 2, "dp": 2}}'
    ordered = Mesh(dims=tuple(sorted(mesh.dims, key=lambda d: (d.name in DIVIDING, d.name not in (NODES, REPLICAS)))))
    if ordered != mesh:
        sizes = {d.name: d.size for d in ordered.dims}
        hint = f"use mesh={sizes}: ranks that divide a model are neighbours".replace("'", '"')
    raise Unsupported(
        "a mesh has one dimension of data, before it replicas or nodes, and after it those that divide the model; "
        f"nodes are for whole models. This one is {' x '.join(d.name for d in mesh.dims)}",
        hint=hint,
    )


def _is_data(names: Sequence[str], divides: bool) -> bool:
    """Are these dimensions that a mesh may have over data?"""
    *outer, last = names or ["dp"]
    if not outer:
        return not (divides and last in (NODES, REPLICAS))
    is_outer = outer == [REPLICAS] or (outer == [NODES] and not divides)
    return is_outer and last not in (*DIVIDING, NODES, REPLICAS)
