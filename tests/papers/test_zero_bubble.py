"""Zero-bubble schedules: H1, H2 and V, their idle time and activations; the automatic schedule."""

import random
from itertools import product

import pytest

from holdall.pipelines import PipeCosts, PipeTask, pipeline, simulate
from holdall.pipelines.pipeline import in_rounds, make
from holdall.pipelines.schedules.zb_auto import search_order


def run(name, ranks, n, f=1.0, i=1.0, w=1.0):
    made = pipeline(name, ranks=ranks, micro_batches=n)
    return simulate(made, PipeCosts.even(made.chain, forward=f, input=i, weight=w))


def inside(found):
    return [round(found.idle_inside(r), 9) for r in range(found.pipeline.ranks)]


def test_h1_has_a_third_of_the_bubble_of_1f1b_at_its_memory():
    found = run("zb_h1", 4, 8)
    assert found.makespan == 27
    assert inside(found) == [3, 2, 1, 0]
    assert found.activations == (4, 4, 4, 4)
    assert found.idle(0) == run("1f1b", 4, 8).idle(0) / 3


@pytest.mark.parametrize(("i", "w"), [(1.0, 1.0), (1.2, 0.8)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_idle_times_are_the_papers_formulas(ranks, i, w):
    """(P - 1)(F + I - W) and (P - 1)(F + I - 2W) on the first stage; H2 needs 2P - 1 activations."""
    n = 3 * ranks
    h1, h2 = run("zb_h1", ranks, n, 1.0, i, w), run("zb_h2", ranks, n, 1.0, i, w)
    assert h1.idle_inside(0) == pytest.approx((ranks - 1) * (1 + i - w))
    assert h2.idle_inside(0) == pytest.approx((ranks - 1) * (1 + i - 2 * w), abs=1e-9)
    assert h1.activations == (ranks,) * ranks
    assert h2.activations == (2 * ranks - 1,) * ranks


def test_v_has_no_bubble_inside_at_the_memory_of_1f1b():
    found = run("zb_v", 4, 8)
    assert found.makespan == 51
    assert inside(found) == [0, 0, 0, 0]
    assert found.bubble == pytest.approx(3 / 51)
    assert found.activations == (8,) * 4  # 2P stages of half the size: 1F1B's first rank


def test_v_has_bubbles_where_the_parts_take_different_times():
    assert max(inside(run("zb_v", 4, 8, 1.0, 1.3, 0.7))) > 0


def auto(ranks, n, most, f=1.0, i=1.0, w=1.0, hop=0.0):
    costs = PipeCosts.even(ranks, forward=f, input=i, weight=w, hop=hop)
    return simulate(search_order(costs, n, most=most), costs)


@pytest.mark.parametrize(("i", "w"), [(1.0, 1.0), (1.2, 0.8), (0.8, 1.2)])
def test_the_automatic_schedule_is_no_longer_than_h1_and_h2_at_their_memory(i, w):
    """The paper's relation: with memory for P micro-batches a bubble of H1 or less, with 2P - 1 of H2 or less."""
    ranks, n = 4, 8
    small, large = auto(ranks, n, ranks, 1.0, i, w), auto(ranks, n, 2 * ranks - 1, 1.0, i, w)
    assert max(small.activations) <= ranks and max(large.activations) <= 2 * ranks - 1
    assert small.makespan <= run("zb_h1", ranks, n, 1.0, i, w).makespan + 1e-9
    assert large.makespan <= run("zb_h2", ranks, n, 1.0, i, w).makespan + 1e-9
    assert small.makespan < run("1f1b", ranks, n, 1.0, i, w).makespan
    between = auto(ranks, n, ranks + 1, 1.0, i, w).makespan  # more memory never makes it longer
    assert large.makespan - 1e-9 <= between <= small.makespan + 1e-9


def orders(n, most):
    """All orders of one stage: F, I and W of a micro-batch follow one another, each kind in order, within the memory."""
    found = []

    def grow(f, i, w, tasks):
        if w == n:
            found.append(tasks)
        if f < n and f - w < most:
            grow(f + 1, i, w, [*tasks, ("F", f)])
        if i < f:
            grow(f, i + 1, w, [*tasks, ("I", i)])
        if w < i:
            grow(f, i, w + 1, [*tasks, ("W", w)])

    grow(0, 0, 0, [])
    return found


@pytest.mark.parametrize("most", [2, 3])
def test_the_automatic_schedule_is_the_best_of_all_orders_of_two_stages(most):
    rng = random.Random(most)
    every = orders(3, most)
    assert most == 2 or len(every) == 42  # standard tableaux of a square of three
    pairs = [
        make("all", [[PipeTask(s, kind, m) for kind, m in own] for s, own in enumerate(pair)], in_rounds(2, 2), 3)
        for pair in product(every, repeat=2)
    ]
    f, i, w = (rng.uniform(0.5, 1.5) for _ in range(3))
    costs = PipeCosts.even(2, forward=f, input=i, weight=w, hop=0.2)
    best = min(simulate(made, costs).makespan for made in pairs if ends(made))
    assert auto(2, 3, most, f, i, w, 0.2).makespan == pytest.approx(best)


def ends(made):
    """Does the first rank begin what the second waits for? Else the two wait for each other."""
    first, second = made.lists
    at = {(t.kind, t.batch): n for n, t in enumerate(first)}
    there = {(t.kind, t.batch): n for n, t in enumerate(second)}
    return all(at["I", m] > at["F", k] for m in range(3) for k in range(3) if there["F", k] < there["I", m])
