"""Parameters that are numbers, such as a temperature, in every way to shard; sums of gradients that torch's engine holds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

WIDTH, ROWS, STEPS = 24, 32, 3
WAYS = ("ddp", "fsdp")  # `zero1` is on the engine of the one, `zero2` of the other
TIGHT = 0.75  # of the peak without a budget


class Layer(nn.Module):
    """With a number of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Reads a weight of a layer, which is not gathered by itself then."""

    def __init__(self):
        super().__init__()
        self.layers, self.heat = nn.ModuleList(Layer() for _ in range(4)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x * self.heat.exp() * self.layers[1].norm.weight).square().mean()


def build(dtype=torch.float64):
    torch.manual_seed(0)
    model = Model().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(number):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def train(model, optimizer, rank, average=lambda: None, dtype=torch.float64):
    """Two backwards a step."""
    for step in range(STEPS):
        for n in range(2):
            model(batch(4 * step + 2 * n + rank).to(dtype)).backward()
        average()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def alone():
    """The mean of what the ranks compute by themselves."""
    model, optimizer = build()

    def average():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2

    train(model, optimizer, dist.get_rank(), average)
    return [p.detach() for p in model.parameters()]


def fitted(way, budget, precision=None):
    dtype = torch.float64 if precision is None else torch.float32
    model, optimizer = build(dtype)
    given = {"budget": budget, "precision": precision, "hardware": machine(), "mesh": {"dp": 2}, "shard": way, "accumulate": 2}
    with holdall.fit(model, optimizer, batch(dist.get_rank()).to(dtype), **given) as harness:
        train(model, optimizer, dist.get_rank(), dtype=dtype)
        summed = harness.measured().traffic["dp all_reduce"]
    return {
        "weights": [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()],
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted.peak["cpu"],
        "summed": (summed, harness.plan.predicted.traffic["dp all_reduce"]),
        "actions": harness.plan.count(),
    }


def everything():
    found = {}
    for way in WAYS:
        found[way, "plenty"] = fitted(way, "1GiB")
        found[way, "tight"] = fitted(way, int(TIGHT * found[way, "plenty"]["predicted"]))
    return found | {"alone": alone(), "bf16": fitted("fsdp", "1GiB", "bf16")}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, everything)


each_case = pytest.mark.parametrize("case", [(way, budget) for way in WAYS for budget in ("plenty", "tight")], ids="-".join)


@each_case
def test_weights_are_those_of_the_mean_of_single_processes(ran, case):
    for rank in ran:
        for found, expected in zip(rank[case]["weights"], rank["alone"], strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-14)


@each_case
def test_peaks_and_bytes_are_the_predicted_ones(ran, case):
    """A sum of whole gradients stays until the backward is over, beside the gradients of the backward before."""
    for rank in ran:
        found = rank[case]
        assert abs(min(found["peaks"]) - found["predicted"]) <= 64  # threads of gloo hold buffers for a moment
        assert found["summed"][0] == 2 * found["summed"][1] > 0  # what is predicted is the last backward
        assert (len(found["actions"]) > 1) == (case[1] == "tight")


def test_copies_in_bf16_train_alike(ran):
    for rank in ran:
        for found, expected in zip(rank["bf16"]["weights"], rank["alone"], strict=True):
            assert (found.double() - expected).abs().max() < 0.05
        assert rank["bf16"]["weights"][0].dtype == torch.float32
