"""Groups of ranks: the real one of a run, and a fake one in which a single process stands for one of many ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from holdall.errors import InvalidInput, Unsupported
from holdall.types.mesh import Mesh

_numbers = itertools.count()


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
            hint=f'use mesh={{"{mesh.dims[0].name}": {ranks_here()}}}',
        )
    return init_device_mesh(device, tuple(d.size for d in mesh.dims), mesh_dim_names=tuple(d.name for d in mesh.dims))


def connect(device: str) -> None:
    """Have the ranks of this run meet on GPUs: what NCCL takes there at its first collective is then there before a plan."""
    import torch

    if device == "cuda" and dist.get_backend() == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()


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
        if ranks_here() != mesh.ranks:
            raise InvalidInput(
                f"the mesh has {mesh.ranks} ranks, but the process group {ranks_here()}",
                hint=f'use mesh={{"{mesh.dims[0].name}": {ranks_here()}}}, or trace without a process group',
            )
        group = dist.new_group(backend="fake")
        try:
            yield DeviceMesh.from_group(group, device, mesh_dim_names=names)
        finally:
            dist.destroy_process_group(group)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.ranks)
    try:
        yield init_device_mesh(device, tuple(d.size for d in mesh.dims), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def _check(mesh: Mesh) -> None:
    if len(mesh.dims) != 1:
        raise Unsupported(f"meshes have one dimension so far, not {len(mesh.dims)}", hint='use mesh={"dp": 2}')
