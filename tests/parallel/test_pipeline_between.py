"""What pieces may hand on, and hold: tuples, views, results that do not lie in one row, and counts that trials leave alone."""

import pytest
import torch
from torch import nn

import holdall.pipelines
from holdall.testing.ranks import on_ranks

WIDTH, ROWS, LENGTH, N, STEPS = 8, 8, 4, 4, 3
SCHEDULES = ("1f1b", "zb_h1", "interleaved:chunks=2", "zb_v")
ASKED = {"kept": {}, "again": {"recompute": True}, "budget": {"budget": "1GiB"}}
CASES = [(schedule, asked) for schedule in SCHEDULES for asked in ASKED if (schedule, asked) != ("zb_v", "again")]


class Two(nn.Module):
    """Hands on its input too, which for the first piece is the batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        new, old = given if isinstance(given, tuple) else (given, given)
        return torch.tanh(self.linear(new)) + old, new


class Difference(nn.Module):
    def forward(self, given):
        return given[0] - given[1]


class Recurrent(nn.Module):
    """Its result is a transposed view."""

    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.cells(x)[0]


class Split(nn.Module):
    """Its result is a view that lies in one row; its gradient does not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.transpose(1, 2).reshape(x.shape)).unflatten(-1, (2, -1)).flatten(-2)


class Counting(nn.Module):
    """What it computes depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(WIDTH, WIDTH), 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return x + self.linear(x) / (self.calls + len(self.seen))


def build():
    torch.manual_seed(0)
    pieces = (Two(), Two(), Difference(), Recurrent(), Counting(), Split(), Recurrent(), Counting())
    return nn.Sequential(*pieces).double()


def batch(seed):
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, LENGTH, WIDTH, generator=made, dtype=torch.float64) for _ in range(2)]


def rule(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain():
    """Micro-batches one after the other."""
    model = build()
    optimizer = rule(model.parameters())
    for step in range(STEPS):
        for inputs, targets in zip(*(t.chunk(N) for t in batch(step)), strict=True):
            (nn.functional.mse_loss(model(inputs), targets) / N).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(schedule, asked):
    cut = [1, 2, 5] if schedule not in ("1f1b", "zb_h1") else [4]  # between two that hand on tuples, before and after views
    given = {"loss": nn.functional.mse_loss, "micro_batches": N, "sample": batch(0), "optimizer": rule, "cut": cut}
    pipe = holdall.pipelines.start(build(), schedule=schedule, **given, **ASKED[asked])
    optimizer = pipe.optimizer()
    for step in range(STEPS):
        pipe.step(*batch(step))
        optimizer.step()
        optimizer.zero_grad()
    said = pipe.report()
    calls = [m.calls for module in pipe.modules.values() for m in module if isinstance(m, Counting)]
    weights = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return weights, calls, max(said.predicted.values()), max(said.measured.values())


def everything():
    return {case: train(*case) for case in CASES}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, everything)


@pytest.fixture(scope="module")
def expected():
    return plain()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_weights_are_those_of_one_process(ran, expected, case):
    found = {name: weight for rank in ran for name, weight in rank[case][0].items()}
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-13), name
    assert [calls for rank in ran for calls in rank[case][1]] == [N * STEPS] * 2


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_peaks_are_the_predicted_ones(ran, case):
    """What is handed on unchanged is counted as if it had bytes of its own on the way."""
    for rank in ran:
        _, _, predicted, measured = rank[case]
        assert measured - 64 <= predicted <= 1.1 * measured, case
