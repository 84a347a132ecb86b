"""Libraries keep room for products on every stream: a plan counts it where updates multiply on a stream of their own."""

from dataclasses import replace

import pytest
import torch

import holdall
from holdall.actions.place import Place
from holdall.machine.presets import gpu
from holdall.optim.galore import GaLore
from holdall.simulator import simulate
from holdall.types import Problem
from holdall.units import MiB

MAKERS = {
    "galore": lambda m: GaLore(GaLore.groups(m, rank=8), lr=1e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
}


def traced(kind):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    sample = torch.randn(4, 64)
    return holdall.trace(model, sample, optimizer=MAKERS[kind](model), device="cuda", loss=lambda model, x: model(x).sum())


@pytest.mark.parametrize("when", ["backward", "overlap_forward", "step"])
@pytest.mark.parametrize("update", ["via_device", "host", "device"])
@pytest.mark.parametrize("kind", MAKERS)
def test_their_room_is_counted_where_products_pass(kind, update, when):
    trace = traced(kind)
    assert all(u.products == (kind == "galore") for u in trace.units)
    peaks = []
    for resident in (0, 64 * MiB):
        hardware = replace(gpu("h200"), resident=resident)
        problem = Problem(
            trace=trace, hardware=hardware, budget={t.name: t.capacity for t in hardware.tiers}, reads_gradients=False
        )
        peaks.append(simulate(problem, [Place.all(trace, update=update, when=when)], checked=True).peak[hardware.home.name])
    assert peaks[1] - peaks[0] == (32 * MiB if (kind, update) == ("galore", "via_device") else 0)
