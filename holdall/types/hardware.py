"""The machine a plan is made for: memories, links, and how fast it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdall.errors import InvalidInput
from holdall.types import _json

FORMAT = "holdall-hardware-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A memory. `read` and `write` are bytes per second from and to it, over the link to the accelerator."""

    name: str
    capacity: int
    read: float
    write: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measured point: ops of class `family` in `dtype` of about `work` FLOPs (or bytes) reach `rate` per second."""

    family: str  # matmul, attention, conv, memory
    dtype: str
    work: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`tiers[0]` is the accelerator's own memory; farther ones follow in order of distance."""

    name: str
    device: str  # "cuda" or "cpu"
    tiers: tuple[Tier, ...]
    flops: Mapping[str, float]  # dtype -> peak FLOP/s
    bandwidth: float  # bytes/s of tiers[0]
    overhead: float = 5e-6  # seconds to start one op
    duplex: float = 1.0  # what is left of each direction's rate when both run at once
    overlap: bool = True  # copies run beside computation (false where the CPU does both)
    efficiency: float = 0.6  # share of peak FLOP/s that a large matmul reaches, where nothing was measured
    table: tuple[Rate, ...] = ()  # measured points; empty: datasheet only
    updates: float = 1e9  # parameters per second that the host's processors update
    updates_beside: float = 0.0  # likewise while copies go both ways, which take from the same memory; 0: not measured
    read_beside: float = 1.0  # what is left of the rate of copies to the device while the host updates
    context: int = 0  # bytes of the device that its driver and kernels take before any tensor
    resident: int = 0  # bytes that libraries take once and keep (cuBLAS workspaces)
    world_size: int = 1
    link: float = 0.0  # bytes/s to other ranks
    source: str = ""  # datasheet or "measured", with versions
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates = [self.bandwidth, *self.flops.values(), *(r for t in self.tiers for r in (t.read, t.write, t.capacity))]
        if not self.tiers or not self.flops or any(not 0 < r < float("inf") for r in rates):
            raise InvalidInput(
                f"the hardware {self.name!r} could not exist: it needs a tier, and rates and capacities above zero",
                hint="measure a machine with `holdall probe --out FILE`",
            )

    @property
    def home(self) -> Tier:
        """The accelerator's own memory."""
        return self.tiers[0]

    @property
    def far(self) -> Tier | None:
        """The nearest memory beyond the accelerator's; None: there is none."""
        return self.tiers[1] if len(self.tiers) > 1 else None

    def tier(self, name: str) -> Tier:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)

    def save(self, path: str | Path) -> None:
        _json.write(path, {"format": FORMAT, **_json.pack(self)})

    @staticmethod
    def load(path: str | Path) -> Hardware:
        read: Hardware = _json.unpack(Hardware, _json.read(path, FORMAT), str(path))
        return read
