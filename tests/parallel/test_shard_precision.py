"""`precision="bf16"` over shards: on two ranks, the mean of the gradients of two single processes in that precision."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

CASES = {"fsdp": {}, "ddp": {}, "zero2": {"planner": "chen", "variant": "all"}}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def made(number):
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(32, 24, generator=torch.Generator().manual_seed(number))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {"x": x}


def fitted(way, options):
    model, optimizer, given = made(dist.get_rank())
    asked = {"budget": "1GiB", "hardware": machine(), "mesh": {"dp": 2}, "shard": way, "precision": "bf16"}
    with holdall.fit(model, optimizer, given, **asked, **options) as harness:
        for step in range(3):
            loss = model(**given)
            loss.backward()
            if step == 0:
                grads = [p.grad.full_tensor().tolist() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        traffic = harness.measured().traffic
    return {
        "gradients": grads,
        "dtypes": {p.dtype for p in (*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values()))},
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": {link: size for link, size in traffic.items() if size},
    }


def fitted_all():
    return {way: fitted(way, options) for way, options in CASES.items()}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, fitted_all)


@pytest.fixture(scope="module")
def mean():
    found = []
    for number in range(2):
        model, optimizer, given = made(number)
        with holdall.fit(model, optimizer, given, budget="1GiB", hardware=machine(), precision="bf16"):
            model(**given).backward()
            found.append([p.grad.float().clone() for p in model.parameters()])
    return [(a + b) / 2 for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("way", CASES)
def test_gradients_are_the_mean_of_single_processes(ran, mean, way):
    """Parameters, their shards and the optimizer's states stay in float32."""
    for rank in ran:
        assert all(torch.equal(torch.tensor(a), b) for a, b in zip(rank[way]["gradients"], mean, strict=True))
        assert rank[way]["dtypes"] == {torch.float32}


@pytest.mark.parametrize("way", CASES)
def test_peaks_and_bytes_are_the_predicted_ones(ran, way):
    for rank in ran:
        predicted = rank[way]["predicted"]
        assert rank[way]["traffic"] == {link: size for link, size in predicted.traffic.items() if size}
        # a thread of gloo may hold the buffer of a collective for a moment after it is over
        assert predicted.peak["cpu"] <= min(rank[way]["peaks"]) <= 1.06 * predicted.peak["cpu"]


def test_weights_are_gathered_in_half_of_the_bytes(ran):
    model, optimizer, given = made(0)
    wide = holdall.trace(model, given, optimizer=optimizer, mesh={"dp": 2}, shard="fsdp")
    plan = holdall.plan(wide, planner="nop", budget="1GiB", hardware=machine())
    assert 2 * ran[0]["fsdp"]["predicted"].traffic["dp all_gather"] == plan.predicted.traffic["dp all_gather"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh": {"dp": 2}, "shard": "zero1", "precision": "bf16"}, "not by zero1"),
        ({"mesh": {"dp": 2}, "precision": "bf16-autocast"}, 'use precision="bf16"'),
    ],
)
def test_other_precisions_and_ways_are_refused(given, said):
    model, optimizer, batch = made(0)
    with pytest.raises(holdall.HoldallError) as error:
        holdall.trace(model, batch, optimizer=optimizer, **given)
    assert said in str(error.value)
