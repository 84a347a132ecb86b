"""Schedules run on torch's pipeline runtime, on 2 and 4 gloo ranks: gradients and bytes of activations."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import holdall.pipelines
from holdall.pipelines import PipeCosts, pipeline, schedule, schedule_names, simulate
from holdall.testing.ranks import on_ranks

LAYERS, WIDTH, N = 16, 8, 8
NAMES = [name for name in schedule_names() if schedule(name).is_exact] + [
    "gpipe:reverse=true",
    "hanayo:waves=2",
    "chimera:doubling=true",
]


class Live:
    """Bytes of activations that autograd holds, now and at most; weights are there anyway."""

    now = most = 0

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # without its graph, which would hold itself
        is_weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        self.bytes = 0 if is_weight else tensor.numel() * tensor.element_size()
        Live.now += self.bytes
        Live.most = max(Live.most, Live.now)

    def __del__(self):
        Live.now -= self.bytes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.b = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        with saved_tensors_hooks(Live, lambda live: live.tensor):
            return x + self.b(torch.tanh(self.a(x)))


def build(layers=LAYERS):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers)))


def batch(rows=16):
    made = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=made), torch.randn(rows, WIDTH, generator=made)


def loss(output, target):
    return ((output - target) ** 2).mean()


def steps(names):
    """Of every schedule: the loss, gradients by stage, and the most bytes held."""
    found = {}
    for name in names:
        pipe = holdall.pipelines.start(build(), schedule=name, micro_batches=N, loss=loss)
        pipe.step(*batch())  # finds the shapes
        for p in pipe.parameters():
            p.grad = None
        Live.most = Live.now
        before = Live.now
        mean = pipe.step(*batch())
        assert Live.now == before, "something of a micro-batch is left"
        gradients = {i: [p.grad for p in module.parameters()] for i, module in pipe.modules.items()}
        found[name] = (mean.item(), gradients, Live.most - before)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ran(request):
    return request.param, on_ranks(request.param, steps, NAMES)


def micro_batched(made):
    """Gradients of one process, stage by stage, with each stage's own order of additions; copies are added at the end."""
    model, each = build(), []
    inputs, targets = batch()
    for x, y in zip(inputs.chunk(N), targets.chunk(N), strict=True):
        model.zero_grad(set_to_none=True)
        loss(model(x), y).backward()
        each.append([p.grad for p in model.parameters()])
    per = len(each[0]) // made.chain
    sums = {}
    for stage in range(made.stages):
        own = slice(stage % made.chain * per, (stage % made.chain + 1) * per)
        for m in made.summed(stage):
            sums[stage] = [a + b for a, b in zip(sums[stage], each[m][own], strict=True)] if stage in sums else each[m][own]
    for stage in range(made.chain, made.stages):  # twins
        twin = stage - made.chain
        sums[stage] = sums[twin] = [a + b for a, b in zip(sums[twin], sums[stage], strict=True)]
    return {stage: [g / N for g in found] for stage, found in sums.items()}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_bits_of_micro_batched_training(ran, name):
    ranks, results = ran
    made = pipeline(name, ranks=ranks, micro_batches=N)
    expected = micro_batched(made)
    stages = {stage: gradients for result in results for stage, gradients in result[name][1].items()}
    assert stages.keys() == set(range(made.stages))
    for stage, gradients in stages.items():
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected[stage], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_the_bytes_that_were_simulated(ran, name):
    ranks, results = ran
    made = pipeline(name, ranks=ranks, micro_batches=N)
    before = Live.now
    kept = build(LAYERS // made.chain)(batch()[0][: 16 // N])
    costs = PipeCosts.even(made.chain, activations=Live.now - before)
    del kept
    assert tuple(result[name][2] for result in results) == simulate(made, costs).peak


def test_the_loss_is_the_mean_on_every_rank(ran):
    _, results = ran
    inputs, targets = batch()
    expected = loss(build()(inputs), targets).item()
    assert {round(mean, 6) for result in results for mean, _, _ in result.values()} == {round(expected, 6)}
