"""Steps of several backwards over ranks, and stage 1 of ZeRO: gradients, peaks and bytes on two real ranks."""

import pytest
import torch
import torch.distributed as dist

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

CASES = [("ddp", 2), ("zero1", 1), ("zero1", 2), ("zero2", 3), ("fsdp", 2)]
STEPS = 4


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(torch.nn.Module):
    def __init__(self, width=15, depth=3):  # an odd width: parts of unequal sizes
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(depth))
        self.last = torch.nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def build():
    torch.manual_seed(0)
    return Stack()


def batch(rank, nth):
    return torch.randn(20, 15, generator=torch.Generator().manual_seed(10 * nth + rank))


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def by_hand(backwards):
    """One process: every backward adds the mean of the ranks' gradients."""
    model, (first, other) = build(), (build(), build())
    optimizer = adam(model)
    for _ in range(STEPS):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for nth in range(backwards):
            for rank, one in enumerate((first, other)):
                one.load_state_dict(model.state_dict())
                one.zero_grad()
                one(batch(rank, nth)).backward()
            for p, a, b in zip(model.parameters(), first.parameters(), other.parameters(), strict=True):
                p.grad += (a.grad + b.grad) / 2
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def fitted(way, backwards):
    rank, model = dist.get_rank(), build()
    optimizer = adam(model)
    asked = {"budget": "1GiB", "hardware": machine(), "mesh": {"dp": 2}, "shard": way, "accumulate": backwards}
    with holdall.fit(model, optimizer, (batch(rank, 0),), **asked) as harness:
        for _ in range(STEPS):
            for nth in range(backwards):
                mine = batch(rank, nth)
                loss = model(mine)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        traffic = harness.measured().traffic
    states = sum(
        v.to_local().numel() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()
    )
    return {
        "weights": [p.full_tensor().detach() for p in model.parameters()],
        "states": states,
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": {link: size for link, size in traffic.items() if size},
        "no gradients": all(p.grad is None for p in model.parameters()),
    }


def fitted_all():
    return {case: fitted(*case) for case in CASES}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, fitted_all, timeout=300)


each_case = pytest.mark.parametrize("case", CASES, ids=str)


@each_case
def test_weights_are_those_of_one_process(ran, case):
    expected = by_hand(case[1])
    for rank in ran:
        assert all(torch.equal(a, b) for a, b in zip(rank[case]["weights"], expected, strict=True))
        assert rank[case]["no gradients"]


@each_case
def test_the_peak_is_the_predicted_one(ran, case):
    for rank in ran:
        predicted = rank[case]["predicted"].peak["cpu"]
        assert predicted <= min(rank[case]["peaks"]) <= 1.02 * predicted


@each_case
def test_every_backward_sends_the_predicted_bytes(ran, case):
    way, backwards = case
    for rank in ran:
        said = {k: v for k, v in rank[case]["predicted"].traffic.items() if k.startswith("dp ")}
        times = dict.fromkeys(said, backwards)
        if way == "zero1":
            times["dp all_gather"] = 1  # of the updated parameters, once in a step
        assert rank[case]["traffic"] == {link: times[link] * size for link, size in said.items()} != {}


def test_stage_one_halves_the_states(ran):
    whole = sum(2 * p.numel() for p in build().parameters())
    parts = [rank["zero1", 1]["states"] for rank in ran]
    assert sum(parts) == whole
    assert max(parts) <= 0.55 * whole


def test_stage_one_takes_rules_by_element_only():
    model = build()
    rule = torch.optim.Adafactor(model.parameters())
    with pytest.raises(holdall.HoldallError, match="Adafactor may not update a parameter in parts"):
        holdall.trace(model, (batch(0, 0),), optimizer=rule, mesh={"dp": 2}, shard="zero1")
