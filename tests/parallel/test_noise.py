"""Models that draw noise of their own (variational ones, diffusion, random masks) over tensor ranks."""

import pytest
import torch
from torch import nn

import holdall
from holdall.testing.families import FAMILIES
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

WIDTH, STEPS = 16, 4


class Noisy(nn.Module):
    """`inside`: the noise is as wide as what each rank has a part of."""

    def __init__(self, inside):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside = inside

    def forward(self, x):
        between = torch.relu(self.up(x))
        between = between + torch.randn_like(between) if self.inside else between
        found = self.down(between)
        found = found if self.inside else found + torch.randn_like(found)
        return (self.out(x + found) - x).square().mean()


def world(case):
    torch.manual_seed(0)
    if case in FAMILIES:
        family = FAMILIES[case]
        model, batch = family.build()
        return model.train(), batch, family.loss_of
    return Noisy(case == "inside"), {"x": torch.randn(8, WIDTH)}, lambda model, batch: model(**batch)


def train(model, batch, loss_of, optimizer):
    losses = []
    torch.manual_seed(1)
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def divided(case):
    model, batch, loss_of = world(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = torch.get_rng_state()
    try:
        given = {"mesh": {"tp": 2}, "budget": "1GiB", "hardware": machine(), "enforce": False}
        harness = holdall.fit(model, optimizer, batch, loss=loss_of, **given)
    except holdall.HoldallError as error:
        return str(error)
    is_left = torch.equal(before, torch.get_rng_state())
    with harness:
        return train(model, batch, loss_of, optimizer), is_left


def divided_all():
    return {case: divided(case) for case in ("outside", "vae", "inside")}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, divided_all)


@pytest.mark.parametrize("case", ["outside", "vae"])
def test_noise_that_all_ranks_have_is_that_of_one_process(ran, case):
    model, batch, loss_of = world(case)
    expected = train(model, batch, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for rank in ran:
        losses, is_left = rank[case]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert is_left


def test_noise_of_a_part_of_the_features_is_refused(ran):
    for rank in ran:
        assert "computes something else when it is divided" in rank["inside"]
