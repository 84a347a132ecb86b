"""The search over meshes against trying all of them."""

import random

import pytest

from holdall.errors import Infeasible
from holdall.pipelines.meshes import SCHEDULES, Cluster, DecoderShape, bound, candidates, evaluate, search_meshes
from holdall.types.mesh import Network

FAST, SLOW = Network(name="fast", rate=2e11, latency=5e-6), Network(name="slow", rate=1e10, latency=1e-5)


def cluster(devices, memory, per_node=4, between=SLOW):
    return Cluster(devices=devices, per_node=per_node, memory=int(memory), rate=1e14, inside=FAST, between=between)


def test_the_search_finds_what_trying_all_finds():
    rng = random.Random(0)
    refused = 0
    for _ in range(8):
        shape = DecoderShape(
            layers=rng.choice((8, 16)), hidden=rng.choice((1024, 2048)), heads=16, seq=rng.choice((512, 2048)), batch=8
        )
        machine = cluster(rng.choice((4, 8)), rng.choice((3e8, 2e9, 2e10)))
        tried = [evaluate(shape, machine, plan) for plan in candidates(shape, machine, SCHEDULES)]
        fitting = [plan for plan in tried if plan.peak <= machine.memory]
        if not fitting:
            refused += 1
            with pytest.raises(Infeasible, match="no mesh"):
                search_meshes(shape, machine)
            continue
        found = search_meshes(shape, machine)
        assert found.best.seconds == min(plan.seconds for plan in fitting)
        assert found.candidates == len(tried)
    assert 1 <= refused <= 6


def test_the_bound_is_never_above_and_spares_most_simulations():
    shape, machine = DecoderShape(layers=16, hidden=2048, heads=16, seq=1024, batch=16), cluster(8, 6e10)
    for plan in candidates(shape, machine, SCHEDULES):
        assert bound(shape, machine, plan) <= evaluate(shape, machine, plan).seconds * (1 + 1e-9)
    found = search_meshes(shape, machine)
    assert found.simulated < found.candidates / 4


def test_memory_and_networks_decide_the_shape():
    """With little memory fewer data ranks; over a slow network no large all-reduce."""
    shape = DecoderShape(layers=16, hidden=2048, heads=16, seq=1024, batch=16)
    free = Network(name="free", rate=1e15, latency=0.0)
    roomy, tight = (search_meshes(shape, cluster(4, memory, per_node=1, between=free)).best for memory in (1e12, 1e10))
    assert roomy.data == 4 and tight.data < 4
    assert roomy.peak > 1e10 >= tight.peak
    crawling = Network(name="crawling", rate=1e8, latency=1e-4)
    apart = search_meshes(shape, cluster(8, 1e12, between=crawling)).best
    assert (apart.data, apart.tensor) == (1, 4)  # the node is filled, and only a pipeline's messages leave it
