"""DualPipe and DualPipeV: bubbles, activations, copies, and what an overlapped pair saves."""

import pytest

from holdall.pipelines import PipeCosts, pipeline, simulate


@pytest.mark.parametrize(("ranks", "n", "makespan"), [(8, 20, 66), (8, 16, 54), (4, 8, 26)])
def test_the_bubble_is_that_of_the_report(ranks, n, makespan):
    """(P/2 - 1)(F&B + B - 3W), P + 1 activations, two copies of the parameters."""
    made = pipeline("dualpipe", ranks=ranks, micro_batches=n)
    found = simulate(made)
    assert found.makespan == makespan
    assert {found.idle(r) for r in range(ranks)} == {(ranks / 2 - 1) * (3 + 2 - 3)}
    assert found.activations == (ranks + 1,) * ranks
    assert made.copies == 2


def test_the_folded_one_needs_a_single_copy():
    made = pipeline("dualpipe_v", ranks=4, micro_batches=8)
    found = simulate(made)
    assert found.makespan == 54
    assert found.activations == (9,) * 4
    assert made.copies == 1


def test_overlapped_pairs_save_what_they_hide():
    made = pipeline("dualpipe", ranks=8, micro_batches=20)
    plain, hidden = (simulate(made, PipeCosts.even(8, hidden=share)) for share in (0.0, 0.5))
    for rank, tasks in enumerate(made.lists):
        assert plain.busy(rank) - hidden.busy(rank) == pytest.approx(0.5 * sum(len(task.parts) == 2 for task in tasks))
    assert hidden.makespan < plain.makespan


def test_both_idle_less_than_1f1b():
    plain = simulate(pipeline("1f1b", ranks=8, micro_batches=20))
    for name in ("dualpipe", "dualpipe_v"):
        assert simulate(pipeline(name, ranks=8, micro_batches=20)).bubble < plain.bubble
