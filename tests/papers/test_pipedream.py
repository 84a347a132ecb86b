"""PipeDream and 2BW: versions of weights, and the planner against brute force. Their updates are in tests/parallel."""

import random
from itertools import combinations
from math import ceil

import pytest

from holdall.errors import Infeasible
from holdall.pipelines import PipeCosts, pipeline, simulate
from holdall.pipelines.cuts import CutLayer, pipedream_cut


def test_a_stage_keeps_as_many_versions_and_activations_as_stages_follow():
    for ranks in (1, 2, 4, 8):
        found = simulate(pipeline("pipedream", ranks=ranks, micro_batches=3 * ranks))
        assert found.versions == found.activations == tuple(ranks - s for s in range(ranks))


def test_two_versions_suffice_for_2bw():
    for ranks, per in ((2, 2), (4, 4), (4, 6), (8, 8)):
        found = simulate(pipeline("2bw", ranks=ranks, micro_batches=4 * per, per_update=per))
        assert max(found.versions) == 2


def test_stashed_weights_take_their_bytes():
    costs = PipeCosts.even(4, weights=1000, activations=10)
    assert simulate(pipeline("pipedream", ranks=4, micro_batches=8), costs).peak == (4040, 3030, 2020, 1010)
    assert simulate(pipeline("1f1b", ranks=4, micro_batches=8), costs).peak == (1040, 1030, 1020, 1010)


def test_without_flushes_only_the_ends_of_a_run_have_bubbles():
    """1F1B with a flush every 8 mini-batches idles 9 each time; PipeDream once in all."""
    flushed = simulate(pipeline("1f1b", ranks=4, micro_batches=8))
    never = simulate(pipeline("pipedream", ranks=4, micro_batches=64))
    assert flushed.idle(0) == never.idle(0) == 9
    assert never.makespan < 8 * flushed.makespan


def brute_force(layers, machines, bandwidth, memory):
    best = float("inf")
    n = len(layers)
    for stages in range(1, min(n, machines) + 1):
        for cut in combinations(range(1, n), stages - 1):
            bounds = (0, *cut, n)
            for split in combinations(range(1, machines), stages - 1):
                copies = [b - a for a, b in zip((0, *split), (*split, machines), strict=True)]
                slowest, fits, left = 0.0, True, machines
                for s, m in enumerate(copies):
                    own = layers[bounds[s] : bounds[s + 1]]
                    weights = sum(x.weights for x in own)
                    work = sum(x.forward + x.backward for x in own)
                    slowest = max(slowest, (work + 4 * (m - 1) * weights / (bandwidth * m)) / m)
                    if s:
                        slowest = max(slowest, 2 * layers[bounds[s] - 1].output / (bandwidth * m))
                    fits &= ceil(left / m) * (weights + sum(x.activations for x in own)) <= memory
                    left -= m
                if fits:
                    best = min(best, slowest)
    return best


def test_the_planner_is_exact_on_small_chains():
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        layers = [
            CutLayer(
                forward=rng.uniform(1, 5),
                backward=rng.uniform(1, 9),
                weights=rng.randint(0, 40),
                output=rng.randint(0, 40),
                activations=rng.randint(0, 30),
            )
            for _ in range(rng.randint(1, 8))
        ]
        machines, bandwidth, memory = rng.randint(1, 4), rng.choice((1.0, 5.0, 100.0)), rng.choice((150.0, 400.0, 1e9))
        expected = brute_force(layers, machines, bandwidth, memory)
        try:
            plan = pipedream_cut(layers, machines, bandwidth=bandwidth, memory=memory)
        except Infeasible:
            refused += 1
            assert expected == float("inf")
            continue
        assert plan.seconds == pytest.approx(expected)
        assert sum(stage.replicas for stage in plan.stages) == machines
        assert [s.first for s in plan.stages[1:]] == [s.end for s in plan.stages[:-1]]
    assert 5 <= refused <= 100


def test_replicas_win_for_convolutions_and_stages_for_large_weights():
    """The paper's VGG: early layers, few weights and much computing, are replicated; late ones, the reverse, are a stage."""
    early = [CutLayer(forward=4, backward=8, weights=1, output=2) for _ in range(2)]
    late = [CutLayer(forward=1, backward=2, weights=400, output=1)]
    plan = pipedream_cut([*early, *late], 4, bandwidth=10.0)
    assert [(s.first, s.end, s.replicas) for s in plan.stages] == [(0, 2, 3), (2, 3, 1)]
