"""DAPPLE: activations of its two policies, when the second pays, the formula against the simulator, the planner."""

import random
from itertools import combinations
from statistics import mean

import pytest

from holdall.pipelines import PipeCosts, StageCosts, pipeline, simulate
from holdall.pipelines.cuts import CutLayer, CutStage, dapple_cut
from holdall.pipelines.cuts.dapple import pivot_of, recursion_seconds, step_seconds


def made(policy, ranks, n, **options):
    return pipeline("dapple", ranks=ranks, micro_batches=n, policy=policy, **options)


def test_activations_do_not_grow_with_micro_batches():
    for ranks in (2, 4, 8):
        for n in (2, 4, 32):
            assert simulate(made("a", ranks, n)).activations == tuple(min(n, ranks - s) for s in range(ranks))
            assert simulate(made("b", ranks, n)).activations == tuple(min(n, 2 * (ranks - s) - 1) for s in range(ranks))
    assert simulate(made("b", 4, 32, most=3)).activations == (3, 3, 3, 1)


def test_policy_b_pays_where_messages_take_long():
    for ranks, n in ((4, 16), (8, 32)):
        free = [simulate(made(p, ranks, n)).makespan for p in "ab"]
        costly = [simulate(made(p, ranks, n), PipeCosts.even(ranks, hop=0.5)).makespan for p in "ab"]
        assert free[0] == free[1]
        assert costly[1] < costly[0]


def test_early_backward_saves_memory_at_the_time_of_gpipe():
    early, late = simulate(made("a", 4, 16)), simulate(pipeline("gpipe", ranks=4, micro_batches=16))
    assert early.makespan == late.makespan
    assert max(early.activations) == 4 and max(late.activations) == 16


def random_steps(seed, cases):
    """(stages, micro-batches, paces, seconds by the formula, by the simulator)"""
    rng = random.Random(seed)
    for _ in range(cases):
        ranks, n, spread = rng.randint(2, 6), rng.choice((6, 12, 32, 100)), rng.choice((1.02, 1.2, 2))
        paces = [(f, 2 * f, 0.0) for f in (rng.uniform(1, spread) for _ in range(ranks))]
        layers = [CutLayer(forward=f, backward=b) for f, b, _ in paces]
        costs = PipeCosts(stages=tuple(StageCosts(forward=f, input=f, weight=f) for f, _, _ in paces))
        said = step_seconds(layers, [CutStage(first=i, end=i + 1) for i in range(ranks)], n, float("inf"))
        yield ranks, n, paces, said, simulate(made("a", ranks, n), costs).makespan


def test_the_formula_is_within_5_percent_of_the_simulator_where_the_last_stage_sets_the_pace():
    """Or where there are 20 micro-batches for each hop. Elsewhere it leaves out stages behind the pivot: up to 30 % less."""
    within, beyond = [], []
    for ranks, n, paces, said, simulated in random_steps(0, 100):
        holds = pivot_of(paces, n) == ranks - 1 or n >= 20 * (ranks - 1)
        (within if holds else beyond).append(1 - said / simulated)
    assert min(within + beyond) > -1e-9
    assert max(within) < 0.05 and mean(within) < 0.01
    assert 0.1 < max(beyond) < 0.35 and len(within) > 40


def test_the_recursion_of_the_released_planner_is_the_simulator():
    for _, n, paces, _, simulated in random_steps(1, 60):
        assert recursion_seconds(paces, n) == pytest.approx(simulated, rel=1e-12)


def brute_force(layers, machines, n, bandwidth):
    best = float("inf")
    for stages in range(1, min(len(layers), machines) + 1):
        for cut in combinations(range(1, len(layers)), stages - 1):
            bounds = (0, *cut, len(layers))
            for split in combinations(range(1, machines), stages - 1):
                ends = (0, *split, machines)
                plan = [CutStage(first=bounds[s], end=bounds[s + 1], replicas=ends[s + 1] - ends[s]) for s in range(stages)]
                best = min(best, step_seconds(layers, plan, n, bandwidth))
    return best


def test_the_planner_is_exact_on_small_chains():
    rng = random.Random(1)
    shapes = set()
    for _ in range(120):
        layers = [
            CutLayer(
                forward=rng.uniform(1, 5), backward=rng.uniform(2, 9), weights=rng.randint(0, 60), output=rng.randint(0, 8)
            )
            for _ in range(rng.randint(1, 7))
        ]
        machines, n, bandwidth = rng.randint(1, 4), rng.choice((1, 4, 16)), rng.choice((2.0, 10.0, 1000.0))
        plan = dapple_cut(layers, machines, n, bandwidth=bandwidth)
        assert plan.seconds == pytest.approx(brute_force(layers, machines, n, bandwidth))
        assert sum(stage.replicas for stage in plan.stages) == machines
        shapes.add(tuple(stage.replicas for stage in plan.stages))
    assert {(2,), (1, 1), (4,)} <= shapes  # data parallel and pipelined
