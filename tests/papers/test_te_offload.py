"""Transformer Engine's CPU offload: its schedule replayed, its bound on memory, and its plans against plain training."""

import copy
import gc
from dataclasses import replace
from functools import cache

import pytest
import torch

import holdall
from holdall.errors import InvalidInput
from holdall.planners.te_offload import TeOffload, offload_first
from holdall.planning.segments import saving
from holdall.simulator import close, lower, simulate
from holdall.testing.chaos import chaos
from holdall.testing.contracts import problem_for, train
from holdall.testing.worlds import chain, family, machine
from holdall.types import Copy, Drop, Run, Wait

NAMES = ["tied", "convnet", "tiny-gpt2", "tiny-llama", "tiny-bert"]


def resident_layers(trace, actions):
    """Layers whose inner tensor is on the device, as the steps go by: (most in forward, most in backward)."""
    problem = problem_for(trace, overlap=True)
    inner = {trace.saves[b.saves[0]].tensor for b in trace.blocks}
    here, most = set(), [0, 0]
    for step in close(lower(problem, actions)):
        if isinstance(step, Run):
            here |= inner & set(step.writes)
        elif isinstance(step, Copy) and step.dst == "cpu":
            here |= inner & set(step.tensors)
        elif isinstance(step, Drop) and step.tier == "cpu":
            here.discard(step.tensor)
        is_backward = isinstance(step, Run) and step.op > trace.blocks[-1].last
        if isinstance(step, Run):
            most[is_backward] = max(most[is_backward], len(here))
    return tuple(most)


@pytest.mark.parametrize(("layers", "offloaded"), [(5, 2), (5, 3), (12, 4), (12, 8), (32, 20), (5, 4), (5, 0)])
def test_no_more_than_the_other_layers_are_on_the_device_in_either_pass(layers, offloaded):
    """Check (1) of the catalogue, with its numbers, and the two ends."""
    trace = chain([50] * layers)
    actions = offload_first(trace, trace.blocks, offloaded)
    assert resident_layers(trace, actions) == (layers - offloaded, layers - offloaded)


def test_every_tensor_is_waited_for_once_each_way_and_copied_once_each_way():
    """Check (3) on the schedule."""
    trace = chain([50] * 6)
    steps = list(close(lower(problem_for(trace, overlap=True), offload_first(trace, trace.blocks, 3))))
    for x in {x for s in steps if isinstance(s, Copy) for x in s.tensors}:
        assert sum(isinstance(s, Copy) and x in s.tensors for s in steps) == 2
        assert sum(isinstance(s, Wait) and x in s.tensors for s in steps) == 2


@pytest.mark.parametrize(("rate", "waits"), [(55.0, False), (20.0, True)])
def test_nothing_waits_while_a_layer_computes_as_long_as_its_copy_takes(rate, waits):
    """Check (2) on the simulator: 50 bytes a layer and its input, one second of forward, two of backward."""
    trace = chain([50] * 8)
    hardware = machine(overlap=True, read=rate / 1.0, write=rate * 1.2)
    problem = replace(problem_for(trace), hardware=hardware)
    plain = simulate(problem, []).seconds
    seconds = simulate(problem, offload_first(trace, trace.blocks, 4)).seconds
    assert (seconds > plain + 0.5) if waits else seconds == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_fewest_layers_that_fit_are_offloaded(overlap):
    trace = chain([50] * 8)
    problem = problem_for(trace, overlap=overlap)
    peaks = [simulate(problem, offload_first(trace, trace.blocks, n)).peak["cpu"] for n in range(8)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) > 4
    for budget in range(peaks[-1], peaks[0] + 1, 7):
        plan = TeOffload(elements=0)(replace(problem, budget={"cpu": budget, "far": 2**50}))
        assert len(plan.actions) == min(n for n in range(8) if peaks[n] <= budget)
    with pytest.raises(holdall.Infeasible):
        TeOffload(elements=0)(replace(problem, budget={"cpu": peaks[-1] - 1, "far": 2**50}))


def test_small_tensors_stay():
    """The filter counts elements: at its size a tensor is offloaded, one below it is not."""
    trace = chain([50] * 4)
    for elements, moved in [(0, 60), (10, 60), (11, 50), (50, 50), (51, 0)]:
        traffic = simulate(problem_for(trace), offload_first(trace, trace.blocks, 2, elements)).traffic.get("cpu->far", 0)
        assert traffic == 2 * moved - (10 if elements <= 10 else 0)  # the first block's input is the user's


@cache
def traced(name):
    model, batch = family(name)
    return holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("elements", [0, 1000], ids=["all", "large"])
def test_training_has_the_same_bits_and_the_predicted_peak_and_traffic(name, elements):
    """Check (3): with every number of layers; GPT-2's q, k and v are views of one storage, which travels once."""
    trace = traced(name)
    count = len(saving(trace))
    assert count > 1
    for layers in sorted({1, count // 2, count - 1}):
        model, batch = family(name)
        reference = copy.deepcopy(model)
        expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = holdall.plan(trace, planner="te_offload", hardware=machine(overlap=True), layers=layers, elements=elements)
        gc.collect()
        with holdall.apply(plan, model, optimizer) as harness:
            assert train(model, batch, optimizer) == expected
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
        assert harness.measured().traffic == plan.predicted.traffic
        assert harness.notes == []


@pytest.mark.parametrize("name", ["tiny-gpt2", "convnet"])
def test_late_copies_change_nothing(name):
    model, batch = family(name)
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    layers = len(saving(traced(name))) - 1
    plan = holdall.plan(traced(name), planner="te_offload", hardware=machine(overlap=True), layers=layers, elements=0)
    with chaos(seed=5), holdall.apply(plan, model, optimizer):
        assert train(model, batch, optimizer) == expected


def test_fit_takes_it_by_name_and_too_many_layers_are_refused():
    model, batch = family("tied")
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = holdall.plan(traced("tied"), planner="nop", hardware=machine()).predicted.peak["cpu"]
    with holdall.fit(model, optimizer, batch, budget=int(0.97 * plain), planner="te_offload", elements=0) as harness:
        assert train(model, batch, optimizer) == expected
    assert harness.plan.planner == "te_offload" and harness.plan.actions
    count = len(saving(traced("tied")))
    with pytest.raises(InvalidInput, match=f"`layers` is {count}"):
        holdall.plan(traced("tied"), planner="te_offload", hardware=machine(), layers=count)
