"""Low-memory optimizers under the line: traced without memory, their state counted, updated on the device and on the host."""

import copy

import pytest
import torch

import holdall
from holdall.optim.adafactor import Adafactor
from holdall.optim.apollo import Apollo
from holdall.optim.flora import Flora
from holdall.optim.galore import GaLore
from holdall.testing.contracts import train
from holdall.testing.worlds import family, machine
from holdall.types import Kind

MADE = {
    "adafactor": lambda m: Adafactor(m.parameters()),
    "apollo": lambda m: Apollo(Apollo.groups(m, rank=4, update_proj_gap=2)),
    "q-galore": lambda m: GaLore(GaLore.groups(m, rank=4, bits=8, projector_bits=4, lazy=True, update_proj_gap=2)),
    "flora": lambda m: Flora(m.parameters(), rank=4, kappa=2),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_plans_hold_for_it_on_the_device_and_on_the_host(made):
    """Same losses and weights as alone, the predicted peak to the byte, and the state that `state_bytes` says."""
    model, batch = family("tied")
    reference = copy.deepcopy(model)
    expected = train(reference, batch, made(reference))
    optimizer = made(model)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    state = sum(t.nbytes for t in trace.tensors.values() if t.kind == Kind.STATE)
    assert state == sum(optimizer.state_bytes(p) for p in model.parameters())
    for planner in ("nop", "zero_offload"):
        copied = copy.deepcopy(model)
        own = made(copied)
        plan = holdall.plan(trace, planner=planner, hardware=machine())
        with holdall.apply(plan, copied, own) as harness:
            losses = train(copied, batch, own)
        assert losses == expected
        assert all(map(torch.equal, copied.parameters(), reference.parameters()))
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
        assert harness.notes == []
