"""Ranks as a mesh: named dimensions, the slowest network first, and what joins the ranks of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from holdall.errors import InvalidInput, unknown_name

DIVIDING = {
    "tp": "tensor",
    "cp": "context",
    "ep": "experts",
}  # name of a dimension -> action that divides a step over its ranks
ONE_BATCH = ("tp", "cp")  # dimensions whose ranks compute one batch together
REPLICAS = "replicate"  # dimension of ranks that have the same shards
BY_ENGINE = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hpz", "horing", "qwz", "qgz", "zero++")  # by hooks around modules
NODES = "nodes"  # dimension whose ranks are shards of one whole with those of the next, but farther from each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins ranks: a message takes `latency` seconds and then its bytes at `rate`, each way at once."""

    name: str
    rate: float  # bytes per second that a rank sends, and receives
    latency: float  # seconds of one message, its launch included

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf") or not 0 <= self.latency < float("inf"):
            raise InvalidInput(
                f"the network `{self.name}` has no rate or latency", hint="Network(name=..., rate=50e9, latency=5e-6)"
            )


ASSUMED = Network(name="assumed", rate=1e9, latency=50e-6)  # of ranks of which nothing is said: sockets of one machine, roughly


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDim:
    """One dimension: ranks that differ in it alone are a group."""

    name: str
    size: int
    network: Network = ASSUMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Dimensions of ranks, as in torch's DeviceMesh: the last one's ranks are neighbours."""

    dims: tuple[MeshDim, ...]

    def __post_init__(self) -> None:
        names = [dim.name for dim in self.dims]
        wrong = [dim for dim in self.dims if isinstance(dim.size, bool) or not isinstance(dim.size, int) or dim.size < 1]
        if not names or len(set(names)) < len(names) or wrong or not all(names):
            found = [(dim.name, dim.size) for dim in self.dims]
            raise InvalidInput(
                f"a mesh has named dimensions, each once, of 1 rank or more; this one has {found}",
                hint='use mesh={"dp": 2}',
            )

    @staticmethod
    def of(sizes: Mapping[str, int] | Mesh, networks: Mapping[str, Network] | None = None) -> Mesh:
        """From `{"dp": 2}`; `networks` by the names of dimensions."""
        if isinstance(sizes, Mesh):
            return sizes
        if not isinstance(sizes, Mapping):
            raise InvalidInput(f"`mesh` is {_kind(sizes)}, not sizes by name", hint='use mesh={"dp": 2}')
        joined = networks or {}
        return Mesh(dims=tuple(MeshDim(name=str(n), size=size, network=joined.get(n, ASSUMED)) for n, size in sizes.items()))

    @property
    def ranks(self) -> int:
        return prod(dim.size for dim in self.dims)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Dimensions over which shards are repeated, by their name."""
        return tuple(dim.name for dim in self.dims if dim.name == REPLICAS)

    def is_by_engine(self, way: str) -> bool:
        """Is all that shards a model over these ranks this way done by torch's engine, between modules?"""
        return not self.dividing and way in BY_ENGINE

    @property
    def dividing(self) -> tuple[MeshDim, ...]:
        """The dimensions over which the model itself is divided, by their names: the last ones, whose ranks are neighbours."""
        others = max((n for n, dim in enumerate(self.dims, 1) if dim.name not in DIVIDING), default=0)
        return self.dims[others:]

    @property
    def division(self) -> str:
        """The action that divides a step over them, the first there is; empty: none does. It does what the others do too."""
        names = [dim.name for dim in self.dividing]
        return next((action for name, action in DIVIDING.items() if name in names), "")

    def first_with_batch(self, rank: int) -> int:
        """The first rank that has the batch of this one: those that divide tensors or the sequence have one batch."""
        return self.first_along(rank, ONE_BATCH)

    def first_along(self, rank: int, names: Sequence[str]) -> int:
        """The first of the ranks that differ from this one in these dimensions alone."""
        first, stride = rank, 1
        for dim in reversed(self.dims):
            first -= rank // stride % dim.size * stride * (dim.name in names)
            stride *= dim.size
        return first

    def place(self, rank: int, name: str) -> int:
        """Where a rank is along a dimension."""
        stride = 1
        for dim in reversed(self.dims):
            if dim.name == name:
                return rank // stride % dim.size
            stride *= dim.size
        raise unknown_name("dimension", name, [dim.name for dim in self.dims])

    @property
    def data(self) -> Mesh | None:
        """The other dimensions, over which batches differ and model states may be in shards."""
        dims = self.dims[: len(self.dims) - len(self.dividing)]
        return Mesh(dims=dims) if dims else None

    def dim(self, name: str) -> MeshDim:
        for dim in self.dims:
            if dim.name == name:
                return dim
        raise unknown_name("dimension", name, [dim.name for dim in self.dims])


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
