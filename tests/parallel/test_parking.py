"""Tensors of one stage of a pipeline, parked on other ranks for real."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdall.pipelines
from holdall.errors import InvalidInput
from holdall.pipelines.running.parking import Parking
from holdall.testing.ranks import on_ranks

WIDTH, ROWS, BATCHES = 32, 16, 8  # a micro-batch has two rows
LENDERS = (2, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.parking = None

    def forward(self, x):
        if self.parking is None:
            return x + self.b(torch.tanh(self.a(x)))
        with self.parking.around():
            return x + self.b(torch.tanh(self.a(x)))


def run(lenders):
    """On a rank: gradients of this rank's stage, and what parking it had."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    parking = Parking(borrower=0, lenders=lenders, least=100) if lenders else None
    if dist.get_rank() == 0:
        model[0].parking = parking
    drawn = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(ROWS, WIDTH, generator=drawn), torch.randn(ROWS, WIDTH, generator=drawn)
    pipe = holdall.pipelines.start(model, schedule="1f1b", micro_batches=BATCHES, loss=nn.functional.mse_loss)
    pipe.step(inputs, targets)
    if parking is not None:
        parking.close()
    return [p.grad for p in pipe.parameters()], parking and (parking.sent, parking.most)


def refused():
    said = []
    for lenders in ([], [0], [5]):
        try:
            Parking(borrower=0, lenders=lenders)
        except InvalidInput as error:
            said.append(error.fact)
    return said


def every():
    return {lenders: run(lenders) for lenders in ((), LENDERS)} | {"refused": refused()}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(4, every)


def test_gradients_are_the_same_bits(ran):
    for rank in ran:
        plain, parked = rank[()][0], rank[LENDERS][0]
        assert parked
        assert all(torch.equal(a, b) for a, b in zip(parked, plain, strict=True))


def test_lenders_hold_four_micro_batches_in_stripes(ran):
    """The first of four stages of 1F1B has four under way. Its block saves its input, and twice what follows tanh; once more at
    the start, when torch runs a forward to learn shapes."""
    each = 4 * (ROWS // BATCHES) * (WIDTH + 2 * 4 * WIDTH)
    held = [rank[LENDERS][1] for rank in ran]
    assert held[0] == ((BATCHES + 1) * each, 0)
    assert [most for _, most in held] == [4 * each // len(LENDERS) if rank in LENDERS else 0 for rank in range(4)]


def test_ranks_that_cannot_lend_are_refused(ran):
    assert all(len(rank["refused"]) == 3 for rank in ran)
