"""Where the host cannot hold all model states: some units stay on the device, and a refusal names the tier that is short."""

import re
from functools import cache

import pytest
import torch

import holdall
from holdall import api
from holdall.actions.place import Place
from holdall.problem import make_problem
from holdall.simulator import simulate
from holdall.testing.worlds import machine

WIDTH, LAYERS = 64, 8


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.two(torch.nn.functional.gelu(self.one(x)))


class Net(torch.nn.Module):
    """Eight equal layers, whose states are far larger than its activations."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def loss(model, batch):
    return model(batch)


@cache
def traced(precision):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return holdall.trace(model, torch.randn(4, WIDTH), optimizer=optimizer, loss=loss, precision=precision)


@cache
def needed(precision):
    """(bytes of the device if everything is there, bytes of the host if all states are there)"""
    trace = traced(precision)
    problem = make_problem(trace, hardware=machine(overlap=True))
    on_device = simulate(problem, [Place.all(trace)] if precision else []).peak["cpu"]
    return on_device, simulate(problem, [Place.all(trace, update="host", when="overlap_forward")]).peak["far"]


def planned(precision, device, host, planner="auto", **options):
    on_device, on_host = needed(precision)
    budget = {"cpu": int(device * on_device), "far": int(host * on_host)}
    return api.plan(traced(precision), budget=budget, hardware=machine(overlap=True), planner=planner, **options)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("device", "host"), [(0.8, 0.7), (0.75, 0.5), (0.9, 0.3)])
def test_states_are_divided_between_device_and_host(precision, device, host):
    plan = planned(precision, device, host)
    assert all(plan.predicted.peak[tier] <= plan.budget[tier] for tier in ("cpu", "far"))
    place = next(a for a in plan.actions if isinstance(a, Place))
    updates = [update for _, _, update in place.units]
    assert "device" in updates and len(set(updates)) > 1


def test_a_host_that_is_too_small_is_named_with_a_budget_that_helps():
    with pytest.raises(holdall.Infeasible) as refused:
        planned("bf16", 0.4, 0.3)
    error = refused.value
    assert "of far" in error.fact
    assert "1.1 MiB" in error.fact  # what is there
    typed = dict(pair.split("=") for pair in re.search(r"--budget (\S+)\)", error.hint)[1].split(","))
    assert f'"far": "{typed["far"]}"' in error.hint
    plan = api.plan(traced("bf16"), budget=typed, hardware=machine(overlap=True))
    assert plan.predicted.peak["far"] > int(0.3 * needed("bf16")[1])
    assert error.smallest is None  # that is of the device


def test_a_planner_that_puts_all_states_on_the_host_names_one_that_divides_them():
    with pytest.raises(holdall.Infeasible) as refused:
        planned("bf16", 0.8, 0.7, planner="zero_offload")
    assert "of far" in refused.value.fact
    assert 'planner="auto"' in refused.value.hint
    assert planned("bf16", 0.8, 0.7).planner == "auto"


def test_without_early_updates_the_host_needs_less():
    roomy, lean = planned("bf16", 0.4, 4.0), planned("bf16", 0.4, 4.0, ahead=False)
    assert any(a.ahead for a in roomy.actions if isinstance(a, Place))
    assert not any(a.ahead for a in lean.actions if isinstance(a, Place))
    assert lean.predicted.peak["far"] < 0.7 * roomy.predicted.peak["far"]
