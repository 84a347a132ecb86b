"""A real step in one flat buffer: every result of its ops at its planned offset, freed ranges poisoned, the same bits."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import holdall
from holdall.layouts.best_fit import BestFit
from holdall.layouts.stalloc import STAlloc
from holdall.packing import LaidOut
from holdall.packing.arena import PlannedArena
from holdall.packing.flat_buffer import FlatBuffer
from holdall.planning.finish import with_traced
from holdall.simulator.lifetimes import PlannedStep
from holdall.testing.worlds import HUGGING_FACE, family, machine
from holdall.types import Problem
from holdall.types.lifetimes import lifetimes_of

STEPS = 3


def adam(model):
    return torch.optim.Adam(model.parameters(), foreach=False)


def step(model, batch, optimizer):
    loss = model(**batch).loss if isinstance(batch, dict) else model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def planned(name, planner):
    model, batch = family(name)
    trace = holdall.trace(model, batch, optimizer=adam(model))
    plan = holdall.plan(trace, planner=planner, hardware=machine())
    problem = Problem(trace=trace, hardware=machine(), budget={})
    lifetimes, _ = PlannedStep.of(problem, with_traced(problem, plan.actions)).run()
    return model, batch, plan, lifetimes


def plainly(model, batch):
    model, losses = copy.deepcopy(model), []
    optimizer = adam(model)
    torch.manual_seed(1)
    for _ in range(STEPS + 1):
        losses.append(step(model, batch, optimizer))
    return losses, model


def in_buffer(model, batch, plan, buffer):
    """One step as always, which makes the optimizer's states, then steps in the buffer."""
    optimizer, losses = adam(model), []
    torch.manual_seed(1)
    with holdall.apply(plan, model, optimizer):
        losses.append(step(model, batch, optimizer))
        for _ in range(STEPS):
            with buffer:
                buffer.begin_step()
                losses.append(step(model, batch, optimizer))
    return losses


CASES = [("convnet", "nop", BestFit), ("tied", "chen", BestFit), ("convnet", "chen", STAlloc), ("recurrent", "nop", STAlloc)]


@pytest.mark.parametrize(("name", "planner", "layout"), [*CASES, ("tiny-gpt2", "chen", BestFit)])
def test_every_result_of_a_step_lies_at_its_offset_and_the_bits_are_the_same(name, planner, layout):
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    model, batch, plan, lifetimes = planned(name, planner)
    expected, trained = plainly(model, batch)
    arena = PlannedArena(lifetimes, layout()(lifetimes), range(len(lifetimes.tensors)))
    buffer = FlatBuffer(arena)
    assert in_buffer(model, batch, plan, buffer) == expected
    assert all(torch.equal(p, q) for p, q in zip(trained.parameters(), model.parameters(), strict=True))
    assert arena.fallen == 0
    assert arena.planned == STEPS * sum(t.begin > 0 for t in lifetimes.tensors)
    assert buffer.live() == []


def test_addresses_in_the_middle_of_a_step_are_those_of_the_plan():
    model, batch, _, lifetimes = planned("convnet", "nop")
    layout = BestFit()(lifetimes)
    buffer = FlatBuffer(PlannedArena(lifetimes, layout, range(len(lifetimes.tensors))))
    optimizer = adam(model)
    step(model, batch, optimizer)
    with buffer:
        buffer.begin_step()
        loss = model(*batch)
        live = buffer.live()
        offset = loss.untyped_storage().data_ptr() - buffer.base
        loss.backward()
    assert all(top <= low for (_, top), (low, _) in pairwise(live))  # no byte is shared
    assert {low for low, _ in live} <= set(layout.offsets)
    assert 0 <= offset < layout.reserved
    assert buffer.base % 4096 == 0


def test_freed_ranges_are_poisoned():
    lifetimes = lifetimes_of([(0, 64), (1, 64), (0, -1), (1, -1)], align=64)
    buffer = FlatBuffer(PlannedArena(lifetimes, LaidOut(reserved=128, offsets=(0, 64)), range(2)))
    with buffer:
        buffer.begin_step()
        first, second = torch.ones(16), torch.zeros(16)
        assert first.data_ptr() == buffer.base and second.data_ptr() == buffer.base + 64
        there = torch.frombuffer(buffer.bytes, dtype=torch.float32)
        assert torch.equal(there[:16], torch.ones(16))
        del first
        assert buffer.live() == [(64, 128)]
    assert there[:16].isnan().all()
    assert torch.equal(there[16:], torch.zeros(16)) and torch.equal(second, torch.zeros(16))


def test_a_wrong_plan_costs_room_and_never_values():
    model, batch, plan, lifetimes = planned("convnet", "nop")
    expected, _ = plainly(model, batch)
    wrong = LaidOut(reserved=max(t.size for t in lifetimes.tensors), offsets=(0,) * len(lifetimes.tensors))
    arena = PlannedArena(replace(lifetimes, phases=()), wrong, range(len(lifetimes.tensors)))
    assert in_buffer(model, batch, plan, FlatBuffer(arena)) == expected
    assert arena.fallen > 0


def test_a_tensor_that_lives_longer_than_planned_keeps_its_place():
    """A loop that holds the logits during backward: only what would lie there falls back."""
    pytest.importorskip("transformers")
    model, batch, plan, lifetimes = planned("tiny-gpt2", "nop")
    arena = PlannedArena(lifetimes, BestFit()(lifetimes), range(len(lifetimes.tensors)))
    optimizer = adam(model)
    with holdall.apply(plan, model, optimizer):
        step(model, batch, optimizer)
        with FlatBuffer(arena) as buffer:
            buffer.begin_step()
            out = model(**batch)
            before = out.logits.clone()
            out.loss.backward()
            optimizer.step()
            assert torch.equal(out.logits, before)
    assert 0 < arena.fallen < arena.planned / 2
