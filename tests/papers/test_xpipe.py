"""XPipe: predicted weights. Its runs are held against an emulator in tests/parallel."""

import pytest
import torch

from holdall.pipelines import pipeline, simulate
from holdall.pipelines.running.versions import predicted
from holdall.pipelines.schedules.xpipe import updates_ahead


def steady(optimizer_of, steps=400):
    """A parameter under a constant gradient until the momentum is steady."""
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = optimizer_of([p])
    for _ in range(steps):
        p.grad = torch.tensor([0.5, -0.25], dtype=torch.float64)
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize(
    "optimizer_of",
    [lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9), lambda ps: torch.optim.Adam(ps, lr=0.01)],
    ids=["momentum", "adam"],
)
def test_a_steady_gradient_is_predicted_to_a_millionth(optimizer_of):
    p, optimizer = steady(optimizer_of)
    said = predicted(optimizer, p, 3)
    for _ in range(3):
        p.grad = torch.tensor([0.5, -0.25], dtype=torch.float64)
        optimizer.step()
    assert torch.allclose(said, p.detach(), rtol=0, atol=1e-6)


def test_one_stage_predicts_nothing():
    p, optimizer = steady(lambda ps: torch.optim.Adam(ps, lr=0.01), 3)
    assert updates_ahead(0, 1, 1) == 0
    assert torch.equal(predicted(optimizer, p, 0), p)


def test_updates_between_a_forward_and_its_own_update():
    assert [updates_ahead(s, 4, 1) for s in range(4)] == [3, 2, 1, 0]
    assert [updates_ahead(s, 4, 2) for s in range(4)] == [2, 1, 1, 0]
    assert [updates_ahead(s, 4, 4) for s in range(4)] == [1, 1, 1, 0]


def test_larger_mini_batches_need_fewer_predictions():
    most = [max(simulate(pipeline("xpipe", ranks=4, micro_batches=16, per_update=m)).versions) for m in (1, 2, 4)]
    assert most == sorted(most, reverse=True) and most[-1] <= 3
