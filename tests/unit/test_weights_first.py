"""Updates whose weights are made first: the loop sees what it would see if they were made in one piece.

The reference is the same placement with every update at the step, which is held against plain training in `test_states.py`.
"""

import copy
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import holdall
from holdall.actions.place import Place, streamable
from holdall.cost.roofline import cost_trace
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.states.updating.out_of_place import OutOfPlaceUpdate
from holdall.simulator.lower import lower
from holdall.testing.contracts import machine, problem_for
from holdall.testing.stand_ins import host_adam_by
from holdall.testing.states import Layer, differences
from holdall.types import Run
from holdall.updates.host_step import step_by_torch

pytestmark = pytest.mark.usefixtures("no_modes_left")
LAYERS = 3


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = torch.nn.Linear(8, 16, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def ids(n=0):
    return torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(n))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@cache
def traced():
    torch.manual_seed(0)
    model = Net()
    return model, holdall.trace(model, ids(), optimizer=adamw(model), precision="bf16")


@cache
def planned(kind, when, ahead):
    trace = traced()[1]
    can = streamable(trace) if kind == "streamed" else ()
    rows = {u.name: ("streamed" if u.name in can else "resident", "host") for u in trace.units}
    return finish(Nop(), problem_for(trace), [Place.of(trace, rows, when=when, ahead=ahead)])


def begin(kind, when="overlap_forward", ahead=True):
    model = copy.deepcopy(traced()[0])
    optimizer = adamw(model)
    return model, optimizer, holdall.apply(planned(kind, when, ahead), model, optimizer, enforce=False)


def step(model, optimizer, n, norm=1e-3, look=lambda where: None):
    torch.manual_seed(n)
    loss = model(ids(n))
    look("after forward")
    loss.backward()
    look("after backward")
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def values(model, optimizer):
    return copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


@pytest.fixture
def rests(monkeypatch):
    """(times slept before each rest of an update, names of the units that had one)"""
    sleeps, names = [0.0], []
    catch_up = OutOfPlaceUpdate.catch_up

    def slow(self, unit, order, grads):
        time.sleep(sleeps[0])
        names.append(unit.name)
        catch_up(self, unit, order, grads)

    monkeypatch.setattr(OutOfPlaceUpdate, "catch_up", slow)
    return sleeps, names


def both_ways(kind, loop):
    """What a loop sees, with updates in two parts and in one piece, and what is left in the end."""
    found = []
    for when, ahead in (("overlap_forward", True), ("step", False)):
        model, optimizer, harness = begin(kind, when, ahead)
        with harness:
            seen = loop(model, optimizer)
        found.append({"seen": seen, **values(model, optimizer)})
    return found


kinds = pytest.mark.parametrize("kind", ["resident", "streamed"])


@kinds
@pytest.mark.parametrize("norms", [[1e-3] * 5, [1e-3, 1e-3, 1e6, 1e6, 1e6, 1e-3], [1e6, 1e-3] * 3])
@pytest.mark.parametrize("late", [0.0, 0.01])
def test_the_same_bits_whatever_is_clipped_and_whoever_is_late(kind, norms, late, rests):
    rests[0][0] = late

    def loop(model, optimizer):
        return [step(model, optimizer, n, norm) for n, norm in enumerate(norms)]

    ours, reference = both_ways(kind, loop)
    assert differences(ours, reference) == []
    assert rests[1]


@kinds
def test_every_unit_is_taken_where_the_host_catches_up(kind, rests):
    model, optimizer, harness = begin(kind)
    with harness:
        for n in range(4):
            step(model, optimizer, n)
            harness.engine.settle()
    units = [u.name for u in traced()[1].units]
    assert rests[1] == units * 3  # not in the first step, which makes the states


