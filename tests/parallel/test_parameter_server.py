"""The parameter server, simulated: its rules of waiting, its costs, and Downpour SGD."""

import random

import pytest
import torch

from holdall.cost.collectives import collective_seconds
from holdall.errors import InvalidInput
from holdall.parallel.gradients.parameter_server import server_seconds, train_on_server
from holdall.pipelines import pipeline, simulate
from holdall.types import Network
from holdall.types.mesh import MeshDim

NETWORK = Network(name="n", rate=1e6, latency=1e-3)


def start():
    drawn = torch.Generator().manual_seed(0)
    return [torch.randn(5, 3, generator=drawn), torch.randn(3, generator=drawn)]


def gradient(weights, worker, step):
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(1000 * worker + step))
    own = [w.clone().requires_grad_() for w in weights]
    loss = (torch.tanh(rows @ own[0] + own[1]) - rows[:, :3]).square().mean()
    return torch.autograd.grad(loss, own)


def momentum(weights):
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def adagrad(weights):
    return torch.optim.Adagrad(weights, lr=0.1)


def speeds(workers, steps, seed=0):
    drawn = random.Random(seed)
    return [[drawn.uniform(0.5, 3.0) for _ in range(steps)] for _ in range(workers)]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def synchronous(workers, steps, optimizer):
    """The mean of all workers' gradients of the same weights, step by step."""
    weights = [torch.nn.Parameter(w) for w in start()]
    rule = optimizer(weights)
    for step in range(steps):
        each = [gradient([w.detach() for w in weights], worker, step) for worker in range(workers)]
        for w, *grads in zip(weights, *each, strict=True):
            w.grad = torch.stack(grads).sum(0) / workers
        rule.step()
    return [w.detach() for w in weights]


@pytest.mark.parametrize("rule", [momentum, adagrad])
def test_no_staleness_is_the_bulk_synchronous_trajectory(rule):
    run = train_on_server(start(), gradient, rule, speeds(3, 6), staleness=0)
    assert same(run.weights, synchronous(3, 6, rule))
    assert run.updates == 6
    assert not same(train_on_server(start(), gradient, rule, speeds(3, 6), staleness=1).weights, run.weights)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_fastest_is_never_more_than_the_bound_ahead(staleness):
    leads = []
    for seed in range(10):
        run = train_on_server(start(), gradient, momentum, speeds(4, 8, seed), staleness=staleness)
        for one in run.steps:
            done = [sum(s.worker == w and s.end <= one.start for s in run.steps) for w in range(4)]
            leads.append(one.step - min(done))
    assert max(leads) == staleness


def test_who_waits_less_ends_sooner():
    ends = [train_on_server(start(), gradient, momentum, speeds(4, 8), staleness=s).seconds for s in (0, 1, 3, None)]
    assert ends == sorted(ends, reverse=True)
    assert ends[0] > ends[-1] == max(map(sum, speeds(4, 8)))
    assert ends[0] == pytest.approx(sum(map(max, zip(*speeds(4, 8), strict=True))))  # each step as slow as its slowest worker


def test_without_a_bound_nobody_waits():
    run = train_on_server(start(), gradient, momentum, [[1.0] * 9, [3.0] * 9], staleness=None)
    leads = [one.step - sum(s.worker == 1 and s.end <= one.start for s in run.steps) for one in run.steps if one.worker == 0]
    assert max(leads) == 6
    assert run.updates == 18


@pytest.mark.parametrize("rule", [momentum, adagrad])
def test_downpour_of_one_replica_is_plain_training(rule):
    run = train_on_server(start(), gradient, rule, speeds(1, 7), staleness=None, fetch=1, push=1)
    assert same(run.weights, synchronous(1, 7, rule))


def test_rare_pushes_are_sums_of_gradients_of_older_weights():
    run = train_on_server(start(), gradient, adagrad, speeds(1, 6), staleness=None, fetch=2, push=3)
    weights = [torch.nn.Parameter(w) for w in start()]
    rule = adagrad(weights)
    local, total = None, None
    for step in range(6):
        if step % 2 == 0:
            local = [w.detach().clone() for w in weights]
        found = gradient(local, 0, step)
        total = list(found) if total is None else [a + b for a, b in zip(total, found, strict=True)]
        if step % 3 == 2:
            for w, grad in zip(weights, total, strict=True):
                w.grad = grad
            rule.step()
            total = None
    assert same(run.weights, [w.detach() for w in weights])
    assert run.updates == 2


def rounds(workers, servers):
    """How many rounds it takes until every worker has met every server, each one partner at a time, by a naive rotation."""
    few, many = sorted((workers, servers))
    met, count = set(), 0
    while len(met) < workers * servers:
        met |= {(i, (i + count) % many) for i in range(few)}
        count += 1
    return count


def test_messages_take_the_rounds_of_a_rotation():
    for workers in range(1, 7):
        for servers in range(1, 7):
            expected = 2 * rounds(workers, servers) * (1e-3 + 6000 / servers / 1e6)
            assert server_seconds(6000, workers, servers, NETWORK) == pytest.approx(expected)


def test_one_server_is_a_hot_spot_and_a_ring_has_none():
    fast = Network(name="n", rate=1e9, latency=0.0)
    size = 10**8
    ring = [collective_seconds("all_reduce", size, [MeshDim(name="dp", size=d, network=fast)]) for d in (8, 64)]
    one = [server_seconds(size, d, 1, fast) for d in (8, 64)]
    as_many = [server_seconds(size, d, d, fast) for d in (8, 64)]
    assert one[1] == pytest.approx(8 * one[0])
    assert as_many[0] == pytest.approx(as_many[1]) == pytest.approx(2 * size / 1e9)
    assert ring[0] < ring[1] < as_many[1]


def test_layers_over_machines_are_busy_a_pth_of_the_time():
    """DistBelief's layers on different machines, without micro-batches."""
    for ranks in (2, 4, 8):
        found = simulate(pipeline("naive", ranks=ranks, micro_batches=1))
        assert all(found.busy(rank) / found.makespan == pytest.approx(1 / ranks) for rank in range(ranks))


def test_what_cannot_be_is_refused():
    with pytest.raises(InvalidInput, match="as many steps"):
        train_on_server(start(), gradient, momentum, [[1.0], [1.0, 1.0]])
    with pytest.raises(InvalidInput, match="0 servers"):
        server_seconds(10, 2, 0, NETWORK)
