"""The machine a plan is made for: memories, links, and how fast it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from holdall.errors import InvalidInput, unknown_name
from holdall.types import _json
from holdall.types.info import HardwareInfo

FORMAT = "holdall-hardware-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A memory. `read` and `write` are bytes per second from and to it, as the accelerator sees it."""

    name: str
    capacity: int
    read: float
    write: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection between two tiers. Links with the same `wire` are the same connection and share it."""

    source: str
    destination: str
    rate: float  # bytes per second, alone
    latency: float = 0.0
    duplex: float = 1.0  # what is left of the rate while bytes flow the other way on the same wire
    wire: str = ""  # empty: a wire of its own, in both directions

    @property
    def shared(self) -> str:
        """The name of the wire."""
        return self.wire or " - ".join(sorted((self.source, self.destination)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measured point: ops of class `family` in `dtype` of about `work` FLOPs (or bytes) reach `rate` per second."""

    family: str  # matmul, attention, conv, memory
    dtype: str
    work: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`tiers[0]` is the accelerator's own memory; farther ones follow in order of distance.

    A tier is linked to the accelerator by its own `read`, `write` and `latency`, unless `links` connects it with a tier before
    it: then those links are all there is, and bytes to the accelerator pass through the tiers between.
    """

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
    source: str = ""  # datasheet or "measured", with versions
    about: HardwareInfo = field(default_factory=HardwareInfo)
    links: tuple[Link, ...] = ()  # where they are not what the tiers say of themselves

    def __post_init__(self) -> None:
        rates = [self.bandwidth, *self.flops.values(), *(r for t in self.tiers for r in (t.read, t.write, t.capacity))]
        rates += [link.rate for link in self.links]
        if not self.tiers or not self.flops or any(not 0 < r < float("inf") for r in rates):
            raise InvalidInput(
                f"the hardware {self.name!r} could not exist: it needs a tier, and rates and capacities above zero",
                hint="measure a machine with `holdall probe --out FILE`",
            )
        names = [tier.name for tier in self.tiers]
        for link in self.links:
            for name in (link.source, link.destination):
                if name not in names:
                    raise unknown_name("tier", name, names)

    @property
    def home(self) -> Tier:
        """The accelerator's own memory."""
        return self.tiers[0]

    @property
    def others(self) -> tuple[Tier, ...]:
        """The memories beyond the accelerator's, the nearest first."""
        return self.tiers[1:]

    @property
    def far(self) -> Tier | None:
        """The nearest of them, where bytes go if nothing else is said: the host's; None: there is none."""
        return self.tiers[1] if len(self.tiers) > 1 else None

    def tier(self, name: str) -> Tier:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)

    def direct(self, source: str, destination: str) -> Link | None:
        """The direct link between two tiers; None: there is none."""
        for link in self.links:
            if (link.source, link.destination) == (source, destination):
                return link
        if self.home.name not in (source, destination) or source == destination:
            return None
        tier = self.tier(destination if source == self.home.name else source)
        if self._is_behind(tier.name):
            return None
        rate = tier.write if source == self.home.name else tier.read
        return Link(source=source, destination=destination, rate=rate, latency=tier.latency, duplex=self.duplex)

    def path(self, source: str, destination: str) -> tuple[Link, ...]:
        """The fewest links from one tier to another."""
        link = self.direct(source, destination)
        if link is not None:
            return (link,)
        found: dict[str, tuple[Link, ...]] = {source: ()}
        waiting = [source]
        for here in waiting:  # grows as tiers are reached
            for tier in self.tiers:
                link = self.direct(here, tier.name) if tier.name not in found else None
                if link is not None:
                    found[tier.name] = (*found[here], link)
                    waiting.append(tier.name)
        if destination not in found:
            raise InvalidInput(
                f"the hardware {self.name!r} has no way from `{source}` to `{destination}`",
                hint="add a link between them to its `links`",
            )
        return found[destination]

    def _is_behind(self, name: str) -> bool:
        """Whether a listed link connects this tier with one before it."""
        before = {tier.name for tier in takewhile(lambda tier: tier.name != name, self.tiers)}
        ends = [{link.source, link.destination} for link in self.links]
        return any(name in pair and pair & before for pair in ends)

    def save(self, path: str | Path) -> None:
        _json.write(path, {"format": FORMAT, **_json.pack(self)})

    @staticmethod
    def load(path: str | Path) -> Hardware:
        read: Hardware = _json.unpack(Hardware, _json.read(path, FORMAT), str(path))
        return read
