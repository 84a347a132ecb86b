"""Values written to places that a mask of the batch names (masked speech and image models): backward reads the mask again."""

import pytest
import torch

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

WIDTH, STEPS = 16, 4


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mask = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Parameter(torch.randn(WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, places):
        found = self.first(x)
        found[places] = self.mask
        for layer in self.layers:
            found = found + torch.tanh(layer(found))
        return found.square().mean()


def world():
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(4, 6, WIDTH)
    return model, {"x": x, "places": x[..., 0] > 0}, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, batch, optimizer):
    losses = []
    for _ in range(STEPS):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(shard):
    model, batch, optimizer = world()
    with holdall.fit(model, optimizer, batch, budget="1GiB", hardware=machine(), mesh={"dp": 2}, shard=shard, enforce=False):
        return train(model, batch, optimizer)


@pytest.mark.parametrize("shard", ["fsdp", "zero2"])
def test_ranks_train_as_one_process(shard):
    for found in on_ranks(2, sharded, shard):
        assert found == pytest.approx(train(*world()), rel=1e-6)
