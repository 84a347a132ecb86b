"""GPipe and torchgpipe: bubble, activations, the order of clock cycles, and balanced cuts."""

import random
from itertools import combinations, pairwise

import pytest

from holdall.pipelines import PipeCosts, pipeline, simulate
from holdall.pipelines.cuts import block_partition, even_cut


def run(ranks, n, name="gpipe"):
    return simulate(pipeline(name, ranks=ranks, micro_batches=n))  # forward 1, backward 2


@pytest.mark.parametrize(("ranks", "n", "makespan"), [(4, 4, 21), (4, 8, 33), (2, 8, 27), (8, 32, 117)])
def test_the_bubble_is_that_of_the_paper(ranks, n, makespan):
    found = run(ranks, n)
    assert found.makespan == makespan
    assert found.bubble == pytest.approx((ranks - 1) / (n + ranks - 1))
    assert found.activations == (n,) * ranks  # without recomputing


def test_four_micro_batches_a_stage_come_within_a_fifth_of_ideal():
    for ranks in (2, 4, 8, 16):
        found = run(ranks, 4 * ranks)
        assert 1 - found.bubble == pytest.approx(4 * ranks / (5 * ranks - 1))
        assert 1 - found.bubble >= 0.8


def test_ranks_without_a_pipeline_are_busy_one_in_p():
    for ranks in (2, 4):
        assert 1 - run(ranks, 4, "naive").bubble == pytest.approx(1 / ranks)


def test_forwards_run_in_torchgpipes_clock_cycles():
    """At clock k stage j does micro-batch k - j."""
    found = run(3, 5)
    for span in found.spans:
        if span.task.kind == "F":
            assert span.start == span.task.batch + span.task.stage


def test_blocks_differ_by_no_more_than_the_largest_layer():
    rng = random.Random(0)
    for _ in range(1000):
        costs = [rng.randint(1, 50) for _ in range(rng.randint(4, 40))]
        parts = rng.randint(2, 4)
        sums = [sum(costs[a:b]) for a, b in pairwise(block_partition(costs, parts))]
        assert len(sums) == parts and sum(sums) == sum(costs)
        assert max(sums) - min(sums) <= max(costs)
        best = max(sum(costs[a:b]) for a, b in pairwise(even_cut(costs, parts)))
        assert best <= max(sums) <= best + max(costs)


def test_the_exact_cut_is_that_of_brute_force():
    rng = random.Random(1)
    for _ in range(200):
        costs = [rng.randint(0, 20) for _ in range(rng.randint(3, 9))]
        parts = rng.randint(1, 3)
        tried = [
            max(sum(costs[a:b]) for a, b in pairwise((0, *cut, len(costs))))
            for cut in combinations(range(1, len(costs)), parts - 1)
        ]
        bounds = even_cut(costs, parts)
        assert max(sum(costs[a:b]) for a, b in pairwise(bounds)) == min(tried)
        assert all(a < b for a, b in pairwise(bounds))


def test_a_slow_stage_sets_the_pace():
    made = pipeline("gpipe", ranks=4, micro_batches=16)
    even, slow = PipeCosts.even(4), PipeCosts.even(4)
    slow = PipeCosts(stages=(*slow.stages[:2], type(slow.stages[0])(forward=2.0, input=2.0, weight=2.0), slow.stages[3]))
    assert simulate(made, slow).makespan - simulate(made, even).makespan == pytest.approx(16 * 3)
