"""The whole library in one file: what a user sees, on a model that fits on a page."""

import copy

import pytest
import torch
from torch import nn

import holdall
from holdall.testing.worlds import machine


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(64, 32), nn.ModuleList(Layer(32) for _ in range(6)), nn.Linear(32, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def loop(model, optimizer, ids, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randint(0, 64, (16, 32))


def test_trace_plan_apply_report():
    model, optimizer, ids = make()
    reference = copy.deepcopy(model)
    expected = loop(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), ids)

    trace = holdall.trace(model, ids, optimizer=optimizer)
    plain = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    plan = holdall.plan(trace, budget=int(plain * 0.6), hardware=machine())
    with holdall.apply(plan, model, optimizer) as harness:
        losses = loop(model, optimizer, ids)

    assert losses == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert max(harness.step_peaks) <= int(plain * 0.6)
    report = harness.report()
    assert report.measured.peak["cpu"] == plan.predicted.peak["cpu"]
    assert "peak CPU" in str(report)
    assert harness.notes == []
    assert "forward" not in model.layers[0].__dict__


def test_fit_is_those_three_calls():
    model, optimizer, ids = make()
    with holdall.fit(model, optimizer, ids, budget="1GiB", hardware=machine()) as harness:
        loop(model, optimizer, ids)
    assert harness.plan.actions == ()


def test_too_small_a_budget_is_refused_with_the_smallest_that_works():
    model, optimizer, ids = make()
    trace = holdall.trace(model, ids, optimizer=optimizer)
    with pytest.raises(holdall.Infeasible) as refused:
        holdall.plan(trace, budget="1KiB", hardware=machine())
    assert "at the peak" in refused.value.fact
    plan = holdall.plan(trace, budget=refused.value.smallest, hardware=machine())
    with holdall.apply(plan, model, optimizer) as harness:
        loop(model, optimizer, ids)
    assert max(harness.step_peaks) <= refused.value.smallest


def test_the_run_stops_at_the_op_that_passes_the_budget():
    model, optimizer, ids = make()
    trace = holdall.trace(model, ids, optimizer=optimizer)
    plan = holdall.plan(trace, planner="nop", hardware=machine())
    tight = holdall.plan(trace, planner="nop", budget=plan.predicted.peak["cpu"], hardware=machine())
    with holdall.apply(tight, model, optimizer):
        loop(model, optimizer, ids)
    with pytest.raises(holdall.OverBudget), holdall.apply(tight, model, optimizer):
        loop(model, optimizer, torch.randint(0, 64, (32, 32)))  # twice the batch
    loop(model, optimizer, ids)  # the model works as before
