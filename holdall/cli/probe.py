"""`holdall probe`: measure this machine and write the file that `--hardware` reads, here or on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdall.cli import _options as given
from holdall.cli._console import add_row, facts, grid, say, show, show_json
from holdall.cli._progress import progress_bar
from holdall.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from holdall.types import Hardware


def probe(
    *,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Shorter, noisier timings.")] = False,
    tiers: Annotated[
        str,
        typer.Option("--tiers", metavar="A,B", help="Measure these tiers too (`holdall doctor`).", show_default=False),
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it here, for `--hardware`.", show_default=False)
    ] = None,
    json: given.Json = False,
) -> None:
    """Measure how fast this machine computes and copies, and how much it holds.

    Example: holdall probe --quick --out laptop.json
    """
    from holdall.machine.more_tiers import with_tiers
    from holdall.machine.probe import probe as measure
    from holdall.types import _json
    from holdall.types.hardware import FORMAT

    with progress_bar() as progress:
        machine = with_tiers(measure(device, quick=quick, progress=progress), filter(None, tiers.split(",")))
    if out is not None:
        machine.save(out)
    if json:
        show_json({"format": FORMAT, **_json.pack(machine)})  # the content of the file
        return
    _show(machine)
    if out is not None:
        say(f"\nwritten to {out}")


def _describe_updates(machine: Hardware) -> str:
    """Rates of host Adam in parameters per second; empty on a machine that computes on its CPU."""
    if not machine.updates_beside:
        return ""
    alone, beside = (format_rate(rate, "param") for rate in (machine.updates, machine.updates_beside))
    return (
        f"{alone}, {beside} during copies both ways; copies to the device then run at {machine.read_beside:.0%} of their rate"
    )


def _show(machine: Hardware) -> None:
    show(
        facts(
            {
                "machine": machine.name,
                "device": machine.device,
                "arithmetic": ", ".join(f"{format_rate(rate, 'FLOP')} {dtype}" for dtype, rate in machine.flops.items()),
                "start of an op": format_seconds(machine.overhead),
                "copies overlap computation": "yes" if machine.overlap else "no: the processor does both",
                "both ways at once": f"{machine.duplex:.0%} of each way's rate" if machine.overlap else "",
                "updates on the host": _describe_updates(machine),
                "notes": "; ".join(machine.about.notes),
                "source": machine.source,
            }
        )
    )
    say()
    table = grid("memory", "holds", "read", "write", "latency")
    for tier in machine.tiers:
        latency = format_seconds(tier.latency) if tier.latency else "--"
        rates = (format_rate(rate, "B") for rate in (tier.read, tier.write))
        add_row(table, tier.name, format_bytes(tier.capacity), *rates, latency)
    show(table)
