"""Coop and MegTaiChi over real memory: storages lie where the policy's arena says, and cheap and expensive ones apart."""

import copy
from statistics import mean

import pytest
import torch
from torch import nn

import holdall
from holdall.runtime.eviction.room import is_expensive
from holdall.testing.worlds import machine
from holdall.updates.host_library import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

STEPS = 3


class Net(nn.Module):
    """Convolutions, batch norm and changes in place."""

    def __init__(self):
        super().__init__()
        layers = []
        for n in range(10):
            layers += [nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Tanh()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(8, 10)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.layers(x).mean((2, 3))), y)


@pytest.fixture(scope="module")
def world():
    torch.manual_seed(0)
    model, batch = Net().train(), (torch.randn(6, 3, 12, 12), torch.randint(0, 10, (6,)))
    trace = holdall.trace(model, batch)
    plain = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    before = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    return model, batch, trace, before + (plain - before) * 6 // 10


def addresses(evictor):
    """(place in the policy's arena, real place or None, expensive to make) of every storage that the policy has placed."""
    placed = [s for s in evictor.pool.present if s.place is not None]
    return [
        (s.place.start, evictor.memory.offset_of(s.bytes), is_expensive(s.maker.label)) for s in placed if s.bytes is not None
    ]


@pytest.mark.parametrize("planner", ["coop", "megtaichi"])
def test_storages_lie_where_the_policy_says_and_the_bits_are_the_same(world, planner):
    model, batch, trace, budget = world
    model = copy.deepcopy(model)
    plan = holdall.plan(trace, planner=planner, budget=budget, hardware=machine(), real=True)
    reference = copy.deepcopy(model)
    for _ in range(STEPS):
        reference.zero_grad()
        reference(*batch).backward()
    seen = []
    with holdall.apply(plan, model) as harness:
        evictor = harness.contexts[0]
        evictor.memory.poison()
        for handle in (model.layers[n] for n in range(0, 40, 4)):
            handle.register_forward_hook(lambda *_: seen.append(addresses(evictor)))
        for _ in range(STEPS):
            seen.clear()
            model.zero_grad()
            model(*batch).backward()
        assert evictor.past[-1].evictions > 0
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), reference.buffers(), strict=True))
    assert harness.step_peaks[-1] <= budget
    found = [entry for moment in seen for entry in moment]
    assert len(found) > 50
    assert all(start == real for start, real, _ in found)
    if planner == "coop":
        last = seen[-1]
        expensive, cheap = ([real for _, real, dear in last if dear is kind] for kind in (True, False))
        assert mean(expensive) < mean(cheap)  # from the left end, and from the right


def test_real_addresses_are_refused_where_another_arena_is_in_use(world):
    model, batch, trace, budget = world
    plan = holdall.plan(trace, planner="coop", budget=budget, hardware=machine(), real=True)
    with holdall.apply(plan, copy.deepcopy(model)), pytest.raises(holdall.errors.Unsupported, match="another arena"):
        holdall.apply(plan, copy.deepcopy(model))
    with holdall.apply(plan, model) as harness:
        model(*batch).backward()
        assert harness.contexts[0].memory.counts.placed > 0