@kinds
@pytest.mark.parametrize("norm", [1e-3, 1e6])
def test_where_the_fast_kernel_has_other_bits_torch_makes_the_updates_in_the_same_ways(kind, norm, rests):
    def loop(when, ahead):
        model, optimizer, harness = begin(kind, when, ahead)
        with harness:
            losses = [step(model, optimizer, n, norm) for n in range(5)]
        return {"losses": losses, **values(model, optimizer)}, harness

    def wrong(arrays, rule, threads):
        step_by_torch(arrays, rule, threads)
        for a in arrays:
            (a.out if a.is_peek else a.new[0] if a.new else a.param).mul_(2)

    with host_adam_by(step_by_torch):
        reference, _ = loop("step", False)
    with host_adam_by(wrong, is_exact=False):
        ours, harness = loop("overlap_forward", True)
    assert differences(ours, reference) == []
    assert rests[1] if norm < 1 else all(harness.were_ahead[2:])


def test_fewer_are_taken_where_it_is_late(rests):
    model, optimizer, harness = begin("streamed")
    with harness:
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        harness.engine.settle()
        everybody = len(rests[1])
        rests[0][0] = 0.2
        step(model, optimizer, 2)
        rests[1].clear()
        step(model, optimizer, 3)
        rests[0][0] = 0.0
        harness.engine.settle()
        left = everybody  # of the step before, which may have come to their end meanwhile
        assert len(rests[1]) < left + everybody
        rests[1].clear()
        for n in range(4, 4 + 2 * everybody):
            step(model, optimizer, n)
            harness.engine.settle()
        assert rests[1][-everybody:] == [u.name for u in traced()[1].units]  # all again, when there is time


READS = {
    "a parameter": lambda model, optimizer, homes: [p.sum().item() for p in homes],
    "a state": lambda model, optimizer, homes: [s["exp_avg"].sum().item() for s in optimizer.state.values()],
    "a state dict": lambda model, optimizer, homes: values(model, optimizer),
    "a counter": lambda model, optimizer, homes: [s["step"] + 0 for s in optimizer.state.values()],
}


WHERE = ["after forward", "after backward", "after the step"]
LOOKS = [
    (read, where) for read in READS for where in WHERE if (read, where) != ("a state dict", "after forward")
]  # ends a step


@kinds
@pytest.mark.parametrize(("read", "where"), LOOKS)
def test_whoever_looks_sees_the_new_values(kind, read, where, rests):
    rests[0][0] = 0.01

    def loop(model, optimizer):
        homes, seen = list(model.parameters()), []

        def look(at):
            if at == where:
                seen.append(copy.deepcopy(READS[read](model, optimizer, homes)))

        for n in range(3):
            seen.append(step(model, optimizer, n, look=look))
            look("after the step")
        return seen

    ours, reference = both_ways(kind, loop)
    assert differences(ours, reference) == []
    assert rests[1]


@kinds
def test_evaluations_use_the_new_weights(kind, rests):
    rests[0][0] = 0.01

    def loop(model, optimizer):
        seen = []
        for n in range(3):
            seen.append(step(model, optimizer, n))
            model.eval()
            with torch.no_grad():
                seen += [model(ids(9)).item(), model(ids(8)).item()]
            model.train()
        return seen

    ours, reference = both_ways(kind, loop)
    assert differences(ours, reference) == []


@kinds
def test_a_backward_without_a_step_leaves_the_weights(kind, rests):
    rests[0][0] = 0.01

    def loop(model, optimizer):
        seen = []
        for n in range(4):
            seen.append(step(model, optimizer, n))
            torch.manual_seed(n)
            model(ids(7)).backward()
            optimizer.zero_grad()
        return seen

    ours, reference = both_ways(kind, loop)
    assert differences(ours, reference) == []


@kinds
def test_leaving_at_once_leaves_the_new_values(kind, rests):
    rests[0][0] = 0.01
    found = []
    for when, ahead in (("overlap_forward", True), ("step", False)):
        model, optimizer, harness = begin(kind, when, ahead)
        with harness:
            for n in range(2):
                step(model, optimizer, n)
            torch.manual_seed(2)
            model(ids(2)).backward()
        found.append(values(model, optimizer) | {"grads": [p.grad.clone() for p in model.parameters()]})
    assert differences(*found) == []


