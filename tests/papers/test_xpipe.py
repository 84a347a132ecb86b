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


RANKS, WIDTH = 4, 16


class Trained:
    """One stage of a pipeline in one process: its weights, or its prediction of them, after every update."""

    def __init__(self, seed, ahead, optimizer_of):
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.parameters = list(self.layer.parameters())
        self.optimizer = optimizer_of(self.parameters)
        self.ahead = ahead
        self.history = [self.look()]

    def look(self):
        return [predicted(self.optimizer, p, self.ahead).detach() for p in self.parameters]

    def update(self, gradients):
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g
        self.optimizer.step()
        self.history.append(self.look())


def last_loss(way, optimizer_of, seed, steps=120):
    """The loss over a fixed batch after training. Stage s of PipeDream and XPipe is P - 1 - s updates behind; GPipe is not."""
    behind = [0 if way == "gpipe" else RANKS - 1 - s for s in range(RANKS)]
    stages = [Trained(10 * seed + s, gap if way == "xpipe" else 0, optimizer_of) for s, gap in enumerate(behind)]
    made = torch.Generator().manual_seed(seed)
    table = torch.randn(32, WIDTH, generator=made)  # a fixed next word for each word, and its vector
    following = torch.randperm(32, generator=made)

    def loss_of(weights, words):
        x = table[words]
        for s, (w, b) in enumerate(weights):
            x = torch.nn.functional.linear(x, w, b)
            x = torch.tanh(x) if s < RANKS - 1 else x
        return torch.nn.functional.cross_entropy(x @ table.T / WIDTH**0.5, following[words])

    for t in range(steps):
        words = torch.randint(0, 32, (16,), generator=made)
        used = [[v.clone().requires_grad_() for v in st.history[max(0, t - behind[s])]] for s, st in enumerate(stages)]
        loss_of(used, words).backward()
        for stage, weights in zip(stages, used, strict=True):
            stage.update([w.grad for w in weights])
    with torch.no_grad():
        return loss_of([stage.parameters for stage in stages], torch.arange(32)).item()


@pytest.mark.parametrize("seed", [0, 1])
def test_predicted_weights_come_nearer_to_the_synchronous_loss(seed):
    """Than weights that are as late and not predicted (PipeDream), with Adam, on a toy; GPipe is synchronous."""
    losses = {
        way: last_loss(way, lambda ps: torch.optim.Adam(ps, lr=2e-2), seed, 70) for way in ("gpipe", "xpipe", "pipedream")
    }
    assert losses["gpipe"] < losses["xpipe"] < losses["pipedream"]
    assert losses["xpipe"] - losses["gpipe"] < 0.75 * (losses["pipedream"] - losses["gpipe"])
