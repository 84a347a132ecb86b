"""Chimera: slots, bubbles and activations; and where its plain concatenation loses to 1F1B."""

import pytest

from holdall.pipelines import PipeCosts, pipeline, simulate
from holdall.pipelines.schedules.chimera import slots_of


def run(ranks, n, name="chimera", backward=1.0):
    made = pipeline(name, ranks=ranks, micro_batches=n)
    return simulate(made, PipeCosts.even(made.chain, input=backward / 2, weight=backward / 2))


@pytest.mark.parametrize("ranks", range(2, 33, 2))
def test_no_two_tasks_share_a_slot(ranks):
    for tasks in slots_of(ranks, 2 * ranks):
        assert len({slot for slot, _ in tasks}) == len(tasks) == 2 * 2 * ranks


@pytest.mark.parametrize(
    ("ranks", "n", "makespan"), [(4, 4, 10), (4, 8, 18), (4, 16, 34), (8, 8, 22), (8, 16, 38), (8, 32, 70)]
)
def test_equal_forwards_and_backwards_leave_d_minus_2_bubbles(ranks, n, makespan):
    found = run(ranks, n)
    assert found.makespan == makespan
    assert {found.idle(r) for r in range(ranks)} == {ranks - 2}
    assert found.bubble == pytest.approx((ranks - 2) / (2 * n + ranks - 2))
    assert found.activations == tuple(ranks // 2 + 1 + min(w, ranks - 1 - w) for w in range(ranks))
    assert found.pipeline.copies == 2


@pytest.mark.parametrize(
    ("ranks", "n", "makespan"), [(4, 4, 16), (4, 8, 30), (4, 16, 58), (8, 8, 36), (8, 16, 66), (8, 32, 126)]
)
def test_long_backwards_leave_gaps_between_units(ranks, n, makespan):
    found = run(ranks, n, backward=2.0)
    assert found.makespan == makespan
    assert found.idle(0) == pytest.approx((ranks - 2) * (1 + n / ranks))


def test_doubled_forwards_idle_no_longer_with_more_micro_batches():
    """Where backward takes two forwards; a rank then holds up to twice as much."""
    for ranks in (4, 8):
        plain = [run(ranks, n, backward=2.0) for n in (2 * ranks, 4 * ranks, 8 * ranks)]
        doubled = [run(ranks, n, "chimera:doubling=true", backward=2.0) for n in (2 * ranks, 4 * ranks, 8 * ranks)]
        assert len({found.idle(0) for found in doubled}) == 1
        assert all(d.makespan < p.makespan for d, p in zip(doubled, plain, strict=True))
        assert all(max(d.activations) == 2 * max(p.activations) for d, p in zip(doubled, plain, strict=True))


def test_1f1b_wins_once_there_are_many_micro_batches():
    """N / D > 2 + 3 / (D - 2): for D = 4 beyond 14, for D = 8 beyond 20."""
    for ranks, n, is_better in ((4, 12, True), (4, 16, False), (8, 16, True), (8, 24, False), (8, 32, False)):
        chimera, plain = (run(ranks, n, name, backward=2.0).makespan for name in ("chimera", "1f1b"))
        assert (chimera < plain) == is_better
