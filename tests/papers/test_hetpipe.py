"""HetPipe: cuts over unequal devices, waves and their staleness, parameters that stay in their node. Simulated."""

import random
from itertools import combinations, permutations

import pytest
import torch

from holdall.errors import Infeasible
from holdall.pipelines.adaptive.hetpipe import (
    HetDevice,
    HetStage,
    allocate,
    bytes_across,
    most_missing,
    stage_bytes,
    stage_seconds,
    unequal_cut,
    wave_runs,
)
from holdall.pipelines.cuts import CutLayer

FAST, SLOW = HetDevice(kind="fast", speed=2.0, memory=30), HetDevice(kind="slow", speed=1.0, memory=60)


def brute_force(layers, devices, under_way, bandwidth):
    best = float("inf")
    count = len(devices)
    for order in set(permutations(devices)):
        for inner in combinations(range(1, len(layers)), count - 1):
            bounds = (0, *inner, len(layers))
            stages = [HetStage(first=bounds[s], end=bounds[s + 1], device=order[s]) for s in range(count)]
            fits = all(stage_bytes(layers, x, count - 1 - s, under_way) <= x.device.memory for s, x in enumerate(stages))
            if fits:
                best = min(best, max(stage_seconds(layers, x, bandwidth) for x in stages))
    return best


def test_the_cut_over_two_kinds_of_devices_is_the_best_of_all():
    rng = random.Random(0)
    refused = orders = 0
    for _ in range(30):
        layers = [
            CutLayer(
                forward=rng.uniform(1, 4),
                backward=rng.uniform(2, 8),
                weights=rng.randint(2, 14),
                output=rng.randint(0, 9),
                activations=rng.randint(1, 8),
            )
            for _ in range(rng.randint(4, 9))
        ]
        under_way = rng.choice((1, 2, 4))
        best = brute_force(layers, [FAST, FAST, SLOW, SLOW], under_way, 3.0)
        if best == float("inf"):
            refused += 1
            with pytest.raises(Infeasible, match="no cut"):
                unequal_cut(layers, [FAST, FAST, SLOW, SLOW], under_way=under_way, bandwidth=3.0)
            continue
        plan = unequal_cut(layers, [FAST, FAST, SLOW, SLOW], under_way=under_way, bandwidth=3.0)
        assert plan.seconds == pytest.approx(best)
        orders += plan.stages[0].device is SLOW
    assert 1 <= refused <= 20 and orders  # sometimes the first stage, which holds most, is better on the larger device


def unsteady(seed):
    rng = random.Random(seed)
    speeds = [rng.uniform(0.5, 2) for _ in range(4)]

    def seconds(worker, number):
        pace = speeds[worker] * rng.uniform(0.8, 1.3)
        return pace, pace * 3

    return seconds


@pytest.mark.parametrize(("under_way", "distance"), [(1, 0), (1, 2), (3, 0), (4, 1), (4, 3)])
def test_no_mini_batch_is_staler_than_the_bound(under_way, distance):
    most = 0
    for seed in range(10):
        for run in wave_runs(4, 40, under_way=under_way, distance=distance, seconds=unsteady(seed)):
            most = max(most, run.missing(under_way))
            assert run.own == max(0, run.number + 1 - under_way)
    assert most <= most_missing(distance, under_way)
    assert most >= most_missing(distance, under_way) - 1  # and the bound is no looser than that


def test_a_larger_distance_waits_less():
    ends = [max(run.end for run in wave_runs(4, 60, under_way=2, distance=d, seconds=unsteady(3))) for d in (0, 4)]
    starts = [
        sum(run.start for run in wave_runs(4, 60, under_way=2, distance=d, seconds=unsteady(3)) if run.worker == 0)
        for d in (0, 4)
    ]
    assert starts[1] < starts[0] and ends[1] <= ends[0] * 1.05


def test_distance_0_and_one_mini_batch_is_synchronous():
    """Bit for bit: weights of a mini-batch have all updates of all workers before it, summed wave by wave."""
    made = torch.Generator().manual_seed(0)
    data = torch.randn(4, 6, 3, generator=made)

    def gradient(w, worker, number):
        return (w - data[worker, number]) * 0.1

    runs = wave_runs(4, 6, under_way=1, distance=0, seconds=lambda w, n: (1.0, 1.0))
    waves, w = [torch.zeros(3)], torch.zeros(3)
    for number in range(6):
        own = [run for run in runs if run.number == number]
        used = [waves[run.pulled] for run in own]
        waves.append(waves[-1] - sum(gradient(u, run.worker, number) for u, run in zip(used, own, strict=True)))
        w = w - sum(gradient(w, worker, number) for worker in range(4))
    assert torch.equal(waves[-1], w)


def test_equal_workers_served_locally_send_no_parameters_across_nodes():
    nodes = [[HetDevice(kind=str(n))] * 4 for n in range(4)]
    weights = [10, 20, 30, 40]
    equal, by_node = allocate(nodes, "ed"), allocate(nodes, "np")
    assert [[node for node, _ in worker] for worker in equal] == [[0, 1, 2, 3]] * 4
    assert bytes_across(equal, weights, local=True) == 0
    assert bytes_across(equal, weights, local=False) == bytes_across(by_node, weights, local=False) == 600
    assert bytes_across(by_node, weights, local=True) == 3 * 2 * 100
