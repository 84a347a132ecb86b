"""`precision` over shards: on two ranks, the bits of the mean of two single processes with the same recipe."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdall
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

STEPS = 4
HELD = 4 * (32 * 64 * 2 + 64 + 3 * 32)  # bytes: the gradients of a layer in float32
CASES = by_default(  # recipe, way -> what else is asked
    {
        ("bf16", "fsdp"): {},
        ("bf16", "ddp"): {},
        ("bf16", "zero2"): {"planner": "chen", "variant": "all"},
        ("fp8", "fsdp"): {},
        ("fp8:scaling=row", "zero3"): {"planner": "chen", "variant": "all"},
        ("mxfp8", "ddp"): {},
        ("int8", "zero2"): {},
        ("layerwise:low=layers.1.up:to=fp8", "fsdp"): {},
    },
    ("mxfp8", "ddp"),
    ("layerwise:low=layers.1.up:to=fp8", "fsdp"),
)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.plain = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))  # layers that are gathered by themselves

    def forward(self, x):
        for layer in (*self.layers, *self.plain):
            x = layer(x)
        return x.float().square().mean()


def made(number):
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(number))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {"x": x}


def fitted(recipe, way):
    model, optimizer, given = made(dist.get_rank())
    asked = {"budget": "1GiB", "hardware": machine(), "mesh": {"dp": 2}, "shard": way, "precision": recipe}
    with holdall.fit(model, optimizer, given, **asked, **CASES[recipe, way]) as harness:
        for step in range(STEPS):
            torch.manual_seed(100 + dist.get_rank())  # roundings by chance
            loss = model(**given)
            loss.backward()
            if step == 0:
                grads = [p.grad.full_tensor().tolist() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        traffic = harness.measured().traffic
        dtypes = {p.dtype for p in (*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values()))}
        torch.manual_seed(0)
        before = model(**given).item()
    torch.manual_seed(0)
    return {
        "gradients": grads,
        "dtypes": dtypes,
        "afterwards": (before, model(**given).item()),
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": {link: size for link, size in traffic.items() if size},
    }


def fitted_all():
    return {case: fitted(*case) for case in CASES}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, fitted_all)


def mean(recipe):
    found = []
    for number in range(2):
        model, optimizer, given = made(number)
        with holdall.fit(model, optimizer, given, budget="1GiB", hardware=machine(), precision=recipe):
            torch.manual_seed(100 + number)
            model(**given).backward()
            found.append([p.grad.float().clone() for p in model.parameters()])
    return [(a + b) / 2 for a, b in zip(*found, strict=True)]


each_case = pytest.mark.parametrize("case", CASES, ids="-".join)


@each_case
def test_gradients_are_the_mean_of_single_processes(ran, case):
    """Parameters, their shards and the optimizer's states stay in float32."""
    expected, plain = mean(case[0]), mean("fp32")
    for rank in ran:
        ours = [torch.tensor(g) for g in rank[case]["gradients"]]
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        assert rank[case]["dtypes"] == {torch.float32}


@each_case
def test_peaks_and_bytes_are_the_predicted_ones(ran, case):
    for rank in ran:
        predicted = rank[case]["predicted"]
        assert rank[case]["traffic"] == {link: size for link, size in predicted.traffic.items() if size}
        # a thread of gloo may hold the buffer of a collective for a moment after it is over, on a busy machine in each step
        assert predicted.peak["cpu"] <= min(rank[case]["peaks"]) <= predicted.peak["cpu"] + HELD


def test_weights_are_gathered_in_half_of_the_bytes(ran):
    model, optimizer, given = made(0)
    wide = holdall.trace(model, given, optimizer=optimizer, mesh={"dp": 2}, shard="fsdp")
    plan = holdall.plan(wide, planner="nop", budget="1GiB", hardware=machine())
    assert 2 * ran[0]["bf16", "fsdp"]["predicted"].traffic["dp all_gather"] == plan.predicted.traffic["dp all_gather"]


@each_case
def test_a_model_stays_sharded_in_its_precision(ran, case):
    for rank in ran:
        before, afterwards = rank[case]["afterwards"]
        assert before == afterwards


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh": {"dp": 2}, "precision": "bf16", "shard": "zero1"}, "not by zero1"),
        ({"mesh": {"dp": 2}, "precision": "fp8:scaling=delayed"}, "a window of scales of its own"),
        ({"mesh": {"dp": 2}, "precision": "bf16-autocast"}, 'use precision="bf16"'),
        ({"mesh": {"dp": 2}, "precision": "fp8", "shard": "zero1"}, "not by zero1"),
        ({"mesh": {"tp": 2}, "precision": "fp8"}, "not by tensor"),
        ({"mesh": {"dp": 2}, "precision": "qat-int8"}, "gathered in one dtype"),
    ],
)
def test_what_does_not_work_over_ranks_is_refused_in_a_line(given, said):
    model, optimizer, batch = made(0)
    with pytest.raises(holdall.HoldallError) as error:
        holdall.trace(model, batch, optimizer=optimizer, **{"shard": "fsdp", **given})
    assert said in str(error.value)
