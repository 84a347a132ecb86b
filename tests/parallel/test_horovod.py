"""Horovod's ring for real on gloo ranks, its simulated negotiation, and the order of DDP's buckets."""

import random
import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from holdall.cost.collectives import collective_seconds, messages, sent_bytes
from holdall.errors import InvalidInput
from holdall.parallel.counting import CollectiveBytes
from holdall.parallel.gradients.horovod import fused, negotiated, ring_all_reduce, sum_fused
from holdall.testing.ranks import on_ranks, written_bytes
from holdall.types import Network
from holdall.types.mesh import MeshDim

SIZES = (0, 1, 3, 4, 1001)
LARGE = 40_000


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def gradients(model, rank):
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    model.zero_grad()
    model(rows).square().mean().backward()
    return [p.grad for p in model.parameters()]


# on a rank


def rings():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for size in SIZES:
        drawn = torch.Generator().manual_seed(rank)
        whole = torch.randint(-1000, 1000, (size,), generator=drawn).float()  # their sums are exact in any order
        fractions = torch.randn(size, generator=drawn)
        ours, theirs = [whole.clone(), fractions.clone()], [whole.clone(), fractions.clone()]
        for mine, other in zip(ours, theirs, strict=True):
            ring_all_reduce(mine)
            dist.all_reduce(other)
        found[size] = ours, theirs
    large = torch.ones(LARGE)
    dist.barrier()
    before, counter = written_bytes(), CollectiveBytes("dp", ranks)
    with counter:
        ring_all_reduce(large)
    sent = counter.sent, written_bytes() - before
    model = build()
    grads = gradients(model, rank)
    sum_fused(grads, fusion=300)
    return {"sums": found, "sent": sent, "gradients": [g / ranks for g in grads], "launched": launched()}


def launched():
    """The order in which DDP sums its buckets, on ranks whose backwards go through the branches in different orders."""
    torch.manual_seed(0)
    branches = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(6))
    order = list(range(6))
    random.Random(dist.get_rank()).shuffle(order)

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = branches

        def forward(self, x):
            for i in order:
                x = x + self.branches[i](x)
            return x.square().mean()

    model = torch.nn.parallel.DistributedDataParallel(Branches(), bucket_cap_mb=0.01)
    seen = []

    def record(_, bucket):
        seen.append((bucket.index(), bucket.buffer().numel()))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, record)
    for _ in range(3):
        model(torch.ones(2, 40)).backward()
    return order, seen


@pytest.fixture(scope="module", params=[2, 4])
def ran(request):
    return on_ranks(request.param, rings)


def test_the_ring_sums_as_all_reduce_does(ran):
    for size in SIZES:
        for rank in ran:
            (whole, fractions), (expected, near) = rank["sums"][size]
            assert torch.equal(whole, expected)
            assert torch.equal(fractions, ran[0]["sums"][size][0][1])  # the same bits on every rank
            if len(ran) == 2:
                assert torch.equal(fractions, near)
            torch.testing.assert_close(fractions, near, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's count of written bytes is Linux's")
def test_a_rank_sends_the_bytes_of_the_formula(ran):
    ranks = len(ran)
    expected = 2 * 4 * LARGE * (ranks - 1) // ranks
    assert expected == sent_bytes("all_reduce", 4 * LARGE, ranks)
    for rank in ran:
        counted, written = rank["sent"]
        assert counted == {"dp shift": expected}
        assert expected < written < expected + 1000 * messages("all_reduce", ranks)


def test_gradients_are_those_of_one_process(ran):
    each = [[g.clone() for g in gradients(build(), rank)] for rank in range(len(ran))]
    for rank in ran:
        for mine, *others in zip(rank["gradients"], *each, strict=True):
            torch.testing.assert_close(mine, sum(others) / len(ran), rtol=0, atol=1e-6)


def test_buckets_are_summed_in_one_order_though_backwards_differ(ran):
    orders, seen = zip(*(rank["launched"] for rank in ran), strict=True)
    assert len(set(map(tuple, orders))) > 1
    assert len(set(map(tuple, seen))) == 1
    assert len(set(seen[0])) > 3


# simulated


def test_tensors_share_the_buffer_in_order():
    assert fused([3, 3, 5, 1, 20, 2], 10) == [[0, 1], [2, 3], [4], [5]]
    assert fused([], 10) == []
    drawn = random.Random(0)
    for _ in range(50):
        sizes = [drawn.randint(1, 12) for _ in range(drawn.randint(1, 20))]
        groups = fused(sizes, 10)
        assert [i for some in groups for i in some] == list(range(len(sizes)))
        assert all(len(some) == 1 or sum(sizes[i] for i in some) <= 10 for some in groups)
        assert all(sum(sizes[i] for i in a) + sizes[b[0]] > 10 for a, b in pairwise(groups))


def test_all_ranks_sum_in_the_coordinators_order():
    network = Network(name="n", rate=1e6, latency=1e-3)
    drawn = random.Random(1)
    for _ in range(30):
        count, ranks = drawn.randint(1, 12), drawn.randint(2, 5)
        ready = [[drawn.uniform(0, 0.1) for _ in range(count)] for _ in range(ranks)]
        sizes = [drawn.randint(1, 5000) for _ in range(count)]
        found = negotiated(ready, sizes, network=network, fusion=6000, cycle=0.01)
        drawn.shuffle(ready)
        assert negotiated(ready, sizes, network=network, fusion=6000, cycle=0.01) == found
        assert sorted(i for one in found for i in one.tensors) == list(range(count))
        for one in found:
            assert max(ready[r][i] for r in range(ranks) for i in one.tensors) <= one.start
            nbytes = sum(sizes[i] for i in one.tensors)
            ring = collective_seconds("all_reduce", nbytes, [MeshDim(name="dp", size=ranks, network=network)])
            assert one.end - one.start == pytest.approx(ring)
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(found))


def test_fusion_saves_latencies_and_a_long_cycle_waits():
    """8 ready tensors of 1000 bytes on 4 ranks: 6 messages each, or 6 for all."""
    network = Network(name="n", rate=1e9, latency=1e-3)
    ready, sizes = [[0.0] * 8] * 4, [1000] * 8
    apart = negotiated(ready, sizes, network=network, fusion=1000, cycle=1e-3)
    together = negotiated(ready, sizes, network=network, cycle=1e-3)
    assert (len(apart), len(together)) == (8, 1)
    assert apart[-1].end - apart[0].start == pytest.approx(8 * 6e-3, rel=1e-3)
    assert together[0].end - together[0].start == pytest.approx(6e-3, rel=1e-2)
    assert negotiated(ready, sizes, network=network, cycle=0.5)[0].start == 0.5
    with pytest.raises(InvalidInput, match="not as many moments"):
        negotiated([[0.0]], sizes)
