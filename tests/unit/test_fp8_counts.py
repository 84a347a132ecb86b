"""What FP8 loses, counted layer by layer: the right numbers, the same in every budget, and shown by the report."""

import copy

import pytest
import torch
from torch import nn

import holdall
from holdall import precision
from holdall.narrow.counting import losses_of, told
from holdall.testing.worlds import machine


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)])

    def forward(self, x):
        for block in self.block:
            x = x + block(x)
        return x.float().square().mean()


def test_values_that_become_zero_and_values_that_are_cut_are_counted():
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    undo = precision.find("fp8:scaling=delayed:count=true").put_on(model)
    x = torch.ones(16, 8)
    x[0, 0], x[1, 1] = 1e-9, 0.0  # the first becomes zero, the second is
    model(x).sum().backward()
    given, weight, grad = losses_of(model)
    assert (given.operand, given.cut, given.zeroed, given.wild, given.elements) == ("input", 0, 1, 0, 128)
    assert (weight.operand, weight.elements, grad.operand, grad.elements) == ("weight", 64, "gradient", 128)
    model(torch.full((16, 8), 2.0)).sum().backward()  # above what the first step had
    assert (losses_of(model)[0].cut, losses_of(model)[0].elements) == (128, 256)
    assert any("`0`" in line and "50.00% cut off" in line for line in told(model))
    model.eval()
    model(x)
    assert losses_of(model)[0].elements == 256
    undo()
    assert losses_of(model)[0].cut == 128 and not list(model.buffers())  # a report after the end has them too


def fitted(model, optimizer, batch, budget, **options):
    """In the budget, or in the smallest that the refusals name."""
    for _ in range(4):
        try:
            return holdall.fit(model, optimizer, batch, budget=budget, **options)
        except holdall.Infeasible as refused:
            budget = refused.smallest
    raise AssertionError("refusals name budgets that are refused")


@pytest.mark.parametrize("name", ["fp8:count=true", "fp8:scaling=delayed:count=true"])
def test_counts_and_numbers_are_the_same_in_a_wide_and_a_narrow_budget(name):
    model, seen = _Blocks(), []
    for budget, allow, of in ((10**9, None, name), (1000, ["recompute"], name), (10**9, None, name.replace(":count=true", ""))):
        trained, batch = copy.deepcopy(model), {"x": normal(128, 16)}
        batch["x"][:, 0] *= 1e-7
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
        losses = []
        with fitted(trained, optimizer, batch, budget, hardware=machine(), precision=of, allow=allow) as harness:
            for _ in range(3):
                loss = trained(**batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        report = harness.report()
        assert harness.measured().peak["cpu"] == harness.plan.predicted.peak["cpu"]
        seen.append((losses, losses_of(trained)))
        assert ("FP8 loses most in the" in str(report)) == (of == name), report
    (losses, counts), (narrow, other), (plain, none) = seen
    assert losses == narrow == plain and counts == other and not none
    assert sum(c.zeroed for c in counts) > 0 and all(c.elements for c in counts)


def test_a_run_that_diverges_names_the_layer():
    model, batch = _Blocks(), {"x": normal(128, 16)}
    with torch.no_grad():
        model.block[2][0].bias[3] = float("inf")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with holdall.fit(model, optimizer, batch, budget=10**9, hardware=machine(), precision="fp8:count=true") as harness:
        model(**batch).backward()
        optimizer.zero_grad()
        said = str(harness.report())
    assert "diverged" in said and "the input of `block.3.0`" in said
