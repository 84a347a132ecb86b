"""Host memory that steps will need is taken when the harness is made, not in a step; a change of plans keeps it."""

import mmap
from dataclasses import replace

import pytest
import torch

import holdall
from holdall.actions.place import Place
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import problem_for
from holdall.testing.states import Layer

pytestmark = pytest.mark.usefixtures("no_modes_left")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.head = torch.nn.Linear(8, 16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().pow(2).mean()


@pytest.fixture
def made(monkeypatch):
    """Sizes of the buffers that are taken from the system, as they are taken."""
    seen, take = [], mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda file, nbytes, **flags: seen.append(nbytes) or take(file, nbytes, **flags))
    return seen


def planned(*, amsgrad=False, **changed):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, amsgrad=amsgrad)
    batch = torch.randn(2, 4, 8)
    trace = holdall.trace(model, batch, optimizer=optimizer, precision="bf16")
    place = replace(Place.all(trace, update="host", when="overlap_forward"), **{"ahead": True, **changed})
    return model, optimizer, batch, finish(Nop(), problem_for(trace), [place])


def step(model, optimizer, batch, clip):
    model(batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def test_no_step_takes_host_memory_when_clipping_changes(made):
    told = []
    model, optimizer, batch, plan = planned()
    numel = sum(p.numel() for p in model.parameters())
    harness = holdall.apply(plan, model, optimizer, enforce=False, progress=lambda *given: told.append(given[0]))
    with harness:
        assert harness.store.held >= 14 * numel  # parameters, two moments, new weights
        assert any("early updates" in what for what in told)
        assert made
        made.clear()
        for clip in (1e9, 1e9, 1e-3, 1e9, 1e9, 1e-3, 1e-3, 1e9):
            step(model, optimizer, batch, clip)
        harness.engine.settle()
        assert made == []


def test_an_update_that_is_not_the_fast_kernels_reserves_nothing():
    assert held(amsgrad=True) == held(amsgrad=True, ahead=False)
    assert held() > held(ahead=False)


def held(**changed):
    """Bytes of the host that a harness has taken when it is made."""
    model, optimizer, _, plan = planned(**changed)
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        return harness.store.held


def test_without_room_updates_wait_for_the_norm():
    model, optimizer, batch, plan = planned()
    plan = replace(plan, budget={**plan.budget, "far": held(ahead=False) + 4096})
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        assert harness.store.held <= plan.budget["far"]
        for clip in (1e9, 1e9, 1e-3):
            step(model, optimizer, batch, clip)


def test_another_plan_takes_the_memory_of_the_one_before(made):
    model, optimizer, batch, plan = planned()
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        step(model, optimizer, batch, 1e9)
        step(model, optimizer, batch, 1e9)
        made.clear()
        harness.switch(replace(plan, planner="another"))
        step(model, optimizer, batch, 1e9)
        assert harness.plan.planner == "another"
        assert made == []
