"""GPUs by name, from their datasheets, so that a plan can be made for another machine.

Programs reach less than a datasheet promises: `efficiency` and the link factors below account for that; a measured `Hardware`
is better if the machine is available.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from holdall.errors import InvalidInput, unknown_name
from holdall.types import Hardware, HardwareInfo, HostLink, Tier
from holdall.units import GiB

LINK_FACTOR = 0.87  # share of the link's rate that pinned copies reach: 55 of 63 GB/s measured on PCIe 5 x16
DUPLEX = 0.86  # share left to each direction when both are busy: 47.3 of 55.3 GB/s measured on PCIe 5 x16
LATENCY = 10e-6  # seconds before the first byte of a copy: about one launch and one interrupt
EFFICIENCY = 0.6  # share of the dense peak that large matmuls reach, if not measured

_LANE = {  # bytes/s each way: transfers per second, less 2 of 130 bits of line code
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
}


ALIASES = {"h100": "h100-sxm", "a100": "a100-80gb"}  # short names for what most clusters have


def gpu_names() -> tuple[str, ...]:
    """The names that `gpu` knows, in the order of the table."""
    return tuple(_datasheets())


def gpu(name: str, *, host_bytes: int = 64 * GiB) -> Hardware:
    """One GPU by its datasheet, with a host of `host_bytes` of memory."""
    name = ALIASES.get(name, name)
    if name not in _datasheets():
        raise unknown_name("GPU", name, gpu_names())
    if host_bytes <= 0:
        raise InvalidInput(f"`host_bytes` is {host_bytes}, but a host has memory", hint="pass its size in bytes")
    sheet = _datasheets()[name]
    flops = {dtype: float(peak) for dtype, peak in sheet["flops"].items()}
    tfloat32 = flops.pop("tfloat32", None)  # not a dtype; PyTorch has it off by default, so float32 is the full one
    flops.setdefault("bfloat16", flops["float32"])  # before Ampere it is computed as float32
    link = HostLink(**sheet["link"])
    rate = LINK_FACTOR * rate_of(link)
    return Hardware(
        name=name,
        device="cuda",
        tiers=(
            Tier(name="gpu", capacity=sheet["memory"], read=sheet["bandwidth"], write=sheet["bandwidth"]),
            Tier(name="cpu", capacity=host_bytes, read=rate, write=rate, latency=LATENCY),
        ),
        flops=flops,
        bandwidth=float(sheet["bandwidth"]),
        duplex=DUPLEX,
        efficiency=EFFICIENCY,
        source=sheet["source"],
        about=HardwareInfo(link=link, tfloat32=tfloat32),
    )


def rate_of(link: HostLink) -> float:
    """Bytes per second each way of the link between host and GPU, before losses.

    NVLink-C2C states its rate directly; the factors above were measured on PCIe and are only assumed for it.
    """
    if link.bytes_per_second is not None:
        return float(link.bytes_per_second)
    if link.generation is None or link.lanes is None:
        raise InvalidInput(f"the {link.kind} link has no rate", hint="give `generation` and `lanes`, or `bytes_per_second`")
    return _LANE[link.generation] * float(link.lanes)


@cache
def _datasheets() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((files("holdall") / "data" / "gpus.json").read_text(encoding="utf-8"))
    return found
