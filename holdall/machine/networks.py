"""Networks by name, for the dimensions of a mesh.

Rates are those of the standards, each way, times the share that large messages reach. Neither that share nor the latencies were
measured by holdall: they are assumptions of the usual order, and a `Network` with measured figures is better.
"""

from __future__ import annotations

from holdall.errors import unknown_name
from holdall.machine.presets import LINK_FACTOR, rate_of
from holdall.types import HostLink
from holdall.types.mesh import Network

REACHED = 0.8  # share of a standard's rate, assumed
_GBIT = 1e9 / 8

_NVLINK = {"nvlink-3": 300e9, "nvlink-4": 450e9, "nvlink-5": 900e9}  # bytes/s of a GPU: A100, H100, B200
_PCIE = {"pcie-3": 3, "pcie-4": 4, "pcie-5": 5}  # generations, of 16 lanes
_INFINIBAND = {"infiniband-edr": 100, "infiniband-hdr": 200, "infiniband-ndr": 400}  # Gbit/s of a port
_ETHERNET = {"ethernet-1": 1, "ethernet-10": 10, "ethernet-25": 25, "ethernet-100": 100}  # Gbit/s
_LATENCY = {"nvlink": 5e-6, "pcie": 10e-6, "infiniband": 10e-6, "ethernet": 50e-6}


def network_names() -> tuple[str, ...]:
    return (*_NVLINK, *_PCIE, *_INFINIBAND, *_ETHERNET)


def network(name: str) -> Network:
    """A network by its name, such as "nvlink-4"; one port of it for each rank."""
    if name in _NVLINK:
        rate = REACHED * _NVLINK[name]
    elif name in _PCIE:
        rate = LINK_FACTOR * rate_of(HostLink(kind="pcie", generation=_PCIE[name], lanes=16))
    elif name in _INFINIBAND or name in _ETHERNET:
        rate = REACHED * {**_INFINIBAND, **_ETHERNET}[name] * _GBIT
    else:
        raise unknown_name("network", name, network_names())
    return Network(name=name, rate=rate, latency=_LATENCY[name.partition("-")[0]])