def test_an_error_in_the_rest_reaches_the_loop_and_leaves_nothing(monkeypatch):
    own = torch.autograd.backward

    def fail(*_):
        raise RuntimeError("no more")

    monkeypatch.setattr(OutOfPlaceUpdate, "catch_up", fail)
    model, optimizer, harness = begin("streamed")
    with pytest.raises(RuntimeError, match="no more"), harness:
        for n in range(4):
            step(model, optimizer, n)
    assert torch.autograd.backward is own
    assert all(type(p.data) is torch.Tensor and p.device.type == "cpu" for p in model.parameters())


class Counting(TorchDispatchMode):
    """A mode of the loop's own."""

    ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        return func(*args, **(kwargs or {}))


@kinds
@pytest.mark.parametrize("what", ["forward", "forward and backward", "step"])
def test_modes_of_the_loop_are_left_as_they_were_entered(kind, what, rests):
    rests[0][0] = 0.01

    def loop(model, optimizer):
        homes, seen = list(model.parameters()), []
        for n in range(3):
            torch.manual_seed(n)
            with Counting() if what != "step" else nullcontext() as mode:
                loss = model(ids(n))
                if what != "forward":
                    loss.backward()
            if what == "forward":
                loss.backward()
            seen += [p.sum().item() for p in homes]
            ops = mode.ops if mode is not None else 0
            torch.nn.utils.clip_grad_norm_(homes, 1e-3)
            with Counting() if what == "step" else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
            seen += [p.sum().item() for p in homes]
            assert mode is None or mode.ops == ops  # it is off
        return seen

    ours, reference = both_ways(kind, loop)
    assert differences(ours, reference) == []
    assert rests[1]


def test_ops_of_forward_and_backward_are_not_looked_at(rests, monkeypatch):
    """They would become slow; and the guard is not on the stack where backward takes it along."""
    rests[0][0] = 0.01
    model, optimizer, harness = begin("resident")
    looked = []
    with harness:
        step(model, optimizer, 0)
        guard = harness.engine._pending.guard
        own = type(guard).__torch_dispatch__

        def dispatch(self, func, types, args=(), kwargs=None):
            looked.append(str(func))
            return own(self, func, types, args, kwargs)

        monkeypatch.setattr(type(guard), "__torch_dispatch__", dispatch)
        step(model, optimizer, 1)
        step(model, optimizer, 2)
    assert not [name for name in looked if "addmm" in name or "embedding" in name or "backward" in name]


def rests_said(*, takes, overlap=True):
    """Units that the plan says are updated in two parts, where the host takes so many times the device's seconds for all."""
    hardware = machine(overlap=True)
    trace = cost_trace(traced()[1], hardware)
    rows = {u.name: ("streamed" if u.name in streamable(trace) else "resident", "host") for u in trace.units}
    place = Place.of(trace, rows, when="overlap_forward", ahead=True, overlap=overlap)
    runs = [s for s in lower(problem_for(trace, overlap=True), [place]).steps() if isinstance(s, Run)]
    rate = sum(u.numel for u in trace.units) / (takes * sum(r.seconds for r in runs if r.stream == "compute"))
    problem = replace(problem_for(trace), hardware=replace(hardware, updates=rate))
    return sum(s.name.startswith("rest of the update") for s in lower(problem, [place]).steps() if isinstance(s, Run))


def test_the_plan_says_two_parts_for_as_many_as_the_host_has_time_for():
    everybody = len(traced()[1].units)
    assert rests_said(takes=0.1) == everybody
    assert 0 < rests_said(takes=0.8) < everybody
    assert rests_said(takes=1.5) == 0


def test_the_host_has_more_time_where_the_device_waits_for_copies():
    assert rests_said(takes=0.8, overlap=False) > rests_said(takes=0.8)
