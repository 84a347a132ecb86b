"""A chunked head makes its weight's gradient in forward, and autograd saves it: it is a gradient like any other."""

import pytest
import torch

import holdall
from holdall import models
from holdall.actions.in_backward import used_up
from holdall.actions.place import Place
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.problem import make_problem
from holdall.simulator import simulate


@pytest.fixture(scope="module")
def world():
    pytest.importorskip("transformers")
    source = models.describe("tiny-llama")  # its head is not tied
    model = models.build(source, device="cpu", dtype="float32")
    batch = models.sample_batch(source, batch=2, seq=16, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, batch, optimizer, holdall.trace(model, batch, optimizer=optimizer, head=8)


def test_every_weight_has_its_gradient(world):
    assert all(len(unit.grads) == len(unit.weights) for unit in world[3].units)


def test_the_head_leaves_as_predicted(world):
    """Its gradient was taken for an activation: 1 % too little was predicted, and it was never updated in time."""
    model, batch, optimizer, trace = world
    problem = make_problem(trace, hardware=holdall.probe("cpu", quick=True))
    place = Place.of(problem.trace, {u.name: ("resident", "host") for u in problem.trace.units}, when="step")
    plan = finish(Nop(), problem, [place])
    with holdall.apply(plan, model, optimizer) as harness:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


def test_a_step_without_its_update_can_be_simulated(world):
    """What autograd had saved was let go of by the update, which is not there any more."""
    model, batch, *_ = world
    trace = used_up(holdall.trace(model, batch, optimizer=torch.optim.SGD(model.parameters(), foreach=False), head=8))
    problem = make_problem(trace, hardware=holdall.probe("cpu", quick=True))
    assert simulate(problem, ()).peak["cpu"] > 0
