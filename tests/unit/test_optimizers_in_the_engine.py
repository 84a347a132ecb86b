"""Low-memory optimizers under the line: traced without memory, their state counted, updated on the device and on the host."""

import copy
import functools
from dataclasses import replace

import pytest
import torch

import holdall
from holdall.actions.place import Place, streamable
from holdall.cost.roofline import cost_trace
from holdall.optim.adafactor import Adafactor
from holdall.optim.adam8bit import Adam8bit
from holdall.optim.apollo import Apollo
from holdall.optim.flora import Flora
from holdall.optim.galore import GaLore
from holdall.optim.muon import Muon
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import problem_for, train
from holdall.testing.worlds import family, machine
from holdall.types import Kind

MADE = {
    "adafactor": lambda m: Adafactor(m.parameters()),
    "apollo": lambda m: Apollo(Apollo.groups(m, rank=4, update_proj_gap=2)),
    "q-galore": lambda m: GaLore(GaLore.groups(m, rank=4, bits=8, projector_bits=4, lazy=True, update_proj_gap=2)),
    "flora": lambda m: Flora(m.parameters(), rank=4, kappa=2),
    "muon": lambda m: Muon(Muon.groups(m)),
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


PASSING = MADE | {
    "galore": lambda m: GaLore(GaLore.groups(m, rank=4, update_proj_gap=2)),
    "adam8bit": lambda m: Adam8bit(Adam8bit.groups(m), lr=1e-3),
}


@functools.cache
def plainly(kind):
    """(losses, the trained model, a trace) of plain training."""
    model, batch = family("tied")
    trace = cost_trace(holdall.trace(model, batch, optimizer=PASSING[kind](model)), machine())
    return train(model, batch, PASSING[kind](model), 5), model, trace


@pytest.mark.parametrize("when", ["step", "backward", "overlap_forward"])
@pytest.mark.parametrize("kind", PASSING)
def test_states_pass_through_the_device_and_nothing_of_them_stays(kind, when):
    """Also what a first step adds to a state that was there before, and what later steps put in the place of old tensors."""
    expected, reference, trace = plainly(kind)
    model, batch = family("tied")
    optimizer = PASSING[kind](model)
    plan = finish(Nop(), replace(problem_for(trace), reads_gradients=False), [Place.all(trace, update="via_device", when=when)])
    with holdall.apply(plan, model, optimizer) as harness:
        losses = train(model, batch, optimizer, 5)
    assert losses == expected
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert harness.step_peaks[-1] == pytest.approx(plan.predicted.peak["cpu"], rel=0.015)
    assert harness.notes == []


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_states_of_another_rank_are_loaded_where_others_pass_through_the_device(weights):
    """Larger than those that were there; and then none, but for the seeds."""
    model, batch = family("tied")
    reference, other = copy.deepcopy(model), copy.deepcopy(model)
    optimizer, plain = of_rank(model, 4), of_rank(reference, 4)
    trace = cost_trace(holdall.trace(model, batch, optimizer=optimizer), machine())
    can = streamable(trace) if weights == "streamed" else set()
    rows = {u.name: (weights if u.name in can else "resident", "via_device") for u in trace.units}
    plan = finish(Nop(), replace(problem_for(trace), reads_gradients=False), [Place.of(trace, rows, when="step")])
    larger = of_rank(other, 6)
    train(other, batch, larger, 3)
    found = [larger.state_dict(), of_rank(other, 4).state_dict()]

    def loop(model, optimizer):
        seen = train(model, batch, optimizer, 3)
        for state in found:
            optimizer.load_state_dict(copy.deepcopy(state))
            seen += train(model, batch, optimizer, 3)
        return seen

    expected = loop(reference, plain)
    with holdall.apply(plan, model, optimizer):
        assert loop(model, optimizer) == expected
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


def of_rank(model, rank):
    return GaLore(GaLore.groups(model, rank=rank, update_proj_gap=2))


def test_states_that_the_host_makes_are_counted_as_its_own():
    model, batch = family("tied")
    optimizer = PASSING["galore"](model)
    trace = cost_trace(holdall.trace(model, batch, optimizer=optimizer), machine())
    plan = finish(Nop(), problem_for(trace), [Place.all(trace, update="host", when="step")])
    with holdall.apply(plan, model, optimizer) as harness:
        train(model, batch, optimizer, 3)
        held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        assert harness.engine.updater.outside == sum(v.nbytes for v in held) > 0
        assert {v.untyped_storage()._cdata for v in held} <= harness.engine.away
