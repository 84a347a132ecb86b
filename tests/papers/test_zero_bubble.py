"""Zero-bubble schedules: H1, H2 and V, their idle time and activations."""

import pytest

from holdall.pipelines import PipeCosts, pipeline, simulate


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
